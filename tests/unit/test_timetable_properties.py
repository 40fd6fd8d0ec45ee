"""Timetables against slow ways to the same answer: the minute scan of the oracle, croniter and Celery.

``ANARCHON_HYPOTHESIS=long`` runs many more examples, with new ones each time.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from celery.schedules import crontab
from croniter import CroniterBadDateError, croniter
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.oracle import expected_cron, expected_interval
from celery_anarchon.timetable import Cron, Interval, Timetable, at_instant, cron_from_fields, cron_from_text
from celery_anarchon.zones import WallClock

LONG = os.environ.get("ANARCHON_HYPOTHESIS") == "long"
HOUR, DAY = 3_600_000, 86_400_000
EPOCH = datetime(1970, 1, 1)
ZONES = (
    "Europe/Paris",
    "Europe/Dublin",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "America/Caracas",
    "Africa/Cairo",
    "Africa/Casablanca",
    "Australia/Lord_Howe",
    "Australia/Adelaide",
    "Pacific/Apia",
    "Pacific/Chatham",
    "Asia/Tehran",
    "Asia/Gaza",
    "Asia/Kolkata",
    "Antarctica/Casey",
    "UTC",
)
FIELD_NAMES = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
Fields = dict[str, set[int]]


def examples(number: int) -> settings:
    return settings(
        max_examples=number * 25 if LONG else number,
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def millis(*when: int) -> int:
    return (datetime(*when) - EPOCH) // timedelta(milliseconds=1)  # type: ignore[arg-type]


def offset_at(instant: int, zone: ZoneInfo) -> timedelta | None:
    return (EPOCH + timedelta(milliseconds=instant)).replace(tzinfo=timezone.utc).astimezone(zone).utcoffset()


@functools.cache
def changes(name: str) -> list[int]:
    """The instants from 2000 to 2037 at which the clock of a zone is changed, found without the code under test."""
    zone, found = ZoneInfo(name), []
    for day in range(millis(2000, 1, 1), millis(2038, 1, 1), DAY):
        low, high = day, day + DAY
        before = offset_at(low, zone)
        if before == offset_at(high, zone):
            continue
        while high - low > 1000:
            middle = (low + high) // 2000 * 1000
            low, high = (middle, high) if offset_at(middle, zone) == before else (low, middle)
        found.append(high)
    return found


def subsets(low: int, high: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(low, high), min_size=1, max_size=high - low + 1)


HOURS = st.one_of(
    st.just(set(range(24))),
    subsets(0, 23),
    st.sets(st.integers(0, 4), min_size=1),
    st.integers(2, 12).map(lambda step: set(range(0, 24, step))),
    st.integers(0, 23).map(lambda missing: set(range(24)) - {missing}),
)
MINUTES = st.one_of(subsets(0, 59), st.integers(1, 45).map(lambda step: set(range(0, 60, step))))


def days(low: int, high: int) -> st.SearchStrategy[set[int]]:
    every = set(range(low, high + 1))
    # Mostly all, or few days would ever match in a short window.
    return st.one_of(
        st.just(every), st.just(every), st.integers(low, high).map(lambda day: every - {day}), subsets(low, high)
    )


FIELDS: st.SearchStrategy[Fields] = st.fixed_dictionaries(
    {
        "minute": MINUTES,
        "hour": HOURS,
        "day_of_month": days(1, 31),
        "month_of_year": st.one_of(st.just(set(range(1, 13))), subsets(1, 12)),
        "day_of_week": days(0, 6),
    }
)
ZONE = st.sampled_from(sorted(available_timezones() - {"localtime", "Factory", "posixrules"}) if LONG else ZONES)


@st.composite
def windows(draw: st.DrawFn, longest: int = 60 * HOUR) -> tuple[str, int, int]:
    """(zone, after, until), mostly around a change of the clock; the ends to the millisecond."""
    zone = draw(ZONE)
    known = changes(zone)
    if known and draw(st.integers(0, 9)) > 0:
        centre = draw(st.sampled_from(known))
    else:
        centre = draw(st.integers(millis(2000, 1, 1), millis(2037, 12, 31)))
    after = centre + draw(
        st.one_of(st.integers(-30 * HOUR, 3 * HOUR), st.integers(-180, 180).map(lambda m: m * 60_000))
    )
    return zone, after, after + draw(st.integers(HOUR, longest))


def cron_of(fields: Fields, zone: str) -> Cron:
    try:
        return cron_from_fields(*(fields[name] for name in FIELD_NAMES), zone)
    except ConfigurationError:
        assume(False)
        raise


def walk(timetable: Timetable, after: int, until: int) -> list[int]:
    found: list[int] = []
    slot = timetable.next(after)
    while slot is not None and slot <= until:
        assert slot > after
        found.append(slot)
        after, slot = slot, timetable.next(slot)
    return found


# --- the scan ---------------------------------------------------------------------------------------------------------


@examples(220)
@given(FIELDS, windows(), st.data())
def test_slots_equal_the_scan(fields: Fields, window: tuple[str, int, int], data: st.DataObject) -> None:
    zone, after, until = window
    timetable = cron_of(fields, zone)
    expected = expected_cron(fields, zone, after, until)
    assert walk(timetable, after, until) == expected
    assert timetable.count(after, until) == len(expected)
    for slot in expected:
        assert timetable.next(slot - 1) == slot
        assert timetable.last(slot) == slot

    # Wherever one starts, and however one cuts.
    moment = data.draw(st.integers(after, until))
    later = [slot for slot in expected if slot > moment]
    earlier = [slot for slot in expected if slot <= moment]
    assert timetable.count(after, moment) == len(earlier)
    assert timetable.count(moment, until) == len(later)
    if later:
        assert timetable.next(moment) == later[0]
    if earlier:
        assert timetable.last(moment) == earlier[-1]


@pytest.mark.parametrize("zone", sorted(available_timezones()) if LONG else [*ZONES, "America/Noronha"])
def test_no_change_of_a_clock_is_missed(zone: str) -> None:
    """Noronha's clock was changed twice within a week, Casablanca's is within a Ramadan."""
    clock, at, found = WallClock(ZoneInfo(zone)), millis(2000, 1, 1) // 1000, []
    while at < millis(2038, 1, 1) // 1000:
        _, end, offset = clock.span_at(at)
        if clock.span_at(end)[2] != offset:
            found.append(end * 1000)
        at = end
    assert [change for change in found if change < millis(2038, 1, 1)] == changes(zone)


@pytest.mark.parametrize("hours", [set(range(24)), set(range(4)) | {23}], ids=["every-hour", "timed"])
@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("Europe/Paris", (2026, 3, 29, 1)),
        ("Europe/Paris", (2026, 10, 25, 1)),
        ("Africa/Cairo", (2026, 4, 23, 22)),
        ("Africa/Cairo", (2026, 10, 29, 21)),
        ("Australia/Lord_Howe", (2026, 4, 4, 15)),
        ("America/Sao_Paulo", (2018, 2, 18, 2)),
        ("Antarctica/Casey", (2018, 3, 10, 17)),
        ("Pacific/Apia", (2011, 12, 30, 10)),
    ],
)
def test_every_start_around_a_change(zone: str, change: tuple[int, ...], hours: set[int]) -> None:
    assert millis(*change) in changes(zone)
    fields = {
        "minute": {0, 10, 25, 50},
        "hour": hours,
        "day_of_month": set(range(1, 32)),
        "month_of_year": set(range(1, 13)),
        "day_of_week": set(range(7)),
    }
    timetable = cron_of(fields, zone)
    first, end = millis(*change) - 6 * HOUR, millis(*change) + 8 * HOUR
    slots = expected_cron(fields, zone, first - 2 * DAY, end + 2 * DAY)
    for start in range(first, end, 7 * 60_000):
        later = [slot for slot in slots if slot > start]
        assert timetable.next(start) == later[0]
        assert timetable.last(start) == [slot for slot in slots if slot <= start][-1]
        assert timetable.count(start, end) == len([slot for slot in later if slot <= end])


@examples(40)
@given(FIELDS, subsets(0, 59), windows(longest=3 * HOUR))
def test_seconds_equal_the_scan(fields: Fields, seconds: set[int], window: tuple[str, int, int]) -> None:
    zone, after, until = window
    sets = (*(fields[name] for name in FIELD_NAMES), seconds)
    # No field starts with a star, so the day fields are joined by OR: some day always matches.
    timetable = cron_from_text(" ".join(",".join(map(str, values)) for values in sets), zone, seconds=True)
    expected = expected_cron({**fields, "second": seconds}, zone, after, until, either=True)
    assert walk(timetable, after, until) == expected
    assert timetable.count(after, until) == len(expected)
    last = timetable.last(until)
    assert last == expected[-1] if expected else last is None or last <= after


@pytest.mark.parametrize(
    ("zone", "when"),
    [
        ("America/Juneau", (1867, 10, 18)),
        ("Asia/Manila", (1844, 12, 31)),
        ("Europe/Paris", (1911, 3, 10)),
        ("Kwajalein", (1993, 8, 21)),
    ],
)
@pytest.mark.parametrize("hour", [set(range(24)), {0, 9, 13, 23}])
def test_odd_old_clocks_equal_the_scan(zone: str, when: tuple[int, int, int], hour: set[int]) -> None:
    """A day repeated, a day skipped, offsets with seconds: the rules have no special cases, so neither may the code."""
    fields = {
        "minute": {0, 30},
        "hour": hour,
        "day_of_month": set(range(1, 32)),
        "month_of_year": set(range(1, 13)),
        "day_of_week": set(range(7)),
    }
    after, until = millis(*when) - 30 * HOUR, millis(*when) + 40 * HOUR
    timetable = cron_of(fields, zone)
    expected = expected_cron(fields, zone, after, until)
    assert walk(timetable, after, until) == expected
    assert timetable.count(after, until) == len(expected)
    assert [timetable.last(slot + 1) for slot in expected] == expected


@examples(100)
@given(st.integers(100, 10 * DAY), st.integers(-DAY, DAY), st.integers(-DAY, millis(2100, 1, 1)), st.integers(0, 300))
def test_intervals_equal_the_scan(every: int, offset: int, after: int, widths: int) -> None:
    until = after + every * widths // 10
    timetable = Interval(every, offset)
    expected = expected_interval(every, offset, after, until)
    assert expected == [slot for slot in expected if (slot - offset) % every == 0 and after < slot <= until]
    assert walk(timetable, after, until) == expected
    assert timetable.count(after, until) == len(expected)
    assert timetable.last(until) == (expected[-1] if expected else timetable.next(after) - every)


@examples(150)
@given(ZONE, st.data())
def test_a_naive_datetime_is_the_first_instant_that_shows_it(zone: str, data: st.DataObject) -> None:
    known = changes(zone) or [millis(2020, 1, 1)]
    change = data.draw(st.sampled_from(known))
    info = ZoneInfo(zone)

    def local(second: int) -> datetime:
        return (
            (EPOCH + timedelta(seconds=second))
            .replace(tzinfo=timezone.utc)
            .astimezone(info)
            .replace(tzinfo=None, fold=0)
        )

    when = local(change // 1000 - 1) + timedelta(seconds=data.draw(st.integers(-5400, 5400)))
    instant = at_instant(when, info)
    assert instant % 1000 == 0
    assert local(instant // 1000) >= when
    before = range(instant // 1000 - 26 * 3600, instant // 1000, 60)
    assert all(local(second) < when for second in before)
    assert local(instant // 1000 - 1) < when


# --- what holds everywhere --------------------------------------------------------------------------------------------


@examples(150)
@given(FIELDS, ZONE, st.integers(millis(1890, 1, 1), millis(2500, 1, 1)))
def test_next_and_last_are_inverse(fields: Fields, zone: str, moment: int) -> None:
    timetable = cron_of(fields, zone)
    slot = timetable.next(moment)
    assert slot is not None and slot > moment
    assert timetable.next(slot - 1) == slot
    assert timetable.last(slot) == slot
    previous = timetable.last(slot - 1)
    assert previous is not None and previous <= moment
    assert timetable.next(previous) == slot
    assert timetable.count(previous, slot) == 1
    assert timetable.count(previous, slot - 1) == 0


@examples(40)
@given(FIELDS, ZONE, st.integers(millis(1995, 1, 1), millis(2040, 1, 1)), st.integers(1, 800))
def test_counts_equal_the_walk_over_years(fields: Fields, zone: str, after: int, days: int) -> None:
    fields = {**fields, "minute": {min(fields["minute"]), max(fields["minute"])}}
    timetable = cron_of(fields, zone)
    until = after + days * DAY
    assert timetable.count(after, until) == len(walk(timetable, after, until))


@examples(100)
@given(FIELDS, ZONE, st.data())
def test_spelling_never_matters(fields: Fields, zone: str, data: st.DataObject) -> None:
    """Equal sets give one and the same timetable: lists, ranges and steps, in any order, with repetitions."""

    def spelled(values: set[int]) -> str:
        items = [str(value) for value in values]
        runs = [(low, high) for low in values for high in values if low < high and set(range(low, high + 1)) <= values]
        if runs:
            items += [f"{low}-{high}" for low, high in data.draw(st.lists(st.sampled_from(runs), max_size=3))]
        return ",".join(data.draw(st.permutations(items)))

    # One day field is left to the star: cron text joins two by OR.
    fields = {**fields, "day_of_week": set(range(7))}
    plain = cron_of(fields, zone)
    names = ("minute", "hour", "day_of_month", "month_of_year")
    text = " ".join(spelled(fields[name]) for name in names) + " *"
    assert cron_from_text(text, zone) is plain
    assert cron_from_text(text.replace(" *", "  ?"), ZoneInfo(zone)).key == plain.key


@examples(200)
@given(FIELDS, FIELDS, ZONE, st.integers(millis(2000, 1, 1), millis(2030, 1, 1)))
def test_equal_keys_mean_equal_slots(one: Fields, other: Fields, zone: str, moment: int) -> None:
    first, second = cron_of(one, zone), cron_of({**one, "hour": other["hour"]}, zone)
    assert (first.key == second.key) == (one["hour"] == other["hour"])
    if first.key == second.key:
        assert first.next(moment) == second.next(moment)


# --- other people's arithmetic ----------------------------------------------------------------------------------------


def texts() -> st.SearchStrategy[str]:
    """Cron text of five fields, in all the ways that croniter reads it."""

    def field(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
        number = st.integers(low, high)
        value = st.one_of(number.map(str), st.sampled_from(names)) if names else number.map(str)
        item = st.one_of(
            value,
            st.tuples(value, value).map("-".join),
            st.tuples(number, st.integers(1, high + 3)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
            st.tuples(value, value, st.integers(1, 7)).map(lambda three: f"{three[0]}-{three[1]}/{three[2]}"),
            st.integers(1, high + 3).map(lambda step: f"*/{step}"),
        )
        return st.one_of(st.just("*"), st.lists(item, min_size=1, max_size=3).map(",".join))

    months = ("jan", "Feb", "MAR", "jun", "dec")
    weekdays = ("sun", "Mon", "WED", "sat")
    date = st.one_of(
        field(1, 31),
        st.sampled_from(["L", "l,15", "15W", "w1", "31w", "?", "1-7", "*/2"]),
    )
    weekday = st.one_of(
        field(0, 7, weekdays), st.sampled_from(["L5", "l0", "1#2", "mon-fri#1", "7#5,L2", "*", "*", "?"])
    )
    return st.tuples(field(0, 59), field(0, 23), date, field(1, 12, months), weekday).map(" ".join)


@examples(300)
@given(texts(), st.integers(millis(1995, 1, 1) // 1000, millis(2060, 1, 1) // 1000))
def test_cron_text_means_what_croniter_says(text: str, second: int) -> None:
    try:
        timetable = cron_from_text(text, "UTC")
    except ConfigurationError:
        return
    start: Any = EPOCH + timedelta(seconds=second)
    walker = croniter(text, start, ret_type=datetime, implement_cron_bug=True, max_years_between_matches=500)
    found, expected = [], []
    instant: int | None = second * 1000
    for _ in range(8):
        expected.append((walker.get_next() - EPOCH) // timedelta(milliseconds=1))
        assert instant is not None
        instant = timetable.next(instant)
        found.append(instant)
    assert found == expected


@examples(300)
@given(texts())
def test_refused_text_is_unclear_or_never_due(text: str) -> None:
    """What croniter reads and this does not is refused for a reason of ours."""
    try:
        cron_from_text(text, "UTC")
    except ConfigurationError as error:
        refusal = str(error)
    else:
        return
    assert "\n" not in refusal
    assert repr(text) in refusal
    try:
        slot = croniter(text, 0, implement_cron_bug=True, max_years_between_matches=500).get_next()
    except (ValueError, CroniterBadDateError):
        return
    assert slot
    assert any(reason in refusal for reason in ("all values to some cron tools", "cron tools disagree", "mixes"))


@examples(300)
@given(st.text(alphabet="0123456789*/-,#LWHR?@ jamonsutbegd\u00a0\t", max_size=30), st.booleans())
def test_junk_is_refused_in_one_line_or_read(text: str, seconds: bool) -> None:
    refusal = ""
    try:
        cron_from_text(text, "UTC", seconds=seconds)
    except ConfigurationError as error:
        refusal = str(error)
    assert "\n" not in refusal


class NamedTimes:
    """The times at which stock Celery would run a crontab in UTC, where its arithmetic is exact."""

    def __init__(self, schedule: crontab) -> None:
        self.schedule = schedule

    def after(self, moment: datetime) -> datetime:
        last, delta, _ = self.schedule.remaining_delta(moment, tz=timezone.utc)
        return last + delta  # type: ignore[no-any-return]


@examples(80)
@given(FIELDS, st.integers(millis(2000, 1, 1) // 1000, millis(2060, 1, 1) // 1000))
def test_in_utc_celery_agrees(fields: Fields, second: int) -> None:
    timetable = cron_of(fields, "UTC")
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=second)
    celery = NamedTimes(crontab(**fields, nowfun=lambda: moment))
    instant: int | None = second * 1000
    for _ in range(6):
        assert instant is not None
        moment, instant = celery.after(moment), timetable.next(instant)
        assert instant == (moment.replace(tzinfo=None) - EPOCH) // timedelta(milliseconds=1)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["*/7 * * * *", "30 2 * * *", "0 0 29 2 *", "15 3 L * *", "0 1 * * 1#2"])
def test_threads_share_a_timetable(text: str) -> None:
    timetable = cron_from_text(text, "Europe/Paris")
    starts = [millis(2026, 3, 20) + step * 7 * HOUR for step in range(250)]
    alone = [
        (timetable.next(start), timetable.last(start), timetable.count(start, start + 40 * DAY)) for start in starts
    ]
    # A fresh one, so that the threads race for its caches too.
    fresh = Cron(timetable.fields, ZoneInfo.no_cache("Europe/Paris"))
    answers: list[list[Any]] = [[] for _ in range(4)]

    def ask(mine: list[Any]) -> None:
        for start in starts:
            mine.append((fresh.next(start), fresh.last(start), fresh.count(start, start + 40 * DAY)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask, args=(mine,)) for mine in answers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(mine == alone for mine in answers)
