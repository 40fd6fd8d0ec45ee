"""Claims that take their messages along, in plain dictionaries: the shortest text of the clauses O of
:mod:`celery_anarchon.backends.onestep`. One command is known here: ``("PUT", queue, payload)``.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Command, Confirmation, Enqueue, Takeover
from celery_anarchon.backends.memoryruns import MemoryRuns
from celery_anarchon.backends.memorystore import Space
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.model import Answer, Millis, RunState

PUT = "PUT"


class MemoryOneStep(MemoryRuns, OneStepBackend):
    """What of :class:`~celery_anarchon.backends.memory.MemoryBackend` writes messages."""

    @abc.abstractmethod
    def _claim(self, space: Space, now: Millis, request: ClaimRequest) -> ClaimResult: ...

    @abc.abstractmethod
    def _takeover(self, space: Space, now: Millis, wish: Takeover) -> int | None: ...

    @abc.abstractmethod
    def _confirm(self, space: Space, now: Millis, confirmation: Confirmation) -> bool: ...

    def why_not_one_step(self) -> str | None:
        return None

    def claim_and_send(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._locked() as (space, now):
            return [self._claim_and_send(space, now, request) for request in requests]

    def _claim_and_send(self, space: Space, now: Millis, request: ClaimRequest) -> ClaimResult:
        known = space.find(request.job, request.slot)
        # What it holds already may be out.
        new = known is None or known.state is not RunState.CLAIMED
        result = self._claim(space, now, request)
        if result.answer is Answer.WON and new:
            return self._send(space, now, request, result.attempt)
        return result

    def takeover_and_send(self, wishes: Sequence[Takeover]) -> list[ClaimResult | None]:
        with self._locked() as (space, now):
            return [self._takeover_and_send(space, now, wish) for wish in wishes]

    def _takeover_and_send(self, space: Space, now: Millis, wish: Takeover) -> ClaimResult | None:
        record = space.find(wish.job, wish.slot)
        sent = record is not None and record.state in (RunState.QUEUED, RunState.DISPATCHED)
        if record is not None and sent and wish.enqueue is not None:
            mine = record.owner == wish.owner and record.attempt == wish.enqueue.attempt
            if mine and record.attempt - wish.from_attempt in (0, 1):
                return ClaimResult(Answer.WON, record.attempt, sent=True)
        lapsed = record is not None and record.lapsed(now)
        attempt = self._takeover(space, now, wish)
        if attempt is None:
            return None
        return self._send(space, now, wish, attempt) if lapsed else ClaimResult(Answer.WON, attempt)

    def _send(self, space: Space, now: Millis, asked: ClaimRequest | Takeover, attempt: int) -> ClaimResult:
        """It was just claimed; and now published, if it comes with the right message and that can be written."""
        message = asked.enqueue
        if message is None or message.attempt != attempt or not self._enqueue(message):
            return ClaimResult(Answer.WON, attempt)
        self._confirm(
            space,
            now,
            Confirmation(
                job=asked.job,
                slot=asked.slot,
                owner=asked.owner,
                attempt=attempt,
                late=message.late,
                delay=message.delay,
            ),
        )
        return ClaimResult(Answer.WON, attempt, sent=True)

    def _enqueue(self, message: Enqueue) -> bool:
        if any(command[0] != PUT for command in message.commands):
            return False
        for _, queue, payload in message.commands:
            self._store.queues[str(queue)].append(payload)
        return True

    def decided(self, places: Sequence[tuple[str, Millis]], owner: str) -> list[ClaimResult | None]:
        with self._locked() as (space, _):
            return [self._decided(space, job, slot, owner) for job, slot in places]

    @staticmethod
    def _decided(space: Space, job: str, slot: Millis, owner: str) -> ClaimResult | None:
        record = space.find(job, slot)
        if space.below_floor(job, slot):
            return ClaimResult(Answer.TOO_OLD)
        if record is None or record.state is RunState.WAITING:
            return None
        if record.owner != owner:
            return ClaimResult(Answer.TAKEN)
        return None if record.state is RunState.CLAIMED else ClaimResult(Answer.ALREADY_SENT, record.attempt)

    def write(self, commands: Sequence[Command]) -> bool:
        with self._locked():
            return self._enqueue(Enqueue(commands=tuple(commands)))
