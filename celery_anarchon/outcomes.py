"""What Celery's request callbacks mean for a run: success, failure, retry, a cut-off, a lost worker.

Each callback goes on to do what it does in stock Celery, acknowledgements included; the run's end is told afterwards,
through the keeper, also where that has raised: the body has ended all the same. The first end counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import (
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from celery.worker import state

from celery_anarchon import wire
from celery_anarchon.copies import forget, is_waited_for
from celery_anarchon.held import Held
from celery_anarchon.keeper import Keeper
from celery_anarchon.model import GateAnswer, Millis, RunState, Terms

logger = logging.getLogger("celery_anarchon.worker")

GONE = (WorkerLostError, SystemExit, KeyboardInterrupt)
"""How a pool says that the process which ran the body is no more."""


class NotHeld(Exception):
    """Raised in the place of a body whose run was given back. Pools call neither the body nor a callback then, so the
    message stays unacknowledged."""


def follow(request: Any, held: Held, terms: Terms, keeper: Keeper) -> None:
    """Let *keeper* know how *request* ends."""
    on_success, on_failure, on_timeout = request.on_success, request.on_failure, request.on_timeout
    on_retry, revoked, cancelled = request.on_retry, request._announce_revoked, request._announce_cancelled

    def succeeded(outcome: Any, **kwargs: Any) -> Any:
        try:
            return on_success(outcome, **kwargs)
        finally:
            # A failure has gone through `failed` by now, and the first end counts.
            if not isinstance(outcome, tuple):
                # How threads and greenlets report SystemExit and the like; Celery's own callback fails on it.
                keeper.settle(held, RunState.FAILED, "exception")
            elif _was_killed(outcome):
                _killed(request, held, keeper)
            elif not outcome[0]:
                keeper.settle(held, RunState.SUCCEEDED)
            _unfollow(request, held)

    def failed(info: Any, *args: Any, **kwargs: Any) -> Any:
        retried, requeued = _watch(request, "_retry_worker_lost"), _watch(request, "reject")
        try:
            return on_failure(info, *args, **kwargs)
        finally:
            if any(answer for answer, _ in retried):
                keeper.retry(held, delay_of(Retry(when=request.task.default_retry_delay)))
            goes_back = any(given.get("requeue") for _, given in requeued)
            _end(request, held, terms, keeper, _unwrapped(info.exception), goes_back)
            _unfollow(request, held)

    def timed_out(soft: bool, timeout: Any) -> Any:
        try:
            return on_timeout(soft, timeout)
        finally:
            if not soft:
                keeper.settle(held, RunState.TIMED_OUT, "time-limit")

    def retried(info: Any) -> Any:
        try:
            return on_retry(info)
        finally:
            keeper.retry(held, delay_of(_unwrapped(info.exception)))

    def was_revoked(*args: Any, **kwargs: Any) -> Any:
        try:
            return revoked(*args, **kwargs)
        finally:
            expired = bool(args and args[0] == "expired")
            keeper.settle(held, RunState.FAILED, "expired" if expired else "revoked")

    def was_cancelled(*args: Any, **kwargs: Any) -> Any:
        # The body may still have a moment to live: released when the pool says that it has stopped, or when all has.
        held.stopped = True
        return cancelled(*args, **kwargs)

    request.on_success, request.on_failure, request.on_timeout = succeeded, failed, timed_out
    request.on_retry, request._announce_revoked, request._announce_cancelled = retried, was_revoked, was_cancelled
    if held.begun is not None:
        _watch_body(request, held, terms, keeper)


def _unfollow(request: Any, held: Held) -> None:
    """The pool has said its last word. What is left in the request would hold it in a circle: a worker makes no other,
    so that it hardly ever has to collect garbage, and has the memory of one request for the next."""
    try:
        del request.on_success, request.on_failure, request.on_timeout
        del request.on_retry, request._announce_revoked, request._announce_cancelled
        if held.begun is not None:
            del request.on_accepted, request.execute_using_pool
    except AttributeError:
        # Failures come here twice.
        pass
    for name in ("_retry_worker_lost", "reject"):
        vars(request).pop(name, None)


def _watch_body(request: Any, held: Held, terms: Terms, keeper: Keeper) -> None:
    """Where the pool calls the body in this process: nothing given back begins, and no error passes by unseen."""
    on_accepted, execute = request.on_accepted, request.execute_using_pool
    attempt = held.hold.attempt

    def accepted(*args: Any, **kwargs: Any) -> Any:
        if not keeper.begins(held):
            if held.answer is not None and not (held.answer is GateAnswer.DUPLICATE and is_waited_for(request, terms)):
                # As at the gate: the run and its result are another's. What the store may still need comes again.
                logger.warning("%s does not begin, it is not this worker's any more: %s", held.name, held.answer)
                request.acknowledge()
                forget(request)
            raise NotHeld(f"{held.name} is not held here any more, and its body had not begun")
        if held.hold.attempt != attempt:
            # Granted anew.
            request.request_dict[wire.HEADER]["attempt"] = held.hold.attempt
        try:
            return on_accepted(*args, **kwargs)
        except BaseException:
            # No body is called then; and what was not acknowledged comes again.
            held.begun = request.acknowledged
            raise

    def executed(*args: Any, **kwargs: Any) -> Any:
        result = execute(*args, **kwargs)
        _when_over(result, lambda error: broken_off(request, held, keeper, error))
        return result

    request.on_accepted, request.execute_using_pool = accepted, executed


def _when_over(result: Any, then: Callable[[BaseException | None], None]) -> None:
    """Call *then* with its error once a thread or greenlet is done. solo has raised it by now."""

    def over(future: Any) -> None:
        # One that a stop cancels is held until all bodies have ended: its message goes back only then.
        if not future.cancelled():
            then(future.exception())

    if hasattr(result, "f"):
        result.f.add_done_callback(over)
    elif hasattr(result, "link"):
        result.link(lambda greenlet: then(greenlet.exception))


def broken_off(request: Any, held: Held, keeper: Keeper, error: BaseException | None) -> None:
    """The pool is done with a body. If that came past all callbacks: its run must not be held for ever."""
    if held.ended:
        return
    if error is not None:
        logger.error("%s ended in an error that Celery has no callback for: %r", held.name, error)
    if held.begun is False:
        keeper.give_back_unbegun(held)
    elif error is None:
        _killed(request, held, keeper)
    elif isinstance(error, (WorkerShutdown, WorkerTerminate)):
        keeper.release(held)
    else:
        keeper.settle(held, *outcome_of(error))


def _was_killed(outcome: Any) -> bool:
    """Pools of greenlets report one that was killed as a success without a result and without a runtime."""
    # False itself: of a success that a redelivery finds done, a tracer says 0 and no runtime either
    # (worker_deduplicate_successful_tasks).
    failed, _, runtime = outcome
    return failed is False and runtime is None


def _killed(request: Any, held: Held, keeper: Keeper) -> None:
    """Before Celery announces why: a command has put its id among the revoked; else its worker or connection stops."""
    if request.id in state.revoked:
        keeper.settle(held, RunState.FAILED, "revoked")
    else:
        keeper.release(held)


def _end(request: Any, held: Held, terms: Terms, keeper: Keeper, error: BaseException, goes_back: bool) -> None:
    """What a body's exception means. Retry has its callback, and ends nothing here. *goes_back*: Celery has just put
    the message back."""
    if isinstance(error, Retry):
        return
    if held.stopped:
        keeper.release(held)
    elif isinstance(error, GONE):
        _worker_lost(request, held, terms, keeper, goes_back)
    elif isinstance(error, Reject) and error.requeue and request.task.acks_late:
        keeper.release(held)
    else:
        end, reason = outcome_of(error)
        keeper.settle(held, end, reason)


def outcome_of(error: BaseException) -> tuple[RunState, str]:
    """The end of a run whose body raised *error*, and why."""
    for kind, end, reason in (
        (Ignore, RunState.SUCCEEDED, "ignored"),
        (Reject, RunState.FAILED, "rejected"),
        (Terminated, RunState.FAILED, "revoked"),
        (TimeLimitExceeded, RunState.TIMED_OUT, "time-limit"),
        (SoftTimeLimitExceeded, RunState.TIMED_OUT, "soft-time-limit"),
    ):
        if isinstance(error, kind):
            return end, reason
    return RunState.FAILED, "exception"


def _worker_lost(request: Any, held: Held, terms: Terms, keeper: Keeper, goes_back: bool) -> None:
    """The process that ran the body is gone: the next attempt may begin at once, if there is to be one."""
    stored: Callable[[], Any] = getattr(request, "_success_was_stored", bool)
    if stored():
        keeper.settle(held, RunState.SUCCEEDED)
    elif terms.max_attempts is not None and held.hold.attempt < terms.max_attempts:
        keeper.release(held)
    elif terms.max_attempts is None and goes_back:
        # Its redelivery is the next attempt.
        keeper.release(held)
    else:
        keeper.settle(held, RunState.LOST, "worker-lost")


def _watch(request: Any, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """What Celery makes of a failure in that method of *request*: what the method answers, and the keywords it gets.
    Not every Celery has it."""
    done: list[tuple[Any, dict[str, Any]]] = []
    method = getattr(request, name, None)
    if method is not None:

        def watched(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            done.append((answer, kwargs))
            return answer

        setattr(request, name, watched)
    return done


def _unwrapped(error: BaseException) -> BaseException:
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def delay_of(error: BaseException) -> Millis:
    """How long from now until the ETA of a retry."""
    when = getattr(error, "when", None)
    if isinstance(when, datetime):
        now = datetime.now(when.tzinfo)
        return max(0, wire.instant(when) - wire.instant(now)) if when.tzinfo else 0
    return max(0, round(when * 1000)) if isinstance(when, (int, float)) else 0
