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

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Confirmation, GivenUp, Hold, LapsedClaim, Takeover
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.memorystore import Record
from celery_anarchon.backends.runs import (
    LapsedEnd,
    Start,
    StartResult,
    Unstarted,
    Waiting,
    Worker,
)
from celery_anarchon.model import Answer, Millis, Run, RunState
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


class _Blind(MemoryBackend):
    """Some of the other runs do not count for overlap."""

    def _sees(self, record: Record, now: Millis) -> bool:
        raise NotImplementedError

    def _overlapping(self, space: Any, now: Millis, request: ClaimRequest) -> Answer | None:
        mine = space.runs[request.job]
        unseen = {slot: mine.pop(slot) for slot, record in list(mine.items()) if not self._sees(record, now)}
        try:
            return super()._overlapping(space, now, request)
        finally:
            mine.update(unseen)


class OverlapsWhatLapsed(_Blind):
    """W2: a run whose lease is over is dead."""

    def _sees(self, record: Record, now: Millis) -> bool:
        return not record.lapsed(now)


class OverlapsWhatRetries(_Blind):
    """W2: a run that waits for its next try does not live."""

    def _sees(self, record: Record, now: Millis) -> bool:
        return record.state is not RETRYING


class OverlapsWhatWaits(_Blind):
    """W2: a slot that waits for its turn is not in the way."""

    def _sees(self, record: Record, now: Millis) -> bool:
        return record.state is not RunState.WAITING


class FailedHoldsTheGuard(MemoryBackend):
    """W2: a run that failed is still in the way."""

    def _overlapping(self, space: Any, now: Millis, request: ClaimRequest) -> Answer | None:
        failed = [record for record in space.runs[request.job].values() if record.state is RunState.FAILED]
        for record in failed:
            record.state = RUNNING
        try:
            return super()._overlapping(space, now, request)
        finally:
            for record in failed:
                record.state = RunState.FAILED


class SkipsForAClaim(MemoryBackend):
    """W2: a slot that nobody has sent yet costs the next one."""

    def _overlapping(self, space: Any, now: Millis, request: ClaimRequest) -> Answer | None:
        answer = super()._overlapping(space, now, request)
        if answer is Answer.WAIT:
            space.put(request.job, request.slot, Record(RunState.SKIPPED, ended_at=now), RunState.SKIPPED)
            return Answer.SKIPPED
        return answer


class LooksThenClaims(MemoryBackend):
    """W2: looks for other runs, and claims in a second step."""

    def _overlapping(self, space: Any, now: Millis, request: ClaimRequest) -> Answer | None:
        answer = super()._overlapping(space, now, request)
        threading.Event().wait(1e-2)
        return answer

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        yield self._store.spaces[self.namespace], self._store.clock.wall()


class EverySlotWaits(MemoryBackend):
    """W3: nothing is superseded."""

    def _overlapping(self, space: Any, now: Millis, request: ClaimRequest) -> Answer | None:
        waiting = dict(space.runs[request.job])
        answer = super()._overlapping(space, now, request)
        for slot, record in waiting.items():
            if record.state is RunState.SUPERSEDED and record.reason == "newer-slot":
                record.reason = record.ended_at = None
                space.put(request.job, slot, record, RunState.WAITING)
        return answer


