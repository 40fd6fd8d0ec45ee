"""Backends in which runs overlap, or are kept from it wrongly (W2, W3); part of :mod:`.runsaboteurs`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_anarchon.backends.base import ClaimRequest, ClaimResult
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.memorystore import Record
from celery_anarchon.model import Answer, Millis, RunState

RUNNING, RETRYING = RunState.RUNNING, RunState.RETRYING


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
