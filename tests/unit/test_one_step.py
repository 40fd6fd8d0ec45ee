"""The engine with claims that take their messages along: a store in memory, and a maker of messages that is told how
to behave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.engine import MINUTE, SECOND, SETTINGS, START, World, job

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimRequest, Command, Takeover
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.runs import Settlement, Start, Worker
from celery_anarchon.burst import MOMENT
from celery_anarchon.errors import ConfigurationError, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.model import Answer, GateAnswer, Millis, Overlap, RunState, Terms
from celery_anarchon.publishing import BrokerAway, Dispatch, NothingToSend, NotOneStep
from celery_anarchon.sharing import Share
from celery_anarchon.timetable import Chain

QUEUE = "queue"


@dataclass
class Maker:
    """Writes the message's job, slot and attempt."""

    refusal: str | None = None
    """What :meth:`verify` finds."""
    never: str | None = None
    away: bool = False
    is_new: bool = True
    cheap: bool = False
    left: frozenset[str] = frozenset()
    """Jobs whose messages it does not make."""
    mood: Callable[[Dispatch], None] | None = None
    built: list[tuple[str, Millis]] = field(default_factory=list)
    verified: int = 0

    def why_not(self) -> str | None:
        return self.never

    def verify(self, store: OneStepBackend) -> None:
        if self.away:
            raise BrokerAway("connection refused")
        self.verified += 1
        self.is_new = False
        if self.refusal:
            raise NotOneStep(self.refusal)

    def takes(self, job: Job) -> bool:
        return job.name not in self.left

    def quick(self, job: Job, terms: Terms | None) -> Callable[[Dispatch], tuple[Command, ...]] | None:
        return self.build if self.cheap and self.takes(job) else None

    def build(self, dispatch: Dispatch) -> tuple[Command, ...]:
        self.built.append((dispatch.job.name, dispatch.slot))
        if self.mood is not None:
            self.mood(dispatch)
        return (("PUT", QUEUE, f"{dispatch.job.name} {(dispatch.slot - START) // SECOND} {dispatch.attempt}"),)


@pytest.fixture
def world() -> World:
    return World()


def queue(world: World) -> list[str]:
    return [str(payload) for payload in world.store.queues[QUEUE]]


def test_what_is_due_is_sent_with_its_claim(world: World) -> None:
    maker = Maker()
    world.beat("a", job("x"), job("y", 2 * MINUTE), builder=maker)
    world.run(2 * MINUTE)
    assert queue(world) == ["x 60 1", "x 120 1", "y 120 1"] or sorted(queue(world)) == ["x 120 1", "x 60 1", "y 120 1"]
    assert world.outbox.arrived == []
    assert "confirm" not in world.backend().calls, "there is nothing to confirm"
    assert set(world.states("x").values()) == {"dispatched"}
    assert len(world.events_of(events.Sending)) == len(world.events_of(events.Sent)) == 3
    assert all(event.late < SECOND for event in world.events_of(events.Sent))


def test_a_lost_answer_is_asked_again_and_nothing_is_sent_twice(world: World) -> None:
    beat = world.beat("a", job("x"), builder=Maker())
    beat.tick()
    world.backend().lose_reply_of.add("claim_and_send")
    world.run(MINUTE)
    assert queue(world) == ["x 60 1"]
    assert world.events_of(events.Sent) == []
    world.backend().lose_reply_of.clear()
    world.run(30 * SECOND)
    assert queue(world) == ["x 60 1"]
    (sent,) = world.events_of(events.Sent)
    assert sent.slot == START + MINUTE and sent.late >= 0, "it is told once it is known"
    world.run(MINUTE)
    assert queue(world) == ["x 60 1", "x 120 1"]


def test_a_message_that_is_out_is_told_as_sent_though_the_plan_has_given_its_slot_up(world: World) -> None:
    """The answer was lost, and the store was away until a newer slot had come."""
    world.beat("a", job("x", 10 * SECOND), builder=Maker())
    world.lose_a_reply_of("claim_and_send")
    world.backend().away = True
    world.run(12 * SECOND)
    world.backend().away = False
    world.run(10 * SECOND)
    assert queue(world) == ["x 10 1", "x 20 1", "x 30 1"]
    assert sorted(event.slot - START for event in world.events_of(events.Sent)) == [10_000, 20_000, 30_000]
    assert world.events_of(events.SlotsGivenUp) == []


