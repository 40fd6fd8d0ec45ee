"""For each clause of runs on their workers a backend that breaks it: the store's side of the protocol's mutants.

Belongs here: what :mod:`.saboteurs` is for, for clauses W; and which of them is which mutant of the model
(``tests/model/run_protocol.py``). ``saboteurs`` has them all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import Confirmation, GivenUp, Hold, LapsedClaim, Takeover
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.runs import Start, StartResult, Worker
from celery_anarchon.model import Millis, RunState
from celery_anarchon.testing.endingsaboteurs import (
    DispatchesWhatRan,
    EndsWhatCanGoOn,
    EndsWhatIsConfirmedOnly,
    EndsWhatItRead,
    EndsWhatWaitsAtOnce,
    EndsWhatWaitsBesideOthers,
    ExpiresWhatRuns,
    ForgetsWhatIsToldAlong,
    ListsAllThatWait,
    ReleasesWhatLapsed,
    ReleasesWhatWaits,
    TellsBehindTheQuestion,
)
from celery_anarchon.testing.gatesaboteurs import (
    AnswersWithTheMessage,
    LooksThenStarts,
    OverlapsTheUnguarded,
    OverlapsTheUnknown,
    RefusesTheDispatched,
    RefusesTheUnknown,
    StartsAsTheSameAttempt,
    StartsCopies,
    StartsOnce,
    StartsTheConfirmedOnly,
    StartsWhatIsStale,
    StartsWhatWaits,
    StartsWhatWasDropped,
    StartsWhatWasGivenUp,
    StartsWithoutACap,
    WaitsForTheLastTry,
)
from celery_anarchon.testing.holdersaboteurs import (
    ConfirmsWhatRuns,
    CountsWhatWasGivenBack,
    GivesBackAsQueued,
    GivesBackAStaleRetry,
    GivesBackWhatHasBegun,
    IsAsLateAsItsLastAttempt,
    ReleasesAndKeeps,
    ReleasesToTheLease,
    RenewsForAnybody,
    RenewsWhatIsNotOverOnly,
    RenewsWhatWaits,
    RetriesForEver,
    RetriesOfAnyTry,
    SettlesForAnybody,
    SettlesOnce,
)
from celery_anarchon.testing.overlapsaboteurs import (
    EverySlotWaits,
    FailedHoldsTheGuard,
    LooksThenClaims,
    OverlapsWhatLapsed,
    OverlapsWhatRetries,
    OverlapsWhatWaits,
    SkipsForAClaim,
    WaitsForNothing,
)

QUEUED, RUNNING, RETRYING = RunState.QUEUED, RunState.RUNNING, RunState.RETRYING


class NobodyIsFollowed(MemoryBackend):
    """W1: what is published is dispatched, whatever its terms."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        done = super()._confirm(space, now, confirmation)
        if done:
            record = space.find(confirmation.job, confirmation.slot)
            space.put(confirmation.job, confirmation.slot, record, RunState.DISPATCHED)
        return done


class WaitsForEver(MemoryBackend):
    """W1: nothing ends a run that is queued."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        done = super()._confirm(space, now, confirmation)
        record = space.find(confirmation.job, confirmation.slot)
        if done and record.state is QUEUED:
            record.lease_until = now + 10**9
        return done


class CountsFromTheConfirm(MemoryBackend):
    """W1: the queue limit of a message for tomorrow is over today."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        return super()._confirm(space, now, replace(confirmation, delay=0))


class ListsClaimsOnly(MemoryBackend):
    """W4: sweepers hear of claims, not of runs."""

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        return [found for found in super().lapsed(1_000_000) if found.state is RunState.CLAIMED][:limit]


class HasNoPatience(MemoryBackend):
    """W4: a lease that is over is over, whatever the broker will bring again."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        return super()._start(space, now, replace(start, acks_late=False))


class GoesOnForEver(MemoryBackend):
    """W5: a lapsed run is sent again, however often it was."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is not None and record.terms is not None and record.state is RUNNING:
            record.terms = replace(record.terms, max_attempts=99)
        return super()._takeover(space, now, wish)


class SendsTheSameAttempt(MemoryBackend):
    """W5: a takeover of a run is its attempt again."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        ran = record is not None and record.state is RUNNING
        attempt = super()._takeover(space, now, wish)
        if ran and attempt is not None:
            record.attempt -= 1
            return attempt - 1
        return attempt


class TakesWhatHasEnded(MemoryBackend):
    """W5: what was on the list is written without looking again."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is not None and record.state is RunState.SUCCEEDED:
            record.state, record.lease_until = RUNNING, now
        return super()._takeover(space, now, wish)


class LooksThenGoesOn(MemoryBackend):
    """W5: looks at the run, and takes it over in a second step, whatever has become of it."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is not None and record.state is RUNNING and record.lapsed(now) and record.attempts_left():
            threading.Event().wait(2e-2)
            record.state, record.attempt, record.lease_until = RUNNING, wish.from_attempt, now
        return super()._takeover(space, now, wish)

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        yield self._store.spaces[self.namespace], self._store.clock.wall()


class BeginsAnewAfterAbandon(MemoryBackend):
    """W5: an abandoned claim starts again at attempt 1."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        done = super()._abandon(space, now, hold)
        if done:
            space.find(hold.job, hold.slot).attempt = 1
        return done


class MisfiresWhatHasRun(MemoryBackend):
    """W5: a later attempt that is late is a misfire."""

    def _give_up(self, space: Any, now: Millis, ending: GivenUp) -> bool:
        if ending.state is not RunState.MISFIRE:
            return super()._give_up(space, now, ending)
        done = super()._give_up(space, now, replace(ending, state=RunState.NOT_SENT))
        if done:
            space.find(ending.job, ending.slot).state = RunState.MISFIRE
        return done


