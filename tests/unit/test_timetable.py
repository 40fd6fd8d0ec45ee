"""Timetables by example, and what is refused in which words."""

from __future__ import annotations

import importlib.resources
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from celery_anarchon.crontext import fields_of_text
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.timetable import (
    At,
    Cron,
    Interval,
    Timetable,
    at_instant,
    cron_from_fields,
    cron_from_text,
    zone_of,
)
from celery_anarchon.zones import WallClock

ALL: dict[str, Any] = {
    "minute": set(range(60)),
    "hour": set(range(24)),
    "day_of_month": set(range(1, 32)),
    "month_of_year": set(range(1, 13)),
    "day_of_week": set(range(7)),
}
DAY = 86_400_000


def millis(text: str) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)


def walk(timetable: Timetable, after: str, number: int) -> list[str]:
    found, instant = [], millis(after)
    for _ in range(number):
        following = timetable.next(instant)
        if following is None:
            break
        instant = following
        found.append((datetime(1970, 1, 1) + timedelta(milliseconds=instant)).isoformat(timespec="minutes"))
    return found


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- interval and at --------------------------------------------------------------------------------------------------


def test_an_interval_is_a_grid_from_the_epoch() -> None:
    timetable = Interval(3_600_000, 900_000)
    assert walk(timetable, "2026-01-01T00:15", 2) == ["2026-01-01T01:15", "2026-01-01T02:15"]
    assert timetable.last(millis("2026-01-01T00:15")) == millis("2026-01-01T00:15")
    assert timetable.last(millis("2026-01-01T00:15") - 1) == millis("2025-12-31T23:15")
    assert timetable.count(millis("2026-01-01T00:15"), millis("2027-01-01T00:15")) == 365 * 24
    assert timetable.count(5, 5) == timetable.count(10**12, 0) == 0


def test_equal_grids_have_equal_keys() -> None:
    assert Interval(60_000, -1).key == Interval(60_000, 59_999).key == Interval(60_000, 119_999).key
    assert len({Interval(60_000).key, Interval(60_000, 1).key, Interval(61_000).key, At(60_000).key}) == 4


@pytest.mark.parametrize("every", [99, 0, -60_000])
def test_an_interval_too_short_is_refused(every: int) -> None:
    assert refusal(Interval, every) == f"an interval of {every / 1000:g} s is too short; the shortest is 0.1 s"
    assert Interval(100).next(0) == 100


def test_at_has_one_slot() -> None:
    timetable = At(1000)
    assert [timetable.next(instant) for instant in (999, 1000)] == [1000, None]
    assert [timetable.last(instant) for instant in (999, 1000, 10**15)] == [None, 1000, 1000]
    assert [timetable.count(*pair) for pair in ((0, 999), (999, 1000), (1000, 2000), (2000, 0))] == [0, 1, 0, 0]
    assert timetable.instant == 1000


def test_at_instant_is_never_before_what_was_written() -> None:
    paris = zone_of("Europe/Paris")
    assert at_instant(datetime(2026, 6, 1, 12, 0, 0, 1), paris) == millis("2026-06-01T10:00") + 1
    assert at_instant(datetime(2026, 6, 1, 12, 0, 0, 5000), paris) == millis("2026-06-01T10:00") + 5
    assert at_instant(datetime(2026, 6, 1, 12, 0, 0, 1, tzinfo=timezone.utc), paris) == millis("2026-06-01T12:00") + 1
    # In the gap all that was written is the gap's end.
    assert at_instant(datetime(2026, 3, 29, 2, 30, 0, 5000), paris) == millis("2026-03-29T01:00")


def test_at_instant_reads_an_aware_datetime_by_its_fold_and_a_naive_one_without() -> None:
    paris = zone_of("Europe/Paris")
    first, second = (datetime(2026, 10, 25, 2, 30, fold=fold) for fold in (0, 1))
    assert at_instant(first.replace(tzinfo=paris), paris) == millis("2026-10-25T00:30")
    assert at_instant(second.replace(tzinfo=paris), paris) == millis("2026-10-25T01:30")
    assert at_instant(first, paris) == at_instant(second, paris) == millis("2026-10-25T00:30")


def test_at_instant_beyond_the_calendar_is_refused() -> None:
    latest, utc = datetime.max.replace(microsecond=999_000), zone_of("UTC")
    assert at_instant(latest, utc) == at_instant(latest.replace(tzinfo=timezone.utc), utc) == 253_402_300_799_999
    assert "beyond the years" in refusal(at_instant, datetime(9999, 12, 31, 23), zone_of("America/New_York"))
    assert "beyond the years" in refusal(at_instant, datetime(1, 1, 1), zone_of("Asia/Tokyo"))


