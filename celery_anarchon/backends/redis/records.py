"""What the store's replies mean, and what its scripts are told: records, answers."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeVar

from celery_anarchon import wire
from celery_anarchon.backends.redis.store import decoded, encoded
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Millis, Run, RunState

_Answer = TypeVar("_Answer", bound=enum.Enum)


def optional(text: str | None) -> bytes:
    return b"-" if text is None else b"=" + encoded(text)


def answer(kind: type[_Answer], word: bytes, where: str) -> _Answer:
    try:
        return kind(decoded(word))
    except ValueError as error:
        # Neither yes nor no may be read into it.
        raise OutcomeUnknown(f"{where}: the answer was {word!r}") from error


def runs(namespace: str, job: str, found: Sequence[bytes]) -> list[Run]:
    """Of a reply of slots and records."""
    return [
        _run(namespace, job, int(slot), json.loads(decoded(record)))
        for slot, record in zip(found[::2], found[1::2], strict=True)
    ]


def _run(namespace: str, job: str, slot: Millis, record: dict[str, Any]) -> Run:
    late = record.get("late")
    return Run(
        job=job,
        slot=wire.moment(slot),
        run_id=wire.run_id(namespace, job, slot),
        state=RunState(record["state"]),
        reason=record.get("reason"),
        attempt=int(record["attempt"]),
        claimed_at=_moment(record.get("claimed_at")),
        sent_at=_moment(record.get("sent_at")),
        ended_at=_moment(record.get("ended_at")),
        late=None if late is None else late / 1000,
        beat=record.get("beat") or None,
    )


def _moment(at: float | None) -> datetime | None:
    return None if at is None else wire.moment(int(at))
