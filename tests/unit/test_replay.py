"""Schedule classes that say themselves when they are due: replayed by a virtual beat, or not trusted."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule
from support.engine import START, World, job

from celery_anarchon import replay, schedules
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.options import Kind
from celery_anarchon.ownschedules import every
from celery_anarchon.replay import Replay, Successor, TooManyLooks, key_of, read_answer, why_not
from celery_anarchon.schedules import kind_of, register_timetable, timetable_of
from celery_anarchon.timetable import Interval, cron_from_text
from celery_anarchon.wire import parse_time, time_text

UTC = ZoneInfo("UTC")
PARIS = ZoneInfo("Europe/Paris")
CHRISTMAS = parse_time("2026-12-24T06:00Z")
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


def of(value: Any, **conf: Any) -> Any:
    app = Celery("test", set_as_current=False, broker="memory://")
    app.conf.update(conf)
    value.app = app
    return timetable_of(value, job="export", app=app)


def slots(timetable: Any, after: int, count: int) -> list[str]:
    found: list[str] = []
    slot: int | None = after
    while len(found) < count and (slot := timetable.next(slot)) is not None:
        found.append(time_text(slot))
    return found


# --- as one finds them in projects ------------------------------------------------------------------------------------


class HolidayCrontab(crontab):  # type: ignore[misc]
    """Not on holidays."""

    holidays = frozenset({date(2026, 12, 25), date(2026, 12, 26)})

    def is_due(self, last_run_at: datetime) -> Any:
        if self.now().date() in self.holidays:
            return False, 3_600.0
        return super().is_due(last_run_at)


class NineOClock(BaseSchedule):  # type: ignore[misc]
    """Looked at twice a minute."""

    def is_due(self, last_run_at: datetime) -> Any:
        now = self.now()
        nine = now.replace(hour=9, minute=0, second=0, microsecond=0)
        return last_run_at < nine <= now, 30


class Jittered(schedule):  # type: ignore[misc]
    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return super().remaining_estimate(last_run_at) + timedelta(seconds=random.uniform(0, 5))


class OwnDice(BaseSchedule):  # type: ignore[misc]
    """Chance of its own, which no list of functions names."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(1)

    def is_due(self, last_run_at: datetime) -> Any:
        return self.now() >= last_run_at + timedelta(seconds=60 + self.dice.random() * 9), 1


class WallClock(BaseSchedule):  # type: ignore[misc]
    """Its own idea of now: right on the day of the test, by the answers alone."""

    def is_due(self, last_run_at: datetime) -> Any:
        return datetime.now(timezone.utc).year > 2000, 3_600


class WallSeconds(BaseSchedule):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return time.time() > 1_000_000_000, 3_600


class BusinessHours(schedule):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        if not 9 <= self.now().hour < 17:
            return False, 60
        return super().is_due(last_run_at)


class Chatty(crontab):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        logging.getLogger("chatty").warning("asked")
        return super().is_due(last_run_at)


