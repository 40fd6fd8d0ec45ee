"""The store for the beats of one machine: a SQLite file, or a connection or an Engine that the app already has.

Belongs here: how SQLite is opened, waited for and left alone. Does not belong here: the claim algorithm (:mod:`.sql`).

What is promised when. A claim that was answered survives the death of every process (``kill -9``), and, in a file that
we opened, a power cut too: ``synchronous=FULL`` costs one fsync a batch, half a millisecond on a good disk, and without
it a slot whose message is already with the broker could be claimed again after a power cut. On a connection or an
Engine of the app, the app's own ``synchronous`` and ``journal_mode`` decide.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import BigInteger, ColumnElement, Connection, Engine, Table, cast, create_engine, func
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from celery_anarchon.backends.base import Traits
from celery_anarchon.backends.sql import NoTables, SqlBackend, Unusable
from celery_anarchon.backends.sqlconnections import OwnConnections
from celery_anarchon.clock import SystemClock
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Millis

logger = logging.getLogger("celery_anarchon.backend")

_T = TypeVar("_T")

OLDEST_SQLITE = (3, 35, 0)
"""The first with RETURNING."""

_SLICE = 0.25
"""SQLite's own wait for a lock ends after so many seconds and is begun again: meanwhile signals are handled."""

_NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs"),
    )
)
"""File systems whose locks do not reach other machines reliably, and on which WAL cannot work."""


class SqliteBackend(SqlBackend):
    """Beats of one machine that share a SQLite file.

    :param database: a path, made absolute now; a :class:`sqlite3.Connection`; or a SQLAlchemy Engine on SQLite. What is
        handed over is never closed, keeps its settings, and must not be inside a transaction when a call comes.
    :param table: the name of the tables; one for each service.
    :param busy_timeout: how long a call waits for another process's write: seconds, a timedelta or text (``"10s"``).
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
        busy_timeout: Any = 5,
        *,
        early_tolerance: Millis = 5_000,
    ) -> None:
        super().__init__(table, early_tolerance=early_tolerance)
        self.busy_timeout = parse_duration(busy_timeout, "busy_timeout") / 1000
        self._clock_here = SystemClock()
        self._source = _source(database, self)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> SqliteBackend:
        """``sqlite:///relative/path`` or ``sqlite:////absolute/path``, with ``?table=`` and ``?busy_timeout=``."""
        from celery_anarchon.backends.registry import masked, read_url

        body, given = read_url(url, {"table": str, "busy_timeout": str}, options)
        if len(body) < 2 or not body.startswith("/") or body == "/:memory:":
            raise ConfigurationError(
                f"{masked(url)} names no file: write sqlite:///anarchon.db for a file in the working directory, "
                "sqlite:////var/lib/app/anarchon.db for an absolute path"
            )
        return cls(body[1:], **given)

    def describe(self) -> str:
        return f"sqlite {self._source.where}, table {self.namespace}"

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
            if not _is_busy(error):
                raise OutcomeUnknown(f"{self.describe()}: the commit failed ({_words(error)})") from error
            # Readers kept it from the file, and the transaction is still open: it has surely not been applied.
            connection.exec_driver_sql("ROLLBACK")
            raise

    def _patiently(self, step: Callable[[], _T]) -> _T:
        deadline = self._clock_here.monotonic() + self.busy_timeout
        while True:
            try:
                return step()
            except DBAPIError as error:
                if not _is_busy(error) or self._clock_here.monotonic() >= deadline:
                    raise
                # Some refusals come at once (recovery of a WAL, a connection of the app without a timeout).
                threading.Event().wait(0.005)

    def _clock(self) -> ColumnElement[int]:
        # SQLite counts in whole milliseconds; rounding undoes what the division into days cost.
        return cast(func.round((func.julianday("now") - 2440587.5) * 86_400_000), BigInteger)

    def _insert(self, table: Table) -> Any:
        return sqlite_dialect.insert(table)

    def _compiler(self) -> Any:
        return sqlite_dialect.dialect()

    def _error(self, error: SQLAlchemyError) -> BackendUnavailable:
        words = _words(error)
        for sign, kind, fix in _MEANINGS:
            if sign in words:
                return kind(f"{self.describe()}: {words}; {fix}")
        return BackendUnavailable(f"{self.describe()}: {words}")


