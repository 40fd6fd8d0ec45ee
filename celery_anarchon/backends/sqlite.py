"""The store for the beats of one machine: a SQLite file, or a connection or an Engine that the app already has; and a
libSQL server, which speaks SQLite's SQL, for beats on any number of machines.

Belongs here: what SQLite says in its own way, and how it is waited for. Does not belong here: the claim algorithm
(:mod:`.sqlclaims`), how a file is opened and what is handed over (:mod:`.sqliteconnections`), and how a server is
spoken to (:mod:`.libsql`).

What is promised when. A claim that was answered survives the death of every process (``kill -9``), and, in a file that
we opened, a power cut too: ``synchronous=FULL`` costs one fsync a batch, half a millisecond on a good disk, and without
it a slot whose message is already with the broker could be claimed again after a power cut. On a connection or an
Engine of the app, the app's own ``synchronous`` and ``journal_mode`` decide.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import CTE, BigInteger, ColumnElement, Connection, CursorResult, Engine, Table, cast, func
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.types import TypeEngine

from celery_anarchon.backends import libsql
from celery_anarchon.backends.base import Traits
from celery_anarchon.backends.sql import NoTables, SqlBackend, Unusable
from celery_anarchon.backends.sqliteconnections import File, HandedConnection, HandedEngine, is_busy, words
from celery_anarchon.backends.sqlvalues import Values, given
from celery_anarchon.clock import SystemClock
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Millis

_T = TypeVar("_T")

OLDEST_SQLITE = (3, 35, 0)
"""The first with RETURNING."""


class SqliteBackend(SqlBackend):
    """Beats of one machine that share a SQLite file.

    :param database: a path, made absolute now; a :class:`sqlite3.Connection`; a SQLAlchemy Engine on SQLite; a URL of a
        libSQL server (``libsql://host``, ``libsql+http://host:port``) or a ``libsql.Connection``. What is handed over
        is never closed, keeps its settings, and must not be inside a transaction when a call comes.
    :param table: the name of the tables; one for each service.
    :param busy_timeout: how long a call waits for another process's write: seconds, a timedelta or text (``"10s"``).
    :param auth_token: for a libSQL server that asks for one.
    :param early_tolerance: how far ahead of the store's clock a slot may lie, in milliseconds.
    """

    name = "sqlite"
    traits = Traits(
        leases=True,
        horizon=None,
        server_time=True,
        durable=True,
        any_job_name=True,
        history_by_age=True,
        follows_runs=True,
    )

    def __init__(
        self,
        database: Any = "./anarchon.db",
        table: str = "anarchon_runs",
        busy_timeout: float | timedelta | str = 5,
        auth_token: str | None = None,
        *,
        early_tolerance: Millis = 5_000,
    ) -> None:
        super().__init__(table, early_tolerance=early_tolerance)
        self._values = Values(self._compiler())
        self.busy_timeout = parse_duration(busy_timeout, "busy_timeout") / 1000
        self._clock_here = SystemClock()
        self._source: Any = _source(database, auth_token, self)
        if isinstance(self._source, (libsql.Remote, libsql.HandedClient)):
            self.name = "libsql"

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SqliteBackend:
        """``sqlite:///relative/path`` or ``sqlite:////absolute/path``, with ``?table=`` and ``?busy_timeout=``;
        ``libsql://host`` or ``libsql+http://host:port``, also with ``?auth_token=``."""
        from celery_anarchon.backends.registry import masked, read_url

        if libsql.is_url(url):
            _, given = read_url(url, {"table": str, "busy_timeout": str, "auth_token": str}, options)
            return cls(url.partition("?")[0], **given)
        body, given = read_url(url, {"table": str, "busy_timeout": str}, options)
        if len(body) < 2 or not body.startswith("/") or body == "/:memory:":
            raise ConfigurationError(
                f"{masked(url)} names no file: write sqlite:///anarchon.db for a file in the working directory, "
                "sqlite:////var/lib/app/anarchon.db for an absolute path"
            )
        return cls(body[1:], **given)

    def describe(self) -> str:
        return f"{self.name} {self._source.where}, table {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        try:
            self._source.open(create)
            with self._calling() as connection:
                self._check_version(connection)
                self._source.prepare(connection, create)
        except NoTables:
            # No file yet, and none is to be made: readers find it empty.
            return
        except Unusable as error:
            raise ConfigurationError(str(error)) from error
        super().open(app_name, create=create)

    def close(self) -> None:
        self._source.close()

    def _check_version(self, connection: Connection) -> None:
        text = str(connection.execute(func.sqlite_version().select()).scalar_one())
        if tuple(int(part) for part in text.split(".")[:3]) < OLDEST_SQLITE:
            raise Unusable(
                f"{self.describe()}: SQLite {text} is too old: 3.35 or newer is needed (it comes with Python: use a "
                "newer build)"
            )

    # --- what a dialect says ------------------------------------------------------------------------------------------

    def _connection(self) -> Any:
        return self._source.connection()

    def _begin(self, connection: Connection) -> None:
        # IMMEDIATE: a transaction that begins by reading is refused at once, whatever the timeout, when it then writes.
        self._patiently(lambda: connection.exec_driver_sql("BEGIN IMMEDIATE"))

    def _commit(self, connection: Connection) -> None:
        try:
            self._patiently(lambda: connection.exec_driver_sql("COMMIT"))
        except SQLAlchemyError as error:
            if isinstance(getattr(error, "orig", None), libsql.NotCommitted):
                raise
            if not is_busy(error):
                raise OutcomeUnknown(f"{self._error(error)} (the commit failed)") from error
            # Readers kept it from the file, and the transaction is still open: it has surely not been applied.
            connection.exec_driver_sql("ROLLBACK")
            raise

    def _patiently(self, step: Callable[[], _T]) -> _T:
        deadline = self._clock_here.monotonic() + self.busy_timeout
        while True:
            try:
                return step()
            except DBAPIError as error:
                if not is_busy(error) or self._clock_here.monotonic() >= deadline:
                    raise
                # Some refusals come at once (recovery of a WAL, a connection of the app without a timeout).
                threading.Event().wait(0.005)

    def _clock(self) -> ColumnElement[int]:
        # SQLite counts in whole milliseconds; rounding undoes what the division into days cost.
        return cast(func.round((func.julianday("now") - 2440587.5) * 86_400_000), BigInteger)

    def _insert(self, table: Table) -> Any:
        return sqlite_dialect.insert(table)

    def _given(self, **columns: TypeEngine[Any]) -> CTE:
        return given(**columns)

    def _execute_with(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], values: dict[str, Any]
    ) -> CursorResult[Any]:
        return self._values.execute(connection, statement, rows, values)

    def _compiler(self) -> Any:
        return sqlite_dialect.dialect()

    def _error(self, error: SQLAlchemyError) -> BackendUnavailable:
        text = words(error)
        for sign, kind, fix in _MEANINGS:
            if sign in text:
                return kind(f"{self.describe()}: {text}; {fix}")
        return BackendUnavailable(f"{self.describe()}: {text}")


