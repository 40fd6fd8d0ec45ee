"""Claims and takeovers whose messages go into their queues in the same step: the clauses O of
:mod:`celery_anarchon.backends.onestep` in Lua.

The queues are keys of the same server and the same database, which a script reaches without declaring them: in a
cluster it could not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Command, Enqueue, Takeover
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.redis.records import answer, terms_json
from celery_anarchon.backends.redis.runs import RedisRuns
from celery_anarchon.backends.redis.scripts import Argument, script
from celery_anarchon.backends.redis.store import encoded
from celery_anarchon.model import Answer, Millis

_NO_MESSAGE: tuple[Argument, ...] = (0,)


class RedisOneStep(RedisRuns, OneStepBackend):
    """What of :class:`~celery_anarchon.backends.redis.lease.RedisLease` writes messages."""

    def why_not_one_step(self) -> str | None:
        if self._source.sharded:
            return "in a cluster a queue is on one node, and claims are on all"
        if self._wait is not None:
            return "with wait_replicas a message would be out before the replicas have its claim"
        return None

    def claim_and_send(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return self._claims(requests, with_messages=True)

    def _claims(self, requests: Sequence[ClaimRequest], *, with_messages: bool) -> list[ClaimResult]:
        replies = self._asked(
            "claim",
            requests,
            lambda one: (
                *(encoded(one.owner), encoded(one.beat), one.lease, terms_json(one.terms)),
                *_message(one.enqueue if with_messages else None),
            ),
            before=(self.early_tolerance,),
            width=3,
        )
        where = self.describe()
        return [ClaimResult(answer(Answer, word, where), int(attempt), sent == 1) for word, attempt, sent in replies]

    def takeover_and_send(self, wishes: Sequence[Takeover]) -> list[ClaimResult | None]:
        return [
            ClaimResult(Answer.WON, int(attempt), sent == 1) if attempt else None
            for attempt, sent in self._takeovers(wishes, with_messages=True)
        ]

    def _takeovers(self, wishes: Sequence[Takeover], *, with_messages: bool) -> list[Sequence[Any]]:
        return self._asked(
            "takeover",
            wishes,
            lambda one: (
                *(one.from_attempt, encoded(one.owner), encoded(one.beat), one.lease),
                *_message(one.enqueue if with_messages else None),
            ),
            width=2,
        )

    def open_slots(self, places: Sequence[tuple[str, Millis]], owner: str) -> list[bool]:
        if not places:
            return []
        keys = [self._keys.runs(encoded(job)) for job, _ in places]
        call = script("open_slots")(keys, [encoded(owner), *(slot for _, slot in places)])
        return [reply == 1 for reply in self._reply([call], writes=False)[0]]

    def write(self, commands: Sequence[Command]) -> bool:
        message = Enqueue(commands=tuple(commands))
        return bool(self._reply([script("write")([self._keys.meta], _message(message))], writes=True)[0])


def _message(message: Enqueue | None) -> tuple[Argument, ...]:
    """As ``sending.lua`` reads it."""
    if message is None:
        return _NO_MESSAGE
    words: list[Argument] = [len(message.commands), message.attempt, message.late, message.delay]
    for command in message.commands:
        words.append(len(command))
        words += command
    return tuple(words)
