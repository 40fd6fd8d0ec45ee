"""The contract in plain dictionaries: the reference that every other store is compared with.

Belongs here: the shortest correct text of each clause of :mod:`.base`. Does not belong here: anything that makes it
fast or lasting. One process only, for tests and demos: the records die with it.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    BEATS_KEPT,
    FINGERPRINTS_KEPT,
    GIVEN_UP,
    NEVER_A_RUN,
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    LapsedClaim,
    LeaseBackend,
    Outcome,
    Registration,
    Sighting,
    Takeover,
    Traits,
)
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.errors import LayoutMismatch
from celery_anarchon.model import UNSETTLED, Answer, Millis, Run, RunState

_NO_MESSAGE = GIVEN_UP | NEVER_A_RUN


@dataclass
class _Record:
    """What is known of one (job, slot)."""

    state: RunState
    owner: str | None = None
    """Who holds it, or who ended it. None: abandoned, or never a run."""
    attempt: int = 1
    lease_until: Millis | None = None
    claimed_at: Millis | None = None
    sent_at: Millis | None = None
    ended_at: Millis | None = None
    late: Millis | None = None
    beat: str = ""
    reason: str | None = None

    def held_by(self, hold: Hold) -> bool:
        return self.state is RunState.CLAIMED and self.ended_by(hold)

    def ended_by(self, hold: Hold) -> bool:
        return self.owner == hold.owner and self.attempt == hold.attempt

    def lapsed(self, now: Millis) -> bool:
        return self.state is RunState.CLAIMED and self.lease_until is not None and self.lease_until <= now

    def settled_at(self) -> Millis:
        return max(at for at in (self.claimed_at, self.sent_at, self.ended_at) if at is not None)


@dataclass
class _Space:
    """Everything under one namespace."""

    app_name: str | None = None
    layout: int = wire.LAYOUT_VERSION
    runs: dict[str, dict[Millis, _Record]] = field(default_factory=lambda: defaultdict(dict))
    leased: set[tuple[str, Millis]] = field(default_factory=set)
    """The slots that hold a lease, so that a look for lapsed ones is not a walk over the past."""
    floors: dict[str, Millis] = field(default_factory=dict)
    sights: dict[str, dict[str, Millis]] = field(default_factory=lambda: defaultdict(dict))
    """job -> fingerprint -> since; the fingerprint sighted last stands last."""
    beats: dict[str, Beat] = field(default_factory=dict)

    def find(self, job: str, slot: Millis) -> _Record | None:
        return self.runs.get(job, {}).get(slot)

    def below_floor(self, job: str, slot: Millis) -> bool:
        return job in self.floors and slot <= self.floors[job]


class MemoryStore:
    """The shared part: what a server or a file is to the other backends. Its clock is the store's clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.spaces: dict[str, _Space] = defaultdict(_Space)
        self.lock = threading.RLock()


_named: dict[str, MemoryStore] = defaultdict(MemoryStore)
"""What ``memory://NAME`` means in this process: its clients must meet in one store, as those of a server do."""


