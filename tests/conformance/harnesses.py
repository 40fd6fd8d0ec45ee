"""How the conformance kit reaches this package's own backends: what the author of another one writes too."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from support.losing import losing_commits

from celery_anarchon.backends.base import ClaimBackend, Command
from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness, ManualClock
from celery_anarchon.testing.claimonly import ClaimOnlyMemory, ClaimOnlyStore

NOON: Millis = 1_795_953_600_000


def open_memory(backend: type[MemoryBackend], namespace: str, store: MemoryStore, app_name: str) -> MemoryBackend:
    client = backend(namespace, store=store)
    client.open(app_name)
    return client


class MemoryHarness(BackendHarness):
    backend: type[MemoryBackend] = MemoryBackend
    traits = MemoryBackend.traits
    processes = False
    breakable = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.clock = ManualClock(wall=NOON)
        self.store = MemoryStore(self.clock)

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_memory, self.backend, self.namespace, self.store, app_name or self.app_name)

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        record = self.store.spaces[self.namespace].find(job, slot)
        return None if record is None else dict(vars(record))

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        record = self.store.spaces[self.namespace].find(job, slot)
        assert record is not None
        record.lease_until = lease_until

    def raw_forge_layout(self, version: int) -> None:
        self.store.spaces[self.namespace].layout = version

    def message_writes(self, queue: str, payload: str) -> tuple[Command, ...]:
        return (("PUT", queue, payload),)

    def refused_write(self) -> Command:
        return ("THROW", "away")

    def raw_queue(self, queue: str) -> list[str]:
        return [str(payload) for payload in self.store.queues[queue]]

    def pass_time(self, span: Millis) -> None:
        self.clock.advance(span)


def open_claims(
    backend: type[ClaimOnlyMemory], namespace: str, store: ClaimOnlyStore, options: Any, app_name: str
) -> ClaimOnlyMemory:
    client = backend(namespace, store=store, **options)
    client.open(app_name)
    return client


class ClaimOnlyHarness(BackendHarness):
    backend: type[ClaimOnlyMemory] = ClaimOnlyMemory
    traits = ClaimOnlyMemory.traits
    processes = False
    breakable = False
    options: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.clock = ManualClock(wall=NOON)
        self.store = ClaimOnlyStore(self.clock)

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_claims, self.backend, self.namespace, self.store, self.options, app_name or self.app_name)

    def connect_short(self) -> ClaimBackend:
        return self.connect()

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        mark = self.store.spaces[self.namespace].marks.get((job, slot))
        return None if mark is None else dict(vars(mark))

    def raw_forge_layout(self, version: int) -> None:
        self.store.spaces[self.namespace].layout = version

    def pass_time(self, span: Millis) -> None:
        self.clock.advance(span)


class OwnerlessHarness(ClaimOnlyHarness):
    traits = replace(ClaimOnlyMemory.traits, knows_owner=False)
    options: Mapping[str, Any] = {"knows_owner": False}


def open_sqlite(backend: type[SqliteBackend], path: Path, namespace: str, app_name: str) -> SqliteBackend:
    client = backend(path, table=namespace, busy_timeout=30)
    client.open(app_name)
    return client


class SqliteHarness(BackendHarness):
    backend: type[SqliteBackend] = SqliteBackend
    traits = SqliteBackend.traits

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.path = directory / "store.db"

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_sqlite, self.backend, self.path, self.namespace, app_name or self.app_name)

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.row_factory = sqlite3.Row
            query = f'select * from "{self.namespace}" where job = ? and slot = ?'
            row = connection.execute(query, (job, slot)).fetchone()
            return None if row is None else dict(row)

    def raw_write(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            assert connection.execute(statement, values).rowcount == 1

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        self.raw_write(
            f'update "{self.namespace}" set lease_until = ? where job = ? and slot = ?', lease_until, job, slot
        )

    def raw_forge_layout(self, version: int) -> None:
        self.raw_write(f"update \"{self.namespace}_meta\" set value = ? where key = 'layout'", str(version))

    def restart(self) -> None:
        """There is no server: what ends is every process that had the file open."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        assert not self.path.with_name("store.db-wal").exists()

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        """There is no server to stop; what the path leads to is no database for a while."""
        away = self.directory / "away"
        away.mkdir()
        for file in self.directory.glob("store.db*"):
            file.rename(away / file.name)
        self.path.write_bytes(b"no database" * 1_000)
        try:
            yield
        finally:
            for file in away.iterdir():
                file.rename(self.directory / file.name)

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        return losing_commits(client, "disk I/O error")


class InDelete(SqliteBackend):
    """On a file that stays in journal mode DELETE, as where a WAL cannot be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source.prepare = self._prepare

    def _prepare(self, connection: Connection, create: bool) -> None:
        mode = self._patiently(lambda: connection.exec_driver_sql("PRAGMA journal_mode=DELETE").scalar_one())
        assert mode == "delete"


class DeleteHarness(SqliteHarness):
    backend = InDelete
