"""How the conformance kit reaches PostgreSQL, with each kind of connection object."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import psycopg
import psycopg_pool
from psycopg.rows import dict_row
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import OperationalError
from support.postgres_servers import Postgres
from support.waiting import wait_for

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.postgres import PostgresBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness


class App:
    """What an app has already, in this process: made when asked for, closed by the harness and never by a client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connections: list[psycopg.Connection[Any]] = []
        self._spare: list[psycopg.Connection[Any]] = []
        self._pool: psycopg_pool.ConnectionPool[Any] | None = None
        self._engine: Engine | None = None

    def engine(self) -> Engine:
        """With a default that must not matter."""
        if self._engine is None:
            url = self.url.replace("postgresql://", "postgresql+psycopg://")
            self._engine = create_engine(url, isolation_level="REPEATABLE READ", pool_size=30)
        return self._engine

    def pool(self) -> psycopg_pool.ConnectionPool[Any]:
        if self._pool is None:
            options = {"row_factory": dict_row, "prepare_threshold": 0}
            self._pool = psycopg_pool.ConnectionPool(self.url, min_size=1, max_size=30, open=True, kwargs=options)
        return self._pool

    def connection(self) -> psycopg.Connection[Any]:
        """Autocommit off, rows as dictionaries, statements prepared."""
        if not self._spare:
            # Some at once: a test that counts what is open then finds no more after it has asked for the second.
            made = [psycopg.connect(self.url, row_factory=dict_row, prepare_threshold=0) for _ in range(3)]
            self._connections += made
            self._spare += made
        return self._spare.pop()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._pool is not None:
            self._pool.close()
        if self._engine is not None:
            self._engine.dispose()


_APPS: dict[tuple[int, str], App] = {}
_LOCK = threading.Lock()


def _app(url: str) -> App:
    with _LOCK:
        return _APPS.setdefault((os.getpid(), url), App(url))


class OverEngine(PostgresBackend):
    def __init__(self, url: str, table: str) -> None:
        super().__init__(_app(url).engine(), table)


class OverConnection(PostgresBackend):
    def __init__(self, url: str, table: str) -> None:
        with _LOCK:
            app = _APPS.setdefault((os.getpid(), url), App(url))
            connection = app.connection()
        super().__init__(connection, table)


class OverPool(PostgresBackend):
    def __init__(self, url: str, table: str) -> None:
        super().__init__(_app(url).pool(), table)
        # Its pauses between tries to connect grow.
        self._source.patience = 30


def open_postgres(backend: type[PostgresBackend], url: str, namespace: str, app_name: str) -> PostgresBackend:
    client = backend(url, namespace)
    client.open(app_name)
    return client


class PostgresHarness(BackendHarness):
    """On a server that the test class starts."""

    backend: ClassVar[type[PostgresBackend]] = PostgresBackend
    traits = PostgresBackend.traits
    server: ClassVar[Postgres]
    port: ClassVar[int | None] = None
    """Where clients connect, if not to the server itself."""

    @property
    def url(self) -> str:
        return self.server.at(self.port or self.server.port)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for app in list(_APPS.values()):
            app.close()
        _APPS.clear()

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_postgres, self.backend, self.url, self.namespace, app_name or self.app_name)

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        with self.server.client(row_factory=dict_row) as client:
            query = f'select * from "{self.namespace}" where job = %s and slot = %s'
            found: Mapping[str, Any] | None = client.execute(query, (job, slot)).fetchone()
            return found

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        with self.server.client() as client:
            query = f'update "{self.namespace}" set lease_until = %s where job = %s and slot = %s'
            assert client.execute(query, (lease_until, job, slot)).rowcount == 1

    def raw_forge_layout(self, version: int) -> None:
        with self.server.client() as client:
            query = f"update \"{self.namespace}_meta\" set value = %s where key = 'layout'"
            assert client.execute(query, (str(version),)).rowcount == 1

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.server.restart()

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        """Nothing reaches the database any more, from anybody."""
        with psycopg.connect(self.server.at(self.server.port, "template1"), autocommit=True) as admin:
            self._let_in(admin, False)
            source = client._source  # type: ignore[attr-defined]
            patience = getattr(source, "patience", None)
            source.patience = 0.1
            try:
                yield
            finally:
                source.patience = patience
                self._let_in(admin, True)
                wait_for(self._answers, "the database, open again")

    def _answers(self) -> bool:
        """Also to whom a pooler lets in."""
        with suppress(psycopg.OperationalError), psycopg.connect(self.url, autocommit=True) as connection:
            return bool(connection.execute("select 1").fetchone())
        return False

    def _let_in(self, admin: psycopg.Connection[Any], allowed: bool) -> None:
        admin.execute(f"alter database postgres allow_connections {str(allowed).lower()}")
        if not allowed:
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'postgres'")

    @contextmanager
    def reply_lost(self, client: ClaimBackend) -> Iterator[None]:
        def lose(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            if statement.startswith("BEGIN"):
                connection.info["only looks"] = "READ ONLY" in statement
            if statement == "COMMIT" and not connection.info["only looks"]:
                driver = connection.connection.driver_connection
                driver.pgconn.finish()
                raise OperationalError(statement, None, psycopg.OperationalError("the connection is lost"))

        # An app's connection that has been lost once is followed by some of our own.
        client.now()
        source = client._source  # type: ignore[attr-defined]
        engine = getattr(source, "_own", {}).get("own", source)._engine
        event.listen(engine, "after_cursor_execute", lose)
        try:
            yield
        finally:
            event.remove(engine, "after_cursor_execute", lose)
