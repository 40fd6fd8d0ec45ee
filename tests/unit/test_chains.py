"""Jobs that name no slots beforehand: each run is the successor of the one before, and there is one of each."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule
from support.engine import SECOND, START, Outbox, World, job

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.entries import ANY_STORE, JobFactory
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.publishing import PublishUnclear
from celery_anarchon.timetable import Chain
from celery_anarchon.wire import instant


class Dice(Chain):
    """Due some seconds after the last run: how many, every beat thinks anew each time that it is asked."""

    def __init__(self, world: World, seed: int, shortest: Millis = 2_000, longest: Millis = 6_000) -> None:
        self.clock = world.clock
        self.random = random.Random(seed)
        self.span = shortest, longest
        self.asked: list[Millis] = []

    def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
        self.asked.append(last_run)
        wait = last_run + self.random.randint(*self.span) - self.clock.wall()
        return wait <= 0, max(wait, 1)


def chained(world: World, seed: int = 1, **kwargs: Any) -> Job:
    return job("dice", timetable=Dice(world, seed, **kwargs))


def check(world: World) -> list[tuple[str, Millis]]:
    """One message for each slot, and each slot the millisecond after the claim of the one before."""
    sent = world.outbox.slots
    assert len(set(sent)) == len(sent)
    assert sent == sorted(sent, key=lambda item: item[1])
    runs = list(reversed(next(iter(world.beats.values())).backend.history("dice", 10_000)))
    for before, after in itertools.pairwise(runs):
        assert before.claimed_at is not None
        assert instant(after.slot) == instant(before.claimed_at) + 1
    assert [("dice", instant(run.slot)) for run in runs] == sent
    return sent


def test_one_message_for_each_whatever_the_beats_think() -> None:
    for seed in range(20):
        world = World()
        for number, name in enumerate("abc"):
            world.beat(name, chained(world, seed * 10 + number))
        world.run(120 * SECOND)
        sent = check(world)
        assert 120 / 6 - 1 <= len(sent) <= 120 / 2
        gaps = [after - before for (_, before), (_, after) in itertools.pairwise(sent[1:])]
        assert min(gaps) >= 1_900


def test_the_first_is_asked_about_the_first_sight() -> None:
    world = World()
    first = chained(world)
    world.beat("a", first)
    world.run(1 * SECOND)
    world.beat("b", chained(world, 2))
    world.run(1 * SECOND)
    for name in "ab":
        watched = world.beats[name].agenda.get("dice")
        assert watched is not None
        assert isinstance(watched.job.timetable, Dice)
        assert set(watched.job.timetable.asked) == {START}
    world.run(10 * SECOND)
    assert world.outbox.slots[0] == ("dice", START + 1)


def test_the_first_run_comes_while_another_beat_looks() -> None:
    """Between its look at an empty history and its look at the job: the run is there, and is no older definition's."""
    world = World()
    world.beat("a", chained(world, shortest=0, longest=0))
    late = world.beat("b", chained(world, shortest=0, longest=0))
    late.tick()
    world.clock.advance(1_100)
    backend = world.backend("b")
    register, done = backend.register, []

    def slow(sightings: Any) -> Any:
        if not done:
            done.append(True)
            world.beats["a"].tick()
        return register(sightings)

    backend.register = slow  # type: ignore[method-assign]
    late.tick()
    assert done
    assert world.outbox.slots == [("dice", START + 1)]
    world.run(10 * SECOND)
    check(world)


def test_a_restart_goes_on_after_the_last_run() -> None:
    world = World()
    world.beat("a", chained(world))
    world.run(30 * SECOND)
    world.beats.pop("a").close()
    world.clock.advance(3_600 * SECOND)
    world.beat("b", chained(world, 2))
    world.run(1 * SECOND)
    sent = check(world)
    last, caught_up = sent[-2:]
    # An hour without a beat is one run, as with stock beat.
    assert caught_up[1] < START + 40 * SECOND
    assert last[1] < caught_up[1]
    world.run(20 * SECOND)
    check(world)


def test_one_that_is_always_due_rests_for_a_second() -> None:
    world = World()
    for number, name in enumerate("ab"):
        world.beat(name, chained(world, number, shortest=0, longest=0))
    world.run(30 * SECOND)
    assert 10 <= len(check(world)) <= 31


def test_a_beat_that_slept_asks_for_what_is_taken() -> None:
    """It has read the last run, and sleeps until others have gone on."""
    world = World()
    world.beat("a", chained(world))
    world.run(20 * SECOND)
    sleeper = world.beat("b", chained(world, 2, shortest=0, longest=0))
    sleeper.tick()
    chains = sleeper._planning._chains
    read = chains._run_before
    late: list[Millis | None] = []

    def once(watched: Any) -> Millis | None:
        if not late:
            late.append(read(watched))
            world.run(30 * SECOND, "a")
            return late[0]
        return read(watched)

    chains._run_before = once  # type: ignore[method-assign]
    world.clock.advance(1_500)
    sleeper.tick()
    assert late
    world.run(10 * SECOND)
    check(world)


