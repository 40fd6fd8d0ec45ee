"""What the callbacks of a request mean for its run, without a pool."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.exceptions import Reject, Retry, WorkerTerminate
from celery.worker import state

from celery_anarchon.backends.runs import RunHold
from celery_anarchon.held import Held
from celery_anarchon.model import GateAnswer, RunState, Terms
from celery_anarchon.outcomes import NotHeld, follow


class Told:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.ends: list[Any] = []
        self.holds = True

    def begins(self, held: Held) -> bool:
        held.begun = self.holds
        return self.holds

    def give_back_unbegun(self, held: Held) -> None:
        self.ends.append("given back")

    def settle(self, held: Held, end: RunState, reason: str | None = None) -> None:
        self.ends.append((end, reason))

    def retry(self, held: Held, delay: int) -> None:
        self.ends.append(("retry", delay))

    def release(self, held: Held) -> None:
        self.ends.append("released")


class Anything(SimpleNamespace):
    """Has the identity that Celery's lists of requests want."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def request_of(task_id: str, answer: Callable[..., Any] = lambda *_, **__: None) -> Any:
    names = ("on_success", "on_failure", "on_timeout", "on_retry", "_announce_revoked", "_announce_cancelled")
    return Anything(id=task_id, **dict.fromkeys(names, answer))


def followed(request: Any, begun: bool | None = None) -> Told:
    told: Any = Told()
    hold = RunHold(job="job", slot=1_000, attempt=1, retries=0, token="t")
    follow(request, Held(hold, 30_000, math.inf, begun=begun), Terms(lease=30_000, queue_timeout=60_000), told)
    return told


