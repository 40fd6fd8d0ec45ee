"""For each clause of claims that take their messages along a backend that breaks it; see :mod:`.saboteurs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Enqueue, Takeover
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.memoryonestep import PUT
from celery_anarchon.model import Answer, Millis, RunState


class SendsBeforeItAsks(MemoryBackend):
    """O1: the message is in the queue, whoever wins."""

    def _claim_and_send(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim_and_send(space, now, request)
        if request.enqueue is not None and not result.sent:
            self._enqueue(request.enqueue)
        return result


class ClaimsAndForgetsTheMessage(MemoryBackend):
    """O1: says that it is sent."""

    def _enqueue(self, message: Enqueue) -> bool:
        return True


class StaysClaimed(MemoryBackend):
    """O1: the message is out, and a sweeper will send it again."""

    def _send(self, space: Any, now: Millis, asked: ClaimRequest | Takeover, attempt: int) -> ClaimResult:
        result = super()._send(space, now, asked, attempt)
        if result.sent:
            record = space.find(asked.job, asked.slot)
            space.put(asked.job, asked.slot, record, RunState.CLAIMED, now + asked.lease)
        return result


class EnqueuesAgain(MemoryBackend):
    """O2: asked again by the owner that has sent it, it sends it again."""

    def _claim_and_send(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim_and_send(space, now, request)
        if result.answer is Answer.ALREADY_SENT and request.enqueue is not None:
            self._enqueue(request.enqueue)
        return result


class SendsWhatMayBeOut(MemoryBackend):
    """O2: a slot that its owner has been publishing is sent once more."""

    def _claim_and_send(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim_and_send(space, now, request)
        if result.answer is Answer.WON and not result.sent:
            return self._send(space, now, request, result.attempt)
        return result


class TakesOverInTwoSteps(MemoryBackend):
    """O3: claimed in one step, the message in another: asked again, it is there twice."""

    def _takeover_and_send(self, space: Any, now: Millis, wish: Takeover) -> ClaimResult | None:
        attempt = self._takeover(space, now, wish)
        if attempt is None:
            return None
        if wish.enqueue is not None and wish.enqueue.attempt == attempt:
            return ClaimResult(Answer.WON, attempt, sent=self._enqueue(wish.enqueue))
        return ClaimResult(Answer.WON, attempt)


class SendsAnyAttempt(MemoryBackend):
    """O3: the header of the message says another attempt than the record."""

    def _send(self, space: Any, now: Millis, asked: ClaimRequest | Takeover, attempt: int) -> ClaimResult:
        if asked.enqueue is not None:
            asked = replace(asked, enqueue=replace(asked.enqueue, attempt=attempt))
        return super()._send(space, now, asked, attempt)


class SendsHalfAMessage(MemoryBackend):
    """O4: what the store takes of a message is written, the rest is not."""

    def _enqueue(self, message: Enqueue) -> bool:
        fits = tuple(command for command in message.commands if command[0] == PUT)
        super()._enqueue(replace(message, commands=fits))
        return len(fits) == len(message.commands)


class StopsAtABadOne(MemoryBackend):
    """O4: after a message that could not be written nobody's is."""

    def claim_and_send(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        results = []
        failed = False
        for request in requests:
            results += super().claim_and_send([replace(request, enqueue=None) if failed else request])
            failed = failed or not results[-1].sent
        return results


class IgnoresTheEta(MemoryBackend):
    """O5: the queue limit of a message for tomorrow is over today."""

    def _send(self, space: Any, now: Millis, asked: ClaimRequest | Takeover, attempt: int) -> ClaimResult:
        if asked.enqueue is not None:
            asked = replace(asked, enqueue=replace(asked.enqueue, delay=0))
        return super()._send(space, now, asked, attempt)


class NothingIsDecided(MemoryBackend):
    """O6: messages are made for slots that others have sent."""

    @staticmethod
    def _decided(space: Any, job: str, slot: Millis, owner: str) -> ClaimResult | None:
        return None


class EveryRecordIsAnothers(MemoryBackend):
    """O6: what waits, or is the asker's own, is never asked for again."""

    @staticmethod
    def _decided(space: Any, job: str, slot: Millis, owner: str) -> ClaimResult | None:
        known = MemoryBackend._decided(space, job, slot, owner)
        return known if known is not None or space.find(job, slot) is None else ClaimResult(Answer.TAKEN)


class AnswersTheLatest(MemoryBackend):
    """O7: of two batches under way the answers to the second are given to the first."""

    def begin_claims(self, requests: Sequence[ClaimRequest]) -> Callable[[], list[ClaimResult]]:
        self.latest = self.claim_and_send(requests)
        return lambda: self.latest


class LeavesTheMessagesBehind(MemoryBackend):
    """O7: what is begun is a claim only."""

    def begin_claims(self, requests: Sequence[ClaimRequest]) -> Callable[[], list[ClaimResult]]:
        results = self.claim(requests)
        return lambda: results


ONE_STEP_SABOTEURS: dict[str, tuple[type[MemoryBackend], ...]] = {
    "O1": (SendsBeforeItAsks, ClaimsAndForgetsTheMessage, StaysClaimed),
    "O2": (EnqueuesAgain, SendsWhatMayBeOut),
    "O3": (TakesOverInTwoSteps, SendsAnyAttempt),
    "O4": (SendsHalfAMessage, StopsAtABadOne),
    "O5": (IgnoresTheEta,),
    "O6": (NothingIsDecided, EveryRecordIsAnothers),
    "O7": (AnswersTheLatest, LeavesTheMessagesBehind),
}
"""Clause -> the backends that break it."""
