"""Task messages out of schedule entries, and the beat's own connection to the broker."""

from __future__ import annotations

import inspect
import re
import select
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from typing import Any

from amqp.exceptions import IrrecoverableChannelError
from celery import Celery, signature
from celery.beat import BeatLazyFunc, ScheduleEntry
from kombu.connection import Connection
from kombu.exceptions import OperationalError

from celery_anarchon import wire
from celery_anarchon.entries import CANVAS, OPTIONS_KEY
from celery_anarchon.publishing import BrokerAway, BrokerForbids, Dispatch, PublishUnclear

CONNECT_TIMEOUT = 4.0
"""Seconds for all addresses of a broker together."""

ANSWER_TIMEOUT = 10.0
"""Seconds for one answer of a broker. Beat's default of 30 s per socket would hold up every other job."""

_REFUSALS = re.compile(r"(?:^|caused error: )(?:OOM|READONLY|MISCONF|LOADING|CLUSTERDOWN|MASTERDOWN) ")
_REFUSAL_CLASSES = frozenset(
    {"OutOfMemoryError", "ReadOnlyError", "BusyLoadingError", "ClusterDownError", "MasterDownError"}
)
"""How Redis says that it surely did not write, for its own sake and not the message's; its driver cuts words that it
has a class for."""


_NO_ENTRY_CLASSES = frozenset({"AuthenticationError", "AuthorizationError", "AccessRefused", "NotAllowed"})
"""How the drivers of Redis and AMQP say that a server does not let one in."""


