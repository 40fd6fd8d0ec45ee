"""How the conformance kit reaches libSQL, on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

from support.libsql_servers import Sqld
from support.losing import losing_commits

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness


def open_libsql(url: str, namespace: str, app_name: str) -> SqliteBackend:
    client = SqliteBackend(url, namespace, busy_timeout=30)
    client.open(app_name)
    return client


class LibsqlHarness(BackendHarness):
    traits = SqliteBackend.traits
    server: ClassVar[Sqld]

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_libsql, self.server.url, self.namespace, app_name or self.app_name)

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        rows = self.server.ask(f'select * from "{self.namespace}" where job = ? and slot = ?', job, slot)
        return rows[0] if rows else None

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        query = f'update "{self.namespace}" set lease_until = ? where job = ? and slot = ?'
        assert self.server.change(query, lease_until, job, slot) == 1

    def raw_forge_layout(self, version: int) -> None:
        query = f"update \"{self.namespace}_meta\" set value = ? where key = 'layout'"
        assert self.server.change(query, str(version)) == 1

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.server.restart()

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        self.server.process.stop()
        try:
            yield
        finally:
            self.server.process.start()
            self.server.wait_until_ready()

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        return losing_commits(client, "no answer")
