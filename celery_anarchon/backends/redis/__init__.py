"""Redis and Valkey as stores.

A reader's path: :mod:`.lease` (the operations, with ``lua/``) or, for stores that only take claims, :mod:`.claims` with
one of :mod:`.script`, :mod:`.stream_id` and :mod:`.idmp`; :mod:`.store` (options, opening, keys), :mod:`.connect` (how
calls reach a server, and from there on), :mod:`.address` (URLs), :mod:`.strategies` (the words for all this).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

from celery_anarchon.backends.redis.claims import RedisClaims
from celery_anarchon.backends.redis.idmp import Idmp
from celery_anarchon.backends.redis.lease import RedisLease
from celery_anarchon.backends.redis.script import Script
from celery_anarchon.backends.redis.strategies import (
    LeaseStrategy,
    RedisClaimStrategy,
    RedisStrategy,
    ValkeyClaimStrategy,
    ValkeyStrategy,
    read_strategy,
)
from celery_anarchon.backends.redis.stream_id import StreamId
from celery_anarchon.model import Millis

__all__ = ["RedisBackend", "ValkeyBackend"]

_CLAIMS: Mapping[str, type[RedisClaims]] = {kind.strategy: kind for kind in (StreamId, Idmp, Script)}


if TYPE_CHECKING:

    class _Lease(RedisLease):
        """What the classes below take, their ``__new__`` says; pyright asks ``__init__`` as well."""

        def __init__(self, *arguments: Any, **more: Any) -> None: ...

else:
    _Lease = RedisLease


class RedisBackend(_Lease):
    """Beats that share a Redis, a Redis behind sentinels, or a cluster.

    With a *strategy* other than ``"lease"`` what is made is a store that only takes claims: another class, and no
    :class:`~celery_anarchon.backends.base.LeaseBackend`.

    :param redis: a URL, a mapping of connection options, or a client (``redis.Redis``, ``redis.RedisCluster``) that the
        app already has. A client is never closed, and its own retries are not used.
    :param strategy: how claims are stored: ``"lease"``, ``"stream-id"``, ``"idmp"`` or ``"script"``, or a mapping with
        its options, ``{"name": "script", "window": "10m"}``, ``{"name": "idmp", "duration": 300, "max_size": 1000}``.
    :param prefix: what all keys begin with; one for each service.
    :param wait_replicas: how many replicas must have a write before it counts. Fewer within *wait_timeout*: nothing is
        sent, and the beat asks again.
    :param wait_timeout: seconds, a timedelta or text (``"200ms"``).
    :param early_tolerance: how far ahead of the store's clock a slot may lie, in milliseconds.
    """

    name = "redis:lease"
    product = "redis"

    # For type checkers: what a strategy makes. "lease" alone makes one of this class.
    @overload
    def __new__(
        cls,
        redis: Any = ...,
        strategy: LeaseStrategy = ...,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> RedisBackend: ...

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        redis: Any = ...,
        *,
        strategy: RedisClaimStrategy,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> RedisClaims: ...

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        redis: Any,
        strategy: RedisClaimStrategy,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> RedisClaims: ...

    def __new__(
        cls,
        redis: Any = "redis://localhost:6379/0",
        strategy: RedisStrategy = "lease",
        *rest: Any,
        **more: Any,
    ) -> Any:
        return _made(cls, redis, strategy, rest, more)

    if not TYPE_CHECKING:
        # mypy would look at this one only.
        def __init__(
            self,
            redis: Any = "redis://localhost:6379/0",
            strategy: RedisStrategy = "lease",
            prefix: str = "cron:",
            wait_replicas: int = 0,
            wait_timeout: Any = 0.2,
            early_tolerance: Millis = 5_000,
        ) -> None:
            super().__init__(
                redis,
                prefix=prefix,
                wait_replicas=wait_replicas,
                wait_timeout=wait_timeout,
                early_tolerance=early_tolerance,
            )


class ValkeyBackend(_Lease):
    """The same on Valkey, with the driver valkey-py, and without ``idmp``; see :class:`RedisBackend`. A client of
    redis-py is taken too."""

    name = "valkey:lease"
    product = "valkey"

    # For type checkers: what a strategy makes. "lease" alone makes one of this class.
    @overload
    def __new__(
        cls,
        valkey: Any = ...,
        strategy: LeaseStrategy = ...,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> ValkeyBackend: ...

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        valkey: Any = ...,
        *,
        strategy: ValkeyClaimStrategy,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> RedisClaims: ...

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        valkey: Any,
        strategy: ValkeyClaimStrategy,
        prefix: str = ...,
        wait_replicas: int = ...,
        wait_timeout: float | timedelta | str = ...,
        early_tolerance: Millis = ...,
    ) -> RedisClaims: ...

    def __new__(
        cls,
        valkey: Any = "valkey://localhost:6379/0",
        strategy: ValkeyStrategy = "lease",
        *rest: Any,
        **more: Any,
    ) -> Any:
        return _made(cls, valkey, strategy, rest, more)

    if not TYPE_CHECKING:
        # mypy would look at this one only.
        def __init__(
            self,
            valkey: Any = "valkey://localhost:6379/0",
            strategy: ValkeyStrategy = "lease",
            prefix: str = "cron:",
            wait_replicas: int = 0,
            wait_timeout: Any = 0.2,
            early_tolerance: Millis = 5_000,
        ) -> None:
            super().__init__(
                valkey,
                prefix=prefix,
                wait_replicas=wait_replicas,
                wait_timeout=wait_timeout,
                early_tolerance=early_tolerance,
            )


def _made(cls: Any, server: Any, strategy: Any, rest: Any, more: Mapping[str, Any]) -> Any:
    """An empty object of *cls*, which its ``__init__`` fills; or a finished one of the strategy's class."""
    name, options = read_strategy(strategy, cls.product)
    if name == "lease":
        return object.__new__(cls)
    return _claims(cls.product, _CLAIMS[name], server, options, *rest, **more)


def _claims(
    product: str,
    kind: type[RedisClaims],
    server: Any,
    options: Mapping[str, int],
    prefix: str = "cron:",
    wait_replicas: int = 0,
    wait_timeout: Any = 0.2,
    early_tolerance: Millis = 5_000,
) -> RedisClaims:
    return kind(
        product,
        server,
        options,
        prefix=prefix,
        wait_replicas=wait_replicas,
        wait_timeout=wait_timeout,
        early_tolerance=early_tolerance,
    )
