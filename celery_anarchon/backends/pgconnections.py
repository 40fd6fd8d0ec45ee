"""Where a PostgreSQL backend's connections come from: its own, or what the app hands over.

Belongs here: opening, borrowing and giving back, each call with a connection that nobody else uses meanwhile, in
autocommit and outside of a transaction. Does not belong here: statements, and what errors mean (:mod:`.postgres`).

This module imports the driver; :mod:`.postgres` imports it when a backend is made.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from celery_anarchon.backends.base import Unusable
from celery_anarchon.backends.sqlconnections import AppEngine, OwnConnections
from celery_anarchon.errors import BackendUnavailable, ConfigurationError

logger = logging.getLogger("celery_anarchon.backend")

CONNECT_TIMEOUT = 5
"""Seconds for a new connection, for each host of several."""

CALL_TIMEOUT = 10.0
"""Seconds for the reply to one statement, on connections of our own."""

_WANTS_READ, _WANTS_WRITE = 1, 2

_OPEN_TRANSACTION = (
    "{where} is inside a transaction, and a claim in it could be undone later; commit or roll back first, or hand over "
    "a URL"
)
_BUSY = "{where} is in the middle of another call; give the scheduler a connection of its own, or hand over a URL"


def libpq_options() -> list[str]:
    """The names that a connection string may contain."""
    return [option.keyword.decode() for option in Conninfo.get_defaults()]


class _Patient(psycopg.Connection[Any]):
    """Does not wait for ever: a server that is stopped, not dead, never answers, and closes nothing."""

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        deadline = time.monotonic() + CALL_TIMEOUT
        try:
            wanted = next(gen)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    # Whatever it says later would be taken for the answer to the next question.
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server gave no answer within {CALL_TIMEOUT:g} s")
                ready = _ready(self.pgconn.socket, wanted, left)
                if ready:
                    wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def _ready(socket: int, wanted: int, patience: float) -> int:
    poller = select.poll()
    events = (select.POLLIN if wanted & _WANTS_READ else 0) | (select.POLLOUT if wanted & _WANTS_WRITE else 0)
    poller.register(socket, events)
    found = poller.poll(math.ceil(patience * 1000))
    if not found:
        return 0
    event = found[0][1]
    if event & ~(select.POLLIN | select.POLLOUT):
        # It broke: let the driver find out.
        return wanted
    return (_WANTS_READ if event & select.POLLIN else 0) | (_WANTS_WRITE if event & select.POLLOUT else 0)


def _hung_up(driver: Any) -> bool:
    """Whether the server has ended this idle connection: then nothing need be sent to find out."""
    if driver.closed:
        return True
    with suppress(ValueError):
        for _ in range(10):
            if not _ready(driver.pgconn.socket, _WANTS_READ, 0):
                return False
            try:
                driver.pgconn.consume_input()
            except psycopg.Error:
                return True
    return False


def _driver_of(connection: Connection) -> Any:
    return connection.connection.driver_connection


class Own:
    """Connections that we open, by a connection string."""

    def __init__(self, conninfo: str, options: Mapping[str, Any] | None = None) -> None:
        given = {**conninfo_to_dict(conninfo), **(options or {})}
        known = set(libpq_options())
        defaults: dict[str, Any] = {
            "connect_timeout": None if "PGCONNECT_TIMEOUT" in os.environ else CONNECT_TIMEOUT,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": int(CALL_TIMEOUT * 1000),
        }
        for name, value in defaults.items():
            if name in known and value is not None:
                given.setdefault(name, value)
        given["client_encoding"] = "UTF8"
        self.where = _where(given)
        self._given = given
        self._connections = OwnConnections(self._connect)
        self._engine = _engine(self._connect_driver)

    def open(self) -> None:
        self._connections.open()

    def close(self) -> None:
        self._connections.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._connections.use(lambda connection: not _hung_up(_driver_of(connection))) as connection:
            yield connection

    def _connect(self) -> Connection:
        return self._engine.connect()

    def _connect_driver(self) -> Any:
        return _Patient.connect(
            make_conninfo(**{**self._given, "fallback_application_name": f"celery-anarchon:{os.getpid()}"}),
            autocommit=True,
            # Behind a pooler the next transaction is on another server connection, which does not know the statement.
            prepare_threshold=None,
        )


class _Handed:
    where: str

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


class HandedEngine(AppEngine, _Handed):
    """One of psycopg."""

    def __init__(self, engine: Engine) -> None:
        if engine.dialect.name != "postgresql":
            raise ConfigurationError(
                f"PostgresBackend(connection=...) is an Engine for {engine.dialect.name}, not PostgreSQL"
            )
        if engine.dialect.is_async:
            raise ConfigurationError(
                "PostgresBackend(connection=...) is an Engine for asyncio; make one with create_engine"
            )
        if engine.dialect.driver != "psycopg":
            raise ConfigurationError(
                f"PostgresBackend(connection=...) is an Engine with the driver {engine.dialect.driver}; make one with "
                'create_engine("postgresql+psycopg://..."), or hand over a URL'
            )
        super().__init__(engine)

    def _refuse(self, driver: Any) -> None:
        _refuse_busy(driver, self.where)

    @contextmanager
    def _use(self) -> Iterator[Connection]:
        with _given_back(self._checkout()) as connection:
            driver = _driver_of(connection)
            _refuse_busy(driver, self.where)
            with _plain(driver, self.where):
                connection.begin()
                if driver.info.transaction_status != TransactionStatus.IDLE:
                    # The app's engine begins one for each checkout, by an event. Ours has to be of another kind.
                    connection.exec_driver_sql("ROLLBACK")
                yield connection

    def _checkout(self) -> Connection:
        while True:
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            if not _hung_up(_driver_of(connection)):
                return connection
            connection.invalidate()
            connection.close()


class _Lent(_Handed):
    """Connections of the driver that the app owns, one for each call; SQLAlchemy is told of them one at a time."""

    def __init__(self, like: Callable[[], Own]) -> None:
        self._pid = os.getpid()
        self._like = like
        self._own: dict[str, Own] = {}
        self._now = threading.local()
        self._engine = _engine(lambda: _Borrowed(self._now.driver))

    def open(self) -> None:
        for own in list(self._own.values()):
            own.open()

    def close(self) -> None:
        for own in list(self._own.values()):
            own.close()

    def _ours(self) -> Own:
        """Connections of our own to the same place."""
        # One step: two threads that come together share them. No lock: close() must find none, nor a fork.
        return self._own.get("own") or self._own.setdefault("own", self._like())

    @contextmanager
    def _use(self, driver: Any) -> Iterator[Connection]:
        _refuse_busy(driver, self.where)
        with ExitStack() as stack:
            kept = driver.autocommit
            try:
                driver.autocommit = True
            except psycopg.Error as error:
                raise BackendUnavailable(f"{self.where}: {' '.join(str(error).split())}") from error
            stack.callback(_set_autocommit, driver, kept)
            stack.enter_context(_plain(driver, self.where))
            self._now.driver = driver
            yield stack.enter_context(_given_back(self._engine.connect()))


class HandedConnection(_Lent):
    """A connection of the app. In a fork, and once it is broken, connections of our own to the same place."""

    where = "connection of the app"

    def __init__(self, driver: Any) -> None:
        if driver.closed:
            raise ConfigurationError("PostgresBackend(connection=...) is a connection that is closed already")
        parameters = {**driver.info.get_parameters(), "password": driver.info.password or None}
        super().__init__(lambda: Own("", {name: value for name, value in parameters.items() if value}))
        self.where = f"connection of the app to {_where(parameters)}"
        self._driver = driver
        self._lock = threading.Lock()
        self._told = False

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        driver = self._driver
        if self._pid == os.getpid():
            with self._lock:
                # Not before: a look takes in what has come, and that may be the reply to another thread's call.
                if not (_hung_up(driver) and self._broke(driver)):
                    if driver.closed:
                        raise Unusable(f"{self.where}: the app has closed it; hand over a URL")
                    with self._use(driver) as connection:
                        yield connection
                    return
        with self._ours().connection() as connection:
            yield connection

    def _broke(self, driver: Any) -> bool:
        """It ended, and not because the app wanted so."""
        ended = not driver.closed or driver.broken
        if ended and not self._told:
            self._told = True
            logger.warning("%s broke; going on with connections of our own to the same place", self.where)
        return bool(ended)


class HandedPool(_Lent):
    """A psycopg_pool of the app. In a fork, where its threads are not, connections of our own to the same place."""

    patience = CONNECT_TIMEOUT
    """Seconds until the pool must have given one."""

    def __init__(self, pool: Any) -> None:
        super().__init__(self._same_place)
        self.where = f"pool {pool.name}"
        self._pool = pool

    def _same_place(self) -> Own:
        conninfo, options = self._pool.conninfo, self._pool.kwargs
        conninfo = conninfo() if callable(conninfo) else conninfo
        options = options() if callable(options) else options
        known = set(libpq_options())
        return Own(conninfo or "", {name: value for name, value in (options or {}).items() if name in known})

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            with self._ours().connection() as connection:
                yield connection
            return
        driver = self._checkout()
        try:
            with self._use(driver) as connection:
                yield connection
        finally:
            self._pool.putconn(driver)

    def _checkout(self) -> Any:
        try:
            while True:
                driver = self._pool.getconn(self.patience)
                if not _hung_up(driver):
                    return driver
                driver.close()
                self._pool.putconn(driver)
        except psycopg.Error as error:
            words = " ".join(str(error).split())
            if self._pool.closed:
                raise Unusable(f"{self.where}: {words}; open the pool, and keep it open while beats run") from error
            raise BackendUnavailable(f"{self.where}: {words}") from error


class _Borrowed:
    """The app's connection as SQLAlchemy gets it: it stays open, and nothing is added to it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def add_notice_handler(self, _: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _engine(creator: Callable[[], Any]) -> Engine:
    return create_engine(
        "postgresql+psycopg://",
        creator=creator,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        use_native_hstore=False,
    )


