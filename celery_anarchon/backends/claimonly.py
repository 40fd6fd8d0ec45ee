"""What stores share that only know who was first: how long they remember it, and runs out of lists of entries.

Belongs here: the form of an entry, and which of several about a slot is shown. Does not belong here: any store.

Such a store appends and never changes, so a run is what its entries say together. Each beat may write about a slot, and
an entry whose acknowledgement was lost is written again: the rules of :func:`runs` give every reader the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import GIVEN_UP, NEVER_A_RUN, ClaimRequest, Confirmation, GivenUp, Outcome
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis, Run, RunState

_RANKS = {RunState.DISPATCHED: 0, **dict.fromkeys(GIVEN_UP, 2), RunState.CLAIMED: 3, **dict.fromkeys(NEVER_A_RUN, 4)}
"""Of what is said about a slot the lowest is shown: a message first, and a claim before what is no run."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that was said about (job, slot)."""

    job: str
    slot: Millis
    state: RunState
    at: Millis
    """The writer's clock."""
    owner: str = ""
    beat: str = ""
    attempt: int = 1
    late: Millis | None = None
    reason: str | None = None
    claimed_at: Millis | None = None
    """Of an end: when the claim was won, as far as the writer knows."""
    held: bool = False
    """The end of a claim. MISFIRE and SUPERSEDED are also ends of slots that nobody claimed."""

    @property
    def rank(self) -> int:
        return _RANKS[RunState.NOT_SENT] if self.held and self.state in GIVEN_UP else _RANKS[self.state]


def claimed(request: ClaimRequest, at: Millis) -> Entry:
    return Entry(
        job=request.job, slot=request.slot, state=RunState.CLAIMED, at=at, owner=request.owner, beat=request.beat
    )


def ended(ending: Confirmation | GivenUp, at: Millis, claim: Entry | None) -> Entry:
    """*claim*: what the writer remembers of it."""
    entry = Entry(
        job=ending.job,
        slot=ending.slot,
        state=RunState.DISPATCHED,
        at=at,
        owner=ending.owner,
        attempt=ending.attempt,
        beat=claim.beat if claim else "",
        claimed_at=claim.at if claim else None,
        held=True,
    )
    if isinstance(ending, Confirmation):
        return replace(entry, late=ending.late)
    return replace(entry, state=ending.state, reason=ending.reason)


def recorded(outcome: Outcome, at: Millis) -> Entry:
    return Entry(
        job=outcome.job, slot=outcome.slot, state=outcome.state, at=at, beat=outcome.beat, reason=outcome.reason
    )


def encode(entry: Entry) -> bytes:
    """JSON, without what is not set."""
    shown = {name: value for name, value in vars(entry).items() if value not in (None, "", False)}
    return json.dumps({"v": wire.LAYOUT_VERSION, **shown, "state": str(entry.state)}, separators=(",", ":")).encode()


def decode(data: bytes) -> Entry | None:
    """None: of a newer release, or not ours."""
    try:
        fields = json.loads(data)
        known = {name: value for name, value in fields.items() if name in Entry.__dataclass_fields__}
        return Entry(**{**known, "state": RunState(fields["state"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def runs(namespace: str, entries: Iterable[Entry]) -> list[Run]:
    """What *entries*, oldest first, say together: newest slot first. Of equals the first one counts."""
    by_slot: dict[Millis, list[Entry]] = {}
    for entry in entries:
        by_slot.setdefault(entry.slot, []).append(entry)
    return [_run(namespace, by_slot[slot]) for slot in sorted(by_slot, reverse=True)]


def _run(namespace: str, said: list[Entry]) -> Run:
    shown = min(said, key=lambda entry: entry.rank)
    claim = next((entry for entry in said if entry.state is RunState.CLAIMED), None)
    of_claim = shown.rank < _RANKS[RunState.SKIPPED]
    claimed_at = (claim.at if claim else shown.claimed_at) if of_claim else None
    sent = shown.state is RunState.DISPATCHED
    ended_at = None if sent or shown.state is RunState.CLAIMED else shown.at
    return Run(
        job=shown.job,
        slot=wire.moment(shown.slot),
        run_id=wire.run_id(namespace, shown.job, shown.slot),
        state=shown.state,
        reason=shown.reason,
        attempt=shown.attempt,
        claimed_at=None if claimed_at is None else wire.moment(claimed_at),
        sent_at=wire.moment(shown.at) if sent else None,
        ended_at=None if ended_at is None else wire.moment(ended_at),
        late=None if shown.late is None else shown.late / 1000,
        beat=shown.beat or (claim.beat if claim and of_claim else "") or None,
    )


class Memory:
    """What this process won a while ago, for its own later entries. Never an answer to a claim."""

    def __init__(self, span: Millis) -> None:
        self._span = span
        self._claims: dict[tuple[str, Millis], Entry] = {}

    def add(self, entry: Entry) -> None:
        self._claims[entry.job, entry.slot] = entry
        while len(self._claims) > 1_000:
            first = next(iter(self._claims))
            if self._claims[first].at > entry.at - self._span:
                return
            del self._claims[first]

    def find(self, job: str, slot: Millis, owner: str) -> Entry | None:
        found = self._claims.get((job, slot))
        return found if found is not None and found.owner == owner else None


def check_tolerance(name: str, window: Millis, horizon: Millis, tolerance: Millis) -> None:
    """:raises ConfigurationError: a claim that came early could be forgotten before its slot is too old."""
    if tolerance > window - horizon:
        raise ConfigurationError(
            f"{name} ({window / 1000:g} s) is too short for an early tolerance of {tolerance / 1000:g} s: raise the "
            "one or lower anarchon_early_tolerance"
        )


def remembered(value: Any, name: str, tolerance: Millis) -> tuple[Millis, Millis]:
    """A window in which a store remembers claims: in milliseconds, and the horizon: how far back from now slots may lie
    that are still claimed. Clocks differ, and a claim may come before its slot.

    :raises ConfigurationError: it is too short to be of use.
    """
    window = parse_duration(value, name)
    if window < 2 * tolerance or window < 2_000:
        raise ConfigurationError(
            f"{name}={value!r}: claims must be remembered for {max(2 * tolerance, 2_000) / 1000:g} s at least; "
            "300 is the default"
        )
    return window, min(window * 4 // 5, window - tolerance)
