"""``current_run()``: which run a task's body works for, and whether it still does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery import Celery, current_task

from celery_anarchon import wire
from celery_anarchon.app import open_backend
from celery_anarchon.backends.runs import RunBackend, RunHold
from celery_anarchon.errors import AnarchonError
from celery_anarchon.gate import HELD_KEY
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
    if not held:
        return None
    watch = getattr(request, _WATCH, None)
    if watch is None:
        hold = RunHold(
            job=header["job"],
            slot=wire.parse_time(header["slot"]),
            attempt=int(header["attempt"]),
            retries=int(request.retries or 0),
            token=held["token"],
        )
        side = side_of(app)
        watch = _OfThisProcess(side, hold.token) if side is not None else _OfAChild(app, hold, held)
        setattr(request, _WATCH, watch)
    return watch


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

    def __init__(self, app: Celery, hold: RunHold, held: dict[str, Any]) -> None:
        self._app = app
        self._hold = hold
        self._lease: float = held["lease"] / 1000
        # The monotonic clock is the machine's: the keeper in the parent meant the same moment.
        self._until: float = held["until"]
        self._refused = False
        self._ask_at = 0.0

    def lost(self) -> bool:
        now = time.monotonic()
        if not self._refused and now >= self._ask_at:
            self._ask_at = now + self._lease / 3
            try:
                backend = _client_of(self._app)
                if backend is None or backend.heartbeat([self._hold])[0]:
                    self._until = now + self._lease
                else:
                    self._refused = True
            except AnarchonError:
                # No answer is no loss, until the lease may be over.
                pass
        return self._refused or time.monotonic() > self._until


_clients: dict[int, RunBackend | None] = {}
"""The client of this process, by its app: a child serves one."""


def _client_of(app: Celery) -> RunBackend | None:
    if id(app) not in _clients:
        backend = open_backend(app, create=False)
        _clients[id(app)] = backend if isinstance(backend, RunBackend) else None
    return _clients[id(app)]