# --- cron -------------------------------------------------------------------------------------------------------------


def test_equal_definitions_share_one_object() -> None:
    quarters = cron_from_text("*/15 0-23 * * *", "Europe/Paris")
    assert cron_from_text("0,15,30,45 * * * *", zone_of("Europe/Paris")) is quarters
    assert (
        cron_from_fields({45, 30, 15, 0}, range(24), range(1, 32), range(1, 13), range(7), "Europe/Paris") is quarters
    )
    assert cron_from_text("*/15 * * * *", "Europe/Berlin") is not quarters


def test_keys_tell_meanings_apart() -> None:
    texts = [
        "0 0 13 * 5",
        "0 0 13 * *",
        "0 0 * * 5",
        "0 0 * * L5",
        "0 0 * * 5#4",
        "0 0 L * *",
        "0 0 13W * *",
        "0 0 13 1-11 *",
        "* 0 13 * *",
        "0 * 13 * *",
        "0 0 13 * * 0,1",
        "0 0 13 * * 0 2030",
    ]
    keys = {cron_from_text(text, "UTC", seconds=True).key for text in texts}
    keys.add(cron_from_fields({0}, {0}, {13}, ALL["month_of_year"], {5}, "UTC").key)
    keys.add(cron_from_text(texts[0], "Europe/Paris").key)
    assert len(keys) == len(texts) + 2


def test_a_key_is_pinned() -> None:
    """Stores hold its hash: another spelling of it would make every job a new definition."""
    key = cron_from_text("*/20 9-17,3 L,1 jan * 0,30 2030", "Europe/Paris", seconds=True).key
    assert key == "cron 0,20,40 3,9-17 1,L 1 * 0,30 2030 and Europe/Paris"
    assert cron_from_text("0 0 13 * 5", "UTC").key == "cron 0 0 13 * 5 0 * or UTC"
    assert cron_from_text("0 0 15W * *", "UTC").key == "cron 0 0 15W * * 0 * and UTC"
    assert cron_from_text("0 0 * * L5,1#2", "UTC").key == "cron 0 0 * * 1#2,5#L 0 * and UTC"
    assert Interval(60_000, 1).key == "interval 60000 1"
    assert At(5).key == "at 5"


def test_an_or_that_holds_every_day_is_every_day() -> None:
    assert cron_from_text("0 0 1-31 * 5", "UTC") is cron_from_text("0 0 * * *", "UTC")
    assert cron_from_text("0 0 13 * 0-7", "UTC") is cron_from_text("0 0 * * *", "UTC")


