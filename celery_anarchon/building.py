"""Messages as writes of the store, for claims that take them along: made by Celery and kombu as always, and taken down
instead of sent.

Does not belong here: which slots are asked for (:mod:`celery_anarchon.onestep`), and how kombu's writes are taken down
(:mod:`celery_anarchon.capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery import Celery, Task
from celery.beat import BeatLazyFunc, ScheduleEntry

from celery_anarchon.backends.base import Command
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.entries import CANVAS
from celery_anarchon.job import Job
from celery_anarchon.model import Terms
from celery_anarchon.publish import CeleryPublisher
from celery_anarchon.publishing import BrokerAway, Dispatch, NothingToSend, NotOneStep, PublishUnclear
from celery_anarchon.templates import Templates

if TYPE_CHECKING:
    from celery_anarchon.capture import Capture

_GOES_ITS_OWN_WAY = frozenset({"connection", "producer", "publisher"})
"""Options of an entry that name another way to the broker."""


class CeleryBuilder:
    """Makes messages with the connection of *publisher*; see :class:`~celery_anarchon.publishing.Builder`."""

    def __init__(self, publisher: CeleryPublisher) -> None:
        self.app: Celery = publisher.app
        self.publisher = publisher
        self.templates = Templates(self.app)
        self._seen = -1
        self._capture: Capture | None = None

    # --- whether ------------------------------------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        return self._seen != self.publisher.connections

    def why_not(self) -> str | None:
        connection = self.app.connection_for_write()
        try:
            driver = connection.transport.driver_type
        except Exception as error:
            # Said again, and better, by whoever wants to connect.
            return f"the broker's transport does not load ({error})"
        if driver != "redis":
            return f"messages go to {driver}, not to Redis"
        if "sentinel" in type(connection.transport).__name__.lower():
            return "messages go through sentinels: to another server than the store's, it may be, after each failover"
        if type(self.app).send_task is not Celery.send_task or "send_task" in vars(self.app):
            return "the app has a send_task of its own"
        return None

    def verify(self, store: OneStepBackend) -> None:
        self.publisher.check()
        if self.is_new:
            self._capture = None
            self._seen = self.publisher.connections
        with self._told(NotOneStep):
            if self._capture is not None:
                self._capture.check_server(store)
                return
            capture = self._new_capture()
            capture.check_server(store)
            capture.check_layout(store, self.publisher.producer)
            # Last: a look that failed half-way is made again, all of it.
            self._capture = capture

    def _new_capture(self) -> Capture:
        try:
            # Here: where there is no driver of Redis there is no such broker.
            from celery_anarchon.capture import Capture
        except ImportError as error:
            raise NotOneStep(f"kombu's Redis transport does not load ({error})") from error
        return Capture(self.publisher.producer.channel)

    @contextmanager
    def _told(self, meant: type[Exception]) -> Iterator[None]:
        """Errors of the broker as those that callers know: a no of its own to what was asked is *meant*."""
        try:
            yield
        except self.publisher.broker_errors as error:
            if self.publisher.is_refusal(error):
                raise BrokerAway(str(error)) from error
            if self.publisher.is_reply(error):
                raise meant(f"the broker says: {error}") from error
            self.publisher.close()
            raise BrokerAway(str(error) or repr(error)) from error

    # --- messages -----------------------------------------------------------------------------------------------------

    def takes(self, job: Job) -> bool:
        if self.app.conf.task_always_eager:
            return False
        entry: ScheduleEntry = job.payload
        if entry.task in CANVAS or _GOES_ITS_OWN_WAY & set(entry.options or ()):
            return False
        if any(isinstance(value, BeatLazyFunc) for value in (*(entry.args or ()), *(entry.kwargs or {}).values())):
            return False
        task = self.app.tasks.get(entry.task)
        return task is None or (type(task).apply_async is Task.apply_async and "apply_async" not in vars(task))

    def quick(self, job: Job, terms: Terms | None) -> Callable[[Dispatch], tuple[Command, ...]] | None:
        return self.templates.find(job, terms)

    def build(self, dispatch: Dispatch) -> tuple[Command, ...]:
        commands = self._record(dispatch)
        self.templates.learn(dispatch, commands)
        return commands

    def _record(self, dispatch: Dispatch) -> tuple[Command, ...]:
        if self._capture is None or self.is_new or self.publisher.producer is None:
            # Without a producer of its own Celery would take one from its pool, and send.
            raise PublishUnclear("the connection to the broker is not the one of a moment ago")
        with self._told(NotOneStep), self._capture.recording() as commands:
            self.publisher.send(dispatch)
        if not commands:
            raise NothingToSend(
                "no queue is bound to where this message goes, so it would be lost: declare the queue, or start its "
                "worker first"
            )
        return tuple(commands)