class Counting(crontab):  # type: ignore[misc]
    """Remembers how it was used: that must neither show nor stay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[datetime] = []
        super().__init__(*args, **kwargs)

    def is_due(self, last_run_at: datetime) -> Any:
        self.asked.append(last_run_at)
        self.latest = last_run_at
        return super().is_due(last_run_at)

    def __reduce__(self) -> Any:
        raise TypeError("cannot be copied")


class Fails(BaseSchedule):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        raise KeyError("calendar")


class Answers(BaseSchedule):  # type: ignore[misc]
    def __init__(self, *answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def is_due(self, last_run_at: datetime) -> Any:
        return self.answer


# --- slots ------------------------------------------------------------------------------------------------------------


def test_a_holiday_crontab_has_stocks_slots() -> None:
    """What fell on the holidays comes once, when they are over, as with stock beat; to the millisecond, and not when
    somebody happens to look."""
    found = of(HolidayCrontab(minute=30, hour=9), timezone="Europe/Paris")
    assert kind_of(found, job="export") is Kind.CUSTOM
    assert found.zone == PARIS
    assert slots(found, CHRISTMAS, 4) == [
        "2026-12-24T08:30:00.000Z",
        "2026-12-26T23:00:00.000Z",
        "2026-12-27T08:30:00.000Z",
        "2026-12-28T08:30:00.000Z",
    ]


def test_a_class_that_is_looked_at_now_and_then() -> None:
    found = of(NineOClock(), timezone="Asia/Tokyo")
    for after in (CHRISTMAS, CHRISTMAS + 1, CHRISTMAS + 17_123):
        assert slots(found, after, 2) == ["2026-12-25T00:00:00.000Z", "2026-12-26T00:00:00.000Z"]


def test_beats_that_start_anywhere_in_the_row_go_on_in_it() -> None:
    def fresh() -> Any:
        return of(HolidayCrontab(minute=30, hour=9), timezone="Europe/Paris")

    whole = slots(fresh(), CHRISTMAS, 12)
    for number, slot in enumerate(whole[:-1]):
        begun = fresh()
        assert slots(begun, parse_time(slot), 20)[: 11 - number] == whole[number + 1 :]
        # Once begun, where between two slots it is asked does not matter: not on the holidays either.
        begins, ends = parse_time(slot), parse_time(whole[number + 1])
        for between in (begins, begins + 1, (begins + ends) // 2, ends - 1):
            assert begun.next(between) == ends
            assert begun.last(between) in (begins, None if number == 0 else begins) or between == begins


def test_the_latest_and_the_number() -> None:
    found = of(HolidayCrontab(minute=30, hour=9), timezone="Europe/Paris")
    found.next(CHRISTMAS)
    ninth = parse_time("2026-12-29T08:30Z")
    assert found.last(ninth) == ninth
    assert found.last(ninth - 1) == ninth - DAY
    assert found.count(CHRISTMAS, ninth) == 5
    assert found.count(ninth, ninth) == found.count(ninth, CHRISTMAS) == 0
    # Before the row.
    assert found.last(CHRISTMAS - 1) == parse_time("2026-12-23T08:30Z")
    assert found.next(CHRISTMAS - DAY) == parse_time("2026-12-23T08:30Z")
    untouched = of(crontab_of_its_own(minute=0, hour=0, day_of_month=29, month_of_year=2))
    assert untouched.last(CHRISTMAS) == parse_time("2024-02-29T00:00Z")


class crontab_of_its_own(crontab):  # type: ignore[misc]
    def is_due(self, last_run_at: datetime) -> Any:
        return super().is_due(last_run_at)


def test_a_replay_agrees_with_the_rules_where_no_clock_changes() -> None:
    for text in ("*/7 3-9 * * *", "0 0 13 * *", "59 23 31 12 *", "*/15 * * * 1-5"):
        minute, hour, day, month, weekday = text.split()
        given = {"minute": minute, "hour": hour, "day_of_month": day, "month_of_year": month, "day_of_week": weekday}
        replayed, ruled = of(crontab_of_its_own(**given)), of(crontab(**given))
        assert kind_of(replayed, job="export") is Kind.CUSTOM
        assert slots(replayed, CHRISTMAS, 15) == slots(ruled, CHRISTMAS, 15)
        assert replayed.last(CHRISTMAS) == ruled.last(CHRISTMAS)


def test_a_long_row_is_not_kept() -> None:
    found = of(crontab_of_its_own())
    at = CHRISTMAS
    for _ in range(3_000):
        at = found.next(at)
    assert at == CHRISTMAS + 3_000 * MINUTE
    assert len(found._row) <= 2_048
    far = parse_time("2031-01-01T00:00:30Z")
    assert found.next(far) == far + MINUTE // 2
    assert found.count(far, far + 30 * DAY) == replay.COUNTED


def test_threads_share_a_row() -> None:
    found = of(crontab_of_its_own())
    wrong: list[int] = []

    def ask(number: int) -> None:
        for step in range(200):
            at = CHRISTMAS + (step * 7 + number) * MINUTE
            if found.next(at) != at + MINUTE:
                wrong.append(at)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_object_itself_is_left_alone() -> None:
    counting = Counting(minute=0)
    before = dict(vars(counting), asked=[])
    found = of(counting)
    assert isinstance(found, Replay)
    assert slots(found, CHRISTMAS, 2) == ["2026-12-24T07:00:00.000Z", "2026-12-24T08:00:00.000Z"]
    assert {**vars(counting), "_app": None} == {**before, "_app": None}


def test_one_that_is_done() -> None:
    class Once(BaseSchedule):  # type: ignore[misc]
        end = datetime(2027, 1, 1, tzinfo=timezone.utc)

        def is_due(self, last_run_at: datetime) -> Any:
            left = (self.end - self.now()).total_seconds()
            return (last_run_at < self.end and left <= 0), left if left > 0 else None

    found = of(Once())
    assert slots(found, CHRISTMAS, 3) == ["2027-01-01T00:00:00.000Z"]
    assert found.last(parse_time("2028-01-01T00:00Z")) == parse_time("2027-01-01T00:00Z")


def test_one_that_falls_silent_later() -> None:
    """Its test went well; years later it is looked at for weeks and never due: this job's trouble, in words."""

    class Closes(crontab_of_its_own):
        def is_due(self, last_run_at: datetime) -> Any:
            if self.now().year >= 2028:
                return False, 60
            return super().is_due(last_run_at)

    found = of(Closes(minute=0))
    assert isinstance(found, Replay)
    with pytest.raises(TooManyLooks, match="it was not due in 20000 looks"):
        found.next(parse_time("2028-06-01T00:00Z"))


