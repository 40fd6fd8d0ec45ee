"""Celery's schedules as timetables, and ours as Celery's."""

from __future__ import annotations

import binascii
import copy
import logging
import pickle
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import celery._state
import celery.beat
import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, maybe_schedule, schedule, solar
from celery.utils.time import LocalTimezone
from dateutil import tz as dateutil_tz

from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.options import Kind
from celery_anarchon.ownschedules import at, cron, every
from celery_anarchon.schedules import kind_of, timetable_of
from celery_anarchon.solar import Solar
from celery_anarchon.timetable import At, Cron, Interval, cron_from_text

UTC = timezone.utc
PARIS = ZoneInfo("Europe/Paris")


def make_app(**conf: Any) -> Celery:
    app = Celery("test", set_as_current=False, broker="memory://")
    app.conf.update(conf)
    return app


def timetable(value: Any, **kwargs: Any) -> Any:
    return timetable_of(value, job="export", app=kwargs.pop("app", None) or make_app(), **kwargs)


def refusal(error: type[Exception], value: Any, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        timetable(value, **kwargs)
    text = str(caught.value)
    assert text.startswith("job 'export': ")
    assert "\n" not in text
    return text


# --- what becomes of each schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [90, 90.0, timedelta(seconds=90), schedule(90), maybe_schedule(90), every(90), every("90s"), every("1m30s")],
)
def test_intervals(value: Any) -> None:
    assert timetable(value).key == Interval(90_000).key
    assert kind_of(value, job="export") is Kind.INTERVAL


def test_fractions_are_exact() -> None:
    assert timetable(0.1).key == timetable(schedule(0.1)).key == timetable(every(0.1)).key == Interval(100).key


def test_a_crontab_takes_the_zone_of_the_app() -> None:
    paris = make_app(timezone="Europe/Paris")
    assert timetable(crontab(minute=30, hour=2), app=paris) is cron_from_text("30 2 * * *", "Europe/Paris")
    assert timetable(crontab(minute=30, hour=2)) is cron_from_text("30 2 * * *", "UTC")
    assert timetable(crontab(), app=make_app(enable_utc=False, timezone="Asia/Tokyo")).zone.key == "Asia/Tokyo"


def test_a_crontab_follows_the_app_that_is_asked_for_not_the_current_one() -> None:
    stray = crontab(minute=0)
    assert timetable(stray, app=make_app(timezone="Europe/Paris")).zone.key == "Europe/Paris"
    assert "tz" not in vars(stray)


def test_a_crontab_asked_before_keeps_its_answer() -> None:
    app = make_app(timezone="Europe/Paris")
    asked = crontab(minute=0, app=app)
    assert asked.tz is app.timezone
    assert timetable(asked, app=app).zone.key == "Europe/Paris"
    asked.tz = ZoneInfo("Asia/Tokyo")
    assert timetable(asked, app=app).zone.key == "Asia/Tokyo"


class TzCrontab(crontab):  # type: ignore[misc]
    """As one finds it in projects."""

    tz = PARIS


class Zoned(crontab):  # type: ignore[misc]
    """A zone, and an is_due that only converts to it."""

    def __init__(self, *args: Any, tz: tzinfo | None = None, **kwargs: Any) -> None:
        self.tz = tz
        crontab.__init__(self, *args, **kwargs)

    def is_due(self, last_run_at: datetime) -> Any:
        return crontab.is_due(self, last_run_at.astimezone(self.tz))


class TzAwareCrontab(crontab):  # type: ignore[misc]
    """As much of django-celery-beat's as matters."""

    __module__ = "django_celery_beat.tzcrontab"
    __init__ = Zoned.__init__
    is_due = Zoned.is_due


class DjangoHolidays(TzAwareCrontab):
    def is_due(self, last_run_at: datetime) -> Any:
        return False, 60


