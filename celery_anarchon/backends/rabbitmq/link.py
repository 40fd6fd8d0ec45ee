"""One connection to RabbitMQ: messages published and confirmed one by one, streams read, and what errors mean.

Belongs here: AMQP. Does not belong here: what is in a message.

py-amqp's own confirms take any acknowledgement for that of the message published last, so one that comes late would
confirm another message. Here each is counted by its delivery tag.
"""

from __future__ import annotations

import enum
import logging
import os
import secrets
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import amqp
from amqp import exceptions as trouble
from amqp import spec

from celery_anarchon.backends.rabbitmq.address import CALL_TIMEOUT, Address
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import AnarchonError, BackendUnavailable, ConfigurationError, OutcomeUnknown

logger = logging.getLogger("celery_anarchon.backend")

__all__ = ["Fate", "Link", "Post", "Source"]

OLDEST = (3, 9)
"""The first RabbitMQ with streams."""

_READ_AHEAD = 1_000
"""Messages that a stream delivers before it waits to be told that they arrived."""

_T = TypeVar("_T")
Arguments = Mapping[str, Any]


class Fate(enum.Enum):
    """What became of a message."""

    STORED = "stored"
    REFUSED = "refused"
    """The queue is full, or it died before it had stored the message: :meth:`Link.counts` tells."""
    HOMELESS = "homeless"
    """There is no such queue."""
    UNKNOWN = "unknown"


class Post:
    """A message on its way to a queue."""

    def __init__(self, queue: str, body: bytes, declare: Arguments | None = None) -> None:
        self.queue = queue
        self.body = body
        self.declare = declare
        """Make the queue with these arguments first, in the same breath."""
        self.fate = Fate.UNKNOWN