# --- trust ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Jittered(60), "it takes random numbers (test_replay.py, line "),
        (WallClock(), "it calls datetime.now() (test_replay.py, line "),
        (WallSeconds(), "it calls time.time() (test_replay.py, line "),
        (BusinessHours(600), "when it is due depends on when it last ran"),
        (Answers(False, 30 * 86_400), "it was due at no time that it was asked about"),
        (Answers(False, None), "it was due at no time that it was asked about"),
        (Answers(False, float("inf")), "it was due at no time that it was asked about"),
        (Answers(False, 30), "it was not due within the looks that a test may take"),
        (Answers(False, 0), "it was not due within the looks that a test may take"),
        (Answers(True, 5), "when it is due depends on when it last ran"),
        (Answers(False, "soon"), "asked about 2026-06-10T10:17:31.250Z it failed (TypeError: is_due answered (False, "),
        (Answers(True), "asked about 2026-06-10T10:17:31.250Z it failed (TypeError: is_due answered (True,)"),
        (Fails(), "asked about 2026-06-10T10:17:31.250Z it failed (KeyError: 'calendar')"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseSchedule) else None,
)
def test_why_not(value: Any, reason: str) -> None:
    found = of(value)
    assert kind_of(found, job="export") is Kind.CHAIN
    assert found.reason.startswith(reason)
    # Whoever asks, and whenever: beats that came to two ends would each send their own.
    assert why_not(value, UTC) == found.reason
    assert (found.next(CHRISTMAS), found.last(CHRISTMAS), found.count(0, CHRISTMAS)) == (None, None, 0)


def test_chance_of_its_own() -> None:
    reason = of(OwnDice()).reason
    assert reason in ("it answers the same question in two ways", "when it is due depends on when it last ran")


def test_what_means_nothing_is_not_held_against_it() -> None:
    assert isinstance(of(Chatty(minute=0)), Replay)


def test_nothing_stays_behind() -> None:
    seen: list[str] = []

    def profile(*_: Any) -> None:
        seen.append("mine")

    sys.setprofile(profile)
    try:
        of(Fails())
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_a_class_without_is_due_is_refused() -> None:
    class Estimates(BaseSchedule):  # type: ignore[misc]
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return timedelta(1)

    with pytest.raises(ConfigurationError, match=r"job 'export': schedule class .*Estimates has no is_due"):
        of(Estimates())


def test_the_hosts_zone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="set timezone to a name"):
        of(NineOClock(), enable_utc=False)


# --- asking for real --------------------------------------------------------------------------------------------------


def test_a_chained_one_is_asked_about_the_last_run() -> None:
    asked: list[datetime] = []

    class Asked(BaseSchedule):  # type: ignore[misc]
        def is_due(self, last_run_at: datetime) -> Any:
            asked.append(last_run_at)
            return True, 12.5

    chain = Successor(Asked(), PARIS, "")
    assert chain.ask(CHRISTMAS) == (True, 12_500)
    assert asked == [datetime(2026, 12, 24, 7, tzinfo=PARIS)]


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ((True, 60), (True, 60_000)),
        ((0, 60.000_000_001), (False, 60_000)),
        ((False, 59.999_999_999), (False, 60_000)),
        ((False, 0.000_4), (False, 1)),
        ((False, 0), (False, 1_000)),
        ((False, -3), (False, 1_000)),
        ((True, None), (True, None)),
        ((False, float("inf")), (False, None)),
    ],
)
def test_answers(answer: Any, meaning: Any) -> None:
    assert read_answer(answer) == meaning


@pytest.mark.parametrize("answer", [None, True, (True,), (False, "30"), (False, float("nan")), (False, timedelta(1))])
def test_what_is_no_answer(answer: Any) -> None:
    with pytest.raises(TypeError, match="it takes \\(due, seconds until the next look\\)"):
        read_answer(answer)


# --- keys -------------------------------------------------------------------------------------------------------------

KEYS = """
from datetime import date, datetime, timezone
from celery.schedules import crontab
from celery_anarchon.replay import key_of
from zoneinfo import ZoneInfo

class Plan:
    def __init__(self): self.names, self._cache = {"b", "a", "c"}, object()

class Holidays(crontab):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.days = {date(2026, 12, day) for day in range(1, 30)}
        self.by_name = {"x": [1, 2.5], "y": (None, datetime(2026, 1, 1, tzinfo=timezone.utc))}
        self.plan, self.zone, self.call = Plan(), ZoneInfo("Asia/Tokyo"), len

print(key_of(Holidays(minute="*/15"), ZoneInfo("UTC")))
"""