def test_a_crontab_with_a_zone_of_its_own() -> None:
    assert timetable(TzCrontab(minute=0, hour=3)) is cron_from_text("0 3 * * *", "Europe/Paris")
    assert timetable(TzAwareCrontab(0, 3, tz=PARIS)) is cron_from_text("0 3 * * *", "Europe/Paris")
    assert timetable(TzAwareCrontab(0, 3, tz=UTC)) is cron_from_text("0 3 * * *", "UTC")
    assert timetable(TzAwareCrontab(0, 3), app=make_app(timezone="Asia/Tokyo")).zone.key == "Asia/Tokyo"
    # Whether is_due means something else is not read off it: it is replayed, and a class that never is due is chained.
    zoned = timetable(Zoned(0, 3, tz=PARIS))
    assert (kind_of(zoned, job="export"), zoned.zone) == (Kind.CUSTOM, PARIS)
    assert kind_of(timetable(DjangoHolidays(tz=PARIS)), job="export") is Kind.CHAIN


def test_celery_joins_the_day_fields_by_and_and_text_by_or() -> None:
    friday_13th = crontab(minute=0, hour=0, day_of_month=13, day_of_week=5)
    year = (1_767_225_600_000, 1_798_761_599_999)
    assert timetable(friday_13th).count(*year) == 3
    assert timetable(cron("0 0 13 * 5")).count(*year) == 12 + 52 - 3


def test_cron_takes_its_own_zone_or_the_apps() -> None:
    app = make_app(timezone="Asia/Tokyo")
    assert timetable(cron("0 3 * * *"), app=app).zone.key == "Asia/Tokyo"
    assert timetable(cron("0 3 * * *", timezone="Europe/Paris"), app=app).zone.key == "Europe/Paris"
    assert timetable(cron("0 3 * * *", timezone=PARIS), app=app).zone.key == "Europe/Paris"
    assert kind_of(cron("@daily"), job="export") is Kind.CRON


def test_at_is_an_instant_or_a_time_in_the_apps_zone() -> None:
    app = make_app(timezone="Europe/Paris")
    gap = datetime(2026, 3, 29, 2, 30)
    assert timetable(at(gap), app=app).instant == 1_774_746_000_000
    assert timetable(at("2026-03-29T02:30"), app=app).key == timetable(at(gap), app=app).key
    assert timetable(at("2026-03-29T01:00:00Z"), app=app).instant == 1_774_746_000_000
    assert timetable(at(gap.replace(tzinfo=UTC)), app=app).instant == 1_774_751_400_000
    assert isinstance(timetable(at(gap)), At)
    assert kind_of(at(gap), job="export") is Kind.AT


def test_solar_needs_no_zone() -> None:
    for app in (make_app(), make_app(timezone="Asia/Tokyo"), make_app(enable_utc=False)):
        assert timetable(solar("sunset", 48.8566, 2.3522), app=app).key == Solar("sunset", 48.8566, 2.3522).key


def test_solar_without_ephem_names_the_job_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    sunset = solar("sunset", 48.8566, 2.3522)
    monkeypatch.setitem(sys.modules, "ephem", None)
    assert refusal(ConfigurationError, sunset).endswith(': pip install "celery-anarchon[solar]"')


def test_a_place_that_celery_lets_through() -> None:
    nowhere = solar("sunset", float("nan"), 2.3522)
    assert "latitude must be a number of degrees from -90 to 90, not nan" in refusal(ConfigurationError, nowhere)


@pytest.mark.parametrize(
    ("length", "text"),
    [(timedelta(days=1), "0 0 * * *"), (timedelta(hours=1), "0 * * * *"), (timedelta(minutes=1), "* * * * *")],
)
def test_relative_days_hours_and_minutes_are_crontabs(
    length: timedelta, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    relative = schedule(length, relative=True)
    assert timetable(relative, app=make_app(timezone="Europe/Paris")) is cron_from_text(text, "Europe/Paris")
    assert timetable(relative, timezone="Asia/Tokyo") is cron_from_text(text, "Asia/Tokyo")
    assert kind_of(relative, job="export") is Kind.CRON
    assert not caplog.records


def test_other_relative_intervals_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "celery_anarchon.beat")
    assert timetable(schedule(timedelta(hours=2), relative=True)).key == Interval(7_200_000).key
    (record,) = caplog.records
    assert record.name == "celery_anarchon.beat"
    assert record.getMessage().startswith("job 'export': relative=True means something only for one day")


# --- options ----------------------------------------------------------------------------------------------------------


