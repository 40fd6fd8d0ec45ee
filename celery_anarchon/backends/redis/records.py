"""What the store's replies mean, and what its scripts are told: records, terms, answers."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from celery_anarchon import wire
from celery_anarchon.backends.base import LapsedClaim, Terms
from celery_anarchon.backends.redis.keys import decoded, encoded
from celery_anarchon.backends.runs import RELEASED
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Millis, Run, RunState

_MARK = re.compile(r"([ha])([qrst]?)(\d*)")
_MARKED = {
    "": RunState.CLAIMED,
    "q": RunState.QUEUED,
    "r": RunState.RUNNING,
    "s": RunState.RUNNING,
    "t": RunState.RETRYING,
}

_Answer = TypeVar("_Answer", bound=enum.Enum)


def optional(text: str | None) -> bytes:
    return b"-" if text is None else b"=" + encoded(text)


@lru_cache
def terms_json(terms: Terms | None) -> str:
    """Kept: a job's terms are alike for all its runs, and a gate writes them for each."""
    if terms is None:
        return ""
    return json.dumps({name: value for name, value in vars(terms).items() if value is not None}, separators=(",", ":"))


def answer(kind: type[_Answer], word: bytes, where: str) -> _Answer:
    try:
        return kind(decoded(word))
    except ValueError as error:
        # Neither yes nor no may be read into it.
        raise OutcomeUnknown(f"{where}: the answer was {word!r}") from error


def known(entry: bytes, kind: Any) -> dict[str, Any]:
    """What a beat or a worker says of itself, without the fields of a newer release."""
    found = json.loads(decoded(entry)).items()
    return {name: value for name, value in found if name in kind.__dataclass_fields__}


def lapsed_claim(lease: bytes) -> LapsedClaim:
    slot, attempt, mark, job = lease.split(b":", 3)
    found = _MARK.fullmatch(mark.decode())
    if found is None:
        raise OutcomeUnknown(f"a lease is marked {mark!r}, which this release does not know")
    owned, state, most = found.groups()
    return LapsedClaim(
        job=decoded(job),
        slot=int(slot),
        attempt=int(attempt),
        abandoned=owned == "a" and not state,
        state=_MARKED[state],
        max_attempts=int(most) if most else None,
        reason=RELEASED if state == "s" else None,
    )


def runs(namespace: str, job: str, found: Sequence[bytes]) -> list[Run]:
    """Of a reply of slots and records."""
    return [
        _run(namespace, job, int(slot), json.loads(decoded(record)))
        for slot, record in zip(found[::2], found[1::2], strict=True)
    ]


def _run(namespace: str, job: str, slot: Millis, record: dict[str, Any]) -> Run:
    late, blocker = record.get("late"), record.get("blocked_by")
    return Run(
        job=job,
        slot=wire.moment(slot),
        run_id=wire.run_id(namespace, job, slot),
        state=RunState(record["state"]),
        reason=record.get("reason"),
        attempt=int(record["attempt"]),
        claimed_at=_moment(record.get("claimed_at")),
        sent_at=_moment(record.get("sent_at")),
        started_at=_moment(record.get("started_at")),
        ended_at=_moment(record.get("ended_at")),
        late=None if late is None else late / 1000,
        beat=record.get("beat") or None,
        worker=record.get("worker"),
        blocked_by=None if blocker is None else wire.run_id(namespace, job, int(blocker)),
        refused=int(record.get("refused", 0)),
    )


def _moment(at: float | None) -> datetime | None:
    return None if at is None else wire.moment(int(at))
