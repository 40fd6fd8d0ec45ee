"""The connections of a SQL backend that opened its own: no locks, and safe after a fork."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError


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