def test_offset() -> None:
    assert timetable(60, offset=15_000).key == Interval(60_000, 15_000).key
    assert timetable(schedule(60), offset="15s").key == Interval(60_000, 15_000).key
    assert timetable(every(60), offset=-1).key == Interval(60_000, 59_999).key
    assert timetable(every(60, offset=15), offset=15_000).key == timetable(every(60, offset="15s")).key


def test_auto_offset_is_the_same_in_every_process_and_spreads() -> None:
    expected = Interval(300_000, binascii.crc32(b"export") % 300_000).key
    assert expected == "interval 300000 177076"
    assert timetable(300, offset="auto").key == timetable(every(300, offset="auto")).key == expected
    names = [f"job-{number}" for number in range(50)]
    offsets = {timetable_of(300, job=name, app=make_app(), offset="auto").offset for name in names}  # type: ignore[attr-defined]
    assert len(offsets) == 50


def test_timezone() -> None:
    assert timetable(crontab(), timezone="Asia/Tokyo").zone.key == "Asia/Tokyo"
    assert timetable(cron("* * * * *"), timezone="Asia/Tokyo").zone.key == "Asia/Tokyo"
    assert timetable(cron("* * * * *", timezone="Asia/Tokyo"), timezone="Asia/Tokyo").zone.key == "Asia/Tokyo"


@pytest.mark.parametrize(
    "value",
    [
        crontab(),
        cron("@daily"),
        at(datetime(2026, 1, 1)),
        schedule(86400, relative=True),
        solar("sunset", 48.8566, 2.3522),
    ],
)
@pytest.mark.parametrize("offset", [5, "auto"])
def test_offset_is_refused_where_there_is_no_grid(value: Any, offset: Any) -> None:
    text = refusal(OptionError, value, offset=offset)
    assert "option 'offset' shifts the grid of an interval" in text
    assert text.endswith("; remove it")


@pytest.mark.parametrize(
    "value",
    [
        60,
        timedelta(minutes=1),
        schedule(60),
        every(60),
        at(datetime(2026, 1, 1)),
        solar("sunset", 48.8566, 2.3522),
    ],
)
def test_timezone_is_refused_where_no_zone_matters(value: Any) -> None:
    text = refusal(OptionError, value, timezone="Europe/Paris")
    assert "option 'timezone' is the zone of a crontab" in text
    assert text.endswith("; remove it")


def test_options_against_the_schedule_are_refused() -> None:
    said = refusal(OptionError, cron("@daily", timezone="UTC"), timezone="Europe/Paris")
    assert said.endswith("option 'timezone' is 'Europe/Paris' and the schedule itself says 'UTC'; keep one of them")
    assert "keep one of them" in refusal(OptionError, TzCrontab(), timezone="UTC")
    assert "keep one of them" in refusal(OptionError, every(60, offset=5), offset=6_000)
    assert "keep one of them" in refusal(OptionError, every(60, offset="auto"), offset=6_000)


def test_an_unknown_zone_is_offered_the_nearest_name() -> None:
    said = refusal(OptionError, crontab(), timezone="Europe/Pariss")
    assert said.endswith("option 'timezone': timezone 'Europe/Pariss' is not known; did you mean 'Europe/Paris'?")


# --- refusals ---------------------------------------------------------------------------------------------------------


class Polling(BaseSchedule):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return False, 5


class Jittered(schedule):  # type: ignore[misc]
    def remaining_estimate(self, last_run_at: datetime) -> Any:
        return timedelta(seconds=1)


class Holidays(crontab):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return False, 60


class Impatient(every):
    def is_due(self, last_run_at: datetime) -> Any:
        return True, 1


class Twilight(solar):  # type: ignore[misc]
    """Changes nothing about when, as far as one sees from here."""


