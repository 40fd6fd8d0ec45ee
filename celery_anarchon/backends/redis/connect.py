"""How calls reach a server: connections that we open ourselves, and those of a client that the app handed over.

Belongs here: sockets, sentinels, the nodes of a cluster, and what an error says about whether a call was applied. Does
not belong here: what the calls mean.

Calls go over the driver's *connections*, not its clients, because a client hides what decides here: whether it failed
to connect (nothing was applied) or lost the reply (it may have been), and whether it sent a write twice. Those of a
handed client come from its own pool and go back there; its retries are not used.

No locks of our own: append and pop of a deque are atomic, so ``close()`` may interrupt a call of its own thread at any
line (X3). A call that was in progress then goes on, and closes its connection when it ends.
"""

from __future__ import annotations

import abc
import binascii
import importlib
import inspect
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, TypeVar

from celery_anarchon.backends.redis.address import Address, Host
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown

__all__ = ["Source", "Unusable", "Wait", "handed_source", "own_source"]

CALL_TIMEOUT = 5.0
"""Seconds that a call waits for a server. A beat does nothing else meanwhile."""

_LOOK_AFTER = 15.0
"""A connection that was idle for so many seconds is tried before a call is trusted to it."""

_REDIRECTIONS = 5
"""How often a call follows the cluster's word that its keys have moved. Each error reply means: not applied."""

_T = TypeVar("_T")
_Commands = Sequence[Sequence[Argument]]


class Unusable(BackendUnavailable):
    """It will not get better by itself. ``open`` raises it as a ConfigurationError; a call in a running beat as what it
    is to the beat: nothing was applied, ask again later."""


class Wait:
    """How many replicas must have a write before it counts, and for how many milliseconds to wait for them."""

    def __init__(self, replicas: int, millis: int) -> None:
        self.replicas = replicas
        self.millis = millis


# --- what an error means ----------------------------------------------------------------------------------------------

_REFUSALS = {
    "LOADING": "it is reading its data from disk",
    "MASTERDOWN": "it is a replica without its master",
    "READONLY": "it is a replica; after a failover this passes, else name the master",
    "CLUSTERDOWN": "the cluster does not serve these keys just now",
    "TRYAGAIN": "the cluster is moving these keys",
    "ASK": "the cluster is moving these keys",
    "MISCONF": "it cannot save to disk and takes no writes; see its log",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write",
    "BUSY": "a script of somebody else keeps it busy",
    "OOM": "its memory is used up; raise maxmemory",
}
_WRONG = {
    "NOAUTH": "it wants a password: write it into the URL",
    "WRONGPASS": "wrong user or password",
    "NOPERM": "this user may not do that; see the rights in the documentation of the Redis store",
    "CROSSSLOT": "it is a cluster: write redis+cluster://",
    "MOVED": "it is a node of a cluster: write redis+cluster://",
}
"""Replies that mean: nothing was applied. Each stands first, or after "-" (errors of a script, Redis 6 and older)."""

_BY_CLASS = {
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "ReadOnlyError": "READONLY",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "OutOfMemoryError": "OOM",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "AuthenticationError": "NOAUTH",
    "AuthenticationWrongNumberOfArgsError": "NOAUTH",
    "MovedError": "MOVED",
    "ClusterCrossSlotError": "CROSSSLOT",
    "AskError": "ASK",
}
"""The drivers cut the words that they have a class for."""

_WORD = re.compile(r"(?:^|-)([A-Z]{3,})\b")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _sign(error: BaseException) -> str:
    """The word by which a server says what is wrong; empty: it said none, or nothing at all."""
    for kind in type(error).__mro__:
        if kind.__name__ in _BY_CLASS:
            sign = _BY_CLASS[kind.__name__]
            return "WRONGPASS" if sign == "NOAUTH" and "pass" in str(error).lower() else sign
    for word in _WORD.findall(str(error)):
        if word in _REFUSALS or word in _WRONG or word == "NOSCRIPT":
            return str(word)
    return ""


