"""``celery anarchon next``: which slots a schedule names. Needs no store."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, TypeGuard
from zoneinfo import ZoneInfo

import click
from celery import Celery
from celery.bin.base import CeleryCommand
from click.core import ParameterSource

from celery_anarchon.cli.common import NONE, Schedule, app_of, guarded, json_option, show_json, show_table
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.timetable import Chain, Cron, Timetable, at_instant, zone_of
from celery_anarchon.verdict import named
from celery_anarchon.wire import instant, moment, read_datetime, time_text
from celery_anarchon.zones import DAY, LAST, Change, changes, wall_clock

_REACH = 1_200 * DAY
"""How far ahead clock changes are looked for: zones that change their clock do so twice a year."""

_LISTED = 3
"""How many times, or slots of one job, a table lists before it counts the others."""


@click.command("next", cls=CeleryCommand)
@click.argument("job", required=False)
@click.option(
    "--at",
    metavar="TIME",
    help="Slots after this ISO 8601 time; without a zone in it, the app's zone is meant. Default: now.",
)
@click.option("--count", type=click.IntRange(min=1), default=10, show_default=True, help="How many.")
@click.option(
    "--around-dst",
    is_flag=True,
    help="Instead: the next two clock changes of each zone in use, and the slots that they move, merge or show twice.",
)
@json_option
@click.pass_context
@guarded
def next_slots(
    ctx: click.Context, job: str | None, at: str | None, count: int, around_dst: bool, as_json: bool
) -> None:
    """The next slots of JOB, or of all jobs, ascending."""
    if around_dst and ctx.get_parameter_source("count") is not ParameterSource.DEFAULT:
        raise ConfigurationError("--around-dst shows two clock changes of each zone, and takes no --count")
    app = app_of(ctx)
    schedule = Schedule(app)
    after = SystemClock().wall() if at is None else _read_time(at, app)
    jobs = schedule.jobs if job is None else {job: schedule.job(job)}
    report = schedule.errors.append if job is None else _refuse
    try:
        if around_dst:
            _show_changes(jobs.values(), after, report, as_json)
        else:
            found = list(itertools.islice(merged(jobs.values(), after, report), count))
            _show(found, jobs, after, app, as_json)
    except OverflowError:
        raise ConfigurationError("these slots lie beyond the years 1 to 9999") from None
    if job is None:
        schedule.complain()


def _refuse(error: ConfigurationError) -> None:
    """What went wrong with the one job that was asked for is the whole answer."""
    raise error


# --- slots ------------------------------------------------------------------------------------------------------------


def _show(found: list[tuple[str, Millis]], jobs: Mapping[str, Job], after: Millis, app: Celery, as_json: bool) -> None:
    if as_json:
        show_json(named(found))
        return
    app_zone = _app_zone(app)
    rows = []
    for name, slot in found:
        timetable = jobs[name].timetable
        zone = _zone(timetable) or app_zone
        touch = touched(timetable, slot)
        rows.append((name, time_text(slot), _local(slot, zone), str(zone), "" if touch is None else touch.words))
    show_table(f"After {time_text(after)}", ("job", "slot", "local time", "zone", "clock change"), rows)
    for name, job in sorted(jobs.items()):
        if isinstance(job.timetable, Chain):
            click.echo(f"No slots are known beforehand: {name}, because {job.timetable.reason}")


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


def _failed(job: Job, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"job {job.name!r}: {type(error).__name__}: {error}")


# --- clock changes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Touch:
    """That a clock change has a say in where a slot lies, and which."""

    change: Change
    words: str


def touched(timetable: Timetable, slot: Millis) -> Touch | None:
    """What a clock change did to a slot of a timed crontab: the clock skips what was written, or shows it twice. None
    for any other slot, and for jobs that follow real time."""
    if not _is_timed(timetable):
        return None
    zone, fields, instant = timetable.zone, timetable.fields, slot // 1000
    clock = wall_clock(zone)
    before, shown = clock.latest_shown(instant - 1), clock.latest_shown(instant)
    skipped = fields.count(before, shown - 1)
    if skipped:
        (change,) = changes(zone, instant, instant + 1)
        total = fields.count(before, shown)
        written, at = [], before
        for _ in range(min(total, _LISTED)):
            following = fields.after(at)
            assert following is not None
            written.append(_clock_text(following, shown))
            at = following
        if total == 1:
            return Touch(change, f"moved: the clock skips {written[0]}")
        end = f"{total - _LISTED} more" if total > _LISTED else written.pop()
        return Touch(change, f"merged: {', '.join(written)} and {end} are one slot")
    for change in changes(zone, instant + 1, instant + DAY):
        if change.at + change.after <= shown < change.at + change.before:
            return Touch(change, f"first of two: the clock shows {_clock_text(shown, shown)} again")
    return None


def _is_timed(timetable: Timetable) -> TypeGuard[Cron]:
    return isinstance(timetable, Cron) and not timetable.fields.every_hour


def _show_changes(
    jobs: Iterable[Job], after: Millis, report: Callable[[ConfigurationError], None], as_json: bool
) -> None:
    by_zone: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.name):
        zone = _zone(job.timetable)
        if zone is not None:
            by_zone.setdefault(zone.key, []).append(job)
    start = after // 1000 + 1
    until = min(start + _REACH, LAST)
    coming = {name: list(itertools.islice(changes(zone_of(name), start, until), 2)) for name in by_zone}
    shown: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for change, name in sorted(
        ((change, name) for name, found in coming.items() for change in found), key=lambda each: (each[0].at, each[1])
    ):
        touches = [(job.name, _touches(job, change, report)) for job in by_zone[name]]
        touches = [(job, found) for job, found in touches if found]
        at = time_text(change.at * 1000)
        shown.append(
            {
                "zone": name,
                "at": at,
                "from": _offset_text(change.before),
                "to": _offset_text(change.after),
                "jobs": [{"job": job, "slots": [time_text(slot) for slot, _ in found]} for job, found in touches],
            }
        )
        rows.extend(_change_rows((name, at, _jump_text(change)), touches))
    if as_json:
        show_json(shown)
        return
    show_table(f"Clock changes after {time_text(after)}", ("zone", "at", "clock", "job", "slot", ""), rows)
    still = sorted(name for name, found in coming.items() if not found)
    if still:
        click.echo(f"No change until {time_text(until * 1000)[:10]}: {', '.join(still)}")


def _touches(job: Job, change: Change, report: Callable[[ConfigurationError], None]) -> list[tuple[Millis, str]]:
    """The slots of *job* that *change* moved, merged or shows twice, with the words for it."""
    found: list[tuple[Millis, str]] = []
    if not _is_timed(job.timetable):
        return found
    # The slots of a gap lie at its end, those of a repeated stretch in its first pass.
    at = (change.at - max(change.before - change.after, 0)) * 1000 - 1
    try:
        while True:
            slot = job.timetable.next(at)
            if slot is None or slot > change.at * 1000:
                return found
            touch = touched(job.timetable, slot)
            if touch is not None and touch.change == change:
                found.append((slot, touch.words))
            at = slot
    except Exception as error:
        report(_failed(job, error))
        return found


def _change_rows(
    head: tuple[str, ...], touches: list[tuple[str, list[tuple[Millis, str]]]]
) -> Iterator[tuple[str, ...]]:
    if not touches:
        yield (*head, NONE, NONE, "")
    for job, found in touches:
        for slot, words in found[:_LISTED]:
            yield (*head, job, time_text(slot), words)
        if len(found) > _LISTED:
            yield (*head, job, f"... and {len(found) - _LISTED} more", "")


# --- zones and times --------------------------------------------------------------------------------------------------


def _zone(timetable: Timetable) -> ZoneInfo | None:
    zone = getattr(timetable, "zone", None)
    return zone if isinstance(zone, ZoneInfo) else None


def _app_zone(app: Celery) -> tzinfo:
    """The app's zone, for showing: by its name, as slots are computed, where it has one that every host knows."""
    zone: tzinfo = app.timezone
    try:
        return zone_of(getattr(zone, "key", ""))
    except ConfigurationError:
        return zone


