"""Backends that let a wrong delivery start, or refuse a right one (W6 to W13); part of :mod:`.runsaboteurs`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.memorystore import Record
from celery_anarchon.backends.runs import (
    Start,
    StartResult,
)
from celery_anarchon.model import GateAnswer, Millis, Overlap, RunState

QUEUED, RUNNING, RETRYING = RunState.QUEUED, RunState.RUNNING, RunState.RETRYING


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


class StartsWhatWaits(MemoryBackend):
    """W3: a message of a slot that waits, wherever it is from, starts it."""

    @staticmethod
    def _judge(record: Record, now: Millis, start: Start) -> GateAnswer:
        return GateAnswer.START if record.state is RunState.WAITING else MemoryBackend._judge(record, now, start)


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
        threading.Event().wait(1e-2)
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