def test_beats_share_a_burst_and_messages_are_made_for_what_is_open(world: World) -> None:
    jobs = [job(f"job-{n}") for n in range(20)]
    first, second = Maker(), Maker()
    world.beat("a", *jobs, builder=first)
    world.beat("b", *jobs, builder=second)
    world.run(3 * MINUTE)
    assert len(queue(world)) == len(set(queue(world))) == 60
    assert len(first.built) + len(second.built) == 60, "none was made in vain"
    assert world.outbox.arrived == []


def test_where_messages_cost_nothing_nobody_looks_first(world: World) -> None:
    world.beat("a", job("x"), builder=Maker(cheap=True))
    world.run(MINUTE)
    assert queue(world) == ["x 60 1"]
    assert "decided" not in world.backend().calls


def test_where_others_are_faster_it_looks_first_all_the_same(world: World) -> None:
    jobs = [job(f"job-{n}") for n in range(800)]
    first, second = Maker(cheap=True), Maker(cheap=True)
    world.beat("a", *jobs, builder=first)
    world.beat("b", *jobs, builder=second)
    world.run(MINUTE)
    assert len(queue(world)) == len(set(queue(world))) == 800
    assert len(first.built) == 800
    assert len(second.built) == 2 * world.settings.batch, "and none of the third: two are under way before it knows"


def test_beyond_its_own_part_of_a_burst_a_beat_looks_first(world: World) -> None:
    jobs = [job(f"job-{n}") for n in range(400)]
    first, second = Maker(cheap=True), Maker(cheap=True)
    world.beat("a", *jobs, builder=first)
    world.beat("b", *jobs, builder=second)
    world.run(MINUTE - SECOND)
    beat = world.beats["a"]
    part, own = Share(beat.agenda, beat._roster.place, beat._roster.part), []
    while not part.abroad:
        own.append(part.take().job.name)
    beat.stopping = lambda: len(first.built) >= len(own)
    world.run(2 * SECOND, "a")
    assert {name for name, _ in first.built} == set(own)
    assert "decided" not in world.backend("a").calls
    world.run(2 * SECOND, "b")
    assert not set(first.built) & set(second.built), "nothing was made in vain"
    assert len(queue(world)) == len(set(queue(world))) == 400


def test_what_is_left_to_others_is_left_for_a_moment(world: World) -> None:
    """From when it is left, however long the burst took until then."""
    world.settings = replace(world.settings, batch=10)
    jobs = [job(f"job-{number}") for number in range(200)]
    slow = Maker(cheap=True, mood=lambda _: world.clock.advance(5))
    one, other = world.beat("one", *jobs, builder=slow), world.beat("other", *jobs, builder=Maker(cheap=True))
    world.run(MINUTE - SECOND)
    other.stopping = lambda: len(queue(world)) >= 40
    world.clock.advance(SECOND)
    other.tick()
    one.tick()
    assert len(queue(world)) == 200
    assert world.clock.wall() > START + MINUTE + 2 * MOMENT
    assert one.agenda.next_due() == world.clock.wall() + MOMENT
    assert one.tick() == MOMENT / 1000
    world.clock.advance(MOMENT)
    assert one.tick() > SECOND / 1000, "and once only"


def test_a_beat_leaves_a_burst_to_others_each_second(world: World) -> None:
    world.settings = replace(world.settings, batch=10)
    jobs = [job(f"job-{number}", every=SECOND) for number in range(100)]
    one, other = (world.beat(name, *jobs, builder=Maker(cheap=True)) for name in ("one", "other"))
    world.run(MINUTE)
    world.clock.advance(SECOND)
    left = []
    for _ in range(5):
        other.tick()
        one.tick()
        left.append((one.agenda.next_due() or 0) - world.clock.wall() == MOMENT)
        world.clock.advance(MOMENT)
        one.tick()
        world.clock.advance(SECOND - MOMENT)
    assert all(left)