def test_a_death_between_claim_and_publish_holds_the_row_until_the_takeover() -> None:
    world = World()
    world.beat("a", chained(world))
    world.run(20 * SECOND)
    before = len(check(world))
    backend = world.backend()
    (newest,) = backend.history("dice", 1)
    assert newest.claimed_at is not None
    slot = instant(newest.claimed_at) + 1
    request = ClaimRequest(job="dice", slot=slot, owner="dead", beat="dead", lease=30 * SECOND)
    world.clock.advance(5)
    assert str(backend.claim([request])[0].answer) == "won"
    world.run(25 * SECOND)
    assert len(world.outbox.slots) == before, "the run after it was sent before it"
    world.run(40 * SECOND)
    sent = check(world)
    assert sent[before] == ("dice", slot)
    assert len(sent) > before + 1
    assert [event.slot for event in world.events_of(events.TookOver)] == [slot]


def test_a_broker_outage_owes_one_run() -> None:
    world = World()
    for number, name in enumerate("ab"):
        world.beat(name, chained(world, number))
    world.run(20 * SECOND)
    before = len(check(world))
    world.outbox.away = True
    world.run(600 * SECOND)
    world.outbox.away = False
    world.run(40 * SECOND)
    sent = check(world)
    assert before < len(sent) < before + 25
    assert not world.events_of(events.SlotsGivenUp)


def test_an_unclear_publish_is_told_again_with_the_same_id() -> None:
    world = World()
    world.beat("a", chained(world))
    unclear: list[str] = []

    def lose(dispatch: Any) -> None:
        if len(unclear) < 1:
            unclear.append(dispatch.run_id)
            raise PublishUnclear("no answer")

    world.outbox.after = lose
    world.run(30 * SECOND)
    ids = [run_id for _, _, run_id in world.outbox.arrived]
    assert ids[:2] == unclear * 2
    assert len(set(ids)) == len(ids) - 1 > 3


def test_a_lost_answer_to_a_claim() -> None:
    world = World()
    for number, name in enumerate("ab"):
        world.beat(name, chained(world, number))
    world.run(10 * SECOND)
    world.backend("a").lose_reply_of = {"claim"}
    world.run(20 * SECOND)
    world.backend("a").lose_reply_of = set()
    world.run(60 * SECOND)
    check(world)


def test_a_beat_alone_asks_again_at_once_for_a_successor() -> None:
    """The newest record is then a claim that nobody publishes: it would be waited for until its lease is over."""
    world = World()
    world.beat("a", chained(world))
    world.run(10 * SECOND)
    world.lose_a_reply_of("claim")
    sent, lost_at = len(world.outbox.slots), world.clock.wall()
    world.run(2 * SECOND)
    assert len(world.outbox.slots) == sent + 1
    assert world.events_of(events.TookOver) == []
    (claim,) = (run for run in world.backend().history("dice", 1))
    assert instant(claim.claimed_at) <= lost_at, "it is the one whose answer was lost"
    world.run(60 * SECOND)
    check(world)


def test_a_store_that_is_away_is_no_job_s_trouble() -> None:
    world = World()
    world.beat("a", chained(world))
    world.run(10 * SECOND)
    world.backend().away = True
    world.run(60 * SECOND)
    world.backend().away = False
    world.run(60 * SECOND)
    assert len(check(world)) > 10
    assert not world.events_of(events.JobTrouble)


def test_one_that_fails_troubles_no_other() -> None:
    class Fails(Chain):
        def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
            raise KeyError("calendar")

    class Silent(Chain):
        def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
            return False, None

    world = World(outbox=Outbox())
    world.beat("a", job("fails", timetable=Fails()), job("silent", timetable=Silent()), job("fine", SECOND))
    world.run(30 * SECOND)
    assert [slot for name, slot in world.outbox.slots if name == "fine"] == [START + n * SECOND for n in range(1, 31)]
    assert {name for name, _ in world.outbox.slots} == {"fine"}
    assert [event.job for event in world.events_of(events.JobTrouble)] == ["fails"]
    world.run(600 * SECOND)
    assert len(world.events_of(events.JobTrouble)) == 3


def test_the_history_is_kept_short() -> None:
    world = World()
    world.beat("a", job("dice", timetable=Dice(world, 1), history_size=3))
    world.run(120 * SECOND)
    assert len(world.backend().history("dice", 100)) <= 6
    assert len(world.outbox.slots) == len(set(world.outbox.slots)) > 15


def test_options_that_need_slots() -> None:
    class Never(BaseSchedule):  # type: ignore[misc]
        def is_due(self, last_run_at: Any) -> Any:
            return False, None

    def build(traits: Any = ANY_STORE, **options: Any) -> Job:
        app = Celery("proj", set_as_current=False)
        app.conf.anarchon_jitter = 5
        factory = JobFactory(app, traits)
        entry = {"task": "t", "schedule": Never(), "options": {"anarchon": options}}
        return factory.job(factory.entry("dice", entry))

    assert build().options.jitter == 0
    assert build(history_size=5).options.history_size == 5
    for name, value in {"jitter": 1, "max_late": 60, "catch_up": 5, "coalesce": "all", "history_ttl": 60}.items():
        with pytest.raises(OptionError, match=f"job 'dice': option '{name}' needs slots that are known beforehand"):
            build(**{name: value})
    for name, value in {"offset": 1, "timezone": "UTC"}.items():
        with pytest.raises(OptionError, match=f"option '{name}' .* this job is of a class that names no slots"):
            build(**{name: value})
    with pytest.raises(ConfigurationError, match=r"job 'dice': its class names no slots beforehand .*leases"):
        build(replace(ANY_STORE, leases=False))
