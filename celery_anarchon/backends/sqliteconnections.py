"""Where a SQLite backend's connections come from: a file that we open, or what the app hands over.

Belongs here: opening, borrowing and giving back, and where a file may lie. Does not belong here: statements, and what
errors mean (:mod:`.sqlite`).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from celery_anarchon.backends.base import Unusable
from celery_anarchon.backends.sqlconnections import AppEngine, OwnConnections
from celery_anarchon.backends.sqlstore import NoTables
from celery_anarchon.errors import BackendUnavailable

logger = logging.getLogger("celery_anarchon.backend")

_SLICE = 0.25
"""SQLite's own wait for a lock ends after so many seconds and is begun again: meanwhile signals are handled."""

_NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs"),
    )
)
"""File systems whose locks do not reach other machines reliably, and on which WAL cannot work."""


class Patient(Protocol):
    """What is needed of the backend; see :class:`.sqlite.SqliteBackend`."""

    busy_timeout: float

    def _error(self, error: SQLAlchemyError) -> BackendUnavailable: ...

    def _patiently(self, step: Callable[[], Any]) -> Any: ...


def words(error: BaseException) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())


def is_busy(error: BaseException) -> bool:
    # sqlite_errorcode is there from Python 3.11 on only; these texts have not changed in SQLite's life.
    return "is locked" in words(error)


class File:
    """A file that we open ourselves."""

    def __init__(self, path: Path, backend: Patient) -> None:
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
        system = network_file_system(self._path)
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
            if not is_busy(error):
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


class Handed:
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


class HandedEngine(AppEngine, Handed):
    @contextmanager
    def _use(self) -> Iterator[Connection]:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver: Any = connection.connection.dbapi_connection
            self._refuse(driver)
            connection.begin()
            if driver.in_transaction:
                # The app's engine begins one for each checkout, by an event. Ours has to be of another kind.
                connection.exec_driver_sql("ROLLBACK")
            yield connection

    def _refuse(self, driver: Any) -> None:
        if driver.in_transaction:
            raise BackendUnavailable(_OPEN_TRANSACTION.format(where=self.where))


class HandedConnection(Handed):
    where = "connection of the app"

    def __init__(self, connection: sqlite3.Connection, backend: Patient) -> None:
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
                raise self._backend._error(SQLAlchemyError(words(error))) from error
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


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
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