class MemoryBackend(LeaseBackend):
    """A client of a :class:`MemoryStore`. Clients that are handed the same store share it."""

    name = "memory"
    traits = Traits(leases=True, horizon=None, server_time=True, durable=False, any_job_name=True, history_by_age=True)

    def __init__(
        self,
        namespace: str = "anarchon_runs",
        *,
        store: MemoryStore | None = None,
        clock: Clock | None = None,
        early_tolerance: Millis = 5_000,
    ) -> None:
        if store is not None and clock is not None:
            raise ValueError("the clock belongs to the store: give it to MemoryStore(clock=...)")
        self.namespace = namespace
        self.early_tolerance = early_tolerance
        self._store = store or MemoryStore(clock)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> MemoryBackend:
        """``memory://NAME``: clients of one process that use the same NAME share a store."""
        from celery_anarchon.backends.registry import read_url

        name, given = read_url(url, {"namespace": str}, options)
        return cls(store=_named[name], **given)

    def describe(self) -> str:
        return f"memory of this process, namespace {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        with self._locked() as (space, _):
            if space.layout > wire.LAYOUT_VERSION:
                raise LayoutMismatch(
                    f"namespace {self.namespace}: layout {space.layout} was written by a newer celery-anarchon; this "
                    f"one knows {wire.LAYOUT_VERSION}: upgrade this process"
                )
            if space.app_name not in (None, app_name):
                raise LayoutMismatch(
                    f"namespace {self.namespace}: belongs to app {space.app_name}, and this is app {app_name}; "
                    "set namespace=..."
                )
            if create:
                space.app_name = app_name

    def close(self) -> None:
        """Nothing to give back: the store lives as long as somebody holds it."""

    def now(self) -> Millis:
        return self._store.clock.wall()

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._locked() as (space, now):
            return [self._claim(space, now, request) for request in requests]

    def _claim(self, space: _Space, now: Millis, request: ClaimRequest) -> ClaimResult:
        if space.below_floor(request.job, request.slot):
            return ClaimResult(Answer.TOO_OLD)
        record = space.find(request.job, request.slot)
        if record is None:
            if request.slot > now + self.early_tolerance:
                return ClaimResult(Answer.TOO_EARLY)
            record = _Record(RunState.CLAIMED, request.owner, claimed_at=now, beat=request.beat)
            space.runs[request.job][request.slot] = record
            space.leased.add((request.job, request.slot))
        elif record.owner != request.owner:
            return ClaimResult(Answer.TAKEN)
        elif record.state is not RunState.CLAIMED:
            return ClaimResult(Answer.ALREADY_SENT, record.attempt)
        record.lease_until = now + request.lease
        return ClaimResult(Answer.WON, record.attempt)

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._confirm(space, now, confirmation) for confirmation in confirmations]

    def _confirm(self, space: _Space, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and record.held_by(confirmation):
            self._end(space, confirmation, record, RunState.DISPATCHED)
            record.sent_at, record.late = now, confirmation.late
            return True
        return record is not None and record.state is RunState.DISPATCHED and record.ended_by(confirmation)

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._abandon(space, now, hold) for hold in holds]

    def _abandon(self, space: _Space, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or not record.held_by(hold):
            return False
        record.owner, record.lease_until = None, now
        return True

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        for ending in endings:
            if ending.state not in GIVEN_UP:
                raise ValueError(f"a claim cannot be given up as {ending.state}")
        with self._locked() as (space, now):
            return [self._give_up(space, now, ending) for ending in endings]

    def _give_up(self, space: _Space, now: Millis, ending: GivenUp) -> bool:
        record = space.find(ending.job, ending.slot)
        if record is not None and record.held_by(ending):
            self._end(space, ending, record, ending.state)
            record.ended_at, record.reason = now, ending.reason
            return True
        return record is not None and record.state is ending.state and record.ended_by(ending)

    def _end(self, space: _Space, hold: Hold, record: _Record, state: RunState) -> None:
        record.state, record.lease_until = state, None
        space.leased.discard((hold.job, hold.slot))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.state not in NEVER_A_RUN:
                raise ValueError(f"{outcome.state} is no state of a slot that never became a run")
        with self._locked() as (space, now):
            for outcome in outcomes:
                if not space.below_floor(outcome.job, outcome.slot):
                    record = _Record(outcome.state, ended_at=now, beat=outcome.beat, reason=outcome.reason)
                    space.runs[outcome.job].setdefault(outcome.slot, record)

    def history(self, job: str, limit: int) -> list[Run]:
        with self._locked() as (space, _):
            records = space.runs.get(job, {})
            return [self._run(job, slot, records[slot]) for slot in heapq.nlargest(limit, records)]

    def last_run(self, job: str) -> Run | None:
        with self._locked() as (space, _):
            records = space.runs.get(job, {})
            sent = [slot for slot, record in records.items() if record.state not in _NO_MESSAGE]
            return self._run(job, max(sent), records[max(sent)]) if sent else None

    def _run(self, job: str, slot: Millis, record: _Record) -> Run:
        def moment(at: Millis | None) -> datetime | None:
            return None if at is None else wire.moment(at)

        return Run(
            job=job,
            slot=wire.moment(slot),
            run_id=wire.run_id(self.namespace, job, slot),
            state=record.state,
            reason=record.reason,
            attempt=record.attempt,
            claimed_at=moment(record.claimed_at),
            sent_at=moment(record.sent_at),
            ended_at=moment(record.ended_at),
            late=None if record.late is None else record.late / 1000,
            beat=record.beat or None,
        )

    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        with self._locked() as (space, now):
            return [self._register(space, now, sighting) for sighting in sightings]

    def _register(self, space: _Space, now: Millis, sighting: Sighting) -> Registration:
        known = space.sights[sighting.job]
        since = known.pop(sighting.fingerprint, now)
        known[sighting.fingerprint] = since
        while len(known) > FINGERPRINTS_KEPT:
            del known[next(iter(known))]
        slots = list(space.runs.get(sighting.job, {}))
        if sighting.job in space.floors:
            slots.append(space.floors[sighting.job])
        return Registration(since=since, last=max(slots, default=None))

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        with self._locked() as (space, now):
            held = ((space.runs[job][slot], job, slot) for job, slot in space.leased)
            over = [(record.lease_until, job, slot) for record, job, slot in held if record.lapsed(now)]
            return [
                LapsedClaim(job=job, slot=slot, attempt=record.attempt, abandoned=record.owner is None)
                for _, job, slot in heapq.nsmallest(limit, over)
                for record in [space.runs[job][slot]]
            ]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        with self._locked() as (space, now):
            return [self._takeover(space, now, wish) for wish in wishes]

    def _takeover(self, space: _Space, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is None or record.state is not RunState.CLAIMED or record.attempt != wish.from_attempt:
            return None
        if not record.lapsed(now) and record.owner != wish.owner:
            return None
        record.owner, record.beat, record.lease_until = wish.owner, wish.beat, now + wish.lease
        return record.attempt

    def tidy(self, keeps: Sequence[Keep]) -> int:
        with self._locked() as (space, now):
            return sum(self._tidy(space, now, keep) for keep in keeps)

    def _tidy(self, space: _Space, now: Millis, keep: Keep) -> int:
        records = space.runs.get(keep.job, {})
        surplus = len(records) - keep.history_size
        dropped = 0
        # Oldest slot first, and the first that stays ends it: a floor above a slot that stays would close that slot.
        for slot in sorted(records):
            record = records[slot]
            if record.state in UNSETTLED or slot > keep.decided:
                break
            aged = keep.history_ttl is not None and record.settled_at() < now - keep.history_ttl
            if not (aged or dropped < surplus):
                break
            del records[slot]
            space.floors[keep.job] = slot
            dropped += 1
        return dropped

    def beat_seen(self, beat: Beat) -> Millis:
        with self._locked() as (space, now):
            space.beats[beat.owner] = replace(beat, seen=now)
            for owner, known in list(space.beats.items()):
                if known.seen < now - BEATS_KEPT:
                    del space.beats[owner]
            return now

    def beat_left(self, owner: str) -> None:
        with self._locked() as (space, _):
            space.beats.pop(owner, None)

    def beats(self, within: Millis) -> list[Beat]:
        with self._locked() as (space, now):
            seen = [beat for beat in space.beats.values() if beat.seen >= now - within]
            return sorted(seen, key=lambda beat: (beat.label, beat.owner))

    @contextmanager
    def _locked(self) -> Iterator[tuple[_Space, Millis]]:
        """The one atomic step: this namespace and the store's time, for nobody else meanwhile."""
        with self._store.lock:
            yield self._store.spaces[self.namespace], self._store.clock.wall()