def _local(slot: Millis, zone: tzinfo) -> str:
    return moment(slot).astimezone(zone).isoformat(" ", "milliseconds" if slot % 1000 else "seconds")


def _clock_text(local: int, beside: int) -> str:
    """A local time, with its date if that is not the one of *beside*."""
    shown = moment(local * 1000)
    time = shown.strftime("%H:%M:%S" if local % 60 else "%H:%M")
    return time if local // DAY == beside // DAY else f"{shown:%Y-%m-%d} {time}"


def _jump_text(change: Change) -> str:
    before, after = change.at + change.before, change.at + change.after
    return f"{moment(before * 1000):%Y-%m-%d} {_clock_text(before, before)} -> {_clock_text(after, before)}"


def _offset_text(offset: int) -> str:
    minutes, seconds = divmod(abs(offset), 60)
    text = f"{'-' if offset < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"
    return f"{text}:{seconds:02}" if seconds else text


def _read_time(text: str, app: Celery) -> Millis:
    """As the ``at`` of a job is read, so that its slot lies after every time before it."""
    try:
        when = read_datetime(text)
        if when.tzinfo is not None:
            return instant(when)
        return at_instant(when, zone_of(getattr(app.timezone, "key", "UTC")))
    except ValueError:
        raise ConfigurationError(
            f"--at takes an ISO 8601 time such as 2026-03-29T01:00:00Z or 2026-03-29T03:00:00+02:00, not {text!r}"
        ) from None
