"""The last stop before a worker's pool: does this delivery of a run's message get to execute its body?

Belongs here: the question to the store, what each answer means for the message, and what happens while the store cannot
be asked. Does not belong here: leases and ends (the keeper), how Celery calls this (:mod:`celery_anarchon.worker`).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.runs import Start, StartResult, Unstarted
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.copies import Copies, forget, is_of_lost_connection, is_waited_for, show_running
from celery_anarchon.errors import AnarchonError
from celery_anarchon.events import ClaimForgotten, RunEnded
from celery_anarchon.held import Held, hold_of
from celery_anarchon.keeper import Keeper
from celery_anarchon.model import GRANTED, GateAnswer, Millis, OnUnknown, Overlap, RunState, Terms
from celery_anarchon.options import Settings
from celery_anarchon.outage import Outage
from celery_anarchon.outcomes import NotHeld, broken_off, follow
from celery_anarchon.wire import time_text

logger = logging.getLogger("celery_anarchon.worker")

HELD_KEY = "held"
"""Inside the header of what runs: how ``current_run()`` in a pool's child asks whether the run is still its own. It is
of one try, and ``retry()`` copies it into the next one's message. Without ``until`` the store has not answered yet."""

QUEUE_TIMEOUT: Millis = 24 * 3_600_000
"""Of a run whose beat follows none."""

WHY = {
    GateAnswer.DUPLICATE: "another delivery of it runs already",
    GateAnswer.SETTLED: "it has ended already",
    GateAnswer.TRIMMED: "it ended so long ago that its record was dropped",
    GateAnswer.STALE: "the message is of an earlier attempt",
    GateAnswer.USED_UP: "its worker is gone and no attempt is left: lost",
    GateAnswer.OVERLAPS: "the store had no record of it, and another run of the job lives",
}


@dataclass(eq=False, slots=True)
class Ticket:
    """What a message says of the run it is of."""

    start: Start
    """The question that its delivery asks."""
    on_unknown: OnUnknown
    followed: bool
    """The beat that sent it follows its runs."""

    @property
    def name(self) -> str:
        return f"{self.start.job} {time_text(self.start.slot)}"


def read_ticket(
    request_dict: dict[str, Any],
    namespace: str,
    lease: Millis,
    queue_timeout: Millis,
    *,
    token: str = "",
    worker: str = "",
    acks_late: bool = False,
) -> Ticket | None:
    """The ticket of a message of this namespace; None: it is none of ours. *lease* and *queue_timeout* are for messages
    of beats that follow no runs; *token*, *worker* and *acks_late* are of this delivery.

    :raises Exception: a header that no celery-anarchon wrote.
    """
    header = request_dict.get(wire.HEADER)
    if not isinstance(header, dict) or header.get("ns") != namespace:
        return None
    says = header.get
    job, beat, late = header["job"], says("beat", ""), says("late")
    if not (isinstance(job, str) and isinstance(beat, str)):
        # No store takes it, and what is raised while it is asked would end the worker, and the next.
        raise TypeError(f"job {job!r}, beat {beat!r}: no texts")
    start = Start(
        job=job,
        slot=wire.parse_time(header["slot"]),
        attempt=int(says("attempt", 1)),
        retries=int(request_dict.get("retries") or 0),
        token=token,
        worker=worker,
        terms=_terms(
            *(says("lease"), says("queue_timeout"), says("max_attempts"), says("overlap", "allow")),
            *(lease, queue_timeout),
        ),
        acks_late=acks_late,
        late=None if late is None else round(late * 1000),
        beat=beat,
    )
    return Ticket(start, _on_unknown(says("on_unknown", "repeat")), "queue_timeout" in header)


_on_unknown = lru_cache(OnUnknown)


@lru_cache
def _terms(
    lease: float | None,
    queue_timeout: float | None,
    max_attempts: int | None,
    overlap: str,
    default_lease: Millis,
    default_timeout: Millis,
) -> Terms:
    """Kept: those of a job are alike for all its runs, and mostly for all jobs."""
    return Terms(
        lease=round(lease * 1000) if lease else default_lease,
        queue_timeout=round(queue_timeout * 1000) if queue_timeout else default_timeout,
        max_attempts=max_attempts,
        overlap=Overlap(overlap),
    )


@dataclass(eq=False)
class Delivery:
    """One delivery at the gate."""

    request: Any
    ticket: Ticket
    since: float
    """Monotonic: when it came."""
    asked: bool = False
    """A question was sent whose answer did not come: the start may have been granted."""
    kept: bool = False
    """A redelivery that waits for its run to be free, or to end."""


