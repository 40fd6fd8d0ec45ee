"""The stores that options are tried on, and an app's beat on one of them with a clock that a test moves.

Belongs here: how each store is started, made and read. Does not belong here: what is expected of an option.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import Any

from celery import Celery
from servers import free_port
from support.certificates import certificate, signed
from support.libsql_servers import private_sqld
from support.nats_servers import nats_server
from support.postgres_servers import private_postgres
from support.rabbitmq_servers import rabbitmq_server
from support.redis_servers import private_server
from support.ticking import run_until

from celery_anarchon import (
    Anarchon,
    NatsBackend,
    PostgresBackend,
    RabbitMQBackend,
    RedisBackend,
    Scheduler,
    SqliteBackend,
    ValkeyBackend,
    wire,
)
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Millis, Run
from celery_anarchon.publish import CeleryPublisher
from celery_anarchon.testing.clock import ManualClock


class Servers:
    """Each is started when it is first asked for, and ends with this."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep(self, server: AbstractContextManager[Any]) -> Any:
        """One more, which ends with these."""
        return self._stack.enter_context(server)

    @cached_property
    def redis(self) -> Any:
        return self._stack.enter_context(private_server(self.folder / "redis"))

    @cached_property
    def redis86(self) -> Any:
        return self._stack.enter_context(private_server(self.folder / "redis86", "redis86"))

    @cached_property
    def valkey(self) -> Any:
        return self._stack.enter_context(private_server(self.folder / "valkey", "valkey9"))

    @cached_property
    def postgres(self) -> Any:
        return self._stack.enter_context(private_postgres(self.folder / "postgres"))

    @cached_property
    def sqld(self) -> Any:
        return self._stack.enter_context(private_sqld(self.folder / "sqld"))

    @cached_property
    def rabbitmq(self) -> Any:
        return self._stack.enter_context(rabbitmq_server(self.folder / "rabbitmq"))

    @cached_property
    def rabbitmq_tls(self) -> Any:
        """One that speaks TLS as well, on ``tls_port``, to clients with a certificate that its own vouches for
        only: ``beat`` and ``beats_key."""
        folder = self.folder / "rabbitmq-tls"
        folder.mkdir()
        (mine, key), (other, _) = certificate(folder, "mine"), certificate(folder, "other")
        port = free_port()
        lines = [
            f"listeners.ssl.1 = 127.0.0.1:{port}",
            f"ssl_options.cacertfile = {mine}",
            f"ssl_options.certfile = {mine}",
            f"ssl_options.keyfile = {key}",
            "ssl_options.verify = verify_peer",
            "ssl_options.fail_if_no_peer_cert = true",
        ]
        server: Any = self.keep(rabbitmq_server(folder, lines))
        server.tls_port, server.mine, server.other = port, mine, other
        server.beat, server.beats_key = signed(folder, "beat", (mine, key))
        return server

    @cached_property
    def nats(self) -> Any:
        return self._stack.enter_context(nats_server(self.folder / "nats"))


DAY = "24h"
"""Claims are remembered for so long, where that is an option: the beats of these tests look far ahead."""

SCRIPT = {"name": "script", "window": DAY}
IDMP = {"name": "idmp", "duration": DAY, "max_size": 10_000}


def _valkey(url: str) -> str:
    return url.replace("redis://", "valkey://")