@pytest.mark.parametrize(
    ("text", "zone", "after", "slots"),
    [
        ("30 2 * * *", "Europe/Paris", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:30"]),
        ("30 2 * * *", "Europe/Paris", "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
        ("0,30 2 * * *", "Europe/Paris", "2026-03-28T12:00", ["2026-03-29T01:00", "2026-03-30T00:00"]),
        ("30 * * * *", "Europe/Paris", "2026-10-25T00:00", ["2026-10-25T00:30", "2026-10-25T01:30"]),
        ("30 0-22 * * *", "Europe/Paris", "2026-10-25T00:00", ["2026-10-25T00:30", "2026-10-25T02:30"]),
        ("0 12 30 12 *", "Pacific/Apia", "2011-01-01T00:00", ["2011-12-30T10:00", "2012-12-29T22:00"]),
        ("59 23 31 12 *", "UTC", "2026-12-31T23:58", ["2026-12-31T23:59", "2027-12-31T23:59"]),
        ("0 0 29 2 *", "Asia/Tokyo", "2096-02-28T15:00", ["2104-02-28T15:00"]),
        ("30 2 * * 0", "Europe/Paris", "2060-03-27T12:00", ["2060-03-28T01:00", "2060-04-04T00:30"]),
        ("0 0 5W * *", "UTC", "2026-03-31T12:00", ["2026-04-06T00:00", "2026-05-05T00:00", "2026-06-05T00:00"]),
        ("0 0 31W * *", "UTC", "2026-05-01T00:00", ["2026-05-29T00:00", "2026-06-30T00:00", "2026-07-31T00:00"]),
        ("0 0 1W 8 *", "UTC", "2026-01-01T00:00", ["2026-08-03T00:00", "2027-08-02T00:00"]),
        # Clocks set back over midnight, and every hour of one day only: what is far away in local time comes again.
        ("30 * 17 2 *", "America/Sao_Paulo", "2018-02-18T01:45", ["2018-02-18T02:30", "2019-02-17T03:30"]),
        ("0 0 L * *", "UTC", "2028-01-31T12:00", ["2028-02-29T00:00", "2028-03-31T00:00"]),
    ],
)
def test_slots_by_example(text: str, zone: str, after: str, slots: list[str]) -> None:
    timetable = cron_from_text(text, zone)
    assert walk(timetable, after, len(slots)) == slots
    assert timetable.count(millis(after), millis(slots[-1])) == len(slots)


def test_a_day_that_is_shown_again_after_its_end() -> None:
    # Havana, 1 November 2026, 01:00 is 00:00 again at 05:00Z: at 00:10 the latest slot reads 00:30.
    havana = cron_from_text("30 * 1 11 *", "America/Havana")
    assert havana.last(millis("2026-11-01T05:10")) == millis("2026-11-01T04:30")
    # Dhaka, 31 December 2009, 24:00 is 23:00 again: the year is shown again after its end.
    dhaka = cron_from_text("30 * * * * 0 2009", "Asia/Dhaka", seconds=True)
    assert walk(dhaka, "2009-12-31T16:45", 3) == ["2009-12-31T17:30"]


def test_years_end() -> None:
    timetable = cron_from_text("0 0 1 1 * 0 2027-2028", "America/New_York", seconds=True)
    assert walk(timetable, "2026-06-01T00:00", 5) == ["2027-01-01T05:00", "2028-01-01T05:00"]
    assert timetable.last(millis("2026-06-01T00:00")) is None
    assert timetable.last(millis("2090-06-01T00:00")) == millis("2028-01-01T05:00")
    assert timetable.count(millis("1990-01-01T00:00"), millis("2090-01-01T00:00")) == 2
    hourly = cron_from_text("0 * * * * 0 2027", "America/New_York", seconds=True)
    assert hourly.count(millis("1990-01-01T00:00"), millis("2090-01-01T00:00")) == 8760
    assert hourly.next(millis("2028-01-01T04:00")) is None
    assert hourly.last(millis("2090-01-01T00:00")) == millis("2028-01-01T04:00")
    assert hourly.last(millis("2027-01-01T04:59")) is None


@pytest.mark.parametrize("text", ["* * * * *", "30 2 * * *"])
def test_the_ends_of_time_are_quiet(text: str) -> None:
    timetable = cron_from_text(text, "Europe/Paris")
    for instant in (-(10**17), 10**17):
        assert timetable.count(instant, instant + DAY) == 0
    assert timetable.next(10**17) is None
    assert timetable.last(-(10**17)) is None
    first, last = timetable.next(-(10**17)), timetable.last(10**17)
    assert first is not None and first < millis("0003-01-01T00:00")
    assert last is not None and last > millis("9998-01-01T00:00")
    assert timetable.next(last) is None
    assert timetable.last(first - 1) is None


def test_counting_and_the_last_slot_do_not_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    timetable = cron_from_text("* * * * *", "Europe/Paris")
    asked = 0

    def counted(self: WallClock, instant: int, original: Any = WallClock.span_at) -> Any:
        nonlocal asked
        asked += 1
        return original(self, instant)

    monkeypatch.setattr(WallClock, "span_at", counted)
    assert timetable.count(millis("2026-01-01T00:00"), millis("2036-01-01T00:00")) == 3652 * 1440
    assert timetable.last(millis("2036-01-01T00:00") + 59_999) == millis("2036-01-01T00:00")
    assert asked < 100


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 0 31 2 *", "no date ever matches: day of month 31, month 2, day of week *; correct the day or the month"),
        ("0 0 30,31 2 *", "no date ever matches"),
        ("0 0 31 4,6,9,11 *", "no date ever matches"),
        ("0 0 */31 * 1#5", "no date ever matches"),
        ("0 0 29 2 * 0 2027", "no date ever matches: day of month 29, month 2, day of week *, year 2027"),
        ("R 3 * * *", "minute 'R' is drawn by each program for itself (R)"),
        ("0 r(0-5) * * *", "hour 'R(0-5)' is drawn"),
        ("H/15 * * * *", "needs a name to hash (H); write the number"),
        ("@reboot", "a start is not a slot"),
        ("@every 5m", 'use every("5m")'),
        ("@fortnightly", "is not known; aliases are @hourly"),
        ("1-1 * * * *", "minute '1-1' is all values to some cron tools and one value to others; write '*' or '1'"),
        ("0 0 * jan-jan *", "month 'jan-jan' is all values"),
        ("0 0 * jan-1 *", "month 'jan-1' is all values"),
        ("0 0 * * sun-sun", "day of week 'sun-sun' is all values"),
        ("0 0 * * 7-0/2", "day of week '7-0/2' is all values"),
        ("0 5,07-7 * * *", "hour '07-7' is all values"),
        ("0 0 12 * * ?", "has 6 fields; write five, or pass seconds=True"),
        ("0 0 12 * * * 2030", "has 7 fields; write five, or pass seconds=True"),
        ("* * * *", "has 4 fields; write five: minute, hour, day of month, month, day of week"),
        ("", "has 0 fields"),
        ("60 * * * *", "minute '60' is not valid; it takes 0-59"),
        ("0 24 * * *", "hour '24' is not valid; it takes 0-23"),
        ("0 0 0 * *", "day of month '0' is not valid; it takes 1-31"),
        ("0 0 * 13 *", "month '13' is not valid; it takes 1-12"),
        ("0 0 * * 8", "day of week '8' is not valid; it takes 0-7 (0 and 7 are Sunday)"),
        ("0 0 * * monday", "day of week 'monday' is not valid"),
        ("*/0 * * * *", "minute '*/0' is not valid"),
        ("0 0 * * 5L", "day of week '5l' is not valid"),
        ("0 0 LW * *", "day of month 'lw' is not valid"),
        ("0 0 15W,20 * *", "day of month '15w,20' is not valid"),
        ("0 0 * * 1,1#2", "mixes numbered and plain days"),
        ("0 0 13 * 5#2", "cron tools disagree when one of them has '#', 'W' or the last weekday; write two jobs"),
        ("0 0 15W * 1", "cron tools disagree"),
        ("0\u00a00 * * *", "has 4 fields"),
    ],
)
def test_text_is_refused_with_words(text: str, words: str) -> None:
    message = refusal(cron_from_text, text, "UTC", seconds=text.endswith("2027"))
    assert words in message
    assert message.startswith(f"cron text {text!r}")