class Gate:
    """Called with each request in the worker's main process, instead of what executes it.

    :param execute: hands a request to the pool.
    :param slot_back: gives the pool slot back that a request holds, where there is such a thing.
    :param again: hands a request to the gate once more, as if it had just come.
    :param later: calls a function in so many seconds.
    :param room: see :class:`~celery_anarchon.copies.Copies`.
    :param enforces_timeout: the pool stops a body at its time limit.
    """

    def __init__(
        self,
        *,
        keeper: Keeper,
        namespace: str,
        label: str,
        settings: Settings,
        execute: Callable[[Any], Any],
        slot_back: Callable[[], None],
        again: Callable[[Any], Any],
        later: Callable[[float, Callable[[], None]], Any],
        room: Callable[[], Callable[[], Any]],
        enforces_timeout: bool,
        clock: Clock | None = None,
    ) -> None:
        self._keeper = keeper
        self._namespace = namespace
        self._label = label
        self._settings = settings
        self._execute = execute
        self._slot_back = slot_back
        self._again = again
        self._later = later
        self._enforces_timeout = enforces_timeout
        self._clock = clock or SystemClock()
        self._store = Outage(self._clock)
        self._waiting: dict[int, Delivery] = {}
        """By the identity of their requests: held for want of an answer, or until their run is free."""
        self._copies = Copies(settings.heartbeat / 1000, room)
        self._warned = False
        self._token = f"{secrets.token_hex(8)}-"
        self._deliveries = count()

    def __call__(self, request: Any) -> Any:
        if wire.HEADER not in request.request_dict:
            return self._execute(request)
        delivery = self._waiting.pop(id(request), None)
        if delivery is None:
            ticket = self._ticket(request)
            # A revoked or expired message has not asked, and needs not: the pool's own look drops it.
            if ticket is None or request.revoked():
                return self._execute(request)
            delivery = Delivery(request, ticket, self._clock.monotonic())
        elif delivery.kept and is_of_lost_connection(request):
            return self._let_go(delivery)
        return self._admit(delivery)

    def _ticket(self, request: Any) -> Ticket | None:
        try:
            return read_ticket(
                request.request_dict,
                self._namespace,
                self._settings.lease,
                QUEUE_TIMEOUT,
                token=f"{self._token}{next(self._deliveries):x}",
                worker=self._label,
                acks_late=bool(request.task.acks_late),
            )
        except Exception:
            logger.exception("task %s has a header that cannot be read; it runs untracked", request.id)
            return None

    # --- the question -------------------------------------------------------------------------------------------------

    def _admit(self, delivery: Delivery) -> Any:
        if self._store.remaining() > 0:
            return self._hold(delivery)
        delivery.asked = True
        try:
            result, held = self._keeper.ask(delivery.ticket.start)
        except AnarchonError as error:
            if self._store.failed(error):
                logger.error("the store cannot be asked whether runs may start; they are held: %s", error)
            return self._hold(delivery)
        if result.answer in GRANTED:
            self._store.worked()
        if self._store.away:
            self._store.answered()
            logger.warning("the store answers again; held runs go on")
        return self._act(delivery, result, held)

    def _act(self, delivery: Delivery, result: StartResult, held: Held | None) -> Any:
        ticket = delivery.ticket
        if result.answer is GateAnswer.DUPLICATE and is_waited_for(delivery.request, ticket.start.terms):
            wait = self._copies.hold(delivery.request)
            if wait is not None:
                return self._keep(delivery, wait, result.holder)
        self._copies.leave(delivery.request)
        if result.answer is GateAnswer.UNKNOWN and ticket.followed:
            logger.error("%s: lost claim: the store had no record of it (wiped, or rolled back?); it runs", ticket.name)
            self._keeper.fanout.emit(ClaimForgotten(job=ticket.start.job, slot=ticket.start.slot))
        if held is not None:
            return self._start(delivery, held)
        if result.answer is GateAnswer.TRIMMED and not ticket.followed:
            return self._execute(delivery.request)
        if result.answer is GateAnswer.USED_UP:
            start = ticket.start
            lost = RunEnded(job=start.job, slot=start.slot, state=RunState.LOST, reason="attempts-used-up")
            self._keeper.fanout.emit(lost)
        level = logging.INFO if result.answer is GateAnswer.SETTLED else logging.WARNING
        why = WHY[result.answer] + _on(result.holder)
        logger.log(level, "%s (%s) refused: %s", ticket.name, delivery.request.id, why)
        self._drop(delivery.request)
        return None

    # --- yes ----------------------------------------------------------------------------------------------------------

    def _start(self, delivery: Delivery, held: Held) -> Any:
        request, start = delivery.request, delivery.ticket.start
        held.timeout = self._timeout(request)
        # Where the pool calls the body in this very process, it says so right before.
        held.begun = None if self._enforces_timeout else False
        says: dict[str, Any] = {"token": start.token, "lease": held.lease, "retries": start.retries}
        if held.answered:
            says["until"] = held.until
        # The granted attempt goes with the run, into its retries too (protocol R1).
        request_dict = request.request_dict
        request_dict[wire.HEADER] = {**request_dict[wire.HEADER], "attempt": held.hold.attempt, HELD_KEY: says}
        follow(request, held, start.terms, self._keeper)
        if not held.answered:
            self._keeper.add(held)
        try:
            result = self._execute(request)
        except NotHeld:
            # On solo. All has been said.
            return None
        except BaseException as error:
            if held.begun:
                broken_off(request, held, self._keeper, error)
            else:
                held.begun = False
                self._keeper.give_back_unbegun(held)
            raise
        if self._enforces_timeout:
            held.handed = request._apply_result
            if held.handed is None:
                # A pool that is closed takes nothing, without a word.
                held.begun = False
                self._keeper.give_back_unbegun(held)
        return result

    def _timeout(self, request: Any) -> float | None:
        """Seconds of its body after which the keeper has to end the run, because this pool cannot."""
        limit = request.time_limits[0] or request.task.time_limit
        if self._enforces_timeout or not limit:
            return None
        if not self._warned:
            self._warned = True
            logger.warning(
                "this pool cannot stop a task at its time limit: a run that exceeds it is recorded as timed out, "
                "current_run().lost turns true, and its body may run on"
            )
        return float(limit)

    # --- no -----------------------------------------------------------------------------------------------------------

    def _drop(self, request: Any) -> None:
        """Acknowledge without a trace: no result, no event, for the run's result belongs to the delivery that runs."""
        request.acknowledge()
        forget(request)
        self._slot_back()

    # --- not yet ------------------------------------------------------------------------------------------------------

    def _keep(self, delivery: Delivery, wait: float, holder: str | None) -> None:
        """A redelivery that the store may come to need: it asks again, each time after a longer wait."""
        # This question has its answer.
        delivery.asked = False
        if not delivery.kept:
            delivery.kept = True
            show_running(delivery.request)
            logger.warning(
                "%s (%s) is held: another delivery of it has the run%s. It goes on if that one is gone",
                *(delivery.ticket.name, delivery.request.id, _on(holder)),
            )
        self._wait_for(delivery, wait)

    def _let_go(self, delivery: Delivery) -> None:
        """Without a word to the broker, which has lost us and delivers it again."""
        self._take_back(delivery)
        self._copies.leave(delivery.request)
        forget(delivery.request)
        self._slot_back()

    def _wait_for(self, delivery: Delivery, seconds: float) -> None:
        """Keep the message unacknowledged, give its pool slot back, and ask again then."""
        self._waiting[id(delivery.request)] = delivery
        # Before the slot, which others come to this gate with at once: their errors must not cost this one its turn.
        self._later(seconds, lambda: self._again(delivery.request))
        self._slot_back()

    # --- no answer ----------------------------------------------------------------------------------------------------

    def _hold(self, delivery: Delivery) -> Any:
        """Until the store answers or patience ends."""
        left = delivery.since + self._settings.gate_wait / 1000 - self._clock.monotonic()
        if delivery.kept:
            # The store's latest answer was no, and another body may run: this one never starts without a yes.
            left = math.inf
        if left <= 0:
            return self._give_up(delivery)
        # A little later than the outage's own look: the first to come asks for all.
        return self._wait_for(delivery, min(left, self._store.remaining()) + 0.01)

    def _give_up(self, delivery: Delivery) -> Any:
        ticket, request = delivery.ticket, delivery.request
        waited = self._settings.gate_wait / 1000
        if ticket.on_unknown is OnUnknown.REPEAT:
            logger.error(
                "%s: the store could not be asked for %g s; it runs, and is followed once the store answers "
                "(on_unknown=repeat)",
                *(ticket.name, waited),
            )
            # From here on the keeper asks.
            delivery.asked = True
            return self._start(delivery, self._unanswered(ticket))
        logger.error("%s: the store could not be asked for %g s; dropped (on_unknown=skip)", ticket.name, waited)
        self._take_back(delivery)
        self._keeper.unstarted(_unstarted(ticket.start, "store-unknown"))
        self._drop(request)
        return None

    @staticmethod
    def _unanswered(ticket: Ticket) -> Held:
        start = ticket.start
        # It has no lease that could end, and is not lost before the store says so.
        return Held(
            *(hold_of(start, start.attempt), start.terms.lease, math.inf, start.attempt),
            question=start,
            start=start,
            answered=False,
            followed=ticket.followed,
        )

    def _take_back(self, delivery: Delivery) -> None:
        """The question may have been answered yes without our hearing it: undo that, whatever attempt was granted."""
        if delivery.asked:
            self._keeper.doubt(delivery.ticket.start)

    def stop(self) -> None:
        """The worker stops: what is held goes back to the broker with its connection, and its starts are undone."""
        for delivery in list(self._waiting.values()):
            self._take_back(delivery)
        self._waiting.clear()


def _on(worker: str | None) -> str:
    return f" on {worker}" if worker else ""


def unstarted(request_dict: Any, namespace: str, reason: str) -> Unstarted | None:
    """What to tell of a message of ours that is gone before it came to the gate; None: it is none of ours."""
    ticket = read_ticket(request_dict, namespace, 0, 0)
    return None if ticket is None else _unstarted(ticket.start, reason)


def _unstarted(start: Start, reason: str) -> Unstarted:
    return Unstarted(job=start.job, slot=start.slot, attempt=start.attempt, retries=start.retries, reason=reason)