class Renamed(schedule):  # type: ignore[misc]
    """Changes nothing about when."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Polling(), "it was not due within the looks that a test may take"),
        (Jittered(60), "it was not due within the looks that a test may take"),
        (Holidays(), "it was not due within the looks that a test may take"),
        (Impatient(60), "when it is due depends on when it last ran"),
        (Twilight("sunset", 48.8566, 2.3522), "when it is due depends on when it last ran"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_classes_that_say_themselves_when_and_name_no_slots(
    value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = timetable(value)
    assert kind_of(found, job="export") is Kind.CHAIN
    assert found.reason == reason
    (record,) = caplog.records
    assert record.getMessage() == (
        f"job 'export': the slots of class {type(value).__module__}.{type(value).__name__} are not known beforehand, "
        f"because {reason}; each run is claimed as the successor of the one before: one message each, and nothing to "
        "look ahead to or to catch up (celery_anarchon.schedules.register_timetable gives it slots)"
    )


def test_a_subclass_that_changes_nothing_is_read() -> None:
    assert timetable(Renamed(60)).key == Interval(60_000).key


@pytest.mark.parametrize("value", [None, True, "30m", "* * * * *", object(), SimpleNamespace(run_every=5)])
def test_what_is_no_schedule_is_refused(value: Any) -> None:
    refusal(ConfigurationError, value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.05, "an interval of 0.05 s is too short; the shortest is 0.1 s"),
        (0, "an interval of 0 s is too short"),
        (-5, "an interval of -5 s is too short"),
        (schedule(timedelta(0)), "an interval of 0 s is too short"),
        (1 / 3, "interval must be a whole number of milliseconds, not 0.3333333333333333; round it"),
        (schedule(1 / 3), "interval must be a whole number of milliseconds"),
        (float("nan"), "interval must be a duration"),
        (schedule(None), "interval must be a duration"),
    ],
)
def test_impossible_intervals_are_refused(value: Any, words: str) -> None:
    assert words in refusal(ConfigurationError, value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("minute", set(), "minute is empty"),
        ("hour", {0.5}, "hour holds 0.5"),
        ("day_of_month", {"1"}, "day_of_month holds '1'"),
        ("day_of_week", {7}, "day_of_week holds 7"),
    ],
)
def test_impossible_crontabs_are_refused(name: str, values: Any, words: str) -> None:
    broken = crontab()
    setattr(broken, name, values)
    assert words in refusal(ConfigurationError, broken)


def test_impossible_dates_are_refused() -> None:
    never = crontab()
    never.day_of_month, never.month_of_year = {30}, {2}
    assert "no date ever matches: day of month 30, month 2" in refusal(ConfigurationError, never)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: every(0.05), r"^every\(\): an interval of 0.05 s is too short"),
        (lambda: every("5 min"), r"^every\(\): interval must be a duration"),
        (lambda: every(60, offset="half"), r"^every\(\): offset must be a duration"),
        (
            lambda: cron("61 * * * *"),
            r"^cron\(\): cron text '61 \* \* \* \*': minute '61' is not valid; it takes 0-59$",
        ),
        (lambda: cron("* * * * * *"), r"^cron\(\): .* pass seconds=True"),
        (lambda: cron("@daily", timezone="Mars/Base"), r"^cron\(\): timezone 'Mars/Base' is not known"),
        (lambda: cron("@daily", timezone=timezone(timedelta(hours=2))), r"^cron\(\): timezone .* has no name"),
        (lambda: at("tomorrow"), r"^at\(\): write a datetime or its ISO text.*not 'tomorrow'$"),
        (lambda: at(1e9), r"^at\(\): write a datetime"),  # type: ignore[arg-type]
    ],
)
def test_ours_are_refused_where_they_are_written(call: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        call()


# --- zones ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [crontab(), cron("@daily"), at(datetime(2026, 1, 1)), schedule(86400, relative=True)])
def test_a_host_local_zone_is_refused(value: Any) -> None:
    text = refusal(ConfigurationError, value, app=make_app(enable_utc=False))
    assert "the zone of whatever host beat runs on; set timezone to a name" in text


def test_a_host_local_zone_does_not_matter_where_no_zone_does() -> None:
    local = make_app(enable_utc=False)
    assert timetable(60, app=local).key == Interval(60_000).key
    assert timetable(at(datetime(2026, 1, 1, tzinfo=UTC)), app=local).instant == 1_767_225_600_000
    assert timetable(crontab(), app=local, timezone="Asia/Tokyo").zone.key == "Asia/Tokyo"
    assert timetable(cron("@daily", timezone="Asia/Tokyo"), app=local).zone.key == "Asia/Tokyo"


def test_the_zone_that_celery_took_from_the_host_is_refused() -> None:
    local = make_app(enable_utc=False)
    asked = crontab(app=local)
    assert asked.tz is local.timezone
    assert "the zone of whatever host" in refusal(ConfigurationError, asked, app=local)
    asked.tz = LocalTimezone()
    assert "is the zone of whatever host this runs on" in refusal(ConfigurationError, asked, app=local)


def pytz_like(name: str) -> tzinfo:
    class Zone(tzinfo):
        def __repr__(self) -> str:
            # Stands in the name of a test, which must be the same in every process.
            return "pytz-like"

        zone = name

    return Zone()


@pytest.mark.parametrize(
    ("zone", "key"),
    [
        ("Europe/Paris", "Europe/Paris"),
        (PARIS, "Europe/Paris"),
        (UTC, "UTC"),
        (pytz_like("Europe/Paris"), "Europe/Paris"),
        (dateutil_tz.gettz("Europe/Paris"), "Europe/Paris"),
        (dateutil_tz.UTC, "UTC"),
    ],
    ids=repr,
)
def test_zones_of_any_library_are_known_by_their_name(zone: Any, key: str) -> None:
    asked = crontab()
    asked.tz = zone
    assert timetable(asked).zone is ZoneInfo(key)
    assert timetable(crontab(), app=make_app(timezone=zone)).zone is ZoneInfo(key)


@pytest.mark.parametrize(
    "zone",
    [
        timezone(timedelta(hours=2)),
        LocalTimezone(),
        dateutil_tz.tzlocal(),
        dateutil_tz.tzoffset("X", 3600),
        dateutil_tz.tzfile("/etc/localtime") if Path("/etc/localtime").exists() else dateutil_tz.tzlocal(),
        pytz_like("local"),
        pytz_like("Nowhere/Land"),
        ZoneInfo("localtime") if Path("/usr/share/zoneinfo/localtime").exists() else LocalTimezone(),
    ],
    ids=repr,
)
def test_zones_that_no_other_host_knows_are_refused(zone: Any) -> None:
    asked = crontab()
    asked.tz = zone
    text = refusal(ConfigurationError, asked)
    assert "Europe/Paris" in text or "is not known" in text


def test_a_wrong_zone_of_the_app_is_named() -> None:
    app = make_app(timezone=timezone(timedelta(hours=2)))
    assert refusal(ConfigurationError, crontab(), app=app).startswith("job 'export': setting 'timezone': timezone ")


# --- ours as Celery's -------------------------------------------------------------------------------------------------

EACH = [
    every("1h30m"),
    every(90, offset="15s"),
    every(90, offset="auto"),
    cron("30 2 * * *"),
    cron("0 0 1 1 * 0 2030", timezone="Europe/Paris", seconds=True),
    at(datetime(2026, 3, 29, 2, 30)),
    at(datetime(2026, 3, 29, 2, 30, tzinfo=PARIS)),
]


@pytest.mark.parametrize("value", EACH, ids=repr)
def test_the_repr_is_the_definition(value: Any) -> None:
    assert eval(repr(value), {"every": every, "cron": cron, "at": at}) == value


@pytest.mark.parametrize("value", EACH, ids=repr)
def test_pickle_and_copy_keep_the_definition_and_leave_the_app(value: Any) -> None:
    value = copy.copy(value)
    value.app = make_app(timezone="Asia/Tokyo")
    assert value.tz.key == "Asia/Tokyo"
    for again in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert again == value
        assert again._app is None
        again.app = make_app(timezone="Europe/Paris")
        assert again.tz.key == "Europe/Paris"


def test_equal_means_the_same_definition() -> None:
    assert [[one == other for other in EACH] for one in EACH] == [[one is other for other in EACH] for one in EACH]
    assert every(90) == every("1m30s") != every(90, offset=1)
    assert cron("*/30 * * * *") == cron("0,30 * * * *") != cron("0,30 * * * *", timezone="UTC")
    assert at("2026-01-01T00:00Z") == at("2026-01-01T01:00+01:00") != at("2026-01-01T00:00")
    assert every(90) != schedule(90)
    assert cron("@daily") != crontab(0, 0)


def test_the_app_may_come_later_and_change() -> None:
    nightly = cron("0 3 * * *")
    for zone in ("Asia/Tokyo", "Europe/Paris"):
        nightly.app = make_app(timezone=zone)
        assert nightly.timetable() is cron_from_text("0 3 * * *", zone)
    once = at(datetime(2026, 6, 1, 12))
    once.app = make_app(timezone="Europe/Paris")
    assert once.timetable().instant == 1_780_308_000_000


def test_answers_to_stock_beat() -> None:
    grid = every(60, offset=15)
    grid.nowfun = lambda: datetime(2026, 1, 1, 0, 0, 45, 500_000)
    aware = datetime(2026, 1, 1, tzinfo=UTC)
    assert grid.is_due(aware) == (True, 29.5)
    assert grid.is_due(aware.replace(second=15)) == (False, 29.5)
    assert grid.is_due(datetime(2026, 1, 1, 0, 0, 15, 999)) == (False, 29.5)
    grid.nowfun = lambda: datetime(2026, 1, 1, 0, 0, 15)
    assert grid.is_due(aware) == (True, 60)
    grid.nowfun = lambda: datetime(2026, 1, 1, 0, 0, 45, 500_000)
    assert grid.remaining_estimate(aware) == timedelta(seconds=-30.5)
    assert grid.remaining_estimate(aware.replace(second=15)) == timedelta(seconds=29.5)

    once = at(aware.replace(second=30))
    once.nowfun = grid.nowfun
    due, wait = once.is_due(aware)
    assert (due, wait > 10**9) == (True, True)
    due, wait = once.is_due(aware.replace(second=30))
    assert (due, wait > 10**9) == (False, True)
    assert once.remaining_estimate(aware.replace(second=30)) > timedelta(days=10_000)


# --- under stock beat -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_app_stays() -> Iterator[None]:
    """A schedule out of a shelve has the current app, in Celery's way."""
    before = celery._state._tls.current_app
    yield
    celery._state._set_current_app(before)


