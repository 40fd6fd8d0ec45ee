"""Connections that we open ourselves, kept for the next call.

No locks of our own: append and pop of a deque are atomic, so ``close()`` may interrupt a call of its own thread at any
line (X3). A call that was in progress then goes on, and closes its connection when it ends.
"""

from __future__ import annotations

import importlib
import inspect
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType
from typing import Any

from celery_anarchon.backends.redis.address import Address, Host
from celery_anarchon.backends.redis.replies import Unusable, connect_failure, words_of
from celery_anarchon.backends.redis.source import check_timeout
from celery_anarchon.backends.redis.talk import Driver, Wait, disconnect, exchange
from celery_anarchon.clock import SystemClock

__all__ = ["CALL_TIMEOUT", "Links", "Opener"]

CALL_TIMEOUT = 5.0
"""Seconds that a call waits for a server. A beat does nothing else meanwhile."""

_LOOK_AFTER = 15.0
"""A connection that was idle for so many seconds is tried before a call is trusted to it."""

_Idle = tuple[Any, Callable[[], Any], float]
"""A connection, its look, and the monotonic time when it was last taken."""


def _look_of(link: Any) -> Callable[[], Any]:
    """Tells whether there is something to read on *link*, the end of the connection included. The driver's own look is
    three system calls and more, for each run of a worker under load."""
    sock = getattr(link, "_sock", None)
    if type(sock) is not socket.socket or not isinstance(getattr(select, "poll", None), BuiltinFunctionType):
        # Of an encrypted connection only the driver knows what is for us; and greenlets wait in their own way.
        return partial(link.can_read, 0)
    look = select.poll()
    look.register(sock, select.POLLIN)
    return partial(look.poll, 0)


class Links:
    """Connections to one server that we open ourselves: one for each call in progress; idle ones wait for the next."""

    def __init__(self, connect: Callable[[], Any], alive: Callable[[Any], bool]) -> None:
        self._connect = connect
        self._alive = alive
        self._clock = SystemClock()
        self._idle: deque[_Idle] = deque()
        self._inherited: list[Any] = []
        self._pid = os.getpid()
        self.closed = False

    def use(self) -> Lent:
        """A connection for one call; an error within closes it."""
        return Lent(self)

    def take(self) -> _Idle:
        """One that is not used: with its look, and the monotonic time."""
        if self._pid != os.getpid():
            # Closing what the parent still uses would disturb it, and so would the garbage collector: keep it, unused.
            self._inherited.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()
        now = self._clock.monotonic()
        while True:
            try:
                link, news, since = self._idle.pop()
            except IndexError:
                link = self._connect()
                return link, _look_of(link), now
            try:
                # Readable though nothing was asked: the server has closed it. A call would be lost on it.
                usable = not news() and (now - since < _LOOK_AFTER or self._alive(link))
            except Exception:
                usable = False
            if usable:
                return link, news, now
            disconnect(link)

    def put_back(self, idle: _Idle) -> None:
        if getattr(idle[0], "_sock", idle) is None:
            # The driver has closed it after an error. What it opens next, this look would not see.
            return
        self._idle.append(idle)
        if self.closed:
            self.drop()

    def drop(self) -> None:
        while True:
            try:
                link, _, _ = self._idle.pop()
            except IndexError:
                return
            disconnect(link)

    def close(self) -> None:
        self.closed = True
        if self._pid == os.getpid():
            self.drop()


class Lent:
    """A connection for the time of a ``with``. Not a generator: a worker asks before each run."""

    __slots__ = ("_idle", "_links")

    def __init__(self, links: Links) -> None:
        self._links = links

    def __enter__(self) -> Any:
        self._idle = idle = self._links.take()
        return idle[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._links.put_back(self._idle)
        else:
            # Replies may be under way that nobody reads.
            disconnect(self._idle[0])


class Opener:
    """Opens connections to the servers of an address."""

    def __init__(self, address: Address, driver: Driver, wait: Wait | None) -> None:
        self._driver = driver
        self._address = address
        check_timeout(address.text, address.options, wait)
        here = importlib.import_module(f"{driver.module.__name__}.connection")
        retry = importlib.import_module(f"{driver.module.__name__}.retry").Retry
        backoff = importlib.import_module(f"{driver.module.__name__}.backoff").NoBackoff
        kinds = {"socket": here.UnixDomainSocketConnection, "tls": here.SSLConnection, "plain": here.Connection}
        self._class = kinds["socket" if address.kind == "socket" else "tls" if address.tls else "plain"]
        patience = CALL_TIMEOUT + (wait.millis / 1000 if wait else 0.0)
        self._options: dict[str, Any] = {
            "socket_timeout": patience,
            # No call is sent twice behind our back.
            "retry": retry(backoff(), 0),
            "retry_on_timeout": False,
            "decode_responses": False,
        }
        if address.kind != "socket":
            self._options.update(socket_connect_timeout=CALL_TIMEOUT, socket_keepalive=True)
        # RESP3 begins with a command that Redis 5 does not know. Before redis-py 5 there is no other but 2.
        if "protocol" in inspect.signature(here.AbstractConnection.__init__).parameters:
            self._options["protocol"] = 2
        self._options.update(address.options)

    def open(self, host: Host | None, *, db: int = 0, sentinel: bool = False) -> Any:
        """A new connection. Raises only ours."""
        address = self._address
        login = address.sentinel_login if sentinel else address.login
        one_of_several = host is not None and address.kind in ("sentinel", "cluster")
        where = f"{address.text} ({host[0]}:{host[1]})" if host and one_of_several else address.text
        place = {"path": address.path} if host is None else {"host": host[0], "port": host[1]}
        try:
            link = self._class(db=db, **place, **login, **self._options)
        except (TypeError, ValueError, self._driver.error) as error:
            raise Unusable(f"{where}: {words_of(error)}") from error
        try:
            link.connect()
            if not sentinel:
                # Whatever is replied: a user without the right to name its connection is no reason to send nothing.
                exchange(link, self._driver, [("CLIENT", "SETNAME", f"celery-anarchon:{os.getpid()}")])
        except self._driver.failures as error:
            disconnect(link)
            raise connect_failure(where, error) from error
        except (TypeError, ValueError) as error:
            # An option that the driver looks at only now.
            disconnect(link)
            raise Unusable(f"{where}: {words_of(error)}") from error
        except BaseException:
            disconnect(link)
            raise
        return link

    def alive(self, link: Any) -> bool:
        return bool(exchange(link, self._driver, [("PING",)])[0] == b"PONG")
