"""What a namespace still knows of the past: how it is shown and cut, whatever the strategy."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from celery_anarchon.backends.base import NO_MESSAGE, Keep
from celery_anarchon.backends.redis.batches import ROWS_AT_ONCE, RedisBatches
from celery_anarchon.backends.redis.keys import encoded
from celery_anarchon.backends.redis.records import runs
from celery_anarchon.backends.redis.scripts import Call, script
from celery_anarchon.backends.redis.store import chunks
from celery_anarchon.model import Run

_DROPPED_AT_ONCE = 5_000
"""Records that one call of ``tidy`` drops: the server does nothing else meanwhile."""


class RedisPast(RedisBatches):
    """See the module."""

    def history(self, job: str, limit: int) -> list[Run]:
        return self._history(job, limit, sent_only=False)

    def last_run(self, job: str) -> Run | None:
        return next(iter(self._history(job, 1, sent_only=True)), None)

    def _history(self, job: str, limit: int, *, sent_only: bool) -> list[Run]:
        name = encoded(job)
        keys = self._keys.runs(name), self._keys.slots(name)
        call = script("history")(keys, [max(limit, 0), int(sent_only), *sorted(map(str, NO_MESSAGE))])
        return runs(self.namespace, job, self._reply([call], writes=False)[0])

    def tidy(self, keeps: Sequence[Keep]) -> int:
        groups = self._grouped(keeps)
        calls = [
            self._tidy([keep for _, keep in some], _DROPPED_AT_ONCE)
            for group in groups
            for some in chunks(group, ROWS_AT_ONCE)
        ]
        total = 0
        while calls:
            replies = self._reply(calls, writes=True)
            total += sum(dropped for dropped, _ in replies)
            calls = [call for call, (_, more) in zip(calls, replies, strict=True) if more]
        return total

    @abc.abstractmethod
    def _tidy(self, keeps: Sequence[Keep], at_once: int) -> Call:
        """A call that drops what is too much, *at_once* at most. Its reply: how many were dropped, and whether there
        are more."""