class Rehearsal:
    """Stock beat on a clock of our own, which moves by a millisecond a tick, and by what beat asks to sleep."""

    def __init__(self, start: str, entries: dict[str, Any], zone: str = "Europe/Paris", **kwargs: Any) -> None:
        self.now = datetime.fromisoformat(start).replace(tzinfo=UTC)
        self.sent: list[tuple[str, str]] = []
        self.ticks = 0
        app = make_app(timezone=zone, beat_schedule=kwargs.pop("beat_schedule", {}))
        app.now = lambda: self.now.astimezone(app.timezone)
        if "schedule_filename" in kwargs:
            app.set_current()
        rehearsal = self

        class Beat(kwargs.pop("scheduler", celery.beat.Scheduler)):  # type: ignore[misc]
            producer = None

            def apply_entry(self, entry: Any, producer: Any = None) -> None:
                rehearsal.sent.append((entry.name, rehearsal.now.strftime("%d %H:%M:%S")))

        self.beat = Beat(app, **kwargs)
        self.beat.update_from_dict({name: {"task": "t", "schedule": value} for name, value in entries.items()})

    def until(self, end: str) -> Rehearsal:
        limit = datetime.fromisoformat(end).replace(tzinfo=UTC)
        while self.now < limit:
            self.ticks += 1
            self.now += timedelta(seconds=max(self.beat.tick(), 0), milliseconds=1)
        return self

    def times(self, name: str) -> list[str]:
        return [when for sent, when in self.sent if sent == name]