def _refusal(where: str, error: BaseException) -> BackendUnavailable | OutcomeUnknown:
    """What a reply means that is an error."""
    sign = _sign(error)
    words = _words(error)
    if sign in _REFUSALS:
        return BackendUnavailable(f"{where}: {words}; {_REFUSALS[sign]}")
    if sign in _WRONG:
        return Unusable(f"{where}: {words}; {_WRONG[sign]}")
    if "unknown command" in words.lower() and "hello" in words.lower():
        return Unusable(f"{where}: {words}; it is older than the client's protocol: make the client with protocol=2")
    if "unknown command" in words.lower():
        return Unusable(f"{where}: {words}; this server lacks what claims need, or forbids it")
    return OutcomeUnknown(f"{where}: {words}")


# --- talking over one connection --------------------------------------------------------------------------------------


class _Driver:
    """What we use of redis-py or valkey-py, whose names are the same."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        errors = importlib.import_module(f"{module.__name__}.exceptions")
        self.error: type[Exception] = errors.RedisError if hasattr(errors, "RedisError") else errors.ValkeyError
        self.reply_error: type[Exception] = errors.ResponseError
        self.failures: tuple[type[Exception], ...] = (self.error, OSError)


def _exchange(link: Any, driver: _Driver, commands: _Commands) -> list[Any]:
    """Send *commands* at once and read all replies; one that is an error stands in its place."""
    link.send_packed_command(link.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(link.read_response(disable_decoding=True))
        except driver.error as error:
            if isinstance(error, driver.reply_error):
                replies.append(error)
            elif _sign(error):
                # It closes the connection itself after these, and they are said to all commands alike.
                return replies + [error] * (len(commands) - len(replies))
            else:
                raise
    return replies


def _ask(link: Any, driver: _Driver, where: str, *command: Argument) -> Any:
    """One command that changes nothing. Raises only ours."""
    try:
        reply = _exchange(link, driver, [command])[0]
    except driver.failures as error:
        raise BackendUnavailable(f"{where}: {_words(error)}") from error
    if isinstance(reply, Exception):
        refusal = _refusal(where, reply)
        if isinstance(refusal, OutcomeUnknown):
            raise Unusable(f"{where}: {_words(reply)}") from reply
        raise refusal from reply
    return reply


def _run(link: Any, driver: _Driver, calls: Sequence[Call], wait: Wait | None) -> tuple[list[Any], int | None]:
    """The replies to *calls*, and how many replicas have them."""
    replies = _exchange(link, driver, [*(call.by_digest() for call in calls), *_fence(calls, wait)])
    unknown = [
        number
        for number, reply in enumerate(replies[: len(calls)])
        if isinstance(reply, Exception) and _sign(reply) == "NOSCRIPT"
    ]
    if unknown:
        # It has been restarted, or never saw them. It ran none of these.
        again = [calls[number] for number in unknown]
        second = _exchange(link, driver, [*(call.by_source() for call in again), *_fence(again, wait)])
        for number, reply in zip(unknown, second, strict=False):
            replies[number] = reply
        replies[len(calls) :] = second[len(again) :]
    acknowledged = replies[-1] if wait is not None else None
    return replies[: len(calls)], acknowledged


def _fence(calls: Sequence[Call], wait: Wait | None) -> list[Sequence[Argument]]:
    if wait is None:
        return []
    # WAIT waits for the writes of its own connection. A call that found everything done already wrote nothing, and the
    # write that it found may have come over another connection: this one is behind it in any case.
    tag = calls[0].keys[0].partition(b"}")[0] + b"}fence"
    return [("SET", tag, "1"), ("WAIT", wait.replicas, wait.millis)]


# --- sources ----------------------------------------------------------------------------------------------------------


class Source(abc.ABC):
    """Something that calls can be sent to."""

    where: str
    """For logs and errors."""
    sharded = False
    """Calls must keep to one shard each."""

    def __init__(self, driver: _Driver, where: str) -> None:
        self._driver = driver
        self.where = where

    @abc.abstractmethod
    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        """The replies to *calls*, in a number of round trips that does not grow with them.

        Raises BackendUnavailable when surely none was applied, else OutcomeUnknown; where nothing is written, only the
        former.
        """

    @abc.abstractmethod
    def ask(self, *command: Argument) -> Any:
        """The reply of any one server to a command that changes nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what we opened."""

    def check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse settings that would break a claim. Opens nothing."""

    def reopen(self) -> None:  # noqa: B027 - what was handed over was never closed
        """It is wanted again after a close."""

    def _perform_on(self, link: Any, calls: Sequence[Call], *, writes: bool, wait: Wait | None) -> list[Any]:
        """The replies of one server; an error among them stands in its place."""
        try:
            replies, acknowledged = _run(link, self._driver, calls, wait if writes else None)
        except self._driver.failures as error:
            words = f"{self.where}: the reply did not come ({_words(error)})"
            raise (OutcomeUnknown if writes else BackendUnavailable)(words) from error
        if wait is not None and writes:
            self._check_wait(acknowledged, wait)
        return replies

    def _check_wait(self, acknowledged: Any, wait: Wait) -> None:
        if isinstance(acknowledged, Exception):
            raise OutcomeUnknown(f"{self.where}: WAIT: {_words(acknowledged)}") from acknowledged
        if int(acknowledged) < wait.replicas:
            raise OutcomeUnknown(
                f"{self.where}: {int(acknowledged)} of {wait.replicas} replicas have it after {wait.millis} ms; "
                "nothing is sent until they do"
            )

    def _settle(self, replies: Sequence[Any], *, writes: bool, applied: bool = False) -> None:
        """Raise for the first reply that is an error. *applied*: other servers have applied their part."""
        bad = [reply for reply in replies if isinstance(reply, Exception)]
        if not bad:
            return
        meant = _refusal(self.where, bad[0])
        if not writes and isinstance(meant, OutcomeUnknown):
            meant = BackendUnavailable(str(meant))
        if writes and (applied or len(bad) < len(replies)) and not isinstance(meant, OutcomeUnknown):
            meant = OutcomeUnknown(f"{meant} (a part of the batch was applied)")
        raise meant from bad[0]

    def _sort(self, numbers: Sequence[int], some: Sequence[Any], replies: dict[int, Any], *, writes: bool) -> list[int]:
        """Put what a node of a cluster answered into *replies*; the calls whose keys have moved to another node."""
        moved: list[int] = []
        bad: list[Any] = []
        for number, reply in zip(numbers, some, strict=True):
            if not isinstance(reply, Exception):
                replies[number] = reply
            elif _sign(reply) == "MOVED":
                moved.append(number)
            else:
                bad.append(reply)
        self._settle(bad, writes=writes, applied=bool(replies))
        return moved

    def _still_moving(self, applied: bool) -> BackendUnavailable | OutcomeUnknown:
        words = f"{self.where}: the cluster is moving keys"
        if applied:
            return OutcomeUnknown(f"{words} (a part of the batch was applied)")
        return BackendUnavailable(f"{words}; this passes")