@pytest.mark.parametrize(
    ("outcome", "revoked", "end"),
    [
        ((0, "result", 0.1), False, (RunState.SUCCEEDED, None)),
        ((0, None, 0.0), True, (RunState.SUCCEEDED, None)),
        # What a redelivery finds done already (worker_deduplicate_successful_tasks).
        ((0, None, None), False, (RunState.SUCCEEDED, None)),
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


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_lost_process_leaves_to_the_broker_what_celery_puts_back(goes_back: bool) -> None:
    """And nothing else: with its own retries used up, Celery 5.7 acknowledges what it would have put back."""
    request = request_of("lost", lambda *_, **__: request.reject(requeue=goes_back))
    request.task = SimpleNamespace(default_retry_delay=180, acks_late=True, reject_on_worker_lost=True)
    request.reject = lambda requeue: None
    told = followed(request)
    request.on_failure(SimpleNamespace(exception=WorkerLostError("gone")))
    assert told.ends == ["released" if goes_back else (RunState.LOST, "worker-lost")]


@pytest.mark.parametrize(
    ("answer", "redelivered", "dropped"),
    [
        (None, True, False),
        (GateAnswer.STALE, True, True),
        (GateAnswer.SETTLED, False, True),
        (GateAnswer.DUPLICATE, False, True),
        # The store may come to need it.
        (GateAnswer.DUPLICATE, True, False),
    ],
)
def test_what_another_has_before_the_body_began(answer: GateAnswer | None, redelivered: bool, dropped: bool) -> None:
    """As at the gate: acknowledged, without a result; and only if somebody else has it."""
    request = request_of("late")
    request.on_accepted = request.execute_using_pool = lambda *_, **__: None
    request.task, request.delivery_info = SimpleNamespace(acks_late=True), {"redelivered": redelivered}
    acknowledged: list[bool] = []
    request.acknowledge = lambda: acknowledged.append(True)
    told: Any = Told()
    told.holds = False
    hold = RunHold(job="job", slot=1_000, attempt=1, retries=0, token="t")
    held = Held(hold, 30_000, math.inf, begun=False, answer=answer)
    follow(request, held, Terms(lease=30_000, queue_timeout=60_000), told)
    with pytest.raises(NotHeld):
        request.on_accepted(1, 0.0)
    assert acknowledged == [True] * dropped


class Request:
    """Its callbacks are its methods, as Celery's are."""

    id = "of nobody"
    task = SimpleNamespace(default_retry_delay=180, acks_late=True, reject_on_worker_lost=False)

    def on_success(self, outcome: Any) -> None:
        if outcome[0]:
            self.on_failure(outcome[1])

    def on_failure(self, info: Any) -> None:
        if isinstance(info.exception, Retry):
            self.on_retry(info)
        elif isinstance(info.exception, WorkerLostError):
            self._retry_worker_lost()

    def _retry_worker_lost(self) -> bool:
        return True

    def callback(self, *_: Any, **__: Any) -> None: ...

    on_timeout = on_retry = _announce_revoked = _announce_cancelled = on_accepted = execute_using_pool = callback


@pytest.mark.parametrize("begun", [None, True])
@pytest.mark.parametrize("error", [None, ValueError("x"), Retry(when=5), WorkerLostError("gone"), Reject("no")])
def test_a_request_goes_with_the_last_who_needs_it(error: Exception | None, begun: bool | None) -> None:
    """Stock Celery has no circle in its requests. A worker that has one in each collects garbage all the time."""
    request = Request()
    told = followed(request, begun)
    gone = weakref.ref(request)
    gc.disable()
    try:
        if isinstance(error, WorkerLostError):
            request.on_failure(SimpleNamespace(exception=error))
        else:
            request.on_success((error is not None, SimpleNamespace(exception=error), 0.1))
        del request
        assert gone() is None
    finally:
        gc.enable()
    assert told.ends


# --- pools that call bodies in the worker's own process ---------------------------------------------------------------


class Greenlet:
    """As gevent's: says when it is done, and in what error."""

    exception: BaseException | None = None

    def link(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def end(self, error: BaseException | None = None) -> None:
        self.exception = error
        self._then(self)


class Thread:
    """What Celery's pool of threads answers."""

    def __init__(self) -> None:
        self.f: Future[None] = Future()

    def end(self, error: BaseException | None = None) -> None:
        if error is None:
            self.f.set_result(None)
        else:
            self.f.set_exception(error)


def in_process(result: Any, accept: Callable[..., Any] = lambda *_: None) -> tuple[Any, Told]:
    request = request_of("here")
    request.acknowledged = False
    request.on_accepted, request.execute_using_pool = accept, lambda pool: result
    told = followed(request, begun=False)
    assert request.execute_using_pool("pool") is result
    return request, told


@pytest.mark.parametrize("kind", [Greenlet, Thread])
@pytest.mark.parametrize(
    ("error", "end"),
    [
        (MemoryError("no more"), (RunState.FAILED, "exception")),
        (SystemExit(1), (RunState.FAILED, "exception")),
        (Reject("out of after_return"), (RunState.FAILED, "rejected")),
        (WorkerTerminate(1), "released"),
    ],
)
def test_an_error_that_celery_has_no_callback_for(kind: Any, error: BaseException, end: Any) -> None:
    """It stays in a future that nobody reads. The run would be held until its worker stops."""
    result = kind()
    request, told = in_process(result)
    request.on_accepted(1, 0.0)
    result.end(error)
    assert told.ends == [end]


def test_a_body_that_ended_by_its_callback_has_ended_once() -> None:
    result = Thread()
    request, told = in_process(result)
    request.on_accepted(1, 0.0)
    held_ends = told.settle

    def settle(held: Held, end: RunState, reason: str | None = None) -> None:
        held.ended = True
        held_ends(held, end, reason)

    told.settle = settle  # type: ignore[method-assign]
    request.on_success((0, "result", 0.1))
    result.end()
    assert told.ends == [(RunState.SUCCEEDED, None)]


def test_a_pool_that_reports_no_outcome_but_an_error() -> None:
    """How it reports SystemExit: to the callback of successes, which fails on it."""

    def stock(outcome: Any) -> None:
        _, _, _ = outcome

    request = request_of("exits", stock)
    told = followed(request)
    try:
        raise WorkerLostError("SystemExit(1)")
    except WorkerLostError:
        info = ExceptionInfo()
    with pytest.raises(TypeError):
        request.on_success(info)
    assert told.ends == [(RunState.FAILED, "exception")]


def test_what_was_given_back_does_not_begin() -> None:
    accepted: list[Any] = []
    result = Thread()
    request, told = in_process(result, lambda *args: accepted.append(args))
    told.holds = False
    with pytest.raises(NotHeld):
        request.on_accepted(1, 0.0)
    assert accepted == []


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_pool_that_calls_no_body_after_all(acknowledged: bool) -> None:
    """Celery fails when it notes the start. Its message comes again, or is gone."""

    def accept(*_: Any) -> None:
        request.acknowledged = acknowledged
        raise NotImplementedError("terminate")

    result = Thread()
    request, told = in_process(result, accept)
    with pytest.raises(NotImplementedError) as caught:
        request.on_accepted(1, 0.0)
    result.end(caught.value)
    assert told.ends == [(RunState.FAILED, "exception") if acknowledged else "given back"]


def test_a_start_that_a_stop_cancels_is_held_until_the_stop() -> None:
    """Warm, with bodies of hours: its message goes back only after them, and is not to be given up in the meantime."""
    result = Thread()
    _, told = in_process(result)
    result.f.cancel()
    assert told.ends == []
