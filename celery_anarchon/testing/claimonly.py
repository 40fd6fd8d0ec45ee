"""A store that only takes claims, in plain dictionaries: the weakest that the engine can stand on.

It has what a message broker has and no more: it can say who was first, for a while, and it can keep a list. Tests of
the engine use it, and the kit is tried on it. What it lacks, its options choose.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    GIVEN_UP,
    NEVER_A_RUN,
    ClaimBackend,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    Outcome,
    Traits,
)
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.errors import LayoutMismatch
from celery_anarchon.model import Answer, Millis, Run, RunState


@dataclass
class Mark:
    """Whose a claim is, and until when that is known."""

    owner: str
    until: Millis


@dataclass
class Space:
    """Everything under one namespace."""

    app_name: str | None = None
    layout: int = wire.LAYOUT_VERSION
    marks: dict[tuple[str, Millis], Mark] = field(default_factory=dict)
    history: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """Of each job what was written, in that order, however often."""


class ClaimOnlyStore:
    """The part that clients share, and its clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.spaces: dict[str, Space] = defaultdict(Space)
        self.lock = threading.RLock()


class ClaimOnlyMemory(ClaimBackend):
    """A client of a :class:`ClaimOnlyStore`.

    :param horizon: how long a claim is remembered.
    :param knows_owner: False: an owner that asks again is told TAKEN, as everyone else is.
    """

    name = "claim-only-memory"
    traits = Traits(
        leases=False,
        horizon=300_000,
        server_time=True,
        durable=False,
        any_job_name=True,
        history_by_age=False,
        exact_history=False,
    )

    def __init__(
        self,
        namespace: str = "claims",
        *,
        store: ClaimOnlyStore,
        horizon: Millis = 300_000,
        knows_owner: bool = True,
    ) -> None:
        self.namespace = namespace
        self.traits = replace(type(self).traits, horizon=horizon, knows_owner=knows_owner)
        self._horizon = horizon
        self._store = store

    def describe(self) -> str:
        return f"claims in memory, namespace {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        with self._locked() as (space, _):
            if space.layout > wire.LAYOUT_VERSION:
                raise LayoutMismatch(f"namespace {self.namespace!r}: layout {space.layout} is of a newer release")
            if space.app_name not in (None, app_name):
                raise LayoutMismatch(
                    f"namespace {self.namespace!r} belongs to app {space.app_name}, and this is app {app_name}"
                )
            if create:
                space.app_name = app_name

    def close(self) -> None:
        """Nothing to give back."""

    def now(self) -> Millis:
        return self._store.clock.wall()

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._locked() as (space, now):
            return [ClaimResult(self._claim(space, now, request)) for request in requests]

    def _claim(self, space: Space, now: Millis, request: ClaimRequest) -> Answer:
        if request.slot > now + self.early_tolerance:
            return Answer.TOO_EARLY
        if request.slot < now - self._horizon:
            return Answer.TOO_OLD
        mark = space.marks.get((request.job, request.slot))
        if mark is None or mark.until < now:
            # Early by the tolerance is as late as a claim can be made before its slot.
            until = max(now, request.slot) + self._horizon
            space.marks[request.job, request.slot] = Mark(request.owner, until)
            return Answer.WON
        return Answer.WON if mark.owner == request.owner and self.traits.knows_owner else Answer.TAKEN

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        with self._locked() as (space, now):
            for one in confirmations:
                run = self._run(one.job, one.slot, RunState.DISPATCHED)
                space.history[one.job].append(replace(run, sent_at=wire.moment(now), late=one.late / 1000))
        return [True] * len(confirmations)

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        return [False] * len(holds)

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        with self._locked() as (space, now):
            for one in endings:
                if one.state not in GIVEN_UP:
                    raise ValueError(f"a claim cannot be given up as {one.state}")
                run = self._run(one.job, one.slot, one.state)
                space.history[one.job].append(replace(run, ended_at=wire.moment(now), reason=one.reason))
        return [True] * len(endings)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        with self._locked() as (space, now):
            for one in outcomes:
                if one.state not in NEVER_A_RUN:
                    raise ValueError(f"{one.state} is no state of a slot that never became a run")
                run = self._run(one.job, one.slot, one.state)
                space.history[one.job].append(
                    replace(run, ended_at=wire.moment(now), reason=one.reason, beat=one.beat or None)
                )

    def history(self, job: str, limit: int) -> list[Run]:
        with self._locked() as (space, _):
            return self._folded(space, job)[: max(limit, 0)]

    def last_run(self, job: str) -> Run | None:
        with self._locked() as (space, _):
            return next((run for run in self._folded(space, job) if run.state is RunState.DISPATCHED), None)

    def tidy(self, keeps: Sequence[Keep]) -> int:
        dropped = 0
        with self._locked() as (space, _):
            for keep in keeps:
                kept = self._folded(space, keep.job)[: keep.history_size]
                dropped += len(space.history[keep.job]) - len(kept)
                space.history[keep.job] = kept
        return dropped

    def _folded(self, space: Space, job: str) -> list[Run]:
        """One run for each slot, newest slot first: a message before what was only noted, and the first word of two."""
        runs: dict[float, Run] = {}
        for run in space.history.get(job, ()):
            key = run.slot.timestamp()
            known = runs.get(key)
            if known is None or (run.state is RunState.DISPATCHED and known.state is not RunState.DISPATCHED):
                runs[key] = run
        return [runs[key] for key in sorted(runs, reverse=True)]

    def _run(self, job: str, slot: Millis, state: RunState) -> Run:
        return Run(job=job, slot=wire.moment(slot), run_id=wire.run_id(self.namespace, job, slot), state=state)

    @contextmanager
    def _locked(self) -> Iterator[tuple[Space, Millis]]:
        with self._store.lock:
            yield self._store.spaces[self.namespace], self._store.clock.wall()
