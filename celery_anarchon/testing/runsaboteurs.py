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
    RELEASED,
    GiveBack,
    LapsedEnd,
    NextTry,
    RunHold,
    Settlement,
    Start,
    StartResult,
    Unstarted,
    Waiting,
    Worker,
)
from celery_anarchon.model import Answer, GateAnswer, Millis, Overlap, Run, RunState

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
        threading.Event().wait(1e-3)
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


class StartsOnce(MemoryBackend):
    """W6: a start asked again is a duplicate."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None and record.state is RUNNING and record.token == start.token:
            start = replace(start, token=f"{start.token} again")
        return super()._start(space, now, start)


class AnswersWithTheMessage(MemoryBackend):
    """W6: a start asked again is answered with the attempt that its message says."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        again = record is not None and record.state is RUNNING and record.token == start.token
        result = super()._start(space, now, start)
        return replace(result, attempt=start.attempt) if again else result


class StartsWhatWasDropped(MemoryBackend):
    """W7: what was trimmed from the history counts as unknown."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        floor = space.floors.pop(start.job, None)
        try:
            return super()._start(space, now, start)
        finally:
            if floor is not None:
                space.floors[start.job] = floor


class StartsWhatWasGivenUp(MemoryBackend):
    """W7: a message that comes after its run was lost in the queue still starts it."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None and record.state is RunState.LOST_IN_QUEUE:
            record.state = QUEUED
        return super()._start(space, now, start)


class RefusesTheUnknown(MemoryBackend):
    """W8: without a record there is no run."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        if space.find(start.job, start.slot) is None and not space.below_floor(start.job, start.slot):
            return StartResult(GateAnswer.SETTLED)
        return super()._start(space, now, start)


class OverlapsTheUnknown(MemoryBackend):
    """W8: without a record nobody looks at overlap."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        if space.find(start.job, start.slot) is None:
            start = replace(start, terms=replace(start.terms, overlap=Overlap.ALLOW))
        return super()._start(space, now, start)


class StartsWhatIsStale(MemoryBackend):
    """W9: the attempt of a message is not looked at."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None:
            start = replace(start, attempt=max(start.attempt, record.attempt))
        return super()._start(space, now, start)


class StartsTheConfirmedOnly(MemoryBackend):
    """W10: what is only claimed was not sent, as far as the store knows."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None and record.state is RunState.CLAIMED and record.attempt <= start.attempt:
            return StartResult(GateAnswer.DUPLICATE)
        return super()._start(space, now, start)


class RefusesTheDispatched(MemoryBackend):
    """W10: dispatched is an end."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None and record.state is RunState.DISPATCHED:
            return StartResult(GateAnswer.SETTLED)
        return super()._start(space, now, start)


class OverlapsTheUnguarded(MemoryBackend):
    """W10: one that was given up as dispatched starts, whatever was sent after it."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is not None and record.state is RunState.DISPATCHED:
            start = replace(start, terms=replace(start.terms, overlap=Overlap.ALLOW))
        return super()._start(space, now, start)


class WaitsForTheLastTry(MemoryBackend):
    """W11: while a try runs, the next one is a copy of it."""

    @staticmethod
    def _judge(record: Record, now: Millis, start: Start) -> GateAnswer:
        another = record.state is RUNNING and record.token != start.token and start.retries > record.retries
        answer = MemoryBackend._judge(record, now, start)
        return GateAnswer.DUPLICATE if another and answer is GateAnswer.START else answer


class StartsCopies(MemoryBackend):
    """W12: whoever has the message may run it."""

    @staticmethod
    def _judge(record: Record, now: Millis, start: Start) -> GateAnswer:
        answer = MemoryBackend._judge(record, now, start)
        return GateAnswer.START if answer is GateAnswer.DUPLICATE else answer