_MEANINGS: tuple[tuple[str, type[BackendUnavailable], str], ...] = (
    ("is locked", BackendUnavailable, "another process kept writing for longer than busy_timeout"),
    ("no such table", NoTables, "there are no tables of anarchon in it (any more): start a beat to make them"),
    ("readonly database", Unusable, "this user may not write the file and its directory; change their owner or mode"),
    ("unable to open database file", Unusable, "it is gone, or this user may not open it: check the path and its mode"),
    ("file is not a database", Unusable, "it is another kind of file, or encrypted: choose another path"),
    ("malformed", Unusable, "the file is damaged: move it away, its claims cannot be trusted"),
    ("HTTP 401", Unusable, "give the right auth_token"),
    ("HTTP 403", Unusable, "give an auth_token that may write"),
    ("database or disk is full", BackendUnavailable, "make room on the disk"),
    ("created in a thread", Unusable, "make the connection with check_same_thread=False, or hand over a path"),
    ("closed database", Unusable, "the app has closed the connection that it handed over; hand over a path"),
)


def _source(database: Any, auth_token: str | None, backend: SqliteBackend) -> Any:
    if isinstance(database, str) and libsql.is_url(database):
        return libsql.Remote(database, auth_token)
    if auth_token is not None:
        raise ConfigurationError("SqliteBackend(auth_token=...) is for the URL of a libSQL server")
    if libsql.is_client(database):
        return libsql.HandedClient(database)
    if type(database).__module__.partition(".")[0] in ("turso", "pyturso"):
        raise ConfigurationError(
            "SqliteBackend(database=...) is a connection of pyturso, which locks its file for one process: other beats "
            "could not open it. Give a path, or the URL of a libSQL server"
        )
    if isinstance(database, sqlite3.Connection):
        return HandedConnection(database, backend)
    if isinstance(database, Engine):
        if database.dialect.name != "sqlite":
            raise ConfigurationError(
                f"SqliteBackend(database=...) is an Engine for {database.dialect.name}, not SQLite"
            )
        if database.dialect.is_async:
            raise ConfigurationError(
                "SqliteBackend(database=...) is an Engine for asyncio; make one with create_engine"
            )
        return HandedEngine(database)
    if isinstance(database, (str, os.PathLike)) and not isinstance(database, bytes):
        text = os.fspath(database)
        if text in ("", ":memory:") or text.startswith("file:") or "://" in text:
            raise ConfigurationError(
                f"SqliteBackend(database={text!r}) is no path of a file that beats can share; give a path, or a URL to "
                "backend_from_url; for one process there is MemoryBackend()"
            )
        return File(Path(text).expanduser().absolute(), backend)
    raise ConfigurationError(
        "SqliteBackend(database=...) takes a path, a sqlite3.Connection, a SQLAlchemy Engine, a libSQL URL or a "
        "libsql.Connection, not "
        f"{type(database).__module__}.{type(database).__qualname__}"
    )
