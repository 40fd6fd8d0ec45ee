"""Publishing what was won: brokers that keep silent, leases that end meanwhile, and how late a first publish may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.engine import MINUTE, SECOND, START, Failing, World, job

from celery_anarchon import events
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.clock import Clock
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.model import Millis
from celery_anarchon.publishing import Dispatch, PublishUnclear

HOUR = 60 * MINUTE


@pytest.fixture
def world() -> World:
    return World()


def silence(world: World, span: Millis = 10 * SECOND) -> Callable[[Dispatch], None]:
    """A broker that takes each message, and says nothing for so long."""

    def mood(_dispatch: Dispatch) -> None:
        world.clock.advance(span)
        raise PublishUnclear("timed out")

    return mood


def drive(world: World, until: Millis, name: str = "a") -> None:
    """Let one beat tick until then, however much time its ticks take."""
    while world.clock.wall() < until:
        wait = world.beats[name].tick()
        world.clock.advance(max(1, min(round(wait * 1000), until - world.clock.wall())))


def given_up(world: World) -> list[tuple[str, str]]:
    return [(str(event.state), event.reason) for event in world.events_of(events.SlotsGivenUp)]


# --- a broker that keeps silent ---------------------------------------------------------------------------------------


def stopped_at_the_first_message(world: World, span: Millis) -> float:
    """A hundred slots are won, the stop comes while the first is published; for how many seconds the beat goes on."""
    beat = world.beat("a", *(job(f"job-{number}") for number in range(100)))
    world.run(SECOND)
    say_nothing = silence(world, span)
    stops: list[Dispatch] = []
    beat.stopping = lambda: bool(stops)

    def mood(dispatch: Dispatch) -> None:
        stops.append(dispatch)
        say_nothing(dispatch)

    world.outbox.mood = mood
    world.clock.advance(START + MINUTE - world.clock.wall())
    begun = world.clock.monotonic()
    beat.tick()
    beat.close()
    assert stops, "nothing was published"
    return world.clock.monotonic() - begun


@pytest.mark.parametrize("span", [10 * SECOND, 200])
def test_a_stop_while_the_broker_confirms_nothing_hands_back_all_that_was_won(world: World, span: Millis) -> None:
    assert stopped_at_the_first_message(world, span) <= 15
    assert world.events_of(events.LeaseOver) == []
    assert len(MemoryBackend(store=world.store).lapsed(200)) == 100


def test_a_stop_while_the_broker_confirms_nothing_is_quick_where_nobody_takes_over() -> None:
    world = World(claim_only={})
    assert stopped_at_the_first_message(world, 10 * SECOND) <= 25
    assert len(given_up(world)) == 100
    assert set(given_up(world)) == {("not-sent", "publish-unclear"), ("not-sent", "beat-stopped")}


def test_a_broker_that_keeps_silent_is_away_and_what_was_won_is_sent_once_it_speaks(world: World) -> None:
    world.beat("a", *(job(f"job-{number}") for number in range(100)))
    world.run(SECOND)
    say_nothing, until = silence(world), START + MINUTE + 25 * SECOND

    def mood(dispatch: Dispatch) -> None:
        if world.clock.wall() < until:
            say_nothing(dispatch)

    world.outbox.mood = mood
    drive(world, START + 2 * MINUTE - SECOND)
    assert world.events_of(events.LeaseOver) == []
    assert sorted(world.outbox.slots) == sorted((f"job-{number}", START + MINUTE) for number in range(100))
    assert [event.error is None for event in world.events_of(events.BrokerChanged)] == [False, True]


def test_what_the_broker_was_silent_about_is_tried_again_after_the_others(world: World) -> None:
    """One queue of a broker may take nothing while the others work."""
    say_nothing = silence(world)

    def mood(dispatch: Dispatch) -> None:
        if dispatch.job.name == "bad":
            say_nothing(dispatch)

    world.outbox.mood = mood
    world.beat("a", job("bad", every=5 * MINUTE), job("good", every=5 * SECOND))
    drive(world, START + 6 * MINUTE)
    assert world.events_of(events.Unclear), "it never came to that"
    lates = [event.late for event in world.events_of(events.Sent)]
    assert max(lates) < 12 * SECOND
    pauses = [after.slot - before.slot for before, after in pairwise(world.events_of(events.Sent))]
    assert max(pauses) <= 15 * SECOND


def test_a_line_that_was_cut_in_mid_message_is_no_outage(world: World) -> None:
    """The next message has a connection of its own."""
    tried: list[Dispatch] = []

    def cut_once(dispatch: Dispatch) -> None:
        tried.append(dispatch)
        if len(tried) == 1:
            raise PublishUnclear("connection reset")

    world.outbox.mood = cut_once
    world.beat("a", *(job(f"job-{number}") for number in range(10)))
    world.run(MINUTE + SECOND)
    assert len(set(world.outbox.slots)) == len(world.outbox.slots) == 10
    assert world.events_of(events.BrokerChanged) == world.events_of(events.TookOver) == []


# --- leases that end while the host sleeps ----------------------------------------------------------------------------


class Sleeper:
    """The clocks of a host whose monotonic one stands still while it sleeps."""

    def __init__(self, true: Clock) -> None:
        self._true = true
        self._slept = 0.0
        self.behind: Millis = 0
        """How far its wall clock is."""

    def wall(self) -> Millis:
        return self._true.wall() - self.behind

    def monotonic(self) -> float:
        return self._true.monotonic() - self._slept

    def sleep(self, meanwhile: Callable[[], None]) -> None:
        begun = self._true.monotonic()
        meanwhile()
        self._slept += self._true.monotonic() - begun


class Nodding(Dispatcher):
    """Something happens to its host once it has been told WON."""

    after_claim: Callable[[], None] | None = None

    def _won(self, asked: Any) -> Any:
        won = super()._won(asked)
        happens, self.after_claim = self.after_claim, None
        if happens is not None:
            happens()
        return won


def nodding(world: World, host: Clock, **given: Any) -> Nodding:
    beat = world.beat("nodding", job(), kind=lambda **args: Nodding(**{**args, "clock": host}), **given)
    assert isinstance(beat, Nodding)
    return beat


def test_a_host_that_slept_past_its_lease_sends_nothing_on_its_old_claim(world: World) -> None:
    host = Sleeper(world.clock)
    beat = nodding(world, host)
    world.run(SECOND)
    world.beat("awake", job())
    world.run(MINUTE - 2 * SECOND)
    beat.after_claim = lambda: host.sleep(lambda: world.run(45 * SECOND, "awake"))
    world.run(SECOND, "nodding")
    assert beat.after_claim is None, "it came there"
    world.run(5 * SECOND)
    assert world.outbox.slots == [("job", START + MINUTE)]
    assert len(world.events_of(events.LeaseOver, "nodding")) == 1
    assert [event.step for event in world.events_of(events.ClockStepped)] == [45 * SECOND]
    assert world.events_of(events.Stalled, "nodding") == [], "said once"


def test_a_host_that_slept_past_its_lease_repeats_no_unclear_publish(world: World) -> None:
    host, deaf = Sleeper(world.clock), World().outbox

    def unclear(_dispatch: Dispatch) -> None:
        raise PublishUnclear("connection reset")

    deaf.mood = unclear
    nodding(world, host, publisher=deaf)
    world.run(MINUTE)
    world.beat("awake", job())
    host.sleep(lambda: world.run(45 * SECOND, "awake"))
    assert world.outbox.slots == [("job", START + MINUTE)]
    deaf.mood = None
    world.run(5 * SECOND)
    assert deaf.slots == []
    assert world.outbox.slots == [("job", START + MINUTE)]


def test_a_clock_set_back_lengthens_no_lease(world: World) -> None:
    host = Sleeper(world.clock)
    beat = nodding(world, host)
    world.run(SECOND)
    world.beat("awake", job())
    world.run(MINUTE - 2 * SECOND)

    def paused() -> None:
        world.run(45 * SECOND, "awake")
        host.behind = MINUTE

    beat.after_claim = paused
    world.run(SECOND, "nodding")
    assert beat.after_claim is None, "it came there"
    world.run(5 * SECOND)
    assert world.outbox.slots == [("job", START + MINUTE)]


def test_a_clock_set_ahead_between_claim_and_publish_costs_no_slot(world: World) -> None:
    """Nobody can tell it from a sleep; the store can."""
    world.settings = replace(world.settings, lease=3 * SECOND, heartbeat=SECOND)
    host = Sleeper(world.clock)
    host.behind = 4 * SECOND
    beat = nodding(world, host)
    world.run(MINUTE + 3 * SECOND)
    assert world.outbox.slots == []
    beat.after_claim = lambda: setattr(host, "behind", 0)
    world.run(SECOND + 100)
    assert beat.after_claim is None, "it came there"
    assert world.outbox.slots == [("job", START + MINUTE)]
    assert len(world.events_of(events.LeaseOver)) == 1
    assert world.events_of(events.TookOver) == []


# --- how late a first publish may be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4])
def test_what_a_slow_broker_makes_too_late_is_a_misfire(world: World, batch: int) -> None:
    world.settings = replace(world.settings, batch=batch)
    jobs = [job(f"job-{number}", max_late=5 * SECOND) for number in range(4)]
    beat = world.beat("a", *jobs)
    world.run(MINUTE - SECOND)
    world.outbox.after = lambda _: world.clock.advance(6 * SECOND)
    world.clock.advance(SECOND)
    beat.tick()
    assert len(world.outbox.slots) == 1
    assert given_up(world) == [("misfire", "max-late")] * 3
    states = [state for one in jobs for state in world.states(one.name).values()]
    assert sorted(states) == ["dispatched"] + ["misfire (max-late)"] * 3
    beat.close()


def test_a_pause_in_mid_burst_bends_no_max_late(world: World) -> None:
    world.settings = replace(world.settings, batch=1)
    beat = world.beat("a", *(job(f"job-{number}", every=HOUR, max_late=MINUTE) for number in range(2)))
    first = START + HOUR - START % HOUR
    world.run(first - SECOND - world.clock.wall())
    world.outbox.after = lambda _: world.clock.advance(10 * MINUTE)
    world.clock.advance(SECOND)
    beat.tick()
    assert [event.late for event in world.events_of(events.Sent)] == [0]
    assert given_up(world) == [("misfire", "max-late")]


def test_an_unclear_publish_is_not_repeated_beyond_max_late(world: World) -> None:
    """It may be out, so nobody says that it is not."""
    world.outbox.mood = silence(world)
    world.beat("a", job(every=5 * MINUTE, max_late=5 * SECOND))
    drive(world, START + 5 * MINUTE + 40 * SECOND)
    world.outbox.mood = None
    drive(world, START + 7 * MINUTE)
    assert world.outbox.slots == []
    assert given_up(world) == [("misfire", "publish-unclear")]
    assert list(world.states("job").values()) == ["misfire (publish-unclear)"]


def test_late_is_counted_from_when_a_slot_falls_due(world: World) -> None:
    jittered = job(every=HOUR, jitter=10 * MINUTE, max_late=5 * SECOND)
    world.beat("a", jittered)
    world.run(2 * HOUR)
    sent = world.events_of(events.Sent)
    assert sent and all(event.late > 5 * SECOND for event in sent), "late by the slot, not by its due time"
    due = sent[0].slot + sent[0].late
    assert not jittered.is_late(sent[0].slot, due + 5 * SECOND)
    assert jittered.is_late(sent[0].slot, due + 5 * SECOND + 1)


def test_a_timetable_that_fails_makes_nothing_late() -> None:
    broken = Failing(MINUTE)
    one = job(timetable=broken, jitter=SECOND, max_late=5 * SECOND)
    broken.fails = True
    assert not one.is_late(START, START + MINUTE)
