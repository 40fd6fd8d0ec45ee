"""Backends that end runs which may go on, or keep those that have ended (W20 to W23, W26, W27); part of
:mod:`.runsaboteurs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.memorystore import Record
from celery_anarchon.backends.runs import LapsedEnd, Unstarted, Waiting
from celery_anarchon.model import Millis, Run, RunState

QUEUED, RUNNING, RETRYING = RunState.QUEUED, RunState.RUNNING, RunState.RETRYING


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
