"""Beats whose clocks are wrong: they leave the slots to those that are right, or follow the store's clock."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine import MINUTE, SECOND, START, World, job

from celery_anarchon import events
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.model import Coalesce, Millis, Traits
from celery_anarchon.options import scheduler_settings
from celery_anarchon.skew import FleetClock, Standing
from celery_anarchon.testing.clock import ManualClock

DAY: Millis = 86_400_000


class Off:
    """The clock of a host that is off the store's by so much."""

    def __init__(self, true: ManualClock, by: Millis) -> None:
        self.true = true
        self.by = by

    def wall(self) -> Millis:
        return self.true.wall() + self.by

    def monotonic(self) -> float:
        return self.true.monotonic()


@pytest.fixture
def world() -> World:
    return World()


def beat_off(world: World, name: str, by: Millis, *jobs: Any) -> Off:
    clock = Off(world.clock, by)
    world.beat(name, *(jobs or (job(every=10 * SECOND),)), kind=lambda **given: Dispatcher(**{**given, "clock": clock}))
    return clock


def slots(start: Millis, end: Millis, every: Millis = 10 * SECOND) -> list[tuple[str, Millis]]:
    """(start, end], relative to START, which lies on the grid."""
    return [("job", START + at) for at in range(start + every, end + 1, every)]


def claimed(world: World, name: str) -> list[Millis]:
    return [event.slot for event in world.events_of(events.Claimed, name)]


def beyond(world: World, name: str) -> list[bool]:
    return [event.following for event in world.events_of(events.SkewBeyond, name)]


@pytest.mark.parametrize("by", [180 * SECOND, -180 * SECOND, DAY, -DAY])
def test_a_wrong_clock_claims_nothing_beside_a_right_one(world: World, by: Millis) -> None:
    beat_off(world, "right", 0)
    beat_off(world, "wrong", by)
    world.run(5 * MINUTE)
    assert world.outbox.slots == slots(0, 5 * MINUTE)
    assert claimed(world, "wrong") == []
    assert beyond(world, "wrong") == [False]
    assert beyond(world, "right") == []
    assert set(world.states("job").values()) == {"dispatched"}
    assert all(event.late == 0 for event in world.events_of(events.Sent))


def test_a_barred_beat_rests(world: World) -> None:
    beat_off(world, "right", 0)
    beat_off(world, "wrong", 180 * SECOND)
    world.run(MINUTE + 4 * SECOND)
    assert 1 < world.beats["wrong"].tick() <= 10


@pytest.mark.parametrize("by", [4 * SECOND, -4 * SECOND])
def test_a_clock_within_the_limit_is_followed(world: World, by: Millis) -> None:
    beat_off(world, "near", by)
    world.run(MINUTE)
    assert world.events_of(events.SkewSeen)
    assert beyond(world, "near") == []
    assert [event.late for event in world.events_of(events.Sent)] == [0] * len(world.outbox.slots)
    assert len(world.outbox.slots) >= 5


@pytest.mark.parametrize("by", [180 * SECOND, -180 * SECOND, DAY, -DAY])
def test_alone_it_follows_the_stores_clock(world: World, by: Millis) -> None:
    beat_off(world, "wrong", by)
    arrived: list[Millis] = []
    world.outbox.after = lambda dispatch: arrived.append(world.clock.wall() - dispatch.slot)
    world.run(5 * MINUTE)
    assert world.outbox.slots == slots(0, 5 * MINUTE)
    assert max(arrived) < 100, "at the store's time"
    assert beyond(world, "wrong") == [True]
    assert set(world.states("job").values()) == {"dispatched"}


def test_of_two_wrong_clocks_each_slot_is_sent_once_at_the_stores_time(world: World) -> None:
    beat_off(world, "ahead", 90 * SECOND)
    beat_off(world, "behind", -90 * SECOND)
    arrived: list[Millis] = []
    world.outbox.after = lambda dispatch: arrived.append(world.clock.wall() - dispatch.slot)
    world.run(5 * MINUTE)
    assert world.outbox.slots == slots(0, 5 * MINUTE)
    assert max(arrived) < 100
    assert beyond(world, "ahead") == beyond(world, "behind") == [True]


@pytest.mark.parametrize("coalesce", [Coalesce.LATEST, Coalesce.ALL])
def test_when_the_last_right_beat_dies_no_slot_is_lost(world: World, coalesce: Coalesce) -> None:
    work = job(every=10 * SECOND, coalesce=coalesce)
    beat_off(world, "right", 0, work)
    beat_off(world, "wrong", 180 * SECOND, work)
    world.run(2 * MINUTE + 5 * SECOND)
    world.run(3 * MINUTE, "wrong")
    assert world.outbox.slots == slots(0, 5 * MINUTE + 5 * SECOND)
    assert beyond(world, "wrong") == [False, True]
    assert set(world.states("job").values()) == {"dispatched"}


