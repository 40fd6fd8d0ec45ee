"""``current_run()``: which run a task's body works for, and whether it still does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery import Celery, current_task

from celery_anarchon import wire
from celery_anarchon.app import open_backend
from celery_anarchon.backends.runs import RunBackend, RunHold, Start
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import AnarchonError
from celery_anarchon.gate import HELD_KEY, QUEUE_TIMEOUT, read_ticket
from celery_anarchon.model import GRANTED
from celery_anarchon.worker import side_of

_WATCH = "_anarchon_watch"


@dataclass(frozen=True)
class CurrentRun:
    """The run that the calling task works for."""

    job: str
    slot: datetime
    """Aware, UTC. The time the work is for: use it, not the clock, as the key of what the task writes."""
    attempt: int
    run_id: str
    """The task id: the same for every attempt and retry."""
    _watch: Any = field(repr=False, compare=False)

    @property
    def lost(self) -> bool:
        """Whether this attempt is not surely the run's any more: another may have taken over, and what this one still
        writes may be written twice. Cheap: a pool's child asks the store once a heartbeat at most. False for a run
        that is not followed."""
        return self._watch is not None and bool(self._watch.lost())


def current_run() -> CurrentRun | None:
    """The run of the task that is executing, None outside of one or if no beat of ours sent it."""
    task = current_task
    request = getattr(task, "request", None)
    header = getattr(request, wire.HEADER, None) or (getattr(request, "headers", None) or {}).get(wire.HEADER)
    if not isinstance(header, dict):
        return None
    return CurrentRun(
        job=header["job"],
        slot=wire.moment(wire.parse_time(header["slot"])),
        attempt=int(header.get("attempt", 1)),
        run_id=request.id,  # type: ignore[union-attr]
        _watch=_watch_of(task.app, request, header),
    )


def _watch_of(app: Celery, request: Any, header: dict[str, Any]) -> Any:
    held = header.get(HELD_KEY)
    retries = int(request.retries or 0)
    if not held or held.get("retries", retries) != retries:
        # A worker without the gate has this one, perhaps as the next try of one that was held.
        return None
    watch = getattr(request, _WATCH, None)
    if watch is None:
        hold = RunHold(
            job=header["job"],
            slot=wire.parse_time(header["slot"]),
            attempt=int(header["attempt"]),
            retries=retries,
            token=held["token"],
        )
        side = side_of(app)
        if side is not None:
            watch = _OfThisProcess(side, hold.token)
        else:
            watch = _OfAChild(app, hold, held, None if "until" in held else _question(request, header, held))
        setattr(request, _WATCH, watch)
    return watch


def _question(request: Any, header: dict[str, Any], held: dict[str, Any]) -> Start | None:
    """What the gate asked in vain before this body was started all the same."""
    fields = {wire.HEADER: header, "retries": request.retries}
    ticket = read_ticket(
        *(fields, header["ns"], held["lease"], QUEUE_TIMEOUT),
        token=held["token"],
        worker=request.hostname,
        acks_late=bool(current_task.acks_late),
    )
    return ticket.start if ticket is not None else None


class _OfThisProcess:
    """Where the body runs beside the keeper: it knows."""

    def __init__(self, side: Any, token: str) -> None:
        self._side = side
        self._token = token

    def lost(self) -> bool:
        # Not held any more, and the body still runs: its run was ended over its head (its time was over).
        return self._side.keeper.lost(self._token) is not False


class _OfAChild:
    """In a pool's child: asks over a connection of this process, made after the fork."""

    def __init__(self, app: Celery, hold: RunHold, held: dict[str, Any], question: Start | None) -> None:
        self._app = app
        self._hold = hold
        self._question = question
        """Asked here as well as by the keeper, as the same delivery: both get the same answer."""
        self._lease: float = held["lease"] / 1000
        self._clock = SystemClock()
        # The monotonic clock is the machine's: the keeper in the parent meant the same moment.
        self._until: float = held.get("until", math.inf)
        self._refused = False
        self._ask_at = 0.0

    def lost(self) -> bool:
        now = self._clock.monotonic()
        if not self._refused and now >= self._ask_at:
            self._ask_at = now + self._lease / 3
            try:
                backend = _client_of(self._app)
                if backend is None or self._is_mine(backend):
                    self._until = now + self._lease
                else:
                    self._refused = True
            except AnarchonError:
                # No answer is no loss, until the lease may be over.
                pass
        return self._refused or self._clock.monotonic() > self._until

    def _is_mine(self, backend: RunBackend) -> bool:
        if self._question is None:
            return backend.heartbeat([self._hold])[0]
        result = backend.start([self._question])[0]
        if result.answer not in GRANTED:
            return False
        self._hold = replace(self._hold, attempt=result.attempt)
        self._question = None
        return True


_clients: dict[int, RunBackend | None] = {}
"""The client of this process, by its app: a child serves one."""


def _client_of(app: Celery) -> RunBackend | None:
    if id(app) not in _clients:
        backend = open_backend(app, create=False)
        _clients[id(app)] = backend if isinstance(backend, RunBackend) else None
    return _clients[id(app)]