def test_slots_of_one_job_are_not_under_way_in_two_batches(world: World) -> None:
    """They go over connections of their own, and the server may come to the newer ones first."""
    world.settings = replace(world.settings, batch=2)
    # Of which some owe a slot, and some as many as make a batch.
    jobs = [job(f"x-{n}", every=SECOND) for n in range(5)] + [job(f"y-{n}", every=4 * SECOND) for n in range(5)]
    beat = world.beat("a", *jobs, builder=Maker())
    world.run(2 * SECOND)
    under_way: list[set[str]] = []
    begin = beat.one_step.store.begin_claims

    def noted(requests: Any) -> Any:
        answers, jobs = begin(requests), {request.job for request in requests}
        assert not any(jobs & others for others in under_way)
        under_way.append(jobs)

        def landed() -> Any:
            under_way.remove(jobs)
            return answers()

        return landed

    beat.one_step.store.begin_claims = noted  # type: ignore[method-assign]
    world.clock.advance(4 * SECOND)
    for _ in range(4):
        beat.tick()
    assert sum(text.startswith("x") for text in set(queue(world))) == 5 * 6
    world.clock.advance(SECOND)
    for _ in range(2):
        beat.tick()
    assert sum(text.startswith("x") for text in set(queue(world))) == 5 * 7
    assert len(queue(world)) == len(set(queue(world)))


def test_a_beat_in_two_steps_beside_one_in_one(world: World) -> None:
    """A rolling deploy, or two hosts of which one may not run scripts on the queues."""
    jobs = [job(f"job-{n}") for n in range(20)]
    world.beat("a", *jobs, builder=Maker())
    world.beat("b", *jobs)
    for number in range(6):
        names = "ab" if number % 2 else "ba"
        world.run(MINUTE, *names)
    sent = [(name, START + int(at) * SECOND) for name, at, _ in (text.split() for text in queue(world))]
    both = sent + world.outbox.slots
    assert sent and world.outbox.slots
    assert len(both) == len(set(both)) == 120
    assert all(state == "dispatched" for one in jobs for state in world.states(one.name).values())


def test_a_job_whose_messages_are_not_made_so_is_published(world: World) -> None:
    world.beat("a", job("x"), job("canvas"), builder=Maker(left=frozenset({"canvas"})))
    world.run(MINUTE)
    assert queue(world) == ["x 60 1"]
    assert world.outbox.slots == [("canvas", START + MINUTE)]


@pytest.mark.parametrize("error", [TypeError("not JSON"), NothingToSend("no queue is bound to it")])
def test_a_message_that_cannot_be_made_is_one_jobs_trouble(world: World, error: Exception) -> None:
    def refuse(dispatch: Dispatch) -> None:
        if dispatch.job.name == "bad":
            raise error

    world.beat("a", job("x"), job("bad"), builder=Maker(mood=refuse))
    world.run(MINUTE)
    assert queue(world) == ["x 60 1"]
    assert world.outbox.arrived == [], "it is not published either"
    assert world.states("bad") == {START + MINUTE: "not-sent (publish-error)"}
    assert [event.error for event in world.events_of(events.NotSent)] == [error]


@pytest.mark.parametrize("error", [BrokerAway("gone"), NotOneStep("an unknown command")])
def test_where_making_it_fails_for_another_reason_it_is_published(world: World, error: Exception) -> None:
    def refuse(_: Dispatch) -> None:
        raise error

    world.beat("a", job("x"), builder=Maker(mood=refuse))
    world.run(MINUTE)
    assert queue(world) == []
    assert world.outbox.slots == [("x", START + MINUTE)]


def test_a_lapsed_claim_is_sent_with_its_takeover(world: World) -> None:
    dead = world.beat("dead", job("x"))
    dead.tick()
    world.outbox.mood = lambda _: (_ for _ in ()).throw(SystemExit)
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        dead.tick()
    world.outbox.mood = None
    world.beat("b", job("x"), builder=Maker())
    world.run(50 * SECOND, "b")
    assert queue(world) == ["x 60 1"]
    assert world.outbox.arrived == []
    assert [(event.slot, event.attempt) for event in world.events_of(events.TookOver)] == [(START + MINUTE, 1)]
    assert world.states("x") == {START + MINUTE: "dispatched"}