class LooksThenStarts(MemoryBackend):
    """W12: judges, and writes in a second step."""

    def _judge(self, record: Record, now: Millis, start: Start) -> GateAnswer:  # type: ignore[override]
        answer = MemoryBackend._judge(record, now, start)
        threading.Event().wait(1e-3)
        return answer

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        yield self._store.spaces[self.namespace], self._store.clock.wall()


class StartsAsTheSameAttempt(MemoryBackend):
    """W13: a redelivery after a crash is the attempt that crashed."""

    def _start(self, space: Any, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        known = None if record is None or record.state is not RUNNING else record.attempt
        result = super()._start(space, now, start)
        if known is None or result.answer is not GateAnswer.START:
            return result
        record.attempt = known
        return replace(result, attempt=known)


class StartsWithoutACap(MemoryBackend):
    """W13: the gate counts attempts, and does not look at how many there may be."""

    @staticmethod
    def _judge(record: Record, now: Millis, start: Start) -> GateAnswer:
        answer = MemoryBackend._judge(record, now, start)
        return GateAnswer.START if answer is GateAnswer.USED_UP else answer


class RenewsForAnybody(MemoryBackend):
    """W14: a heartbeat renews the slot for whoever asks."""

    def _heartbeat(self, space: Any, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is not None and record.state is RUNNING:
            hold = replace(hold, attempt=record.attempt, retries=record.retries, token=record.token)
        return super()._heartbeat(space, now, hold)


class RenewsWhatIsNotOverOnly(MemoryBackend):
    """W14: a heartbeat that comes late finds its run lost."""

    def _heartbeat(self, space: Any, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        return record is not None and not record.lapsed(now) and super()._heartbeat(space, now, hold)


class SettlesForAnybody(MemoryBackend):
    """W15: an end is of the slot, whoever says so."""

    def _settle(self, space: Any, now: Millis, settlement: Settlement) -> bool:
        record = space.find(settlement.job, settlement.slot)
        if record is not None and record.state in (RunState.CLAIMED, QUEUED, RUNNING, RETRYING):
            self._settle_as(space, now, settlement.job, settlement.slot, settlement.state, settlement.reason)
            return True
        return super()._settle(space, now, settlement)


class SettlesOnce(MemoryBackend):
    """W15: a settle asked again is refused."""

    def _settle(self, space: Any, now: Millis, settlement: Settlement) -> bool:
        record = space.find(settlement.job, settlement.slot)
        return record is not None and record.state is RUNNING and super()._settle(space, now, settlement)


class ConfirmsWhatRuns(MemoryBackend):
    """W16: a confirm writes "queued", whatever the record says."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and record.state in (RUNNING, RETRYING):
            space.put(confirmation.job, confirmation.slot, record, QUEUED, now + record.terms.queue_timeout)
            return True
        return super()._confirm(space, now, confirmation)


class IsAsLateAsItsLastAttempt(MemoryBackend):
    """W25: the second attempt of a run that was on time looks like a late dispatch."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and record.held_by(confirmation):
            record.sent_at = None
        return super()._confirm(space, now, confirmation)


class RetriesOfAnyTry(MemoryBackend):
    """W17: which try it was that will be made again is not looked at."""

    def _retrying(self, space: Any, now: Millis, a_try: NextTry) -> bool:
        record = space.find(a_try.job, a_try.slot)
        if record is not None and record.attempt == a_try.attempt:
            a_try = replace(a_try, retries=record.retries, token=record.token)
        return super()._retrying(space, now, a_try)


class RetriesForEver(MemoryBackend):
    """W17: the queue limit is for what is queued only."""

    def _retrying(self, space: Any, now: Millis, a_try: NextTry) -> bool:
        return super()._retrying(space, now, replace(a_try, delay=10**9))


class GivesBackAsQueued(MemoryBackend):
    """W18: a start that is given back is queued, whatever it was before."""

    def _give_back(self, space: Any, now: Millis, back: GiveBack) -> bool:
        done = super()._give_back(space, now, back)
        if done:
            record = space.find(back.job, back.slot)
            record.retries = 0
            space.put(back.job, back.slot, record, QUEUED, now + record.terms.queue_timeout)
        return done


class GivesBackAStaleRetry(MemoryBackend):
    """W18: a retry that was granted a higher attempt is given back as a retry."""

    def _give_back(self, space: Any, now: Millis, back: GiveBack) -> bool:
        return super()._give_back(space, now, replace(back, message_attempt=back.attempt) if back.retries else back)


class GivesBackWhatHasBegun(MemoryBackend):
    """W18: what the holder has just reported as retrying, it may still give back."""

    def _give_back(self, space: Any, now: Millis, back: GiveBack) -> bool:
        record = space.find(back.job, back.slot)
        return super()._give_back(space, now, back) or (
            record is not None and record.state is RETRYING and record.run_ended_by(back)
        )


class ReleasesToTheLease(MemoryBackend):
    """W19: the run of a worker that stops waits for its lease."""

    @staticmethod
    def _release(space: Any, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or not record.run_by(hold):
            return False
        record.token, record.reason = None, RELEASED
        return True


class ReleasesAndKeeps(MemoryBackend):
    """W19: who released a run still holds it."""

    @staticmethod
    def _release(space: Any, now: Millis, hold: RunHold) -> bool:
        done = MemoryBackend._release(space, now, hold)
        if done:
            space.find(hold.job, hold.slot).token = hold.token
        return done


class ExpiresWhatRuns(MemoryBackend):
    """W20: a message that expired ends its run, whatever the run does."""

    def _unstarted(self, space: Any, now: Millis, message: Unstarted) -> bool:
        record = space.find(message.job, message.slot)
        if record is not None and record.attempt == message.attempt and record.state in (RUNNING, RETRYING):
            record.state = QUEUED
        return super()._unstarted(space, now, message)


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
    "W2": (OverlapsWhatLapsed, OverlapsWhatRetries, SkipsForAClaim, LooksThenClaims),
    "W3": (EverySlotWaits, WaitsForNothing),
    "W4": (ListsClaimsOnly, HasNoPatience),
    "W5": (GoesOnForEver, SendsTheSameAttempt, TakesWhatHasEnded, BeginsAnewAfterAbandon, MisfiresWhatHasRun),
    "W6": (StartsOnce, AnswersWithTheMessage),
    "W7": (StartsWhatWasDropped, StartsWhatWasGivenUp),
    "W8": (RefusesTheUnknown, OverlapsTheUnknown),
    "W9": (StartsWhatIsStale,),
    "W10": (StartsTheConfirmedOnly, RefusesTheDispatched, OverlapsTheUnguarded),
    "W11": (WaitsForTheLastTry,),
    "W12": (StartsCopies, LooksThenStarts),
    "W13": (StartsAsTheSameAttempt, StartsWithoutACap),
    "W14": (RenewsForAnybody, RenewsWhatIsNotOverOnly),
    "W15": (SettlesForAnybody, SettlesOnce),
    "W16": (ConfirmsWhatRuns,),
    "W17": (RetriesOfAnyTry, RetriesForEver),
    "W18": (GivesBackAsQueued, GivesBackAStaleRetry, GivesBackWhatHasBegun),
    "W19": (ReleasesToTheLease, ReleasesAndKeeps),
    "W20": (ExpiresWhatRuns,),
    "W21": (EndsWhatItRead, EndsWhatCanGoOn, DispatchesWhatRan),
    "W22": (ListsAllThatWait,),
    "W23": (ReleasesWhatWaits, ReleasesWhatLapsed),
    "W24": (OneWorkerForEachLabel, ForgetsItHadWorkers),
    "W25": (IsAsLateAsItsLastAttempt,),
    "W26": (EndsWhatWaitsAtOnce, EndsWhatWaitsBesideOthers),
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
