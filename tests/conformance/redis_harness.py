"""How the conformance kit reaches Redis and Valkey."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import redis
from support.losing import losing_replies
from support.redis_servers import Cluster, Private, Proxy, through

from celery_anarchon.backends.base import ClaimBackend, Command
from celery_anarchon.backends.redis import RedisBackend, ValkeyBackend
from celery_anarchon.backends.redis.keys import Keys, encoded
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness

Backend = type[RedisBackend] | type[ValkeyBackend]


def open_redis(backend: Backend, url: str, prefix: str, app_name: str) -> ClaimBackend:
    client = backend(url, prefix=prefix)
    client.open(app_name)
    return client


class RedisHarness(BackendHarness):
    """On a server that the test class starts; on the nodes of a cluster in a subclass."""

    backend: ClassVar[Backend] = RedisBackend
    traits = RedisBackend.traits
    server: ClassVar[Any] = None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.keys = Keys(self.namespace)
        self._proxies: dict[int, Proxy] = {}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for proxy in self._proxies.values():
            proxy.close()

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_redis, self.backend, self.server.url, self.namespace, app_name or self.app_name)

    @contextmanager
    def raw(self, key: bytes) -> Iterator[redis.Redis]:
        with self.node(key).client() as client:
            yield client

    def node(self, key: bytes) -> Private:
        server: Private = self.server
        return server

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        name = encoded(job)
        with self.raw(self.keys.runs(name)) as client:
            record = client.hget(self.keys.runs(name), str(slot))
            if record is None:
                return None
            leases = client.zrange(self.keys.leases(self.keys.shard(name)), 0, -1, withscores=True)
        mine = {lease: end for lease, end in leases if lease.startswith(b"%d:" % slot) and lease.endswith(b":" + name)}
        return {**json.loads(record), "leases": mine}

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        found = self.raw_read(job, slot)
        assert found is not None and len(found["leases"]) == 1
        key = self.keys.leases(self.keys.shard(encoded(job)))
        with self.raw(key) as client:
            # A sweeper looks at it later where the broker comes first.
            client.zadd(key, {next(iter(found["leases"])): lease_until + found.get("patience", 0)})

    def raw_forge_layout(self, version: int) -> None:
        with self.raw(self.keys.meta) as client:
            client.hset(self.keys.meta, "layout", str(version))

    def message_writes(self, queue: str, payload: str) -> tuple[Command, ...]:
        return (("LPUSH", f"{self.namespace}:{queue}", payload), ("PEXPIRE", f"{self.namespace}:{queue}", 600_000))

    def refused_write(self) -> Command:
        return ("NO-SUCH-COMMAND", "key")

    def raw_queue(self, queue: str) -> list[str]:
        with self.server.client() as client:
            return [payload.decode() for payload in reversed(client.lrange(f"{self.namespace}:{queue}", 0, -1))]

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.server.restart()

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        lines = through(client, self._proxies)
        for line in lines:
            line.cut()
        try:
            yield
        finally:
            for line in lines:
                line.mend()

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        return losing_replies(through(client, self._proxies))


class ValkeyHarness(RedisHarness):
    backend: ClassVar[Backend] = ValkeyBackend
    traits = ValkeyBackend.traits


class OnCluster:
    """For a harness whose server is a cluster."""

    server: Any

    def node(self, key: bytes) -> Private:
        from celery_anarchon.backends.redis.cluster import hash_slot

        nodes: Cluster = self.server
        return nodes.node_of(hash_slot(key))

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        for node in self.server.nodes:
            node.restart()
        self.server.wait_until_ok()


class ClusterHarness(OnCluster, RedisHarness):
    # There, queues are elsewhere: see `why_not_one_step`.
    traits = replace(RedisBackend.traits, one_step=False)


# --- strategies that only take claims ---------------------------------------------------------------------------------


def open_claims(
    backend: Backend, url: str, strategy: Any, prefix: str, tolerance: Millis, app_name: str
) -> ClaimBackend:
    client: ClaimBackend = backend(url, strategy, prefix, early_tolerance=tolerance)
    client.open(app_name)
    return client


class ClaimsHarness(RedisHarness):
    """One of the strategies; subclasses say which."""

    strategy: ClassVar[Mapping[str, Any]]
    short_strategy: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "strategy"):
            # The same on Valkey, whose driver may not be here.
            cls.traits = RedisBackend("redis://nowhere", cls.strategy).traits

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        name = app_name or self.app_name
        return partial(open_claims, self.backend, self.server.url, self.strategy, self.namespace, 5_000, name)

    def connect_short(self) -> ClaimBackend:
        prefix = f"{self.namespace}short:"
        client = open_claims(self.backend, self.server.url, self.short_strategy, prefix, 400, self.app_name)
        self._clients.append(client)
        return client

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        name = encoded(job)
        with self.raw(self.keys.runs(name)) as client:
            record = client.hget(self.keys.runs(name), str(slot))
            claim = self.raw_claim(client, name, slot)
        return None if record is None and claim is None else {**json.loads(record or "{}"), "claim": claim}

    def raw_claim(self, client: redis.Redis, job: bytes, slot: Millis) -> Any:
        raise NotImplementedError


class StreamIdHarness(ClaimsHarness):
    strategy: ClassVar[Mapping[str, Any]] = {"name": "stream-id"}

    def raw_claim(self, client: redis.Redis, job: bytes, slot: Millis) -> Any:
        return client.xrange(self.keys.claims(job), f"{slot}-0", f"{slot}-0") or None


class ScriptHarness(ClaimsHarness):
    strategy: ClassVar[Mapping[str, Any]] = {"name": "script", "window": "3h"}
    short_strategy: ClassVar[Mapping[str, Any]] = {"name": "script", "window": 2}

    def raw_claim(self, client: redis.Redis, job: bytes, slot: Millis) -> Any:
        return client.get(self.keys.marker(job, slot))


class IdmpHarness(ClaimsHarness):
    strategy: ClassVar[Mapping[str, Any]] = {"name": "idmp", "duration": "3h", "max_size": 2_000}
    short_strategy: ClassVar[Mapping[str, Any]] = {"name": "idmp", "duration": 2, "max_size": 10}

    def raw_claim(self, client: redis.Redis, job: bytes, slot: Millis) -> Any:
        """Its idempotency id is in no reply of the server: the record must do."""
