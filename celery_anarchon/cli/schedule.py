"""``celery anarchon next``: which slots a schedule names. Needs no store."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

import click
from celery import Celery
from celery.bin.base import CeleryCommand

from celery_anarchon.cli.common import Schedule, app_of, guarded, json_option, show_json, show_table
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.timetable import at_instant, zone_of
from celery_anarchon.verdict import named
from celery_anarchon.wire import instant, moment, time_text


@click.command("next", cls=CeleryCommand)
@click.argument("job", required=False)
@click.option(
    "--at",
    metavar="TIME",
    help="Slots after this ISO 8601 time; without a zone in it, the app's zone is meant. Default: now.",
)
@click.option("--count", type=click.IntRange(min=1), default=10, show_default=True, help="How many.")
@json_option
@click.pass_context
@guarded
def next_slots(ctx: click.Context, job: str | None, at: str | None, count: int, as_json: bool) -> None:
    """The next slots of JOB, or of all jobs, ascending."""
    app = app_of(ctx)
    schedule = Schedule(app)
    after = SystemClock().wall() if at is None else _read_time(at, app)
    try:
        if job is not None:
            found = _of_one(schedule.job(job), after, count)
        else:
            found = list(itertools.islice(merged(schedule.jobs.values(), after, schedule.errors.append), count))
        _show(found, after, app, as_json)
    except OverflowError:
        raise ConfigurationError("these slots lie beyond the years 1 to 9999") from None
    if job is None:
        schedule.complain()


def _show(found: list[tuple[str, Millis]], after: Millis, app: Celery, as_json: bool) -> None:
    if as_json:
        show_json(named(found))
    else:
        rows = [(name, time_text(slot), _local(slot, app)) for name, slot in found]
        show_table(f"After {time_text(after)}", ("job", "slot", str(app.timezone)), rows)


def merged(
    jobs: Iterable[Job], after: Millis, report: Callable[[ConfigurationError], None]
) -> Iterator[tuple[str, Millis]]:
    """(job, slot) of all *jobs* strictly after *after*, ascending by slot, then by name.

    Each timetable is asked once at the start, and again only when its slot was taken.

    :param report: is told of a timetable that fails; its job has no further slots then.
    """
    heap: list[tuple[Millis, str, Job]] = []
    for job in jobs:
        try:
            slot = job.timetable.next(after)
        except Exception as error:
            report(_failed(job, error))
        else:
            if slot is not None:
                heap.append((slot, job.name, job))
    heapq.heapify(heap)
    while heap:
        slot, name, job = heap[0]
        yield name, slot
        try:
            following = job.timetable.next(slot)
        except Exception as error:
            report(_failed(job, error))
            following = None
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following, name, job))


def _of_one(job: Job, after: Millis, count: int) -> list[tuple[str, Millis]]:
    errors: list[ConfigurationError] = []
    found = list(itertools.islice(merged([job], after, errors.append), count))
    for error in errors:
        raise error
    return found


def _failed(job: Job, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"job {job.name!r}: {type(error).__name__}: {error}")


def _local(slot: Millis, app: Celery) -> str:
    return moment(slot).astimezone(app.timezone).isoformat(" ", "milliseconds" if slot % 1000 else "seconds")


def _read_time(text: str, app: Celery) -> Millis:
    """As the ``at`` of a job is read, so that its slot lies after every time before it."""
    try:
        # datetime.fromisoformat reads a trailing Z from Python 3.11 on only.
        when = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        if when.tzinfo is not None:
            return instant(when)
        return at_instant(when, zone_of(getattr(app.timezone, "key", "UTC")))
    except ValueError:
        raise ConfigurationError(
            f"--at takes an ISO 8601 time such as 2026-03-29T01:00:00Z or 2026-03-29T03:00:00+02:00, not {text!r}"
        ) from None
