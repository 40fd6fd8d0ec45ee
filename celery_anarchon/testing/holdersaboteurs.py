"""Backends that believe any holder, or not the right one (W14 to W19, W25); part of :mod:`.runsaboteurs`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import Confirmation
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.runs import (
    RELEASED,
    GiveBack,
    NextTry,
    RunHold,
    Settlement,
)
from celery_anarchon.model import Millis, RunState

QUEUED, RUNNING, RETRYING = RunState.QUEUED, RunState.RUNNING, RunState.RETRYING


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


class RenewsWhatWaits(MemoryBackend):
    """W14: a heartbeat for what no worker has started, or what waits for its next try, renews it."""

    def _heartbeat(self, space: Any, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or record.state not in (RunState.CLAIMED, QUEUED, RETRYING):
            return super()._heartbeat(space, now, hold)
        if (record.attempt, record.retries) != (hold.attempt, hold.retries):
            return False
        record.lease_until = now + record.terms.lease
        return True


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


class CountsWhatWasGivenBack(MemoryBackend):
    """W18: a start that is given back was an attempt."""

    def _give_back(self, space: Any, now: Millis, back: GiveBack) -> bool:
        done = super()._give_back(space, now, back)
        if done:
            space.find(back.job, back.slot).attempt += 1
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
