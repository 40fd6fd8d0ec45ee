"""Claims and takeovers whose messages go into their queues in the same step: the clauses O of
:mod:`celery_anarchon.backends.onestep` in Lua.

The queues are keys of the same server and the same database, which a script reaches without declaring them: in a
cluster it could not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Command, Enqueue, Takeover, Terms
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.redis.batches import ROWS_AT_ONCE
from celery_anarchon.backends.redis.keys import encoded
from celery_anarchon.backends.redis.messages import Forms
from celery_anarchon.backends.redis.records import terms_json
from celery_anarchon.backends.redis.runs import RedisRuns
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.store import chunks
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Answer, Millis


class RedisOneStep(RedisRuns, OneStepBackend):
    """What of :class:`~celery_anarchon.backends.redis.lease.RedisLease` writes messages."""

    def why_not_one_step(self) -> str | None:
        if self._source.sharded:
            return "in a cluster a queue is on one node, and claims are on all"
        if self._wait is not None:
            return "with wait_replicas a message would be out before the replicas have its claim"
        return None

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim_and_send(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return self._claims(requests, with_messages=True)

    def begin_claims(self, requests: Sequence[ClaimRequest]) -> Callable[[], list[ClaimResult]]:
        if self._source.sharded or self._wait is not None:
            return super().begin_claims(requests)
        calls = [self._claim_call(some, with_messages=True) for some in chunks(requests, ROWS_AT_ONCE)]
        replies = self._source.begin(calls, writes=True)

        def results() -> list[ClaimResult]:
            rows = [row for reply in replies() for row in _rows(reply)]
            if len(rows) != len(requests):
                raise OutcomeUnknown(f"{self.describe()}: {len(requests)} claims got {len(rows)} answers")
            return [self._result(row) for row in rows]

        return results

    def _claims(self, requests: Sequence[ClaimRequest], *, with_messages: bool) -> list[ClaimResult]:
        found = self._in_calls(
            "claim", requests, lambda some: self._claim_call(some, with_messages=with_messages), _rows, wait=True
        )
        return [self._result(row) for row in found]

    def _claim_call(self, requests: Sequence[ClaimRequest], *, with_messages: bool) -> Call:
        """Whatever rows have in common goes once, for a burst is made of such rows."""
        keys: list[bytes] = []
        rows: list[Argument] = []
        shards: dict[int, int] = {}
        askers: dict[tuple[str, str, Millis, Terms | None], int] = {}
        forms = Forms()
        for one in requests:
            job = encoded(one.job)
            shard = self._keys.shard(job)
            keys += self._keys.of_job(shard, job)
            asker = (one.owner, one.beat, one.lease, one.terms)
            rows += (
                job,
                one.slot,
                shards.setdefault(shard, len(shards) + 1),
                askers.setdefault(asker, len(askers) + 1),
                *forms.row(one.enqueue if with_messages else None),
            )
        for shard in shards:
            keys += self._keys.of_shard(shard)
        before: list[Argument] = [self.early_tolerance, len(requests), len(askers)]
        for owner, beat, lease, terms in askers:
            before += (encoded(owner), encoded(beat), lease, terms_json(terms))
        return script("claim")(keys, [*before, *forms.all(), *rows])

    def _result(self, row: bytes) -> ClaimResult:
        try:
            return _read(row)
        except ValueError as error:
            # Neither yes nor no may be read into it.
            raise OutcomeUnknown(f"{self.describe()}: claim was answered {row!r}") from error

    def decided(self, places: Sequence[tuple[str, Millis]], owner: str) -> list[ClaimResult | None]:
        if not places:
            return []
        keys = [self._keys.runs(encoded(job)) for job, _ in places]
        call = script("decided")(keys, [encoded(owner), *(slot for _, slot in places)])
        found = _rows(self._reply([call], writes=False)[0])
        if len(found) != len(places):
            raise OutcomeUnknown(f"{self.describe()}: {len(places)} looks got {len(found)} answers")
        return [None if row == b"-" else self._result(row) for row in found]

    # --- takeovers ----------------------------------------------------------------------------------------------------

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
                *_alone(one.enqueue if with_messages else None),
            ),
            width=2,
        )

    def write(self, commands: Sequence[Command]) -> bool:
        message = _alone(Enqueue(commands=tuple(commands)))
        return bool(self._reply([script("write")([self._keys.meta], message)], writes=True)[0])


def _alone(message: Enqueue | None) -> tuple[Argument, ...]:
    """A message with its form."""
    forms = Forms()
    row = forms.row(message)
    return (*forms.all(), *row)


def _rows(reply: Any) -> list[bytes]:
    """One text for all rows: the driver reads it in one piece."""
    return reply.split() if isinstance(reply, bytes) else []


@lru_cache
def _read(row: bytes) -> ClaimResult:
    word, attempt, sent = row.split(b",")
    return ClaimResult(Answer(word.decode()), int(attempt), sent == b"1")
