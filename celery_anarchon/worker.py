"""The worker side, installed by ``Anarchon(app)``: one bootstep, and two signals for messages that never reach it.

Why a bootstep that wraps ``_process_task``: it is the last stop in the worker's main process before the pool, for
immediate, ETA and rate-limited requests alike; a dead pool child does not matter to it. ``task_prerun`` cannot refuse,
a custom ``Request`` is overridden by Celery's own fast paths, and ``task_received`` comes before the ETA.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery, bootsteps, signals

from celery_anarchon import __version__, dropped, wire
from celery_anarchon.backends.runs import RunBackend, Worker
from celery_anarchon.choice import app_name, choose_backend, own_settings
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.events import Fanout
from celery_anarchon.gate import Gate, unstarted
from celery_anarchon.keeper import Keeper
from celery_anarchon.options import scheduler_settings
from celery_anarchon.signals import teller, wants

logger = logging.getLogger("celery_anarchon.worker")


class WorkerSide:
    """What one worker process has: its gate and its keeper."""

    def __init__(self, worker: Any, backend: RunBackend) -> None:
        app = worker.app
        settings = scheduler_settings(own_settings(app), backend.traits, backend.name)
        backend.early_tolerance = settings.early_tolerance
        name = app_name(app)
        self.pid = os.getpid()
        self.namespace = backend.namespace
        fanout = Fanout()
        fanout.add(teller(app, backend.namespace), wants)
        queues = tuple(sorted(app.amqp.queues.consume_from))
        self.keeper = Keeper(
            backend,
            heartbeat=settings.heartbeat,
            presence=Worker(owner=secrets.token_hex(16), label=worker.hostname, version=__version__, queues=queues),
            opened=lambda: backend.open(name),
            fanout=fanout,
        )
        self.gate = Gate(
            keeper=self.keeper,
            namespace=self.namespace,
            label=worker.hostname,
            settings=settings,
            execute=worker._process_task,
            slot_back=SlotBack(worker),
            again=lambda request: self._again(worker, request),
            later=lambda seconds, step: worker.timer.call_after(seconds, step),
            room=lambda: _room_for_one_more(worker),
            enforces_timeout=_of_processes(worker),
        )

    @staticmethod
    def _again(worker: Any, request: Any) -> None:
        # A worker that stops begins nothing: what is held goes back with its connection.
        if worker.blueprint.state == bootsteps.RUN:
            worker.process_task(request)

    def stop(self) -> None:
        self.gate.stop()
        self.keeper.stop()


def _of_processes(worker: Any) -> bool:
    """Its pool has children, and stops them at a time limit."""
    return "prefork" in str(getattr(worker.pool_cls, "__module__", worker.pool_cls))


_sides: WeakKeyDictionary[Celery, WorkerSide] = WeakKeyDictionary()
"""The worker side of each app that a worker of this process runs."""


def side_of(app: Celery) -> WorkerSide | None:
    """The worker side of *app* in this very process; a pool's child has none."""
    side = _sides.get(app)
    return side if side is not None and side.pid == os.getpid() else None


class GateStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Puts the gate before the pool."""

    # Started after the pool's children and the embedded beat were forked, which would inherit what the keeper's thread
    # holds just then, such as the lock of an import; before the consumer brings the first message.
    requires = ("celery.worker.components:Pool", "celery.worker.components:Beat")

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self.side: WorkerSide | None = None
        try:
            backend, source = choose_backend(parent.app)
            if isinstance(backend, RunBackend):
                self.side = _sides[parent.app] = WorkerSide(parent, backend)
        except ConfigurationError as error:
            logger.critical("%s", error)
            raise SystemExit(2) from None
        if self.side is not None:
            # Before the pool's step reads it; and after all steps have stopped, whichever way the worker ends.
            parent._process_task = self.side.gate
            self._stopped = parent.blueprint.on_stopped
            parent.blueprint.on_stopped = self._on_stopped
            logger.info("store: %s (%s)", backend.describe(), source)
        super().__init__(parent, **kwargs)

    def include_if(self, parent: Any) -> bool:
        return self.side is not None

    def start(self, parent: Any) -> None:
        if self.side is not None:
            if _of_processes(parent):
                dropped.watch(parent.pool, self.side.keeper)
            self.side.keeper.begin()

    def stop(self, parent: Any) -> None:
        """Nothing yet: with some pools bodies still run."""

    def terminate(self, parent: Any) -> None:
        """As :meth:`stop`."""

    def _on_stopped(self) -> None:
        try:
            if self.side is not None:
                self.side.stop()
        finally:
            self._stopped()


class SlotBack:
    """Gives back the pool slot that a request at the gate has: prefork with an event loop takes one before the gate,
    and the other pools take none.

    A release hands the slot to the next request that waits for one, inside the call, and the gate may say no to that
    one too. Were each to release inside the release before it, some hundred that wait would be the end of the stack; so
    the outermost does it for all, one after the other.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._owed = 0
        self._under_way = False

    def __call__(self) -> None:
        worker = self._worker
        release = getattr(worker, "_quick_release", None)
        if release is None or worker.process_task != worker._process_task_sem:
            return
        self._owed += 1
        if self._under_way:
            return
        self._under_way = True
        try:
            while self._owed:
                self._owed -= 1
                release()
        finally:
            # What an error has left owed goes with the next one.
            self._under_way = False


def _room_for_one_more(worker: Any) -> Callable[[], Any]:
    """As Celery does it for messages with an ETA: what waits long does not count among those fetched ahead."""
    qos = getattr(getattr(worker, "consumer", None), "qos", None)
    if qos is None:
        return lambda: None
    qos.increment_eventually()
    # Of this connection: the next one begins with a count of its own.
    return qos.decrement_eventually  # type: ignore[no-any-return]


# --- messages that never come to the gate -----------------------------------------------------------------------------


@signals.task_revoked.connect  # type: ignore[untyped-decorator]
def _on_revoked(sender: Any = None, request: Any = None, expired: bool = False, **_: Any) -> None:
    """Expired in the queue, or revoked before its start. One that had started is refused by the store: not ended."""
    side = side_of(sender.app) if sender is not None else None
    if side is not None and request is not None:
        header = getattr(request, wire.HEADER, None) or (request.headers or {}).get(wire.HEADER)
        fields = {wire.HEADER: header, "retries": request.retries}
        _tell(side, fields, "expired" if expired else "revoked")


@signals.task_unknown.connect  # type: ignore[untyped-decorator]
def _on_unknown(sender: Any = None, message: Any = None, **_: Any) -> None:
    side = side_of(sender.app) if sender is not None else None
    if side is not None and message is not None:
        _tell(side, message.headers or {}, "unknown-task")


@signals.task_rejected.connect  # type: ignore[untyped-decorator]
def _on_rejected(sender: Any = None, message: Any = None, **_: Any) -> None:
    side = side_of(sender.app) if sender is not None else None
    if side is not None and message is not None:
        _tell(side, message.headers or {}, "invalid-message")


def _tell(side: WorkerSide, fields: Any, reason: str) -> None:
    try:
        message = unstarted(fields, side.namespace, reason)
    except Exception:
        logger.exception("a message with a header that cannot be read is gone (%s)", reason)
    else:
        if message is not None:
            side.keeper.unstarted(message)
