"""Redis and Valkey as stores.

A reader's path: :mod:`.lease` (the operations, with ``lua/``), :mod:`.store` (options, opening, keys), :mod:`.connect`
(connections and what errors mean), :mod:`.address` (URLs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_anarchon.backends.redis.lease import RedisLease
from celery_anarchon.model import Millis

__all__ = ["RedisBackend", "ValkeyBackend"]


class RedisBackend(RedisLease):
    """Beats that share a Redis, a Redis behind sentinels, or a cluster.

    :param redis: a URL, a mapping of connection options, or a client (``redis.Redis``, ``redis.RedisCluster``) that the
        app already has. A client is never closed, and its own retries are not used.
    :param strategy: how claims are stored; ``"lease"``.
    :param prefix: what all keys begin with; one for each service.
    :param wait_replicas: how many replicas must have a write before it counts. Fewer within *wait_timeout*: nothing is
        sent, and the beat asks again.
    :param wait_timeout: seconds, a timedelta or text (``"200ms"``).
    :param early_tolerance: how far ahead of the store's clock a slot may lie, in milliseconds.
    """

    name = "redis:lease"
    product = "redis"
    later_strategies = ("stream-id", "idmp", "script")

    def __init__(
        self,
        redis: Any = "redis://localhost:6379/0",
        strategy: str | Mapping[str, Any] = "lease",
        prefix: str = "cron:",
        wait_replicas: int = 0,
        wait_timeout: Any = 0.2,
        early_tolerance: Millis = 5_000,
    ) -> None:
        super().__init__(
            redis,
            strategy=strategy,
            prefix=prefix,
            wait_replicas=wait_replicas,
            wait_timeout=wait_timeout,
            early_tolerance=early_tolerance,
        )


class ValkeyBackend(RedisLease):
    """The same on Valkey, with the driver valkey-py; see :class:`RedisBackend`. A client of redis-py is taken too."""

    name = "valkey:lease"
    product = "valkey"
    later_strategies = ("stream-id", "script")

    def __init__(
        self,
        valkey: Any = "valkey://localhost:6379/0",
        strategy: str | Mapping[str, Any] = "lease",
        prefix: str = "cron:",
        wait_replicas: int = 0,
        wait_timeout: Any = 0.2,
        early_tolerance: Millis = 5_000,
    ) -> None:
        super().__init__(
            valkey,
            strategy=strategy,
            prefix=prefix,
            wait_replicas=wait_replicas,
            wait_timeout=wait_timeout,
            early_tolerance=early_tolerance,
        )