def test_a_lapsed_claim_that_is_too_late_is_not_sent(world: World) -> None:
    dead = world.beat("dead", job("x", max_late=20 * SECOND))
    dead.tick()
    world.outbox.mood = lambda _: (_ for _ in ()).throw(SystemExit)
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        dead.tick()
    world.outbox.mood = None
    world.beat("b", job("x", max_late=20 * SECOND), builder=Maker())
    world.run(50 * SECOND, "b")
    assert queue(world) == []
    assert world.states("x") == {START + MINUTE: "misfire (max-late)"}


@pytest.mark.parametrize("cheap", [True, False])
def test_what_is_too_late_by_its_turn_gets_no_message(world: World, cheap: bool) -> None:
    world.settings = replace(world.settings, batch=1)
    jobs = [job(f"job-{number}", max_late=5 * SECOND) for number in range(4)]
    maker = Maker(cheap=cheap, mood=lambda _: world.clock.advance(6 * SECOND))
    beat = world.beat("a", *jobs, builder=maker)
    world.run(MINUTE - SECOND)
    world.clock.advance(SECOND)
    beat.tick()
    assert len(queue(world)) == len(maker.built) == 1
    assert world.outbox.arrived == [], "it is not published either"
    states = [state for one in jobs for state in world.states(one.name).values()]
    assert sorted(states) == ["dispatched"] + ["misfire (max-late)"] * 3


def followed(name: str, **options: Any) -> Job:
    plain = job(name, **options)
    terms = Terms(
        lease=30 * SECOND,
        queue_timeout=3600 * SECOND,
        max_attempts=options.get("max_attempts"),
        overlap=options.get("overlap", Overlap.ALLOW),
    )
    return replace(plain, terms=terms)


