"""One connection to NATS, for callers that are threads: an event loop on a thread of its own, and what errors mean.

Belongs here: connecting, asking, and life and death of thread and connection. Does not belong here: streams.

A connection that fails is given up, and the next call makes a new one. The driver's own reconnection would send what
was not sent before: a claim that its owner believes lost, made behind its back.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import importlib
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from celery_anarchon.errors import AnarchonError, BackendUnavailable, ConfigurationError

__all__ = ["Away", "Connection", "Handed", "NoAnswer", "Own", "Refusal"]

CALL_TIMEOUT = 5.0
"""Seconds that the server may take to answer one question."""

LISTENER_TIMEOUT = 1.0
"""Seconds in which somebody must listen to a question."""

AGAIN_AFTER = 1.0
"""Seconds after which a question about a stream is asked again."""

CONNECT_TIMEOUT = 4.0

OLDEST = (2, 9)
"""The first version that this is tried with."""

_T = TypeVar("_T")
_Work = Callable[["Line"], Coroutine[Any, Any, _T]]

_inherited: list[Any] = []
"""Loops and connections of a parent process: the garbage collector would take the parent's sockets out of its poll."""


LONGEST = 60.0
"""Seconds after which a call has no answer, whatever its steps wait for."""


class Away(Exception):
    """Nobody was there to take the question: nothing was applied."""


class NoAnswer(Exception):
    """It may have been applied."""