def _check_timeout(where: str, options: Mapping[str, Any], wait: Wait | None) -> None:
    timeout = options.get("socket_timeout")
    if wait is not None and timeout is not None and timeout <= wait.millis / 1000:
        raise ConfigurationError(
            f"{where}: its socket_timeout ({timeout} s) is not longer than wait_timeout; raise the one or lower the "
            "other"
        )


class _Links:
    """Connections to one server that we open ourselves: one for each call in progress; idle ones wait for the next."""

    def __init__(self, connect: Callable[[], Any], alive: Callable[[Any], bool]) -> None:
        self._connect = connect
        self._alive = alive
        self._clock = SystemClock()
        self._idle: deque[tuple[Any, float]] = deque()
        self._inherited: list[Any] = []
        self._pid = os.getpid()
        self.closed = False

    @contextmanager
    def use(self) -> Iterator[Any]:
        if self._pid != os.getpid():
            # Closing what the parent still uses would disturb it, and so would the garbage collector: keep it, unused.
            self._inherited.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()
        link = self._take()
        try:
            yield link
        except BaseException:
            # Replies may be under way that nobody reads.
            _disconnect(link)
            raise
        self._idle.append((link, self._clock.monotonic()))
        if self.closed:
            self.drop()

    def _take(self) -> Any:
        while True:
            try:
                link, since = self._idle.pop()
            except IndexError:
                return self._connect()
            try:
                # Readable though nothing was asked: the server has closed it. A call would be lost on it.
                usable = not link.can_read(0) and (self._clock.monotonic() - since < _LOOK_AFTER or self._alive(link))
            except Exception:
                usable = False
            if usable:
                return link
            _disconnect(link)

    def drop(self) -> None:
        while True:
            try:
                link, _ = self._idle.pop()
            except IndexError:
                return
            _disconnect(link)

    def close(self) -> None:
        self.closed = True
        if self._pid == os.getpid():
            self.drop()