class WaitsForNothing(MemoryBackend):
    """W3: the slot that waits is claimed like any other."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        record = space.find(request.job, request.slot)
        if record is not None and record.state is RunState.WAITING:
            self._hand_out(record, now, request)
            space.put(request.job, request.slot, record, RunState.CLAIMED, now + request.lease)
            return ClaimResult(Answer.WON)
        return super()._claim(space, now, request)


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


class ExpiresWhatRuns(MemoryBackend):
    """W20: a message that expired ends its run, whatever the run does."""

    def _unstarted(self, space: Any, now: Millis, message: Unstarted) -> bool:
        record = space.find(message.job, message.slot)
        if record is not None and record.attempt == message.attempt and record.state in (RUNNING, RETRYING):
            record.state = QUEUED
        return super()._unstarted(space, now, message)


class EndsWhatIsConfirmedOnly(MemoryBackend):
    """W20: a message that is gone is of no run while its beat has not said that it was sent."""

    def _unstarted(self, space: Any, now: Millis, message: Unstarted) -> bool:
        record = space.find(message.job, message.slot)
        return (record is None or record.state is not RunState.CLAIMED) and super()._unstarted(space, now, message)


class EndsWhatItRead(MemoryBackend):
    """W21: what was on the list is ended without looking again."""

    def _end_lapsed(self, space: Any, now: Millis, ending: LapsedEnd) -> bool:
        record = space.find(ending.job, ending.slot)
        if record is not None and record.state is ending.was and record.lease_until is not None:
            record.lease_until = min(record.lease_until, now)
        return super()._end_lapsed(space, now, ending)


class EndsWhatCanGoOn(MemoryBackend):
    """W21: a sweeper that does not know the job ends its runs."""

    def _end_lapsed(self, space: Any, now: Millis, ending: LapsedEnd) -> bool:
        record = space.find(ending.job, ending.slot)
        if record is not None and record.state is ending.was is RUNNING and record.sweep_at() <= now:
            self._settle_as(space, now, ending.job, ending.slot, ending.state, ending.reason)
        return super()._end_lapsed(space, now, ending)


class DispatchesWhatRan(MemoryBackend):
    """W21: a run that had a body becomes dispatched, and its message may start it again."""

    def _end_lapsed(self, space: Any, now: Millis, ending: LapsedEnd) -> bool:
        if ending.state is not RunState.DISPATCHED:
            return super()._end_lapsed(space, now, ending)
        done = super()._end_lapsed(space, now, replace(ending, state=RunState.LOST))
        if done:
            space.find(ending.job, ending.slot).state = RunState.DISPATCHED
        return done


class ForgetsWhatIsToldAlong(MemoryBackend):
    """W27: the question is asked, and what has ended lives until its lease is over."""

    def settle_and_start(self, settlements: Any, starts: Any) -> Any:
        return [True] * len(settlements), self.start(starts)


class TellsBehindTheQuestion(MemoryBackend):
    """W27: the next run of a job that may not overlap finds alive what has ended."""

    def settle_and_start(self, settlements: Any, starts: Any) -> Any:
        started = self.start(starts)
        return self.settle(settlements), started


class EndsWhatWaitsAtOnce(MemoryBackend):
    """W26: a beat that does not know the job ends the slot that waits, whatever its time."""

    def _end_waiting(self, space: Any, now: Millis, ending: LapsedEnd, record: Record) -> bool:
        return super()._end_waiting(space, now + 10**9, ending, record)


class EndsWhatWaitsBesideOthers(MemoryBackend):
    """W26: the slot that waits ends though the run that it waits for lives, and its holder may still know the job."""

    def _end_waiting(self, space: Any, now: Millis, ending: LapsedEnd, record: Record) -> bool:
        space.has_living = lambda *_: False
        try:
            return super()._end_waiting(space, now, ending, record)
        finally:
            del space.has_living


class ListsAllThatWait(MemoryBackend):
    """W22: every slot that waits is listed, also while its job is busy."""

    def waiting(self, limit: int) -> list[Waiting]:
        with self._locked() as (space, _):
            waiting = sorted((slot, job) for job, slot in space.held_up)
            return [Waiting(job=job, slot=slot) for slot, job in waiting[:limit]]


class ReleasesWhatWaits(MemoryBackend):
    """W23: the slot that waits is lost with the run that it waits for."""

    def release_job(self, job: str) -> list[Run]:
        released = super().release_job(job)
        with self._locked() as (space, now):
            for slot, _ in list(space.living(job)):
                self._settle_as(space, now, job, slot, RunState.LOST, "released")
        return released


class ReleasesWhatLapsed(MemoryBackend):
    """W23: what seems alive is not released."""

    def release_job(self, job: str) -> list[Run]:
        with self._locked() as (space, now):
            lapsed = [(slot, record) for slot, record in space.living(job) if record.lapsed(now)]
            for slot, _ in lapsed:
                self._settle_as(space, now, job, slot, RunState.LOST, "released")
            return [self._run(job, slot, record) for slot, record in lapsed]


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