class Link:
    """An open connection. After any error it is to be dropped: what it still hears belongs to nobody."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._clock = SystemClock()
        self._channel = connection.channel()
        self._channel.confirm_select()
        self._channel.events["basic_ack"].add(lambda tag, multiple: self._settle(tag, multiple, Fate.STORED))
        self._channel.events["basic_nack"].add(lambda tag, multiple: self._settle(tag, multiple, Fate.REFUSED))
        self._channel.events["basic_return"].add(self._returned)
        self._tag = 0
        self._open: dict[int, Post] = {}
        self._homeless: set[int] = set()
        self.sent = False
        """Whether this call has published anything."""
        self.state: dict[str, Any] = {}
        """For whoever uses the link; gone with it."""

    @property
    def version(self) -> str:
        return str(self._connection.server_properties.get("version", ""))

    def publish(self, posts: Sequence[Post]) -> None:
        """Send all, and wait until each has its fate. One round trip, whatever their number.

        :raises Exception: py-amqp's. What has a fate by then, keeps it.
        """
        self._open.clear()
        for post in posts:
            if post.declare is not None:
                self.declare(post.queue, post.declare, wait=False)
            self._tag += 1
            self._open[self._tag] = post
            self.sent = True
            message = amqp.Message(
                post.body, delivery_mode=2, content_type="application/json", message_id=str(self._tag)
            )
            self._channel.basic_publish(message, routing_key=post.queue, mandatory=True)
        # Slow is not dead: the limit counts from the last sign of life.
        while self._open:
            self._connection.drain_events(timeout=CALL_TIMEOUT)

    def _returned(self, _: Exception, exchange: str, queue: str, message: Any) -> None:
        """It comes before the acknowledgement of the same message, which is given all the same."""
        self._homeless.add(int(message.properties["message_id"]))

    def _settle(self, tag: int, multiple: bool, fate: Fate) -> None:
        for one in [known for known in self._open if known <= tag] if multiple else [tag]:
            post = self._open.pop(one, None)
            if post is not None:
                post.fate = Fate.HOMELESS if one in self._homeless else fate
            self._homeless.discard(one)

    def declare(self, queue: str, arguments: Arguments, *, wait: bool = True) -> None:
        """Make the queue, or see that it is as asked.

        :raises amqp.PreconditionFailed: it is there and differs.
        """
        self._channel.queue_declare(
            queue, durable=True, exclusive=False, auto_delete=False, arguments=dict(arguments), nowait=not wait
        )

    def counts(self, queues: Sequence[str]) -> list[int]:
        """How many messages are in each. One round trip, whatever their number.

        :raises amqp.NotFound: one of them is not there, or its node is away.
        """
        for queue in queues:
            # Passive, and none of the others. py-amqp's own call waits for each answer.
            self._channel.send_method(spec.Queue.Declare, "BsbbbbbF", (0, queue, True, False, False, False, False, {}))
        answers = [self._channel.wait(spec.Queue.DeclareOk, timeout=CALL_TIMEOUT, returns_tuple=True) for _ in queues]
        return [count for _, count, _ in answers]

    def exists(self, queue: str) -> bool:
        with self._connection.channel() as channel:
            try:
                channel.queue_declare(queue, passive=True)
            except trouble.NotFound as error:
                _see_that_it_is_absent(error)
                return False
        return True

    def read(self, stream: str, offset: Any = "first") -> list[bytes]:
        """All that *stream* holds from *offset* on, oldest first; nothing where there is no such stream."""
        with self._connection.channel() as channel:
            tail = Tail(channel, stream, offset)
            try:
                tail.follow()
            except trouble.NotFound as error:
                _see_that_it_is_absent(error)
                return []
            tail.stop()
            return tail.take()

    def tail(self, stream: str, offset: Any) -> Tail:
        """Follow *stream* for as long as the link lives."""
        return Tail(self._connection.channel(), stream, offset)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Take in what comes until *condition* holds."""
        deadline = self._clock.monotonic() + CALL_TIMEOUT
        while not condition():
            self._connection.drain_events(timeout=max(0.001, deadline - self._clock.monotonic()))

    def alive(self) -> bool:
        """Whether the server has not closed it meanwhile; takes in what has come since the last call."""
        try:
            while self._connection.connected and self._readable():
                self._connection.drain_events(timeout=CALL_TIMEOUT)
            return bool(self._connection.connected)
        except Exception:
            return False

    def _readable(self) -> bool:
        line = self._connection.transport.sock
        if getattr(line, "pending", int)():
            return True
        poll = select.poll()
        poll.register(line, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Say goodbye, and wait for no answer."""
        with suppress(Exception):
            # Where it is closed already, py-amqp would connect anew.
            if self._connection.connected:
                self._connection.transport.sock.settimeout(0.2)
                self._connection.send_method(spec.Connection.Close, "BsBB", (200, "", 0, 0))
        with suppress(Exception):
            self._connection.collect()

    def forget(self) -> None:
        """In a child of the process that opened it: give the socket back without a word, the parent goes on with it."""
        with suppress(Exception):
            os.close(self._connection.transport.sock.detach())


def _see_that_it_is_absent(error: Exception) -> None:
    """A queue whose node is away, or just starting, is "not found" as well."""
    if "no queue" not in str(error):
        raise error


class Tail:
    """What arrives of a stream."""

    def __init__(self, channel: Any, stream: str, offset: Any) -> None:
        self._channel = channel
        self._stream = stream
        self._offset = offset
        self._arrived: list[Any] = []
        self._last: int | None = None
        self._consumer = ""
        self._consuming = False

    def _consume(self) -> None:
        self._channel.basic_qos(0, _READ_AHEAD, False)
        arguments = {"x-stream-offset": self._offset}
        self._consumer = self._channel.basic_consume(self._stream, callback=self._arrived.append, arguments=arguments)
        self._consuming = True

    def follow(self) -> None:
        """Wait until everything is here that is in the stream now.

        The server reads a stream when it is asked to consume, and when it hears that messages arrived, and answers in
        order: so a question that is answered with nothing before it has found the end.
        """
        if not self._consuming:
            self._consume()
        while True:
            self.acknowledge()
            before = len(self._arrived)
            self._channel.queue_declare(self._stream, passive=True)
            if len(self._arrived) == before:
                return

    def stop(self) -> None:
        """Or what comes while the channel is closed would be complained of."""
        self._channel.basic_cancel(self._consumer)

    def acknowledge(self) -> None:
        """Let more come."""
        if self._arrived and self._arrived[-1].delivery_tag != self._last:
            self._last = self._arrived[-1].delivery_tag
            self._channel.basic_ack(self._last, multiple=True)

    def take(self) -> list[bytes]:
        """What has arrived since the last time."""
        self.acknowledge()
        bodies = [message.body for message in self._arrived]
        self._arrived.clear()
        # py-amqp makes text of what says that it is.
        return [body if isinstance(body, bytes) else body.encode() for body in bodies]


class NotYet(BackendUnavailable):
    """A stream is just being made, or started."""


def _is_starting(error: Exception, words: str) -> bool:
    """Of several who make a stream at the same moment RabbitMQ 3.10 drops some with an internal error; a stream that
    is not up yet has "no replica", or a node that is "down"."""
    return isinstance(error, trouble.InternalError) or "have a replica" in words or "down or inaccessible" in words


class Source:
    """The link of a client: opened when it is needed, one call at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self.closed = False

    @contextmanager
    def use(self, *, writes: bool) -> Iterator[Link]:
        """A link for one call. Errors of the driver become ours: with *writes* what was sent may have been applied.

        :raises BackendUnavailable: there is no connection, or nothing was to be written.
        :raises OutcomeUnknown: the connection failed in the middle.
        :raises ConfigurationError: the server refuses what we ask, and always will.
        """
        if self._pid != os.getpid():
            self._after_fork()
        try:
            with self._lock:
                link = self._ready()
                link.sent = False
                try:
                    yield link
                except BaseException as error:
                    self._drop()
                    if isinstance(error, AnarchonError) or not isinstance(error, Exception):
                        raise
                    raise self._meaning(error, writes=writes and link.sent) from error
        finally:
            if self.closed:
                self._drop_if_idle()

    def call(self, work: Callable[[Link], _T], *, writes: bool) -> _T:
        """What *work* returns, as :meth:`use`; while streams are just being made or started it is tried again, as long
        as nothing was published."""
        give_up = SystemClock().monotonic() + CALL_TIMEOUT
        while True:
            try:
                with self.use(writes=writes) as link:
                    return work(link)
            except NotYet as error:
                if SystemClock().monotonic() > give_up:
                    raise
                logger.debug("%s; once more", error)
            threading.Event().wait(0.02 + secrets.randbelow(180) / 1000)

    def _after_fork(self) -> None:
        if self._link is not None:
            self._link.forget()
        self._link, self._lock, self._pid = None, threading.Lock(), os.getpid()

    def _ready(self) -> Link:
        if self._link is not None and not self._link.alive():
            self._drop()
        if self._link is None:
            self._link = self._connect()
        return self._link

    def _connect(self) -> Link:
        said: AnarchonError | None = None
        for opened in self.address.candidates():
            connection = None
            try:
                connection = opened()
                link = Link(connection)
            except Exception as error:
                if connection is not None:
                    with suppress(Exception):
                        connection.collect()
                said = self._meaning(error, writes=False)
                continue
            self._check_version(link)
            return link
        assert said is not None
        raise said

    def _check_version(self, link: Link) -> None:
        parts = link.version.split(".")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1].isdecimal() and tuple(map(int, parts[:2])) < OLDEST:
            link.close()
            raise ConfigurationError(
                f"{self.address.text}: RabbitMQ {link.version} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed"
            )

    def _meaning(self, error: Exception, *, writes: bool) -> AnarchonError:
        words = " ".join(str(error).split()) or type(error).__name__
        text = f"{self.address.text}: {words}"
        if not writes and _is_starting(error, words):
            return NotYet(text)
        mismatch = isinstance(error, trouble.PreconditionFailed) and "inequivalent" in words
        if mismatch or isinstance(error, (trouble.AccessRefused, trouble.NotAllowed)):
            return ConfigurationError(text)
        return OutcomeUnknown(text) if writes else BackendUnavailable(text)

    def close(self) -> None:
        """Without waiting for a call in progress: that drops the link when it is done."""
        self.closed = True
        if self._pid == os.getpid():
            self._drop_if_idle()

    def _drop_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
