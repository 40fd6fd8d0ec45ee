"""How the conformance kit reaches PostgreSQL, with each kind of connection object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import psycopg
import psycopg_pool
from psycopg.rows import dict_row
from sqlalchemy import create_engine, event
from sqlalchemy.exc import OperationalError
from support.postgres_servers import Postgres

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.postgres import PostgresBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness


class OverEngine(PostgresBackend):
    """An app that hands over an Engine of its own, with a default that must not matter, and closes it in the end."""

    def __init__(self, url: str, table: str) -> None:
        self.url = url.replace("postgresql://", "postgresql+psycopg://")
        self.engine = create_engine(self.url, isolation_level="REPEATABLE READ")
        super().__init__(self.engine, table)

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class OverConnection(PostgresBackend):
    """An app that hands over a connection of its own: autocommit off, rows as dictionaries, statements prepared."""

    def __init__(self, url: str, table: str) -> None:
        self.connection = psycopg.connect(url, row_factory=dict_row, prepare_threshold=0)
        super().__init__(self.connection, table)


class OverPool(PostgresBackend):
    """An app that hands over a psycopg_pool."""

    def __init__(self, url: str, table: str) -> None:
        self.pool = psycopg_pool.ConnectionPool(
            url, min_size=1, max_size=4, open=True, kwargs={"row_factory": dict_row}
        )
        super().__init__(self.pool, table)


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

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        url = self.server.at(self.port or self.server.port)
        return partial(open_postgres, self.backend, url, self.namespace, app_name or self.app_name)

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
            try:
                yield
            finally:
                self._let_in(admin, True)

    def _let_in(self, admin: psycopg.Connection[Any], allowed: bool) -> None:
        admin.execute(f"alter database postgres allow_connections {str(allowed).lower()}")
        if not allowed:
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'postgres'")

    @contextmanager
    def reply_lost(self, client: ClaimBackend) -> Iterator[None]:
        def lose(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            if statement == "COMMIT":
                driver = connection.connection.driver_connection
                driver.pgconn.finish()
                raise OperationalError(statement, None, psycopg.OperationalError("the connection is lost"))

        source = client._source  # type: ignore[attr-defined]
        event.listen(source._engine, "after_cursor_execute", lose)
        try:
            yield
        finally:
            event.remove(source._engine, "after_cursor_execute", lose)
