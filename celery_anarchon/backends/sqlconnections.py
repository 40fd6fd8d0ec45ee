"""The connections of a SQL backend: those that it opened, and those of an Engine of the app. Safe after a fork."""

from __future__ import annotations

import abc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool


class OwnConnections:
    """The connections that a backend opened itself: one for each call in progress; idle ones wait for the next call.

    No locks: append and pop of a deque are atomic, so :meth:`close` may interrupt a call of its own thread at any line
    (X3). A call that was in progress then goes on, and closes its connection when it ends.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: deque[Connection] = deque()
        self._inherited: list[Connection] = []
        self._pid = os.getpid()
        self._closed = False

    def open(self) -> None:
        self._closed = False

    @contextmanager
    def use(self, alive: Callable[[Connection], bool] = lambda _: True) -> Iterator[Connection]:
        """One for a call. *alive*: whether an idle one is worth a try."""
        if self._pid != os.getpid():
            # Closing what the parent still uses would disturb it, and so would the garbage collector: keep it, unused.
            self._inherited.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()
        connection = self._take(alive)
        try:
            yield connection
        except BaseException:
            # Whatever state it is in: closing rolls back.
            _close(connection)
            raise
        self._idle.append(connection)
        if self._closed:
            self.drop_idle()

    def _take(self, alive: Callable[[Connection], bool]) -> Connection:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect()
            if alive(connection):
                return connection
            _close(connection)

    def drop_idle(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            _close(connection)

    def close(self) -> None:
        self._closed = True
        if self._pid == os.getpid():
            self.drop_idle()


def _close(connection: Connection) -> None:
    with suppress(SQLAlchemyError):
        connection.close()


class AppEngine(abc.ABC):
    """An Engine that the app hands over: a connection of its pool for each call, never closed."""

    def __init__(self, engine: Engine) -> None:
        self.where = f"engine {engine.url.render_as_string(hide_password=True)}"
        self._engine = engine
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            # What the pool holds is the parent's, and a thread that is not here may have held the lock.
            self._engine.dispose(close=False)
            self._lock = threading.Lock()
            self._pid = os.getpid()
        pool = self._engine.pool
        if not isinstance(pool, StaticPool):
            with self._use() as connection:
                yield connection
            return
        # One connection for everybody: one call at a time.
        with self._lock:
            # Looked at before it is ours, because giving it back rolls back.
            self._refuse(pool.connection.dbapi_connection)
            with self._use() as connection:
                yield connection

    @abc.abstractmethod
    def _use(self) -> AbstractContextManager[Connection]:
        """A connection of the pool, in autocommit, for one call."""

    @abc.abstractmethod
    def _refuse(self, driver: Any) -> None:
        """Raises where the app uses this connection of the driver just now."""