class CeleryPublisher:
    """Publishes through a connection of its own: short timeouts, no retries behind the engine's back."""

    def __init__(self, app: Celery, *, namespace: str, label: str) -> None:
        self.app = app
        self.namespace = namespace
        self.label = label
        self.connections = 0
        """How many there have been: another number, another connection."""
        self._connection: Connection | None = None
        self._producer: Any = None
        self._waits_for_confirms = False
        self.broker_errors: tuple[type[BaseException], ...] = (OperationalError, OSError)

    # --- the connection -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See :class:`~celery_anarchon.publishing.Publisher`. A connection that died is replaced once, at once."""
        if self._connection is not None:
            try:
                self._probe(self._connection)
                return
            except Exception:
                self._drop()
        try:
            self._connect()
        except Exception as error:
            # Whatever it is (refused, unknown host, wrong password): without a connection nothing was sent.
            self._drop()
            kind = BrokerForbids if _is_one_of(_NO_ENTRY_CLASSES, error) else BrokerAway
            raise kind(str(error) or repr(error)) from error

    def _connect(self) -> None:
        connection: Connection = self.app.connection_for_write()
        connection.transport_options = {**_defaults_for(connection), **(connection.transport_options or {})}
        self._connection = connection
        self.broker_errors = (
            OperationalError,
            OSError,
            *connection.connection_errors,
            *connection.channel_errors,
        )
        connection.ensure_connection(
            max_retries=max(1, len(connection.alt or ())), interval_start=0, interval_step=0, timeout=CONNECT_TIMEOUT
        )
        self._producer = self.app.amqp.Producer(connection, auto_declare=False)
        # Asked once: the answer costs as much as a tenth of a message.
        self._waits_for_confirms = "confirm_timeout" in inspect.signature(self._producer.publish).parameters
        self.connections += 1
        self._probe(connection)

    @property
    def producer(self) -> Any:
        """Of the connection as it is now; None: there is none."""
        return self._producer

    def _probe(self, connection: Connection) -> None:
        """Raise unless the broker is there, as far as can be told without sending anything that lasts."""
        if not connection.connected:
            raise ConnectionResetError("the connection is closed")
        ping = getattr(getattr(connection.default_channel, "client", None), "ping", None)
        if callable(ping):
            ping()
        transport = getattr(connection.connection, "transport", None)
        sock = getattr(transport, "sock", None)
        if sock is not None and select.select([sock], [], [], 0)[0]:
            # Something waits to be read: a close, a heartbeat, or the end of the stream.
            try:
                connection.drain_events(timeout=0.1)
            except TimeoutError:
                pass

    def _drop(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.collect()
            except Exception:  # noqa: S110 - it is dead already, and its last words are of no use to anybody
                pass

    def close(self) -> None:
        self._drop()

    # --- one message --------------------------------------------------------------------------------------------------

    def publish(self, dispatch: Dispatch) -> None:
        """See :class:`~celery_anarchon.publishing.Publisher`."""
        if self._producer is None:
            self.check()
        # Apart from what follows: these run code of the user's, whose errors may look like a connection's.
        args, kwargs = _arguments(dispatch)
        try:
            self._send(dispatch, args, kwargs)
        except IrrecoverableChannelError:
            # The broker's no to this very message (no such exchange, access refused): the channel is gone, that is all.
            self._drop()
            raise
        except self.broker_errors as error:
            if self.is_refusal(error):
                raise BrokerAway(str(error)) from error
            if self.is_reply(error):
                raise
            self._drop()
            raise PublishUnclear(str(error) or repr(error)) from error

    @staticmethod
    def is_refusal(error: BaseException) -> bool:
        """Whether a broker surely did not write, for its own sake and not the message's."""
        return _is_one_of(_REFUSAL_CLASSES, error) or any(_REFUSALS.search(str(one)) for one in _with_cause(error))

    @staticmethod
    def is_reply(error: BaseException) -> bool:
        """Whether Redis answered, and answered no: surely not sent, and not for the broker's sake."""
        return _is_one_of({"ResponseError"}, error)

    def send(self, dispatch: Dispatch) -> None:
        """Hand the message to Celery, over the connection as it is. Raises whatever that raises."""
        self._send(dispatch, *_arguments(dispatch))

    def _send(self, dispatch: Dispatch, args: list[Any], kwargs: dict[str, Any]) -> None:
        entry: ScheduleEntry = dispatch.job.payload
        options = self._options(dispatch, entry)
        if entry.task in CANVAS:
            self._send_canvas(entry, args, kwargs, options)
            return
        task = self.app.tasks.get(entry.task)
        with self._nobody_waits():
            if task is not None:
                task.apply_async(args, kwargs, producer=self._producer, **options)
            else:
                self.app.send_task(entry.task, args, kwargs, producer=self._producer, **options)

    @contextmanager
    def _nobody_waits(self) -> Iterator[None]:
        """Within, a result backend is not told of tasks: it would subscribe to their results, which no beat reads, and
        one that is away would keep messages from a broker that is not."""
        backend: Any = self.app.backend
        backend.on_task_call = lambda *_: {}
        try:
            yield
        finally:
            del backend.on_task_call

    def _options(self, dispatch: Dispatch, entry: ScheduleEntry) -> dict[str, Any]:
        options = {key: value for key, value in (entry.options or {}).items() if key != OPTIONS_KEY}
        header = wire.header(
            namespace=self.namespace,
            job=dispatch.job.name,
            slot=dispatch.slot,
            attempt=dispatch.attempt,
            late=dispatch.late,
            beat=self.label,
        )
        if dispatch.terms is not None:
            header.update(wire.terms_header(dispatch.terms, dispatch.job.options.when_unknown))
        elif dispatch.job.options.on_unknown is not None:
            # A worker that asks may be there all the same.
            header["on_unknown"] = str(dispatch.job.options.on_unknown)
        if dispatch.attempt > 1 and not isinstance(options.get("expires"), (int, float)):
            # It bounds the first start only: a later attempt would expire on arrival (protocol H9).
            options.pop("expires", None)
        name = wire.UNTRACKED_HEADER if entry.task in CANVAS else wire.HEADER
        # A copy: stock writes into the entry's own dict, from where it would travel into every later message.
        options["headers"] = {**(options.get("headers") or {}), "celery_beat_task": True, name: header}
        options["task_id"] = dispatch.run_id
        options["retry"] = False
        timeout = dispatch.job.options.timeout
        if timeout is not None:
            options["time_limit"] = timeout / 1000
        if self._waits_for_confirms:
            options.setdefault("confirm_timeout", ANSWER_TIMEOUT)
        return options

    def _send_canvas(
        self, entry: ScheduleEntry, args: list[Any], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        built = signature(
            {
                "task": entry.task,
                "args": args,
                "kwargs": kwargs,
                "options": {},
                "subtask_type": CANVAS[entry.task],
                "immutable": False,
            },
            app=self.app,
        )
        with self._producer_for_all():
            built.apply_async(producer=self._producer, **options)

    @contextmanager
    def _producer_for_all(self) -> Iterator[None]:
        """A chain drops the producer it is given and takes one from the app's pool, whose timeouts are not ours."""
        self.app.producer_or_acquire = lambda producer=None: nullcontext(producer or self._producer)
        try:
            yield
        finally:
            del self.app.producer_or_acquire


def _arguments(dispatch: Dispatch) -> tuple[list[Any], dict[str, Any]]:
    """What the task is called with, as of now."""
    entry: ScheduleEntry = dispatch.job.payload
    args = [_now(value) for value in entry.args or ()]
    return args, {key: _now(value) for key, value in (entry.kwargs or {}).items()}


def _now(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value


def _with_cause(error: BaseException) -> Iterator[BaseException]:
    """kombu raises errors of its own from those of the driver."""
    yield error
    if error.__cause__ is not None:
        yield error.__cause__


def _is_one_of(names: Set[str], error: BaseException) -> bool:
    return any(kind.__name__ in names for one in _with_cause(error) for kind in type(one).__mro__)


def _defaults_for(connection: Connection) -> Mapping[str, Any]:
    """Transport options that a user may override: answers within a bound, and confirms where the broker gives them
    (without them a cut connection loses messages that seemed sent)."""
    driver = connection.transport.driver_type
    if driver == "amqp":
        return {
            "confirm_publish": True,
            "read_timeout": ANSWER_TIMEOUT,
            "write_timeout": ANSWER_TIMEOUT,
        }
    if driver == "redis":
        return {"socket_timeout": ANSWER_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT}
    return {}
