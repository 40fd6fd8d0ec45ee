"""The beat's log: one line per event that a person wants to read, one line per change of state."""

from __future__ import annotations

import logging
import shlex

from celery_anarchon import events
from celery_anarchon.errors import AnarchonError
from celery_anarchon.model import Answer
from celery_anarchon.publishing import BrokerAway, PublishUnclear
from celery_anarchon.wire import instant, time_text

logger = logging.getLogger("celery_anarchon.beat")


def log_event(event: events.Event) -> None:
    """A listener for :class:`celery_anarchon.events.Fanout`. Every line carries its ``extra``: the action, and
    job, slot and attempt where the event has them."""
    if not wants(type(event)) and not (isinstance(event, events.Claimed) and event.answer in events.NEWS):
        return
    extra = {"action": type(event).__name__}
    for name in ("job", "slot", "attempt"):
        if hasattr(event, name):
            extra[f"anarchon_{name}"] = getattr(event, name)
    level, text = _line(event)
    logger.log(level, "%s", text, extra=extra, exc_info=_traceback(event))


def wants(kind: type[events.Event]) -> bool:
    """Whether events of that kind have a line just now."""
    return logger.isEnabledFor(_OF_EACH_SLOT.get(kind, logging.CRITICAL))


_OF_EACH_SLOT: dict[type[events.Event], int] = {
    events.Claimed: logging.DEBUG,
    events.Sending: logging.INFO,
    events.Sent: logging.DEBUG,
}


def _traceback(event: events.Event) -> BaseException | None:
    return event.error if isinstance(event, (events.NotSent, events.JobTrouble)) else None


def _line(event: events.Event) -> tuple[int, str]:  # noqa: PLR0911, PLR0912 - one line per kind of event
    match event:
        case events.Claimed(answer=Answer.SKIPPED):
            return logging.WARNING, f"{event.job} {time_text(event.slot)} skipped: an earlier run of the job lives"
        case events.Claimed(answer=Answer.WAITING):
            return logging.INFO, f"{event.job} {time_text(event.slot)} waits for the end of an earlier run of the job"
        case events.Claimed():
            return logging.DEBUG, f"claim of {event.job} {time_text(event.slot)}: {event.answer}"
        case events.Sending():
            # Stock's own line, with the slot and the lateness behind it: people and tools search for it.
            return logging.INFO, (
                f"Scheduler: Sending due task {event.job} ({event.task}) "
                f"slot={time_text(event.slot)} late={event.late / 1000:.3f}s"
            )
        case events.Sent():
            return logging.DEBUG, f"{event.job} {time_text(event.slot)} sent. id->{event.run_id}"
        case events.NotSent():
            return logging.ERROR, (
                f"{event.job} {time_text(event.slot)} not sent: {_words(event.error)}; "
                "the slot is over, the next one is tried as usual"
            )
        case events.Unclear():
            return logging.WARNING, (
                f"{event.job} {time_text(event.slot)}: the broker did not say whether it has the message "
                f"({_words(event.error)}); published again with the same id {event.run_id}"
            )
        case events.TookOver(started=True):
            return logging.WARNING, (
                f"took over {event.job} {time_text(event.slot)}: its worker let it go; attempt {event.attempt}"
            )
        case events.Blocked(run=run):
            where = f" on worker {run.worker}" if run.worker else ""
            return logging.WARNING, (
                f"{event.job}: {event.skipped} slots in a row skipped, because run {run.run_id} of "
                f"{time_text(instant(run.slot))} is {run.state}{where}; if it is dead: "
                f"celery -A ... anarchon release {shlex.quote(event.job)}"
            )
        case events.NoWorkers():
            return logging.WARNING, (
                f"no worker that asks the store is there, and {', '.join(event.jobs)} rely on one (overlap, "
                "max_attempts): does the workers' module have the Anarchon(app, ...) line?"
            )
        case events.RunEnded():
            return logging.WARNING, f"{event.job} {time_text(event.slot)} {event.state} ({event.reason})"
        case events.TookOver():
            why = "its beat had no broker" if event.abandoned else "its beat did not publish it in time"
            return logging.WARNING, f"took over {event.job} {time_text(event.slot)}: {why}"
        case events.LeaseOver():
            return logging.WARNING, (
                f"{event.job} {time_text(event.slot)} was claimed here, but the lease ran out before it was sent "
                "(was this process paused?); the store decides anew"
            )
        case events.ClaimUnresolved():
            return logging.WARNING, (
                f"{event.job} {time_text(event.slot)} may be lost: the store did not answer a claim of it in time, and "
                "if that claim was applied nobody else can send it"
            )
        case events.SlotsGivenUp():
            slots = "slot" if event.total == 1 else "slots"
            return logging.WARNING, (
                f"{event.job}: {event.total} {slots} up to {time_text(event.newest)} {event.state} ({event.reason})"
            )
        case events.StoreChanged(error=None):
            return logging.WARNING, "the store is back; due slots follow the normal rules"
        case events.StoreChanged():
            return logging.ERROR, f"the store is away, nothing is sent until it is back: {_words(event.error)}"
        case events.BrokerChanged(error=None):
            return logging.WARNING, "the broker is back; due slots follow the normal rules"
        case events.BrokerChanged():
            return logging.ERROR, f"the broker is away, nothing is claimed until it is back: {_words(event.error)}"
        case events.OneStepChanged(reason=None):
            return logging.INFO, "claim and enqueue in one step from now on"
        case events.OneStepChanged():
            level = logging.ERROR if event.wanted else logging.WARNING
            return level, f"claim and enqueue in two steps: {event.reason}"
        case events.Stalled():
            return logging.WARNING, (
                f"this process was paused for {event.pause / 1000:.1f} s; slots of that time count as missed"
            )
        case events.ClockStepped():
            return logging.WARNING, f"the system clock stepped by {event.step / 1000:+.1f} s; planned anew"
        case events.SkewSeen():
            return logging.WARNING, f"this host's clock is {event.skew / 1000:+.1f} s off the store's"
        case events.SkewBeyond(following=False):
            return logging.ERROR, (
                f"this host's clock is {event.skew / 1000:+.1f} s off the store's, more than anarchon_max_skew "
                f"({event.limit / 1000:g} s): this beat claims nothing while another one's clock is right; set this one"
            )
        case events.SkewBeyond():
            return logging.ERROR, (
                f"no live beat's clock is within anarchon_max_skew ({event.limit / 1000:g} s) of the store's, this "
                f"host's is {event.skew / 1000:+.1f} s off: slots follow the store's clock; set the clocks"
            )
        case events.SkewWithin():
            return logging.WARNING, (
                f"this host's clock is within anarchon_max_skew again ({event.skew / 1000:+.1f} s); slots follow it"
            )
        case events.ZonesDiffer():
            return logging.ERROR, (
                f"beat {event.label} has other zone data for {', '.join(event.zones)}: some slots may be sent twice; "
                "bring all hosts to one release and restart their beats, or set anarchon_packaged_tzdata"
            )
        case events.JobTrouble():
            return logging.ERROR, f"job {event.job!r} failed, the others go on: {_words(event.error)}"
        case events.Settled() | events.HoldLost() | events.ClaimForgotten():
            # Of workers, which have their own log.
            return logging.DEBUG, f"{event.job} {time_text(event.slot)} {type(event).__name__}"


def _words(error: BaseException | None) -> str:
    """The error in one line; ours are sentences already."""
    text = " ".join(str(error).split())
    if text and isinstance(error, (AnarchonError, BrokerAway, PublishUnclear)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
