"""Celery signals: what became of slots and runs, for the apps that want to know.

The sender is the Celery app. Instants are aware UTC datetimes, spans are seconds, a state is a
:class:`~celery_anarchon.model.RunState`. Receivers take any further arguments: some may be added.

A receiver runs between two steps of the beat, or of the worker's main process (there in the main thread, or in the one
that keeps its leases): it must be quick, for nothing is sent and no lease renewed meanwhile. What it raises is logged
and goes no further.

Belongs here: which event is which signal. Does not belong here: any event's cause.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.utils.dispatch import Signal

from celery_anarchon import events
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.wire import moment, run_id

__all__ = ["claim_lost", "run_dispatched", "run_lost", "run_misfired", "run_settled", "run_skipped"]

run_dispatched = Signal(name="run_dispatched")
"""In a beat: the broker has the message of a slot. ``job``, ``slot``, ``run_id``, ``attempt``, ``late``."""

run_skipped = Signal(name="run_skipped")
"""In a beat: a slot is not sent, because an earlier run of its job lives. ``job``, ``slot``, ``run_id``, ``reason``."""

run_misfired = Signal(name="run_misfired")
"""In a beat: slots of a job were given up as too late. ``job``, ``slot`` (the latest of them), ``run_id`` (of that
one), ``count`` (how many), ``reason``."""

run_settled = Signal(name="run_settled")
"""In the worker that ran it, or whose message it was; or in the beat that ended it for a worker that is gone: the store
has the end of a run. ``job``, ``slot``, ``run_id``, ``attempt`` (None where no body of it has ended), ``state``,
``reason``."""

run_lost = Signal(name="run_lost")
"""In a worker: a run that it executes is not its own any more, another has taken over (``taken-over``). In a worker or
a beat: a run has ended as ``lost`` or ``lost-in-queue``; `run_settled` is sent, too. ``job``, ``slot``, ``run_id``,
``attempt`` (None where no body of it has ended), ``reason``."""

claim_lost = Signal(name="claim_lost")
"""In a worker: the store had no record of a run that a beat had claimed. In a beat, on a store that only takes claims:
a claim that was never answered may have been applied. ``job``, ``slot``, ``run_id``, ``reason``."""


_OF_EACH_RUN: dict[type[events.Event], tuple[Any, ...]] = {
    events.Sent: (run_dispatched,),
    events.Settled: (run_settled, run_lost),
}


def wants(kind: type[events.Event]) -> bool:
    """Whether there is a signal of events of that kind; of those of each slot and each run, which are many,
    whether it has a receiver."""
    signals = _OF_EACH_RUN.get(kind)
    if signals is not None:
        return any(signal.receivers for signal in signals)
    return kind not in (events.Sending, events.Claimed)


def teller(app: Celery, namespace: str) -> events.Listener:
    """A listener for :class:`celery_anarchon.events.Fanout` that sends the signals of *app*'s runs."""

    def send(signal: Any, job: str, slot: Millis, **more: Any) -> None:
        if not signal.receivers:
            return
        signal.send(sender=app, job=job, slot=moment(slot), run_id=run_id(namespace, job, slot), **more)

    def tell(event: events.Event) -> None:
        match event:
            case events.Sent():
                send(run_dispatched, event.job, event.slot, attempt=event.attempt, late=event.late / 1000)
            case events.Claimed(answer=Answer.SKIPPED):
                send(run_skipped, event.job, event.slot, reason="overlap")
            case events.SlotsGivenUp(state=RunState.MISFIRE):
                send(run_misfired, event.job, event.newest, count=event.total, reason=event.reason)
            case events.Settled() | events.RunEnded():
                attempt = event.attempt if isinstance(event, events.Settled) else None
                told = {"attempt": attempt, "reason": event.reason}
                send(run_settled, event.job, event.slot, state=event.state, **told)
                if event.state in (RunState.LOST, RunState.LOST_IN_QUEUE):
                    send(run_lost, event.job, event.slot, **told)
            case events.HoldLost():
                send(run_lost, event.job, event.slot, attempt=event.attempt, reason="taken-over")
            case events.ClaimForgotten():
                send(claim_lost, event.job, event.slot, reason="no-record")
            case events.ClaimUnresolved():
                send(claim_lost, event.job, event.slot, reason="no-answer")

    return tell