STORES: Mapping[str, Callable[[Servers, str], ClaimBackend]] = {
    "redis:lease": lambda on, space: RedisBackend(on.redis.url, prefix=space),
    "redis:stream-id": lambda on, space: RedisBackend(on.redis.url, "stream-id", prefix=space),
    "redis:idmp": lambda on, space: RedisBackend(on.redis86.url, IDMP, prefix=space),  # type: ignore[arg-type]
    "redis:script": lambda on, space: RedisBackend(on.redis.url, SCRIPT, prefix=space),  # type: ignore[arg-type]
    "valkey:lease": lambda on, space: ValkeyBackend(_valkey(on.valkey.url), prefix=space),
    "valkey:stream-id": lambda on, space: ValkeyBackend(_valkey(on.valkey.url), "stream-id", prefix=space),
    "valkey:script": lambda on, space: ValkeyBackend(_valkey(on.valkey.url), SCRIPT, prefix=space),  # type: ignore[arg-type]
    "postgres": lambda on, space: PostgresBackend(on.postgres.url, table=space),
    "sqlite": lambda on, space: SqliteBackend(on.folder / "store.db", table=space, busy_timeout=30),
    "libsql": lambda on, space: SqliteBackend(on.sqld.url, table=space, busy_timeout=30),
    "rabbitmq queue": lambda on, space: RabbitMQBackend(on.rabbitmq.url, prefix=space, slot_ttl=DAY),
    "rabbitmq stream": lambda on, space: RabbitMQBackend(
        on.rabbitmq.url, prefix=space, slot_ttl=DAY, strategy="stream"
    ),
    "nats": lambda on, space: NatsBackend(on.nats.url, stream=space, prefix=f"{space}.", duplicate_window=DAY),
}
"""Column -> its store, not opened yet, in a namespace."""

UNASKED: Mapping[str, Callable[[], ClaimBackend]] = {
    "redis:lease": RedisBackend,
    "redis:stream-id": lambda: RedisBackend(strategy="stream-id"),
    "redis:idmp": lambda: RedisBackend(strategy="idmp"),
    "redis:script": lambda: RedisBackend(strategy="script"),
    "valkey:lease": ValkeyBackend,
    "valkey:stream-id": lambda: ValkeyBackend(strategy="stream-id"),
    "valkey:script": lambda: ValkeyBackend(strategy="script"),
    "postgres": PostgresBackend,
    "sqlite": SqliteBackend,
    "libsql": lambda: SqliteBackend("libsql://nowhere.invalid"),
    "rabbitmq queue": RabbitMQBackend,
    "rabbitmq stream": lambda: RabbitMQBackend(strategy="stream"),
    "nats": NatsBackend,
}
"""The same with their defaults, for what must be refused before any server is asked."""


class Beats:
    """Beats of one app, one after the other, on a real store and by a clock that moves by hand; its broker is kombu's
    in-memory one."""

    def __init__(self, backend: ClaimBackend, **settings: Any) -> None:
        self.clock = ManualClock(wall=SystemClock().wall())
        self.backend = backend
        # kombu's memory transport is one world per process: a virtual host of its own keeps apps apart.
        self.app = Celery("columns", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
        self.app.conf.task_default_queue = f"queue-{uuid.uuid4()}"
        self.app.conf.update(timezone="UTC", result_expires=None)
        self.app.conf.update({f"anarchon_{name}": value for name, value in settings.items()})
        self.anarchon = Anarchon(self.app, backend=backend)
        self.arrived: list[tuple[str, Millis, Millis]] = []
        """Of each message its job, its slot and when the beat sent it."""
        self.batches: list[list[Any]] = []
        """What the store was asked for in each call."""
        asked = backend.claim

        def claim(requests: Any) -> Any:
            self.batches.append(list(requests))
            return asked(requests)

        backend.claim = claim  # type: ignore[method-assign]
        self.beat: Any = None

    def start(self) -> None:
        arrived, clock = self.arrived, self.clock

        class Noting(CeleryPublisher):
            def publish(self, dispatch: Any) -> None:
                super().publish(dispatch)
                arrived.append((dispatch.job.name, dispatch.slot, clock.wall()))

        kind = type("Beat", (Scheduler,), {"clock": clock, "publisher_class": Noting})
        self.beat = kind(app=self.app)

    def run(self, until: Millis) -> None:
        """Let the beat tick whenever it asked to, up to that time."""
        run_until(self.clock, until, self.beat.tick)

    def stop(self) -> None:
        self.beat.close()

    def messages(self) -> list[Any]:
        """All that the broker holds, taken from it."""
        found = []
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            while (message := channel.basic_get(self.app.conf.task_default_queue)) is not None:
                message.ack()
                found.append(message)
        return found


def history(store: ClaimBackend, job: str) -> list[Run]:
    """The runs of a job, read by a client of its own."""
    with closing(store) as reader:
        reader.open("columns", create=False)
        return reader.history(job, 2_000)


def slot_of(run: Run) -> Millis:
    return wire.instant(run.slot)
