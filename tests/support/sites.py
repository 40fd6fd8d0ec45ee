"""Where a fleet of the tests lives: the store that its beats share, the broker that they send to, and how to look into
both past the product.
"""

from __future__ import annotations

import abc
import sqlite3
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import amqp
import redis
from support.rabbitmq_servers import RabbitServer
from support.redis_servers import RESP2

from celery_anarchon.backends import ClaimBackend, backend_from_url
from celery_anarchon.model import Millis
from celery_anarchon.testing.fleet import (
    Message,
    amqp_messages,
    filesystem_broker,
    filesystem_messages,
    redis_messages,
)


class Store(abc.ABC):
    """A store with a namespace of one fleet's own."""

    url: str
    namespace: str

    @abc.abstractmethod
    def open_claims(self) -> list[tuple[str, Millis]]:
        """The (job, slot) that it holds as claimed, read past the backend."""

    def reader(self) -> ClaimBackend:
        """The backend, for reading. Close it."""
        backend = backend_from_url(self.url)
        backend.open("fleet", create=False)
        return backend


class SqliteStore(Store):
    namespace = "anarchon_runs"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "anarchon.db"
        self.url = f"sqlite:///{self.path}"

    def open_claims(self) -> list[tuple[str, Millis]]:
        with closing(sqlite3.connect(self.path)) as raw:
            return raw.execute("SELECT job, slot FROM anarchon_runs WHERE state = 'claimed'").fetchall()


class RedisStore(Store):
    """*server*: what redis-py connects to; *url*: what the beats are told, where that is another way to it.

    *namespace*: one of its own, unless named.
    """

    def __init__(self, server: str, url: str = "", namespace: str = "") -> None:
        self._server = server
        self.namespace = namespace or f"t{uuid.uuid4().hex[:12]}:"
        self.url = f"{url or server}?prefix={self.namespace}"

    def reader(self) -> ClaimBackend:
        backend = backend_from_url(f"{self._server}?prefix={self.namespace}")
        backend.open("fleet", create=False)
        return backend

    def open_claims(self) -> list[tuple[str, Millis]]:
        with redis.Redis.from_url(self._server, **RESP2) as raw:
            found = [member for key in raw.keys(f"{self.namespace}{{*}}leases") for member in raw.zrange(key, 0, -1)]
        parts = [member.decode().split(":", 3) for member in found]
        return [(job, int(slot)) for slot, _, _, job in parts]


class Broker(abc.ABC):
    """A broker, in it a queue of one fleet's own."""

    settings: dict[str, Any]
    """Celery's settings that lead to it."""

    @abc.abstractmethod
    def messages(self) -> list[Message]:
        """All that waits in it."""


class FilesBroker(Broker):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.settings = filesystem_broker(folder)

    def messages(self) -> list[Message]:
        return filesystem_messages(self._folder)


class RedisBroker(Broker):
    def __init__(self, url: str) -> None:
        self._url = url
        self._queue = f"q{uuid.uuid4().hex[:12]}"
        self.settings = {"broker_url": url, "task_default_queue": self._queue}

    def messages(self) -> list[Message]:
        with redis.Redis.from_url(self._url, **RESP2) as raw:
            return redis_messages(raw, self._queue)


class RabbitBroker(Broker):
    def __init__(self, server: RabbitServer) -> None:
        self._server = server
        self._queue = f"q{uuid.uuid4().hex[:12]}"
        self.settings = {"broker_url": server.url, "task_default_queue": self._queue}

    def messages(self) -> list[Message]:
        # Before the first message there is no queue; and what was read is back when the connection is closed.
        with self._server.client() as link, suppress(amqp.NotFound):
            return amqp_messages(link.channel(), self._queue)
        return []