class OneWorkerForEachLabel(MemoryBackend):
    """W24: workers are known by their labels."""

    def workers(self, within: Millis) -> list[Worker]:
        return list({worker.label: worker for worker in super().workers(within)}.values())


class ForgetsItHadWorkers(MemoryBackend):
    """W24: when the last worker leaves, there never was one."""

    def worker_left(self, owner: str) -> None:
        super().worker_left(owner)
        with self._locked() as (space, _):
            space.had_workers = bool(space.workers)


RUN_SABOTEURS: dict[str, tuple[type[MemoryBackend], ...]] = {
    "W1": (NobodyIsFollowed, WaitsForEver, CountsFromTheConfirm),
    "W2": (
        OverlapsWhatLapsed,
        OverlapsWhatRetries,
        OverlapsWhatWaits,
        FailedHoldsTheGuard,
        SkipsForAClaim,
        LooksThenClaims,
    ),
    "W3": (EverySlotWaits, WaitsForNothing, StartsWhatWaits),
    "W4": (ListsClaimsOnly, HasNoPatience),
    "W5": (
        GoesOnForEver,
        SendsTheSameAttempt,
        TakesWhatHasEnded,
        LooksThenGoesOn,
        BeginsAnewAfterAbandon,
        MisfiresWhatHasRun,
    ),
    "W6": (StartsOnce, AnswersWithTheMessage),
    "W7": (StartsWhatWasDropped, StartsWhatWasGivenUp),
    "W8": (RefusesTheUnknown, OverlapsTheUnknown),
    "W9": (StartsWhatIsStale,),
    "W10": (StartsTheConfirmedOnly, RefusesTheDispatched, OverlapsTheUnguarded),
    "W11": (WaitsForTheLastTry,),
    "W12": (StartsCopies, LooksThenStarts),
    "W13": (StartsAsTheSameAttempt, StartsWithoutACap),
    "W14": (RenewsForAnybody, RenewsWhatIsNotOverOnly, RenewsWhatWaits),
    "W15": (SettlesForAnybody, SettlesOnce),
    "W16": (ConfirmsWhatRuns,),
    "W17": (RetriesOfAnyTry, RetriesForEver),
    "W18": (GivesBackAsQueued, CountsWhatWasGivenBack, GivesBackAStaleRetry, GivesBackWhatHasBegun),
    "W19": (ReleasesToTheLease, ReleasesAndKeeps),
    "W20": (ExpiresWhatRuns, EndsWhatIsConfirmedOnly),
    "W21": (EndsWhatItRead, EndsWhatCanGoOn, DispatchesWhatRan),
    "W22": (ListsAllThatWait,),
    "W23": (ReleasesWhatWaits, ReleasesWhatLapsed),
    "W24": (OneWorkerForEachLabel, ForgetsItHadWorkers),
    "W25": (IsAsLateAsItsLastAttempt,),
    "W26": (EndsWhatWaitsAtOnce, EndsWhatWaitsBesideOthers),
    "W27": (ForgetsWhatIsToldAlong, TellsBehindTheQuestion),
}
"""Clause -> the backends that break it."""

MUTANTS: dict[str, str] = {
    "confirm-overwrites": "ConfirmsWhatRuns",
    "settle-unfenced": "SettlesForAnybody",
    "end-without-retries": "RetriesOfAnyTry",
    "heartbeat-unfenced": "RenewsForAnybody",
    "gate-not-idempotent": "StartsOnce",
    "gate-needs-queued": "StartsTheConfirmedOnly",
    "expiry-unfenced": "ExpiresWhatRuns",
    "max-late-ends-attempts": "MisfiresWhatHasRun",
    "gate-running-is-duplicate": "WaitsForTheLastTry",
    "gate-forgets-floor": "StartsWhatWasDropped",
    "gate-unknown-ignores-overlap": "OverlapsTheUnknown",
    "give-back-as-queued": "GivesBackAsQueued",
    "give-back-stale-retry": "GivesBackAStaleRetry",
    "gate-redelivery-same-attempt": "StartsAsTheSameAttempt",
    "gate-ignores-max": "StartsWithoutACap",
    "gate-admits-lost-in-queue": "StartsWhatWasGivenUp",
    "gate-refuses-dispatched": "RefusesTheDispatched",
    "takeover-claimed-burns-attempt": "CountsTakeovers",
    "takeover-unchecked": "TakesWhatHasEnded",
    "abandon-deletes": "AbandonsByForgetting",
    "abandon-forgets-attempt": "BeginsAnewAfterAbandon",
    "abandon-unfenced": "AbandonsWhatOthersHold",
    "overlap-ignores-lapsed": "OverlapsWhatLapsed",
    "overlap-ignores-retrying": "OverlapsWhatRetries",
    "no-queue-timeout": "WaitsForEver",
    "retrying-never-times-out": "RetriesForEver",
    "owner-is-hostname": "OwnerIsTheHost",
    "won-again-publishes": "WinsAgainAfterSending",
    "one-step-enqueues-again": "EnqueuesAgain",
    "one-step-takeover-two-steps": "TakesOverInTwoSteps",
}
"""Mutant of the model -> the saboteur that it is in a store."""

NOT_OF_A_STORE = frozenset(
    {
        "gate-token-per-worker",
        "requeue-after-unknown",
        "retry-keeps-old-header",
        "ask-then-expire",
        "gate-store-down-repeat",
        "repeat-never-asks",
        "gateless-worker",
        "gateless-worker-overlap",
        "renew-by-owner",
        "publish-after-abandon",
        "handover-before-stop",
        "handover-overtakes-settle",
        "unknown-is-won",
        "unknown-is-taken",
    }
)
"""Mutants that beats, workers or publishing make: no store can tell."""