def test_stock_beat_keeps_the_slots_over_a_repeated_hour() -> None:
    """Paris, 25 October 2026, 03:00 is 02:00 again at 01:00Z. Stock's own crontab would send without a pause when beat
    is started in the second pass, and skip an hour when it is not."""
    entries = {
        "quarter": cron("*/15 * * * *"),
        "nightly": cron("30 2 * * *"),
        "tokyo": cron("30 9 * * *", timezone="Asia/Tokyo"),
        "grid": every("20m", offset="1m"),
        "once": at(datetime(2026, 10, 25, 2, 45)),
    }
    whole = Rehearsal("2026-10-24T23:50", entries).until("2026-10-25T02:01")
    quarters = [f"25 {hour:02}:{minute:02}:00" for hour in range(2) for minute in (0, 15, 30, 45)] + ["25 02:00:00"]
    assert whole.times("quarter") == quarters
    assert whole.times("nightly") == ["25 00:30:00"]
    assert whole.times("tokyo") == ["25 00:30:00"]
    assert whole.times("grid") == [f"25 {hour:02}:{minute:02}:00" for hour in range(2) for minute in (1, 21, 41)]
    assert whole.times("once") == ["25 00:45:00"]

    restarted = Rehearsal("2026-10-25T01:10", entries).until("2026-10-25T02:01")
    assert restarted.times("quarter") == ["25 01:15:00", "25 01:30:00", "25 01:45:00", "25 02:00:00"]
    assert restarted.times("nightly") == restarted.times("once") == []
    # A tick to send, and one per millisecond of the last ten, for which beat wakes early by itself.
    assert whole.ticks < 15 * len(whole.sent)
    assert restarted.ticks < 15 * len(restarted.sent)