@contextmanager
def _given_back(connection: Connection) -> Iterator[Connection]:
    """Close it in the end; what then fails on a broken one must not hide why it broke."""
    try:
        yield connection
    except BaseException:
        with suppress(SQLAlchemyError):
            connection.close()
        raise
    connection.close()


def _refuse_busy(driver: Any, where: str) -> None:
    if driver.closed:
        return
    status = driver.info.transaction_status
    if status == TransactionStatus.ACTIVE or driver.info.pipeline_status != PipelineStatus.OFF:
        raise BackendUnavailable(_BUSY.format(where=where))
    if status != TransactionStatus.IDLE:
        raise BackendUnavailable(_OPEN_TRANSACTION.format(where=where))


@contextmanager
def _plain(driver: Any, where: str) -> Iterator[None]:
    """For a while without what the app has set on it and what would change our statements or their rows."""
    if driver.info.encoding != "utf-8":
        raise Unusable(f"{where}: its client_encoding is not UTF8, and names could be lost; set it, or hand over a URL")
    kept = driver.row_factory, driver.cursor_factory, driver.prepare_threshold
    driver.row_factory, driver.cursor_factory, driver.prepare_threshold = tuple_row, psycopg.Cursor, None
    try:
        yield
    finally:
        driver.row_factory, driver.cursor_factory, driver.prepare_threshold = kept


def _set_autocommit(driver: Any, value: bool) -> None:
    # Within a transaction it cannot be set: then the call has failed and so did its ROLLBACK.
    with suppress(psycopg.Error):
        if driver.autocommit != value:
            driver.autocommit = value


def _where(given: Mapping[str, Any]) -> str:
    """Where these options of libpq lead, without secrets."""
    if given.get("service"):
        return f"service {given['service']}"
    host = given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "local socket"
    port = given.get("port") or os.environ.get("PGPORT") or 5432
    database = given.get("dbname") or os.environ.get("PGDATABASE")
    user = given.get("user") or os.environ.get("PGUSER")
    return f"{user + '@' if user else ''}{host}:{port}" + (f"/{database}" if database else "")