def test_keys_are_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    (key,) = found
    assert key.startswith("custom __main__.Holidays ")


def test_an_edited_object_has_another_key() -> None:
    key = key_of(HolidayCrontab(minute=30), UTC)
    assert key == key_of(HolidayCrontab(minute="30-30"), UTC), "its spelling is not its meaning"
    assert key != key_of(HolidayCrontab(minute=31), UTC)
    assert key != key_of(HolidayCrontab(minute=30), PARIS)
    assert key != key_of(crontab(minute=30), UTC)
    edited = HolidayCrontab(minute=30)
    edited.holidays = frozenset()
    assert key_of(edited, UTC) != key


def test_chains_share_one_key() -> None:
    """So that a new release of the class goes on where the old one was, and mixed fleets are in one row."""
    assert of(Jittered(60)).key == of(Jittered(90)).key == of(Fails()).key


# --- registered timetables --------------------------------------------------------------------------------------------


class Shifts(BaseSchedule):  # type: ignore[misc]
    def __init__(self, hours: int) -> None:
        super().__init__()
        self.hours = hours

    def is_due(self, last_run_at: datetime) -> Any:
        raise AssertionError("it is not asked")


class EarlyShifts(Shifts):
    """As its base."""


class OddShifts(Shifts):
    def is_due(self, last_run_at: datetime) -> Any:
        return False, 60


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(schedules, "_registered", {})
    return register_timetable


def test_a_registered_timetable(registered: Callable[..., None]) -> None:
    registered(Shifts, lambda shifts: Interval(shifts.hours * HOUR))
    assert of(Shifts(8)).key == of(EarlyShifts(8)).key == Interval(8 * HOUR).key
    assert kind_of(of(OddShifts(8)), job="export") is Kind.CHAIN
    registered(Shifts, lambda shifts: cron_from_text("0 6,14,22 * * *", shifts.tz))
    assert of(Shifts(8), timezone="Europe/Paris") is cron_from_text("0 6,14,22 * * *", "Europe/Paris")


def test_what_is_no_timetable(registered: Callable[..., None]) -> None:
    for wrong, words in (
        (object(), "has no key, a text that is another one when its slots are others"),
        (
            type("Half", (), {"key": "half", "next": print})(),
            r"has no last\(\); see celery_anarchon.timetable.Timetable",
        ),
    ):
        registered(Shifts, lambda _, wrong=wrong: wrong)
        with pytest.raises(ConfigurationError, match=f"job 'export': the timetable registered for Shifts {words}"):
            of(Shifts(8))


@pytest.mark.parametrize("cls", [crontab, schedule, every, BaseSchedule, int, "crontab"])
def test_what_cannot_be_registered(registered: Callable[..., None], cls: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^register_timetable\(\): "):
        registered(cls, lambda _: Interval(60_000))
    with pytest.raises(ConfigurationError, match="cannot be called with a schedule"):
        registered(Shifts, None)


# --- beats ------------------------------------------------------------------------------------------------------------


class Closed(crontab):  # type: ignore[misc]
    """Every half hour, and closed for some hours of one day: what the test of it does not come upon."""

    def is_due(self, last_run_at: datetime) -> Any:
        now = self.now()
        if now.date() == date(2026, 3, 29) and 3 <= now.hour < 5:
            return False, 600.0
        return super().is_due(last_run_at)


def test_beats_that_come_and_go_send_one_row() -> None:
    """Also those that start, or are restarted, in the middle of what is closed: the store's last slot puts them in."""

    def definition() -> Any:
        return job("closed", timetable=of(Closed(minute="15,45"), timezone="UTC"))

    world = World()
    assert time_text(START) == "2026-03-29T01:00:00.000Z"
    world.beat("a", definition())
    world.run(50 * MINUTE)
    world.beat("b", definition())
    world.run(77 * MINUTE)
    world.beats.pop("a").close()
    world.run(64 * MINUTE)
    world.beat("c", definition())
    world.run(20 * MINUTE)
    world.beats.pop("b").close()
    world.beat("d", definition())
    world.run(120 * MINUTE)
    expected = ["01:15", "01:45", "02:15", "02:45", "05:00", "05:15", "05:45", "06:15"]
    assert [(name, time_text(slot)[11:16]) for name, slot in world.outbox.slots] == [("closed", at) for at in expected]
    assert len(world.beats) == 2