def test_stock_beat_keeps_the_slots_over_a_gap() -> None:
    entries = {"nightly": cron("30 2 * * *"), "once": at(datetime(2026, 3, 29, 2, 10)), "half": cron("*/30 * * * *")}
    night = Rehearsal("2026-03-29T00:10", entries).until("2026-03-29T02:10")
    assert night.times("nightly") == night.times("once") == ["29 01:00:00"]
    assert night.times("half") == ["29 00:30:00", "29 01:00:00", "29 01:30:00", "29 02:00:00"]


def test_under_stock_beat_a_schedule_that_has_ended_never_stands_in_the_way() -> None:
    entries = {
        "once": at(datetime(2026, 1, 1, 0, 1, tzinfo=UTC)),
        "past": at(datetime(2025, 1, 1, tzinfo=UTC)),
        "year": cron("0 0 1 1 * 0 2025", seconds=True),
        "grid": every("1d"),
    }
    long = Rehearsal("2026-01-01T00:00:30", entries, zone="UTC").until("2026-03-01T00:00:01")
    assert long.times("once") == ["01 00:01:00"]
    assert long.times("past") == long.times("year") == []
    assert len(long.times("grid")) == 59


def test_stock_beat_makes_up_for_one_slot_only_after_a_pause() -> None:
    grid = Rehearsal("2026-01-01T00:00:01", {"grid": every("1m")}).until("2026-01-01T00:03:30")
    grid.now += timedelta(hours=1, seconds=-10)
    grid.until("2026-01-01T01:06:30")
    assert grid.times("grid") == [
        "01 00:01:00",
        "01 00:02:00",
        "01 00:03:00",
        "01 01:03:49",
        "01 01:04:00",
        "01 01:05:00",
        "01 01:06:00",
    ]


@pytest.mark.usefixtures("no_app_stays")
def test_the_shelve_of_stock_beat_keeps_ours(tmp_path: Path) -> None:
    entries = {"grid": every("1h"), "nightly": cron("30 2 * * *"), "once": at(datetime(2026, 1, 1, 0, 30))}
    definitions = {name: {"task": "t", "schedule": value} for name, value in entries.items()}
    shelve: dict[str, Any] = {
        "scheduler": celery.beat.PersistentScheduler,
        "schedule_filename": str(tmp_path / "beat"),
        "beat_schedule": definitions,
    }
    first = Rehearsal("2025-12-31T22:30", {}, **shelve).until("2025-12-31T23:10")
    assert first.times("grid") == ["31 23:00:00"]
    first.beat.close()

    # Down over 00:00Z and 01:30Z (02:30 in Paris): both jobs are sent once when beat is back, `once` too.
    second = Rehearsal("2026-01-01T02:10", {}, **shelve)
    assert {name: second.beat.schedule[name].schedule for name in entries} == entries
    second.until("2026-01-01T03:05")
    assert second.times("grid") == ["01 02:10:00", "01 03:00:00"]
    assert second.times("nightly") == second.times("once") == ["01 02:10:00"]
    second.beat.close()


@pytest.mark.parametrize("value", [*EACH, crontab(), 60], ids=repr)
def test_entries_take_any_of_them(value: Any) -> None:
    app = make_app()
    entry = celery.beat.ScheduleEntry(name="export", task="t", schedule=value, app=app)
    assert isinstance(timetable(entry.schedule, app=app), (Interval, Cron, At))
    assert len(entry.is_due()) == 2
