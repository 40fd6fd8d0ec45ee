"""The contract in plain dictionaries: the reference that every other store is compared with.

Belongs here: the shortest correct text of each clause of :mod:`.base`. Does not belong here: anything that makes it
fast or lasting. One process only, for tests and demos: the records die with it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import (
    BEATS_KEPT,
    FINGERPRINTS_KEPT,
    NO_MESSAGE,
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    LapsedClaim,
    Outcome,
    Registration,
    Sighting,
    Takeover,
    Traits,
    check_charter,
    check_given_up,
    check_never_a_run,
)
from celery_anarchon.backends.memoryonestep import MemoryOneStep
from celery_anarchon.backends.memorystore import MemoryStore, Record, Space
from celery_anarchon.clock import Clock
from celery_anarchon.model import UNSETTLED, Answer, Millis, Overlap, Run, RunState

_named: dict[str, MemoryStore] = defaultdict(MemoryStore)
"""What ``memory://NAME`` means in this process: its clients must meet in one store, as those of a server do."""


class MemoryBackend(MemoryOneStep):
    """A client of a :class:`MemoryStore`. Clients that are handed the same store share it."""

    name = "memory"
    traits = Traits(
        leases=True,
        horizon=None,
        server_time=True,
        durable=False,
        any_job_name=True,
        history_by_age=True,
        follows_runs=True,
        one_step=True,
    )

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
            check_charter(self, app_name, layout=space.layout, app=space.app_name, own="namespace=...")
            if create:
                space.app_name = app_name

    def close(self) -> None:
        """Nothing to give back: the store lives as long as somebody holds it."""

    def now(self) -> Millis:
        return self._store.clock.wall()

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._locked() as (space, now):
            return [self._claim(space, now, request) for request in requests]

    def _claim(self, space: Space, now: Millis, request: ClaimRequest) -> ClaimResult:
        if space.below_floor(request.job, request.slot):
            return ClaimResult(Answer.TOO_OLD)
        record = space.find(request.job, request.slot)
        if record is None:
            if request.slot > now + self.early_tolerance:
                return ClaimResult(Answer.TOO_EARLY)
            held_up = self._overlapping(space, now, request)
            if held_up is not None:
                return ClaimResult(held_up)
            record = Record(RunState.CLAIMED)
            self._hand_out(record, now, request)
        elif record.state is RunState.WAITING:
            if space.has_living(request.job):
                return ClaimResult(Answer.WAITING)
            self._hand_out(record, now, request)
        elif record.owner != request.owner:
            return ClaimResult(Answer.TAKEN)
        elif record.state is not RunState.CLAIMED:
            return ClaimResult(Answer.ALREADY_SENT, record.attempt)
        space.put(request.job, request.slot, record, RunState.CLAIMED, now + request.lease)
        return ClaimResult(Answer.WON, record.attempt)

    @staticmethod
    def _hand_out(record: Record, now: Millis, request: ClaimRequest) -> None:
        record.owner, record.beat, record.terms = request.owner, request.beat, request.terms
        record.claimed_at = now

    def _overlapping(self, space: Space, now: Millis, request: ClaimRequest) -> Answer | None:
        """Record what becomes of an open slot that may not overlap; None: it may be claimed."""
        overlap = Overlap.ALLOW if request.terms is None else request.terms.overlap
        if overlap is Overlap.ALLOW:
            return None
        others = list(space.living(request.job))
        waiting = [(slot, record) for slot, record in others if record.state is RunState.WAITING]
        if overlap is Overlap.QUEUE_ONE:
            others = [other for other in others if other not in waiting]
        published = [slot for slot, record in others if record.state is not RunState.CLAIMED]
        if others and not published:
            return Answer.WAIT
        mine = Record(RunState.SKIPPED, ended_at=now, beat=request.beat)
        if overlap is Overlap.SKIP:
            if not others:
                return None
            mine.reason, mine.blocked_by = "overlap", published[0]
            space.put(request.job, request.slot, mine, RunState.SKIPPED)
            return Answer.SKIPPED
        if any(slot > request.slot for slot, _ in waiting):
            mine.reason = "newer-slot"
            space.put(request.job, request.slot, mine, RunState.SUPERSEDED)
            return Answer.SKIPPED
        for slot, record in waiting:
            record.ended_at, record.reason = now, "newer-slot"
            space.put(request.job, slot, record, RunState.SUPERSEDED)
        if not others:
            return None
        waits = Record(RunState.WAITING, claimed_at=now, beat=request.beat, terms=request.terms)
        waits.blocked_by = published[0]
        space.put(request.job, request.slot, waits, RunState.WAITING)
        return Answer.WAITING

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._confirm(space, now, confirmation) for confirmation in confirmations]

    def _confirm(self, space: Space, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and record.held_by(confirmation):
            if record.terms is None:
                space.put(confirmation.job, confirmation.slot, record, RunState.DISPATCHED)
            else:
                until = now + confirmation.delay + record.terms.queue_timeout
                space.put(confirmation.job, confirmation.slot, record, RunState.QUEUED, until)
            if record.sent_at is None:
                record.sent_at, record.late = now, confirmation.late
            return True
        sent = (RunState.DISPATCHED, RunState.QUEUED)
        return record is not None and record.state in sent and record.ended_by(confirmation)

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._abandon(space, now, hold) for hold in holds]

    def _abandon(self, space: Space, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or not record.held_by(hold):
            return False
        record.owner, record.lease_until = None, now
        return True

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        check_given_up(endings)
        with self._locked() as (space, now):
            return [self._give_up(space, now, ending) for ending in endings]

    def _give_up(self, space: Space, now: Millis, ending: GivenUp) -> bool:
        record = space.find(ending.job, ending.slot)
        if ending.state is RunState.MISFIRE and ending.attempt > 1:
            return False
        if record is not None and record.held_by(ending):
            space.put(ending.job, ending.slot, record, ending.state)
            record.ended_at, record.reason = now, ending.reason
            return True
        return record is not None and record.state is ending.state and record.ended_by(ending)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        check_never_a_run(outcomes)
        with self._locked() as (space, now):
            for outcome in outcomes:
                if not space.below_floor(outcome.job, outcome.slot):
                    record = Record(outcome.state, ended_at=now, beat=outcome.beat, reason=outcome.reason)
                    space.runs[outcome.job].setdefault(outcome.slot, record)

    def history(self, job: str, limit: int) -> list[Run]:
        with self._locked() as (space, _):
            records = space.runs.get(job, {})
            return [self._run(job, slot, records[slot]) for slot in heapq.nlargest(limit, records)]

    def last_run(self, job: str) -> Run | None:
        with self._locked() as (space, _):
            records = space.runs.get(job, {})
            sent = [slot for slot, record in records.items() if record.state not in NO_MESSAGE]
            return self._run(job, max(sent), records[max(sent)]) if sent else None

    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        with self._locked() as (space, now):
            return [self._register(space, now, sighting) for sighting in sightings]

    def _register(self, space: Space, now: Millis, sighting: Sighting) -> Registration:
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
            over = [(record.sweep_at(), job, slot) for record, job, slot in held if record.sweep_at() <= now]
            return [
                LapsedClaim(
                    job=job,
                    slot=slot,
                    attempt=record.attempt,
                    abandoned=record.state is RunState.CLAIMED and record.owner is None,
                    state=record.state,
                    max_attempts=None if record.terms is None else record.terms.max_attempts,
                    reason=record.reason,
                )
                for _, job, slot in heapq.nsmallest(limit, over)
                for record in [space.runs[job][slot]]
            ]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        with self._locked() as (space, now):
            return [self._takeover(space, now, wish) for wish in wishes]

    def _takeover(self, space: Space, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is None:
            return None
        if record.state is RunState.RUNNING and record.attempt == wish.from_attempt:
            if not (record.lapsed(now) and record.attempts_left()):
                return None
            record.attempt, record.retries = record.attempt + 1, 0
            record.reason = None
        elif record.state is not RunState.CLAIMED:
            return None
        elif record.owner != wish.owner:
            if not (record.lapsed(now) and record.attempt == wish.from_attempt):
                return None
        elif record.attempt - wish.from_attempt not in (0, 1):
            return None
        record.owner, record.beat, record.token = wish.owner, wish.beat, None
        space.put(wish.job, wish.slot, record, RunState.CLAIMED, now + wish.lease)
        return record.attempt

    def tidy(self, keeps: Sequence[Keep]) -> int:
        with self._locked() as (space, now):
            return sum(self._tidy(space, now, keep) for keep in keeps)

    def _tidy(self, space: Space, now: Millis, keep: Keep) -> int:
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