def test_a_message_says_of_its_run_what_the_claim_says(world: World) -> None:
    said = {}
    maker = Maker(mood=lambda dispatch: said.update({(dispatch.slot - START) // MINUTE: dispatch.terms}))
    one = followed("x")
    world.beat("a", one, builder=maker)
    world.run(MINUTE + SECOND)
    world.client().worker_seen(Worker(owner="o", label="w", version="1"))
    world.run(MINUTE)
    assert said == {1: None, 2: one.terms}
    assert list(world.states("x").values()) == ["dispatched", "queued"]


def started(world: World, one: Job, slot: Millis) -> None:
    assert one.terms is not None
    ask = Start(job=one.name, slot=slot, attempt=1, retries=0, token="d", worker="w", terms=one.terms)
    assert world.client().start([ask])[0].answer is GateAnswer.START


def test_a_lapsed_run_is_sent_as_its_next_attempt(world: World) -> None:
    one = followed("x", every=3600 * SECOND, max_attempts=2)
    world.clock.advance(3600 * SECOND - 5 * SECOND - START % (3600 * SECOND))
    world.beat("a", one, builder=Maker())
    world.run(10 * SECOND)
    (slot,) = world.states("x")
    assert world.states("x") == {slot: "queued"}
    started(world, one, slot)
    world.run(60 * SECOND)
    assert [text.split()[0::2] for text in queue(world)] == [["x", "1"], ["x", "2"]]
    assert world.states("x") == {slot: "queued"}
    (took,) = world.events_of(events.TookOver)
    assert took.attempt == 2 and took.started


@pytest.mark.parametrize("along", [True, False])
def test_max_late_bounds_the_first_attempt_only(world: World, along: bool) -> None:
    one = followed("x", every=3600 * SECOND, max_attempts=2, max_late=5 * SECOND)
    world.clock.advance(3600 * SECOND - 5 * SECOND - START % (3600 * SECOND))
    world.beat("a", one, builder=Maker() if along else None)
    world.run(10 * SECOND)
    (slot,) = world.states("x")
    started(world, one, slot)
    world.run(60 * SECOND)
    assert [event.attempt for event in world.events_of(events.Sent)] == [1, 2]
    assert len(world.outbox.arrived) == (0 if along else 2)
    assert world.states("x") == {slot: "queued"}


def test_what_waited_is_sent_with_its_claim(world: World) -> None:
    one = followed("x", overlap=Overlap.QUEUE_ONE)
    world.beat("a", one, builder=Maker())
    world.run(MINUTE)
    started(world, one, START + MINUTE)
    # Its lease is renewed by nobody here: settle before it lapses.
    world.clock.advance(0)
    client = world.client()
    world.run(10 * SECOND)
    assert client.heartbeat([_hold("x", START + MINUTE)])[0]
    world.run(25 * SECOND)
    assert client.heartbeat([_hold("x", START + MINUTE)])[0]
    world.run(25 * SECOND)
    assert world.states("x")[START + 2 * MINUTE] == "waiting"
    assert client.settle([Settlement(**vars(_hold("x", START + MINUTE)), state=RunState.SUCCEEDED)])[0]
    world.run(20 * SECOND)
    assert world.states("x")[START + 2 * MINUTE] == "queued"
    assert queue(world) == ["x 60 1", "x 120 1"]
    assert world.outbox.arrived == []


def test_what_waited_and_whose_answer_was_lost_is_told_once_it_is_known(world: World) -> None:
    one = followed("x", overlap=Overlap.QUEUE_ONE, every=10 * MINUTE)
    world.beat("a", one, builder=Maker())
    world.run(10 * MINUTE)
    started(world, one, START + 10 * MINUTE)
    client = world.client()
    for _ in range(61):
        world.run(10 * SECOND)
        assert client.heartbeat([_hold("x", START + 10 * MINUTE)])[0]
    assert client.settle([Settlement(**vars(_hold("x", START + 10 * MINUTE)), state=RunState.SUCCEEDED)])[0]
    world.lose_a_reply_of("claim_and_send")
    assert queue(world) == ["x 600 1", "x 1200 1"]
    assert len(world.events_of(events.Sent)) == 1
    world.run(MINUTE)
    assert queue(world) == ["x 600 1", "x 1200 1"]
    assert [event.slot for event in world.events_of(events.Sent)] == [START + 10 * MINUTE, START + 20 * MINUTE]


@pytest.mark.parametrize("change", ["removed", "edited"])
def test_what_waited_and_whose_answer_was_lost_is_asked_for_as_its_job_is_now(world: World, change: str) -> None:
    one = followed("x", overlap=Overlap.QUEUE_ONE, every=10 * MINUTE)
    maker = Maker()
    beat = world.beat("a", one, builder=maker)
    world.run(10 * MINUTE)
    started(world, one, START + 10 * MINUTE)
    client = world.client()
    for _ in range(61):
        world.run(10 * SECOND)
        assert client.heartbeat([_hold("x", START + 10 * MINUTE)])[0]
    assert client.settle([Settlement(**vars(_hold("x", START + 10 * MINUTE)), state=RunState.SUCCEEDED)])[0]
    # Not even the question arrives.
    store = world.backend()
    asked = store.claim_and_send
    store.claim_and_send = lambda _: _no_answer()  # type: ignore[method-assign, union-attr]
    world.run(20 * SECOND)
    store.claim_and_send = asked  # type: ignore[method-assign, union-attr]
    other = replace(one, task="another")
    beat.load({"x": other} if change == "edited" else {})
    made: list[Job] = []
    maker.mood = lambda dispatch: made.append(dispatch.job)
    world.run(MINUTE)
    assert made == ([other] if change == "edited" else [])


def _no_answer() -> Any:
    raise OutcomeUnknown("no answer")


def test_a_takeover_whose_answer_was_lost_is_told_once_it_is_known(world: World) -> None:
    dead = MemoryBackend(store=world.store)
    dead.claim([ClaimRequest(job="x", slot=START - SECOND, owner="dead", beat="dead", lease=30 * SECOND)])
    world.beat("a", job("x", every=60 * MINUTE), builder=Maker())
    world.lose_a_reply_of("takeover_and_send")
    assert queue(world) == ["x -1 1"] and world.events_of(events.Sent) == []
    world.run(MINUTE)
    assert queue(world) == ["x -1 1"]
    assert [event.slot for event in world.events_of(events.Sent)] == [START - SECOND]
    assert len(world.events_of(events.TookOver)) == 1


def test_a_successor_whose_answer_was_lost_is_told_once_it_is_known(world: World) -> None:
    class Always(Chain):
        def ask(self, last_run: Millis) -> tuple[bool, Millis | None]:
            return world.clock.wall() >= last_run + 5 * SECOND, SECOND

    world.beat("a", job("x", timetable=Always()), builder=Maker())
    world.run(12 * SECOND)
    world.lose_a_reply_of("claim_and_send")
    sent = len(queue(world))
    assert len(world.events_of(events.Sent)) == sent - 1
    world.run(2 * SECOND)
    assert len(world.events_of(events.Sent)) == sent
    world.run(20 * SECOND)
    assert len(world.events_of(events.Sent)) == len(queue(world)) == len(set(queue(world))) > sent


def _hold(name: str, slot: Millis) -> Any:
    from celery_anarchon.backends.runs import RunHold

    return RunHold(job=name, slot=slot, attempt=1, retries=0, token="d")


# --- whether ----------------------------------------------------------------------------------------------------------


def test_another_server_is_published_to_and_looked_at_again(world: World) -> None:
    maker = Maker(refusal="two servers")
    beat = world.beat("a", job("x"), builder=maker)
    assert (beat.one_step.on, beat.one_step.reason) == (False, "two servers")
    world.run(MINUTE)
    assert world.outbox.slots == [("x", START + MINUTE)]
    assert world.events_of(events.OneStepChanged) == [], "it was said when the beat began"
    maker.refusal, maker.is_new = None, True
    world.run(MINUTE)
    assert queue(world) == ["x 120 1"]
    assert [event.reason for event in world.events_of(events.OneStepChanged)] == [None]
    maker.refusal = "a failover"
    world.run(MINUTE)
    assert world.outbox.slots[1:] == [("x", START + 3 * MINUTE)]
    assert [event.reason for event in world.events_of(events.OneStepChanged)] == [None, "a failover"]


def test_a_broker_that_is_away_at_the_start_is_no_refusal(world: World) -> None:
    maker = Maker(away=True)
    beat = world.beat("a", job("x"), builder=maker)
    assert (beat.one_step.on, beat.one_step.reason) == (False, "")
    maker.away = False
    world.run(MINUTE)
    assert queue(world) == ["x 60 1"]


def test_what_can_never_be_is_never_asked(world: World) -> None:
    maker = Maker(never="the broker is amqp")
    beat = world.beat("a", job("x"), builder=maker)
    world.run(MINUTE)
    assert maker.verified == 0
    assert beat.one_step.reason == "the broker is amqp"
    assert len(world.outbox.arrived) == 1


@pytest.mark.parametrize("maker", [Maker(refusal="two servers"), Maker(never="the broker is amqp"), None])
def test_who_insists_gets_no_start_without(world: World, maker: Maker | None) -> None:
    world.settings = replace(SETTINGS, one_step=True)
    with pytest.raises(ConfigurationError, match="anarchon_one_step is True"):
        world.beat("a", job("x"), builder=maker)


def test_switched_off(world: World) -> None:
    world.settings = replace(SETTINGS, one_step=False)
    maker = Maker()
    world.beat("a", job("x"), builder=maker)
    world.run(MINUTE)
    assert maker.verified == 0 and len(world.outbox.arrived) == 1


def test_a_takeover_by_another_beat_is_seen(world: World) -> None:
    """A claim that this beat holds in two steps is not sent in one: its message may be out."""
    world.outbox.away = False
    beat = world.beat("a", job("x"), builder=Maker(left=frozenset({"x"})))
    beat.tick()
    world.clock.advance(MINUTE)
    beat.tick()
    wish = Takeover(job="x", slot=START + MINUTE, from_attempt=1, owner="z", beat="z", lease=SECOND)
    assert world.client().takeover([wish]) == [None]
    assert [event.answer for event in world.events_of(events.Claimed)] == [Answer.WON]