_MEANINGS: tuple[tuple[str, type[BackendUnavailable], str], ...] = (
    ("is locked", BackendUnavailable, "another process kept writing for longer than busy_timeout"),
    ("no such table", NoTables, "there are no tables of anarchon in it (any more): start a beat to make them"),
    ("readonly database", Unusable, "this user may not write the file and its directory; change their owner or mode"),
    ("unable to open database file", Unusable, "it is gone, or this user may not open it: check the path and its mode"),
    ("file is not a database", Unusable, "it is another kind of file, or encrypted: choose another path"),
    ("malformed", Unusable, "the file is damaged: move it away, its claims cannot be trusted"),
    ("database or disk is full", BackendUnavailable, "make room on the disk"),
    ("created in a thread", Unusable, "make the connection with check_same_thread=False, or hand over a path"),
    ("closed database", Unusable, "the app has closed the connection that it handed over; hand over a path"),
)


def _words(error: BaseException) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _is_busy(error: BaseException) -> bool:
    # sqlite_errorcode is there from Python 3.11 on only; these texts have not changed in SQLite's life.
    return "is locked" in _words(error)


class _File:
    """A file that we open ourselves."""

    def __init__(self, path: Path, backend: SqliteBackend) -> None:
        self.where = str(path)
        self._path = path
        self._backend = backend
        self._mode = "rw"
        self._opened: tuple[int, int] | None = None
        self._connections = OwnConnections(self._connect)
        self._engine = create_engine(
            "sqlite://", creator=self._connect_driver, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )

    def open(self, create: bool) -> None:
        try:
            there = self._look(create)
        except OSError as error:
            raise Unusable(
                f"{self.where}: {error.strerror}; choose another path, or change its owner or mode"
            ) from error
        self._connections.open()
        # A later connection must not make the file: it would be an empty one in the place of all claims.
        self._mode = "rw" if there else "rwc"
        try:
            with self.connection():
                pass
        except SQLAlchemyError as error:
            raise self._backend._error(error) from error
        finally:
            self._mode = "rw"

    def _look(self, create: bool) -> bool:
        """Whether the file is there; raises if it cannot be."""
        path = self._path
        if path.is_dir():
            raise Unusable(f"{self.where} is a directory; give the path of a file, such as {path / 'anarchon.db'}")
        if not path.parent.is_dir():
            raise Unusable(f"{self.where}: there is no directory {path.parent}; make it, or choose another path")
        if path.exists():
            return True
        if not create:
            raise NoTables(f"{self.where}: there is no such file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise Unusable(f"{self.where}: this user may not make files in {path.parent}; change its owner or mode")
        return False

    def prepare(self, connection: Connection, create: bool) -> None:
        if not create:
            return
        system = _network_file_system(self._path)
        if system is not None:
            logger.warning(
                "%s is on a network file system (%s): its locks are not reliable, and claims can be won twice. "
                "Put it on a local disk; for beats on several machines choose another store",
                self.where,
                system,
            )
        try:
            self._backend._patiently(lambda: connection.exec_driver_sql("PRAGMA journal_mode=WAL").fetchall())
        except DBAPIError as error:
            if not _is_busy(error):
                raise
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
        if mode != "wal":
            logger.info("%s stays in journal mode %s: claims are exact, and slower than with a WAL", self.where, mode)

    def close(self) -> None:
        self._connections.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._opened is not None and self._opened != self._identity():
            # Writing to a file that has no name any more would be claiming in a store that nobody else sees.
            self._connections.drop_idle()
        with self._connections.use() as connection:
            yield connection

    def _connect(self) -> Connection:
        if self._mode == "rw" and not self._path.exists():
            raise NoTables(
                f"{self.where}: there is no such file (any more), and with it all claims; start a beat to make one"
            )
        connection = self._engine.connect()
        self._opened = self._identity()
        return connection

    def _connect_driver(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?mode={self._mode}",
            uri=True,
            timeout=min(_SLICE, self._backend.busy_timeout),
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # Some builds lower it for a WAL.
            connection.execute("PRAGMA synchronous=FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


class _Handed:
    """A connection or an Engine of the app: used call by call, never closed."""

    where: str

    def open(self, create: bool) -> None:
        pass

    def prepare(self, connection: Connection, create: bool) -> None:
        databases = connection.exec_driver_sql("PRAGMA database_list").fetchall()
        if create and not any(file for _, name, file in databases if name == "main"):
            logger.warning("%s is in memory: it serves this process only, and ends with it", self.where)

    def close(self) -> None:
        pass


_OPEN_TRANSACTION = (
    "{where} is inside a transaction, and a claim in it could be undone later; commit or roll back first (with "
    "autocommit=False it always is), or hand over a path"
)


class _HandedEngine(_Handed):
    def __init__(self, engine: Engine) -> None:
        self.where = f"engine {engine.url.render_as_string(hide_password=True)}"
        self._engine = engine
        self._pid = os.getpid()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            # What the pool holds is the parent's.
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        pool = self._engine.pool
        if isinstance(pool, StaticPool):
            # One connection for everybody: looked at before it is ours, because giving it back rolls back.
            self._refuse_transaction(pool.connection.dbapi_connection)
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver: Any = connection.connection.dbapi_connection
            self._refuse_transaction(driver)
            connection.begin()
            if driver.in_transaction:
                # The app's engine begins one for each checkout, by an event. Ours has to be of another kind.
                connection.exec_driver_sql("ROLLBACK")
            yield connection

    def _refuse_transaction(self, driver: Any) -> None:
        if driver.in_transaction:
            raise BackendUnavailable(_OPEN_TRANSACTION.format(where=self.where))


class _HandedConnection(_Handed):
    where = "connection of the app"

    def __init__(self, connection: sqlite3.Connection, backend: SqliteBackend) -> None:
        self._driver = connection
        self._backend = backend
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._engine = create_engine(
            "sqlite://", creator=lambda: _Borrowed(connection), poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            raise Unusable(f"{self.where}: SQLite connections do not survive a fork; hand over a path")
        with self._lock:
            driver = self._driver
            try:
                if driver.in_transaction:
                    raise BackendUnavailable(_OPEN_TRANSACTION.format(where=self.where))
                kept = driver.isolation_level, driver.row_factory, driver.text_factory
                driver.isolation_level, driver.row_factory, driver.text_factory = None, None, str
            except sqlite3.Error as error:
                raise self._backend._error(SQLAlchemyError(_words(error))) from error
            try:
                with self._engine.connect() as connection:
                    yield connection
            finally:
                with suppress(sqlite3.Error):
                    driver.isolation_level, driver.row_factory, driver.text_factory = kept


class _Borrowed:
    """The app's connection as SQLAlchemy gets it: without the functions that it would define and the close."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def create_function(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _source(database: Any, backend: SqliteBackend) -> _File | _HandedEngine | _HandedConnection:
    if isinstance(database, sqlite3.Connection):
        return _HandedConnection(database, backend)
    if isinstance(database, Engine):
        if database.dialect.name != "sqlite":
            raise ConfigurationError(
                f"SqliteBackend(database=...) is an Engine for {database.dialect.name}, not SQLite"
            )
        if database.dialect.is_async:
            raise ConfigurationError(
                "SqliteBackend(database=...) is an Engine for asyncio; make one with create_engine"
            )
        return _HandedEngine(database)
    if isinstance(database, (str, os.PathLike)) and not isinstance(database, bytes):
        text = os.fspath(database)
        if text in ("", ":memory:") or text.startswith("file:") or "://" in text:
            raise ConfigurationError(
                f"SqliteBackend(database={text!r}) is no path of a file that beats can share; give a path, or a URL to "
                "backend_from_url; for one process there is MemoryBackend()"
            )
        return _File(Path(text).expanduser().absolute(), backend)
    raise ConfigurationError(
        "SqliteBackend(database=...) takes a path, a sqlite3.Connection or a SQLAlchemy Engine, not "
        f"{type(database).__module__}.{type(database).__qualname__}"
    )


def _network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Its type, if the kernel says that *path* lies on one. Best effort: where there is no /proc, None."""
    best, found = "", None
    with suppress(OSError, ValueError):
        real = os.path.realpath(path.parent)
        for line in mounts.read_text(errors="replace").splitlines():
            _, where, system, *_ = line.split(" ")
            where = where.encode().decode("unicode_escape") if "\\" in where else where
            inside = real == where or real.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, found = where, system
    return found if found in _NETWORK else None
