"""What the callbacks of a request mean for its run, without a pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import Retry
from celery.worker import state

from celery_anarchon.backends.runs import RunHold
from celery_anarchon.keeper import Held
from celery_anarchon.model import RunState, Terms
from celery_anarchon.outcomes import follow


class Told:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def settle(self, held: Held, end: RunState, reason: str | None = None) -> None:
        self.ends.append((end, reason))

    def retry(self, held: Held, delay: int) -> None:
        self.ends.append(("retry", delay))

    def release(self, held: Held) -> None:
        self.ends.append("released")


def request_of(task_id: str, answer: Callable[..., Any] = lambda *_, **__: None) -> Any:
    names = ("on_success", "on_failure", "on_timeout", "on_retry", "_announce_revoked", "_announce_cancelled")
    return SimpleNamespace(id=task_id, **dict.fromkeys(names, answer))


def followed(request: Any) -> Told:
    told: Any = Told()
    hold = RunHold(job="job", slot=1_000, attempt=1, retries=0, token="t")
    follow(request, Held(hold, 30_000, math.inf), Terms(lease=30_000, queue_timeout=60_000), told)
    return told


@pytest.mark.parametrize(
    ("outcome", "revoked", "end"),
    [
        ((0, "result", 0.1), False, (RunState.SUCCEEDED, None)),
        ((0, None, 0.0), True, (RunState.SUCCEEDED, None)),
        ((False, None, None), True, (RunState.FAILED, "revoked")),
        ((False, None, None), False, "released"),
    ],
)
def test_a_killed_greenlet_is_no_success(outcome: Any, revoked: bool, end: Any) -> None:
    """gevent says "no failure" of a body that was killed: by a command, or because its worker stops."""
    task_id = f"of {outcome} {revoked}"
    if revoked:
        state.revoked.add(task_id)
    request = request_of(task_id)
    told = followed(request)
    request.on_success(outcome)
    assert told.ends == [end]
    state.revoked.discard(task_id)


@pytest.mark.parametrize(
    ("callback", "args", "end"),
    [
        ("on_success", ((0, "result", 0.1),), (RunState.SUCCEEDED, None)),
        ("on_failure", (SimpleNamespace(exception=ValueError("x")),), (RunState.FAILED, "exception")),
        ("on_timeout", (False, 5), (RunState.TIMED_OUT, "time-limit")),
        ("on_retry", (SimpleNamespace(exception=Retry(when=5)),), ("retry", 5_000)),
        ("_announce_revoked", ("terminated", True, "9", False), (RunState.FAILED, "revoked")),
    ],
)
def test_a_body_has_ended_whether_the_broker_takes_the_acknowledgement_or_not(
    callback: str, args: Any, end: Any
) -> None:
    """Celery acknowledges, stores and tells in these callbacks. A run whose end is not told keeps its lease until its
    worker stops."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("OOM command not allowed")

    request = request_of(f"of {callback}", refuse)
    told = followed(request)
    with pytest.raises(ConnectionError):
        getattr(request, callback)(*args)
    assert told.ends == [end]


def test_a_body_that_is_cut_is_released_once_it_has_stopped() -> None:
    """A cold shutdown announces the end of bodies that still run (mutant handover-before-stop)."""
    request = request_of("cut")
    told = followed(request)
    request._announce_cancelled(SimpleNamespace(exception=None))
    assert told.ends == []
    request.on_failure(SimpleNamespace(exception=SystemExit()))
    assert told.ends == ["released"]


def test_the_retry_of_a_lost_worker_is_due_when_celery_sends_it() -> None:
    """Waited for from now on, a retry that is due later than its queue timeout would end in the queue."""
    request = request_of("lost", lambda *_, **__: request._retry_worker_lost())
    request.task = SimpleNamespace(default_retry_delay=180, acks_late=True, reject_on_worker_lost=False)
    request._retry_worker_lost = lambda: True
    told = followed(request)
    request.on_failure(SimpleNamespace(exception=WorkerLostError("gone")))
    assert told.ends[0] == ("retry", 180_000)