def _disconnect(link: Any) -> None:
    with suppress(Exception):
        link.disconnect()


class _Opener:
    """Opens connections to the servers of an address."""

    def __init__(self, address: Address, driver: _Driver, wait: Wait | None) -> None:
        self._driver = driver
        self._address = address
        _check_timeout(address.text, address.options, wait)
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
            raise Unusable(f"{where}: {_words(error)}") from error
        try:
            link.connect()
            if not sentinel:
                # Whatever is replied: a user without the right to name its connection is no reason to send nothing.
                _exchange(link, self._driver, [("CLIENT", "SETNAME", f"celery-anarchon:{os.getpid()}")])
        except self._driver.failures as error:
            _disconnect(link)
            raise _connect_failure(where, error) from error
        except BaseException:
            _disconnect(link)
            raise
        return link

    def alive(self, link: Any) -> bool:
        return bool(_exchange(link, self._driver, [("PING",)])[0] == b"PONG")


def _connect_failure(where: str, error: BaseException) -> BackendUnavailable:
    meant = _refusal(where, error)
    words = _words(error)
    if isinstance(meant, BackendUnavailable):
        return meant
    if "invalid database" in words.lower() or "db index" in words.lower():
        return Unusable(f"{where}: {words}; it has no database of this number")
    if "certificate" in words.lower():
        return Unusable(f"{where}: {words}; see ssl_ca_certs and ssl_cert_reqs")
    if "invalid username" in words.lower() or "invalid password" in words.lower():
        return Unusable(f"{where}: {words}; {_WRONG['WRONGPASS']}")
    return BackendUnavailable(f"{where}: {words}")