def test_when_the_last_right_beat_leaves_the_next_heartbeat_takes_over(world: World) -> None:
    beat_off(world, "right", 0)
    beat_off(world, "wrong", -180 * SECOND)
    world.run(MINUTE + 5 * SECOND)
    world.beats["right"].close()
    world.run(15 * SECOND, "wrong")
    assert world.outbox.slots == slots(0, MINUTE + 20 * SECOND)


def test_a_right_beat_takes_the_slots_from_one_that_follows(world: World) -> None:
    beat_off(world, "wrong", 180 * SECOND)
    world.run(MINUTE)
    beat_off(world, "right", 0)
    world.run(MINUTE)
    world.seen.clear()
    world.run(MINUTE)
    assert claimed(world, "wrong") == []
    assert world.outbox.slots == slots(0, 3 * MINUTE)


@pytest.mark.parametrize("others", [0, 1])
def test_a_clock_that_is_set_right_is_followed_again(world: World, others: int) -> None:
    clock = beat_off(world, "wrong", 180 * SECOND)
    if others:
        beat_off(world, "right", 0)
    world.run(MINUTE)
    clock.by = 0
    world.run(MINUTE)
    assert world.beats["wrong"].clock.standing is Standing.OWN
    assert len(world.events_of(events.SkewWithin, "wrong")) == 1
    world.run(MINUTE, "wrong")
    assert world.outbox.slots == slots(0, 3 * MINUTE)
    assert set(world.states("job").values()) == {"dispatched"}


@pytest.mark.parametrize("others", [0, 1])
def test_a_clock_that_is_set_wrong_burns_nothing(world: World, others: int) -> None:
    """A day ahead, all at once, while the beat runs: tomorrow's slots are not given up, and not claimed."""
    clock = beat_off(world, "wrong", 0)
    if others:
        beat_off(world, "right", 0)
    world.run(MINUTE + 5 * SECOND)
    clock.by = DAY
    world.run(MINUTE)
    assert world.outbox.slots == slots(0, 2 * MINUTE)
    assert world.states("job") == dict.fromkeys((slot for _, slot in world.outbox.slots), "dispatched")
    assert beyond(world, "wrong") == [not others]


def test_a_clock_that_is_set_between_two_looks_burns_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very moment between the look at the clock and its reading."""
    clock = beat_off(world, "wrong", 0)
    world.run(MINUTE)
    beat = world.beats["wrong"]
    honest = beat.agenda.next_due
    readings: list[int] = []
    wall = beat.clock.wall

    def next_due() -> Millis | None:
        readings.append(1)
        return honest()

    def late_wall() -> Millis:
        # The first reading that is for planning: the tick has looked already.
        if not clock.by and world.clock.wall() > START + MINUTE:
            clock.by = DAY
        return wall()

    world.clock.advance(10 * SECOND)
    monkeypatch.setattr(beat.agenda, "next_due", next_due)
    monkeypatch.setattr(beat._roster, "show_presence", lambda: monkeypatch.setattr(beat.clock, "wall", late_wall))
    beat.tick()
    monkeypatch.undo()
    assert clock.by == DAY and readings
    assert set(world.states("job").values()) == {"dispatched"}
    world.run(MINUTE)
    assert world.outbox.slots == slots(0, 2 * MINUTE + 10 * SECOND)


def test_a_slow_answer_is_no_skew() -> None:
    """The store looked at its clock at some moment of a call of 20 s: that proves nothing about 8 s."""
    clock = ManualClock(wall=START)
    seen: list[events.Event] = []
    fleet = FleetClock(clock, events.Fanout(seen.append), 5 * SECOND)

    def slow(before: Millis, after: Millis) -> Millis:
        clock.advance(before)
        now = clock.wall()
        clock.advance(after)
        return now

    fleet.compare(lambda: slow(2 * SECOND, 18 * SECOND))
    assert not fleet.decide([])
    fleet.compare(lambda: slow(18 * SECOND, 2 * SECOND))
    assert not fleet.decide([])
    assert fleet.standing is Standing.OWN
    fleet.compare(lambda: slow(0, 0) - 6 * SECOND)
    assert fleet.decide([(0, START)])
    assert fleet.standing is Standing.BARRED


def test_the_others_learn_of_a_skew_before_they_rely_on_it(world: World) -> None:
    beat_off(world, "wrong", 180 * SECOND)
    world.beats["wrong"].tick()
    (shown,) = world.backend("wrong").beats(within=MINUTE)
    assert shown.skew == 180 * SECOND


LEASES = Traits(
    leases=True,
    horizon=None,
    server_time=True,
    durable=True,
    any_job_name=True,
    history_by_age=True,
    max_key_length=None,
)


def test_the_setting() -> None:
    assert scheduler_settings({}, LEASES).max_skew == 5_000
    assert scheduler_settings({"max_skew": "1m"}, LEASES).max_skew == 60_000
    with pytest.raises(ConfigurationError, match=r"anarchon_max_skew.*at least 1 s"):
        scheduler_settings({"max_skew": 0.5}, LEASES)
    claim_only = Traits(**{**vars(LEASES), "leases": False})
    with pytest.raises(OptionError, match=r"anarchon_max_skew.*needs a store with leases"):
        scheduler_settings({"max_skew": 5}, claim_only)