def test_what_is_not_text_is_refused() -> None:
    for wrong in (None, 5, ["0 0 * * *"], b"0 0 * * *"):
        assert "cron text is text such as" in refusal(cron_from_text, wrong, "UTC")


@pytest.mark.parametrize(
    "text",
    [
        "0 0 * * 0-7",
        "0 0 * * 0-7/2",
        "0 0 * * sun-7",
        "0 0 */2 * 1#1",
        "0 0 L * 5",
        "0 0 31 2 1",
        "@Daily",
        " 0  0\t* * * ",
    ],
)
def test_text_that_is_clear_is_read(text: str) -> None:
    assert isinstance(cron_from_text(text, "UTC"), Cron)


def test_seconds_allow_five_fields_too() -> None:
    assert fields_of_text("0 3 * * *", seconds=True) == fields_of_text("0 3 * * *")
    assert fields_of_text("0 3 * * * 0", seconds=True) == fields_of_text("0 3 * * *")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"minute": set()}, "minute is empty"),
        ({"hour": {24}}, "hour holds 24; it takes whole numbers from 0 to 23"),
        ({"minute": {0.5}}, "minute holds 0.5"),
        ({"minute": {True}}, "minute holds True"),
        ({"day_of_month": {0}}, "day_of_month holds 0"),
        ({"month_of_year": {"jan"}}, "month_of_year holds 'jan'"),
        ({"day_of_week": {7}}, "day_of_week holds 7; it takes whole numbers from 0 to 6"),
        ({"day_of_month": {30}, "month_of_year": {2}}, "no date ever matches: day of month 30, month 2"),
    ],
)
def test_sets_are_refused_with_words(change: dict[str, Any], words: str) -> None:
    assert words in refusal(cron_from_fields, *{**ALL, **change}.values(), "UTC")


def test_sets_are_copied() -> None:
    minutes = {0}
    timetable = cron_from_fields(*{**ALL, "minute": minutes}.values(), "UTC")
    minutes.add(1)
    assert timetable.count(0, DAY) == 24


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Europe/Pariss", "timezone 'Europe/Pariss' is not known; did you mean 'Europe/Paris'?"),
        ("europe/berlin ", "did you mean 'Europe/Berlin'?"),
        ("Europe", "is not known"),
        ("", "is not known; use a name such as"),
        ("../UTC", "is not known"),
        ("/etc/localtime", "is not known"),
        ("a\0b", "is not known"),
        ("localtime", "is not the same on every host"),
        ("right/Europe/Paris", "is not the same on every host"),
        (None, "a timezone is a name such as"),
    ],
)
def test_zones_are_refused_with_words(name: Any, words: str) -> None:
    assert words in refusal(zone_of, name)


def test_a_zone_without_a_name_is_refused() -> None:
    with importlib.resources.files("tzdata.zoneinfo.Europe").joinpath("Paris").open("rb") as file:
        nameless = ZoneInfo.from_file(file)
    assert "without a name" in refusal(cron_from_text, "0 0 * * *", nameless)