class _Own(Source):
    """One server at a time: named directly, or by sentinels."""

    def __init__(self, address: Address, driver: _Driver, wait: Wait | None) -> None:
        super().__init__(driver, address.text)
        self._address = address
        self._opener = _Opener(address, driver, wait)
        self._links = _Links(self._connect, self._opener.alive)
        self._sentinels = list(address.hosts)

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        with self._links.use() as link:
            replies = self._perform_on(link, calls, writes=writes, wait=wait)
            try:
                self._settle(replies, writes=writes)
            except (BackendUnavailable, OutcomeUnknown):
                # Perhaps it is not the master any more, or reads its data: ask for the way anew.
                self._links.drop()
                raise
        return replies

    def ask(self, *command: Argument) -> Any:
        with self._links.use() as link:
            return _ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        self._links.close()

    def reopen(self) -> None:
        self._links.closed = False

    def _connect(self) -> Any:
        address = self._address
        if address.kind == "socket":
            return self._opener.open(None, db=address.db)
        if address.kind == "server":
            return self._opener.open(address.hosts[0], db=address.db)
        link = self._opener.open(self._master(), db=address.db)
        try:
            role = _ask(link, self._driver, self.where, "ROLE")[0]
        except Unusable:
            # It may not be asked. Writes to a replica are refused anyway.
            return link
        except BaseException:
            _disconnect(link)
            raise
        if role != b"master":
            _disconnect(link)
            raise BackendUnavailable(f"{self.where}: the sentinels name a {role.decode()}; a failover is under way")
        return link

    def _master(self) -> Host:
        said = ""
        for sentinel in list(self._sentinels):
            try:
                link = self._opener.open(sentinel, sentinel=True)
                try:
                    answer = _ask(
                        *(link, self._driver, self.where),
                        *("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.master_name),
                    )
                finally:
                    _disconnect(link)
            except BackendUnavailable as error:
                said = str(error)
                continue
            if answer:
                # The one that answered is asked first the next time.
                self._sentinels.sort(key=lambda one: one != sentinel)
                return answer[0].decode(), int(answer[1])
            said = f"{self.where}: the sentinels watch no master of that name"
        raise BackendUnavailable(said)


_Range = tuple[int, int, Host]


class _OwnCluster(Source):
    """The masters of a cluster. Which one serves a slot is asked when it is not known, and again after any failure."""

    sharded = True

    def __init__(self, address: Address, driver: _Driver, wait: Wait | None) -> None:
        super().__init__(driver, address.text)
        self._opener = _Opener(address, driver, wait)
        self._seeds = list(address.hosts)
        self._nodes: dict[Host, _Links] = {}
        self._ranges: list[_Range] = []
        self._closed = False

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        replies: dict[int, Any] = {}
        open_calls = list(range(len(calls)))
        for _ in range(_REDIRECTIONS):
            moved: list[int] = []
            for host, numbers in self._by_host(calls, open_calls, bool(replies) and writes).items():
                try:
                    with self._links(host).use() as link:
                        some = self._perform_on(link, [calls[number] for number in numbers], writes=writes, wait=wait)
                except BackendUnavailable as error:
                    self._ranges = []
                    if writes and replies:
                        raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
                    raise
                except OutcomeUnknown:
                    self._ranges = []
                    raise
                try:
                    moved += self._sort(numbers, some, replies, writes=writes)
                except (BackendUnavailable, OutcomeUnknown):
                    self._ranges = []
                    raise
            if not moved:
                return [replies[number] for number in range(len(calls))]
            self._ranges = []
            open_calls = moved
        raise self._still_moving(bool(replies) and writes)

    def ask(self, *command: Argument) -> Any:
        host = self._host_of(0)
        with self._links(host).use() as link:
            return _ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        self._closed = True
        for links in list(self._nodes.values()):
            links.close()

    def reopen(self) -> None:
        self._closed = False
        for links in list(self._nodes.values()):
            links.closed = False

    def _links(self, host: Host) -> _Links:
        links = self._nodes.get(host)
        if links is None:
            # One step: two threads that come together share it.
            links = self._nodes.setdefault(host, _Links(lambda: self._opener.open(host), self._opener.alive))
        if self._closed:
            links.closed = True
        return links

    def _by_host(self, calls: Sequence[Call], numbers: Sequence[int], applied: bool) -> dict[Host, list[int]]:
        by_host: dict[Host, list[int]] = {}
        try:
            for number in numbers:
                by_host.setdefault(self._host_of(hash_slot(calls[number].keys[0])), []).append(number)
        except BackendUnavailable as error:
            if applied:
                raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
            raise
        return by_host

    def _host_of(self, slot: int) -> Host:
        ranges = self._ranges
        if not ranges:
            self._ranges = ranges = self._discover()
        for first, last, host in ranges:
            if first <= slot <= last:
                return host
        self._ranges = []
        raise BackendUnavailable(f"{self.where}: no node serves slot {slot} of the cluster just now")

    def _discover(self) -> list[_Range]:
        said: BackendUnavailable | None = None
        for host in [*self._seeds, *(node for node in list(self._nodes) if node not in self._seeds)]:
            try:
                with self._links(host).use() as link:
                    answer = _ask(link, self._driver, self.where, "CLUSTER", "SLOTS")
            except BackendUnavailable as error:
                if "cluster support disabled" in str(error):
                    raise Unusable(f"{self.where}: it is no cluster: write redis://") from error
                said = error
                continue
            found = [
                # A node that does not know its own address leaves it out.
                (int(first), int(last), ((master[0] or b"").decode() or host[0], int(master[1])))
                for first, last, master, *_ in answer
            ]
            if found:
                return found
            said = BackendUnavailable(f"{self.where}: the cluster serves no slots (yet)")
        raise said or BackendUnavailable(f"{self.where}: no node answers")


def hash_slot(key: bytes) -> int:
    """The cluster's slot of *key*: of its tag, where it has one."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    tag = key[start + 1 : end] if end > start + 1 else key
    return binascii.crc_hqx(tag, 0) % 16384


# --- clients of the app -----------------------------------------------------------------------------------------------


@contextmanager
def _borrowed(client: Any, driver: _Driver, where: str) -> Iterator[Any]:
    """A connection from the pool of the app's client."""
    pool = client.connection_pool
    named = "command_name" in inspect.signature(pool.get_connection).parameters
    optional = named and inspect.signature(pool.get_connection).parameters["command_name"].default is None
    try:
        link = pool.get_connection() if optional or not named else pool.get_connection("EVALSHA")
    except driver.failures as error:
        raise _connect_failure(where, error) from error
    try:
        yield link
    except BaseException:
        _disconnect(link)
        raise
    finally:
        pool.release(link)


class _Handed(Source):
    """A client of one server that the app has. Never closed."""

    def __init__(self, client: Any, driver: _Driver, wait: Wait | None) -> None:
        super().__init__(driver, f"client of the app ({_place(client)})")
        self._client = client
        self._wait = wait

    def check(self) -> None:
        _check_timeout(self.where, self._client.connection_pool.connection_kwargs, self._wait)

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        with _borrowed(self._client, self._driver, self.where) as link:
            replies = self._perform_on(link, calls, writes=writes, wait=wait)
            self._settle(replies, writes=writes)
        return replies

    def ask(self, *command: Argument) -> Any:
        with _borrowed(self._client, self._driver, self.where) as link:
            return _ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        """It is not ours."""


class _HandedCluster(Source):
    """A cluster client that the app has. It knows which node has which keys; never closed."""

    sharded = True

    def __init__(self, client: Any, driver: _Driver) -> None:
        super().__init__(driver, "cluster client of the app")
        self._client = client

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        replies: dict[int, Any] = {}
        open_calls = list(range(len(calls)))
        for _ in range(_REDIRECTIONS):
            moved: list[int] = []
            by_node: dict[str, tuple[Any, list[int]]] = {}
            try:
                for number in open_calls:
                    node = self._node(calls[number].keys[0])
                    by_node.setdefault(node.name, (node, []))[1].append(number)
                for node, numbers in by_node.values():
                    with _borrowed(self._client.get_redis_connection(node), self._driver, self.where) as link:
                        some = self._perform_on(link, [calls[number] for number in numbers], writes=writes, wait=wait)
                    moved += self._sort(numbers, some, replies, writes=writes)
            except (BackendUnavailable, OutcomeUnknown) as error:
                self._look_again()
                if writes and replies and isinstance(error, BackendUnavailable):
                    raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
                raise
            if not moved:
                return [replies[number] for number in range(len(calls))]
            self._look_again()
            open_calls = moved
        raise self._still_moving(bool(replies) and writes)

    def ask(self, *command: Argument) -> Any:
        node = self._node(b"{0}")
        with _borrowed(self._client.get_redis_connection(node), self._driver, self.where) as link:
            return _ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        """It is not ours."""

    def _node(self, key: bytes) -> Any:
        try:
            return self._client.get_node_from_key(key)
        except Exception as error:
            raise BackendUnavailable(f"{self.where}: {_words(error)}") from error

    def _look_again(self) -> None:
        with suppress(Exception):
            self._client.nodes_manager.initialize()


def _place(client: Any) -> str:
    options = client.connection_pool.connection_kwargs
    if options.get("path"):
        return str(options["path"])
    if "host" in options:
        return f"{options['host']}:{options.get('port', 6379)}/{options.get('db') or 0}"
    return type(client.connection_pool).__name__


# --- choosing one -----------------------------------------------------------------------------------------------------


def own_source(address: Address, product: str, wait: Wait | None) -> Source:
    """A source with connections of our own, over the driver of *product* (``redis`` or ``valkey``)."""
    try:
        driver = _Driver(importlib.import_module(product))
    except ImportError as error:
        raise ConfigurationError(
            f'the driver {product} is not installed: pip install "celery-anarchon[{product}]"'
        ) from error
    return _OwnCluster(address, driver, wait) if address.kind == "cluster" else _Own(address, driver, wait)


def handed_source(client: Any, product: str, wait: Wait | None) -> Source:
    """A source on *client*, a client of redis-py or valkey-py (either speaks to either server)."""
    named = f"{product}=... is a {type(client).__module__}.{type(client).__qualname__}"
    roots = [kind.__module__.split(".") for kind in type(client).__mro__]
    root = next((parts[0] for parts in roots if parts[0] in ("redis", "valkey")), None)
    if root is None:
        raise ConfigurationError(f"{named}: give a URL, a mapping of connection options or a client of redis-py")
    if any("asyncio" in parts for parts in roots):
        raise ConfigurationError(f"{named}, which is for asyncio: give a client for threads")
    driver = _Driver(importlib.import_module(root))
    names = {kind.__name__ for kind in type(client).__mro__}
    if names & {"RedisCluster", "ValkeyCluster"} and not any("Pipeline" in name for name in names):
        return _HandedCluster(client, driver)
    if names & {"Redis", "Valkey"} and not any("Pipeline" in name for name in names):
        return _Handed(client, driver, wait)
    raise ConfigurationError(f"{named}: give the client itself")