class Refusal(Exception):
    """JetStream says no, with a number."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.number = int(error.get("err_code", 0))
        self.code = int(error.get("code", 0))
        super().__init__(f"{error.get('description', 'refused')} ({self.number})")


class Line:
    """A connected client of nats-py, seen from its event loop."""

    def __init__(self, client: Any, gone: asyncio.Event | None) -> None:
        self.client = client
        self._gone = gone
        self._errors = importlib.import_module("nats.errors")

    async def ask(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> dict[str, Any]:
        """The reply, JSON.

        :param patience: seconds; None: CALL_TIMEOUT.
        :raises Away: nothing was sent, or nobody listens.
        :raises NoAnswer: there was none in time, or the connection broke.
        :raises Refusal: it is an error.
        """
        if not self.client.is_connected:
            raise Away("not connected")
        give_up = asyncio.get_running_loop().time() + LISTENER_TIMEOUT
        patience = CALL_TIMEOUT if patience is None else patience
        try:
            while True:
                try:
                    message = await self._in_time(self.client.request(subject, data, patience, headers=headers))
                    break
                except self._errors.NoRespondersError:
                    # Nothing was applied. A stream that was just made is not known to all servers of a cluster.
                    if asyncio.get_running_loop().time() > give_up:
                        raise
                    await asyncio.sleep(0.05)
        except (self._errors.NoRespondersError, self._errors.OutboundBufferLimitError) as error:
            raise Away(f"nobody answers on {subject.partition('.')[0]}...") from error
        except (self._errors.Error, asyncio.TimeoutError, OSError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._broken():
                raise
            raise NoAnswer(str(error) or "no answer in time") from error
        try:
            reply = json.loads(message.data)
        except ValueError as error:
            raise NoAnswer(f"no JSON: {message.data[:80]!r}") from error
        if "error" in reply:
            raise Refusal(reply["error"])
        return dict(reply)

    async def insist(self, subject: str, data: bytes = b"") -> dict[str, Any]:
        """As :meth:`ask`, for a question that may be asked again: while a cluster makes a stream, a question about it
        may never be answered, and the next one is."""
        give_up = asyncio.get_running_loop().time() + 3 * CALL_TIMEOUT
        while True:
            try:
                return await self.ask(subject, data, patience=AGAIN_AFTER)
            except NoAnswer:
                if asyncio.get_running_loop().time() > give_up:
                    raise

    async def _in_time(self, question: Any) -> Any:
        """Its answer; an error at once when the connection breaks, which the driver would wait out."""
        if self._gone is None:
            return await question
        asked = asyncio.ensure_future(question)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise OSError("the connection broke")
            return asked.result()
        finally:
            for task in (asked, gone):
                task.cancel()

    def _broken(self) -> bool:
        return not self.client.is_connected or (self._gone is not None and self._gone.is_set())


class Connection(abc.ABC):
    """How the store asks."""

    text: str
    """For logs and errors: no secrets."""

    @abc.abstractmethod
    def run(self, work: _Work[_T]) -> _T:
        """What *work* returns, done on the event loop. :class:`Away`, :class:`NoAnswer` and :class:`Refusal` that it
        raises pass.

        :raises BackendUnavailable: there is no connection.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is ours."""

    @abc.abstractmethod
    def reopen(self) -> None:
        """After a close."""

    def _check(self, client: Any) -> None:
        version = str(getattr(client, "connected_server_version", "") or "")
        parts = version.split(".")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal() and tuple(map(int, parts[:2])) < OLDEST:
            raise ConfigurationError(
                f"{self.text}: NATS {version} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed"
            )


class Own(Connection):
    """Connections, a loop and a thread that are ours. The thread lives from the first call to :meth:`close`."""

    def __init__(self, servers: Sequence[str], text: str, options: Mapping[str, Any]) -> None:
        try:
            self._driver = importlib.import_module("nats.aio.client")
        except ImportError as error:
            raise ConfigurationError(
                'the driver nats-py is not installed: pip install "celery-anarchon[nats]"'
            ) from error
        self.servers = list(servers)
        self.text = text
        self._options = dict(options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._line: Line | None = None
        self._connecting: asyncio.Lock | None = None
        self._calls = 0
        self._closed = False

    def run(self, work: _Work[_T]) -> _T:
        with self._call() as loop:
            return _answer(self._work(work), loop)

    @contextmanager
    def _call(self) -> Iterator[asyncio.AbstractEventLoop]:
        if self._pid != os.getpid():
            _inherited.append((self._loop, self._line, self._thread))
            self._loop = self._thread = self._line = self._connecting = None
            self._lock, self._calls, self._pid = threading.Lock(), 0, os.getpid()
        with self._lock:
            self._calls += 1
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._connecting = asyncio.Lock()
                self._thread = threading.Thread(target=_serve, args=(loop,), name="celery-anarchon-nats", daemon=True)
                self._thread.start()
        try:
            yield loop
        finally:
            # Counted without the lock, too: a signal handler that closes may have interrupted us anywhere.
            with self._lock:
                self._calls -= 1
            if self._closed:
                self._stop_if_idle()

    async def _work(self, work: _Work[_T]) -> _T:
        assert self._connecting is not None
        async with self._connecting:
            if self._line is None or not self._line.client.is_connected:
                await self._drop()
                self._line = await self._connect()
        return await work(self._line)

    async def _connect(self) -> Line:
        said: AnarchonError | None = None
        for server in list(self.servers):
            client, gone = self._driver.Client(), asyncio.Event()
            try:
                opening = client.connect(
                    servers=[server],
                    name=f"celery-anarchon {socket.gethostname()}:{os.getpid()}",
                    allow_reconnect=False,
                    # For the first connection, too: the driver would try a server that refuses for minutes.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=CONNECT_TIMEOUT,
                    # Nothing is kept for later.
                    pending_size=-1,
                    error_cb=_say_nothing,
                    disconnected_cb=_setting(gone),
                    closed_cb=_setting(gone),
                    **self._options,
                )
                await _within(2 * CONNECT_TIMEOUT, opening)
                self._check(client)
            except Exception as error:
                await _end(client)
                if isinstance(error, AnarchonError):
                    raise
                said = self._failure(server, error)
                continue
            # The one that answered is asked first the next time.
            self.servers = [server, *(one for one in self.servers if one != server)]
            return Line(client, gone)
        assert said is not None
        raise said

    def _failure(self, server: str, error: Exception) -> AnarchonError:
        words = " ".join(str(error).split()) or type(error).__name__
        login = server.partition("://")[2].rpartition("@")[0]
        if login:
            words = words.replace(login, "***")
        if "authorization" in words.lower() or "authentication" in words.lower():
            return ConfigurationError(f"{self.text}: {words}")
        return BackendUnavailable(f"{self.text}: {words}")

    async def _drop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await _end(line.client)

    def close(self) -> None:
        """Without waiting for a call in progress: that ends the thread when it is done."""
        self._closed = True
        if self._pid == os.getpid():
            self._stop_if_idle()

    def reopen(self) -> None:
        self._closed = False

    def _stop_if_idle(self) -> None:
        if not self._lock.acquire(blocking=False):
            # Whoever holds it is about to make a call, or to end one, and looks again.
            return
        try:
            if self._calls:
                return
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        finally:
            self._lock.release()
        if loop is not None and thread is not None:
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._drop(), loop).result(2)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(2)


class Handed(Connection):
    """A client of nats-py that the app has, connected, its event loop running on another thread. Never closed."""

    def __init__(self, client: Any) -> None:
        kind = f"{type(client).__module__}.{type(client).__qualname__}"
        if not hasattr(client, "request") or not hasattr(client, "is_connected") or not hasattr(client, "jetstream"):
            raise ConfigurationError(f"connection=... is a {kind}: give a connected client of nats-py, or servers=...")
        self.text = "client of the app"
        self._client = client
        self._pid = os.getpid()

    def run(self, work: _Work[_T]) -> _T:
        task = getattr(self._client, "_reading_task", None)
        loop = None if task is None else task.get_loop()
        if self._pid != os.getpid():
            raise ConfigurationError("connection=... was made before a fork: give servers=..., or connect in the child")
        if loop is None or not loop.is_running():
            raise BackendUnavailable(f"{self.text}: its event loop does not run")
        if asyncio._get_running_loop() is loop:
            raise ConfigurationError("connection=... runs on this very thread, which would wait for itself")
        if not self._client.is_connected:
            raise BackendUnavailable(f"{self.text}: not connected")
        self._check(self._client)
        return _answer(work(Line(self._client, None)), loop)

    def close(self) -> None:
        """It is not ours."""

    def reopen(self) -> None:
        """It is not ours."""


def _answer(question: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    """What *loop*, on its own thread, gets as an answer.

    :raises NoAnswer: none within :data:`LONGEST`. Every step has a bound of its own; this one is for a driver that does
        not keep to them.
    """
    asked = asyncio.run_coroutine_threadsafe(question, loop)
    try:
        return asked.result(LONGEST)
    except concurrent.futures.TimeoutError:
        asked.cancel()
        raise NoAnswer("no answer in time") from None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1))
        # What was closed last says so in the next round.
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _within(seconds: float, question: Coroutine[Any, Any, _T]) -> _T:
    """Its answer. Unlike :func:`asyncio.wait_for` it does not wait for one that does not let itself be cancelled."""
    task = asyncio.ensure_future(question)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        raise TimeoutError("no answer in time")
    return task.result()


async def _end(client: Any) -> None:
    with suppress(Exception):
        await _within(1, client.close())
    # Before 2.12 or so the driver leaves a socket open that the server has closed.
    for name in ("_reading_task", "_ping_interval_task", "_flusher_task"):
        task = getattr(client, name, None)
        if task is not None:
            task.cancel()
    with suppress(Exception):
        client._transport.close()
    await asyncio.sleep(0)


async def _say_nothing(error: Exception) -> None:
    """What went wrong is raised where it was asked."""


def _setting(event: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    async def callback() -> None:
        event.set()

    return callback
