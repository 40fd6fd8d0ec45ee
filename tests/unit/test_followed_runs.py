"""The engine with a store that follows runs: overlap, attempts, queue limits, what waits. Workers played by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine import MINUTE, SECOND, START, Failing, PublishUnclear, World, job

from celery_anarchon import MemoryBackend, events, wire
from celery_anarchon.backends.runs import GiveBack, RunHold, Settlement, Start, Worker
from celery_anarchon.job import Job
from celery_anarchon.model import Answer, GateAnswer, Millis, Overlap, RunState, Terms
from celery_anarchon.publishing import Dispatch

HOUR = 60 * MINUTE


def followed(
    overlap: Overlap = Overlap.ALLOW,
    max_attempts: int | None = None,
    every: Millis = MINUTE,
    name: str = "job",
    **options: object,
) -> Job:
    made = job(name, every, overlap=overlap, max_attempts=max_attempts, **options)
    terms = Terms(lease=30 * SECOND, queue_timeout=HOUR, max_attempts=max_attempts, overlap=overlap)
    return Job(name=made.name, timetable=made.timetable, options=made.options, terms=terms)


class Hand:
    """A worker of a test."""

    def __init__(self, world: World) -> None:
        self.backend = MemoryBackend(store=world.store)
        self.terms = Terms(lease=30 * SECOND, queue_timeout=HOUR)

    def start(self, slot: Millis, attempt: int = 1, job: str = "job", **more: object) -> RunHold:
        token = f"{slot}-{attempt}"
        start = Start(job=job, slot=slot, attempt=attempt, retries=0, token=token, worker="w", terms=self.terms, **more)  # type: ignore[arg-type]
        result = self.backend.start([start])[0]
        assert result.answer is GateAnswer.START
        return RunHold(job=job, slot=slot, attempt=result.attempt, retries=0, token=token)

    def settle(self, hold: RunHold) -> None:
        assert self.backend.settle([Settlement(**vars(hold), state=RunState.SUCCEEDED)]) == [True]

    def states(self) -> dict[int, tuple[str, str | None]]:
        """Minutes since the start -> state and reason."""
        runs = self.backend.history("job", 100)
        return {(round(run.slot.timestamp() * 1000) - START) // MINUTE: (str(run.state), run.reason) for run in runs}


@pytest.fixture
def world() -> World:
    return World()


def test_skip_records_the_slots_and_the_next_free_one_is_sent(world: World) -> None:
    world.beat("a", followed(Overlap.SKIP))
    world.beat("b", followed(Overlap.SKIP))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hold = hand.start(START + MINUTE)
    for _ in range(12):
        world.run(10 * SECOND)
        assert hand.backend.heartbeat([hold]) == [True]
    hand.settle(hold)
    world.run(MINUTE)
    states = hand.states()
    assert (states[1][0], states[4][0]) == ("succeeded", "queued")
    assert states[2] == states[3] == ("skipped", "overlap")
    assert [slot for _, slot in world.outbox.slots] == [START + MINUTE, START + 4 * MINUTE]


def test_five_skips_in_a_row_name_the_holder_once(world: World) -> None:
    world.beat("a", followed(Overlap.SKIP))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hold = hand.start(START + MINUTE)
    for _ in range(60):
        world.run(10 * SECOND)
        hand.backend.heartbeat([hold])
    blocked = world.events_of(events.Blocked)
    assert len(blocked) == 1
    assert (blocked[0].skipped, blocked[0].run.worker, blocked[0].run.state) == (5, "w", RunState.RUNNING)


def skipped_by_a(world: World, hand: Hand, number: int) -> RunHold:
    """Beat b sends a slot, and beat a hears of *number* others that they are skipped."""
    world.run(MINUTE, "b")
    hold = hand.start(max(slot for _, slot in world.outbox.slots), acks_late=True)
    world.run(number * MINUTE, "a")
    return hold


def test_skips_that_are_not_in_a_row_are_no_reason_to_release_a_run(world: World) -> None:
    """Another beat has sent slots in between, of which this one hears nothing."""
    for name in "ab":
        world.beat(name, followed(Overlap.SKIP))
    hand = Hand(world)
    for _ in range(7):
        hand.settle(skipped_by_a(world, hand, 1))
    assert len(world.events_of(events.Claimed, "a")) >= 7
    assert world.events_of(events.Blocked) == []


def test_skips_that_several_beats_record_are_counted_together(world: World) -> None:
    for name in "abc":
        world.beat(name, followed(Overlap.SKIP))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hold = hand.start(START + MINUTE)
    for minute in range(7):
        # Each slot is another beat's to record; the others find it taken.
        first = minute % 3
        for _ in range(6):
            world.run(10 * SECOND, *"abc"[first:], *"abc"[:first])
            hand.backend.heartbeat([hold])
    told = [event.slot for event in world.events_of(events.Claimed) if event.answer is Answer.SKIPPED]
    assert told == [START + minute * MINUTE for minute in range(2, 9)]
    assert {event.run.slot for event in world.events_of(events.Blocked)} == {wire.moment(START + MINUTE)}


def test_each_run_that_blocks_its_job_is_named(world: World) -> None:
    for name in "ab":
        world.beat(name, followed(Overlap.SKIP))
    hand = Hand(world)
    for _ in range(2):
        hand.settle(skipped_by_a(world, hand, 12))
    runs = [event.run.slot for event in world.events_of(events.Blocked)]
    assert len(runs) == len(set(runs)) == 2


def test_queue_one_sends_the_newest_when_the_run_has_ended(world: World) -> None:
    world.beat("a", followed(Overlap.QUEUE_ONE))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hold = hand.start(START + MINUTE)
    for _ in range(20):
        world.run(10 * SECOND)
        hand.backend.heartbeat([hold])
    states = hand.states()
    assert states[2] == states[3] == ("superseded", "newer-slot") and states[4][0] == "waiting"
    hand.settle(hold)
    world.run(11 * SECOND)
    assert [slot for _, slot in world.outbox.slots] == [START + MINUTE, START + 4 * MINUTE]


def test_queue_one_asks_again_for_what_waited(world: World) -> None:
    """Its answer was lost: the slot is claimed then, so it waits no more, and nobody publishes it before its lease is
    over."""
    world.beat("a", followed(Overlap.QUEUE_ONE, every=10 * MINUTE, max_late=HOUR))
    hand = Hand(world)
    world.run(10 * MINUTE + SECOND)
    hold = hand.start(START + 10 * MINUTE)
    for _ in range(61):
        world.run(10 * SECOND)
        hand.backend.heartbeat([hold])
    hand.settle(hold)
    world.lose_a_reply_of("claim")
    assert hand.states()[20][0] == "claimed"
    world.run(2 * SECOND)
    assert [slot for _, slot in world.outbox.slots] == [START + 10 * MINUTE, START + 20 * MINUTE]
    assert hand.states()[20][0] == "queued"
    world.run(2 * MINUTE)
    assert len(world.outbox.slots) == 2 and world.events_of(events.TookOver) == []


def let_many_wait(world: World, *jobs: Job) -> None:
    """Each of *jobs* has a second slot that waits, and then all their first runs end together."""
    world.beat("a", *jobs)
    world.run(10 * MINUTE)
    world.run(10 * MINUTE + SECOND)
    first, second = START + 10 * MINUTE, START + 20 * MINUTE
    hand = Hand(world)
    for one in jobs:
        assert world.states(one.name) == {first: "queued", second: "waiting"}
        hand.settle(hand.start(first, job=one.name))
    world.outbox.arrived.clear()


def test_all_that_waited_goes_on_within_a_heartbeat(world: World) -> None:
    """However many runs end together: one batch after the other, and not one a heartbeat."""
    jobs = [followed(Overlap.QUEUE_ONE, every=10 * MINUTE, name=f"job {number}") for number in range(250)]
    let_many_wait(world, *jobs)
    looks = world.backend().calls.count("lapsed")
    world.run(10 * SECOND)
    assert sorted(world.outbox.slots) == sorted((one.name, START + 20 * MINUTE) for one in jobs)
    assert world.backend().calls.count("lapsed") - looks <= 5


def test_what_waits_for_other_beats_does_not_hide_what_this_one_can_send(world: World) -> None:
    """Slots of jobs that this beat does not know are listed first, and stay so for an hour."""
    mine = [followed(Overlap.QUEUE_ONE, every=10 * MINUTE, name=f"mine {number}") for number in range(150)]
    foreign = [followed(Overlap.QUEUE_ONE, every=10 * MINUTE, name=f"foreign {number}") for number in range(100)]
    let_many_wait(world, *foreign, *mine)
    world.beats["a"].load({one.name: one for one in mine})
    looks = world.backend().calls.count("lapsed")
    world.run(10 * SECOND)
    assert sorted(world.outbox.slots) == sorted((one.name, START + 20 * MINUTE) for one in mine)
    assert world.backend().calls.count("lapsed") - looks <= 8
    world.run(MINUTE)
    assert world.backend().calls.count("lapsed") - looks <= 8 + 2 * 7, "no hot loop"


def test_queue_one_keeps_max_late(world: World) -> None:
    world.beat("a", followed(Overlap.QUEUE_ONE, every=10 * MINUTE, max_late=70 * SECOND))
    hand = Hand(world)
    world.run(10 * MINUTE + SECOND)
    hold = hand.start(START + 10 * MINUTE)
    for _ in range(67):
        world.run(10 * SECOND)
        hand.backend.heartbeat([hold])
    assert hand.states()[20][0] == "waiting"
    hand.settle(hold)
    world.run(11 * SECOND)
    assert hand.states()[20] == ("misfire", "max-late")


def test_a_slot_that_waits_for_a_failing_timetable_is_left_alone(world: World) -> None:
    """Whether it is too late cannot be told; nobody else has to wait for that."""

    broken = Failing(10 * MINUTE)
    one = followed(Overlap.QUEUE_ONE, max_late=HOUR, jitter=SECOND)
    world.beat("a", replace(one, timetable=broken))
    hand = Hand(world)
    world.run(10 * MINUTE + 2 * SECOND)
    (slot,) = (slot for _, slot in world.outbox.slots)
    hold = hand.start(slot)
    for _ in range(61):
        world.run(10 * SECOND)
        hand.backend.heartbeat([hold])
    broken.fails = True
    hand.settle(hold)
    world.run(30 * SECOND)
    assert hand.states()[20][0] == "waiting"
    assert world.events_of(events.StoreChanged) == [] and world.events_of(events.JobTrouble)
    broken.fails = False
    world.run(10 * SECOND)
    assert hand.states()[20][0] == "queued"


def test_a_dead_worker_s_run_goes_on_until_its_attempts_are_used_up(world: World) -> None:
    world.beat("a", followed(max_attempts=2))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.start(START + MINUTE)
    world.run(45 * SECOND)
    assert world.outbox.slots.count(("job", START + MINUTE)) == 2
    hand.start(START + MINUTE, attempt=2)
    world.run(45 * SECOND)
    assert hand.states()[1] == ("lost", "attempts-used-up")
    assert world.outbox.slots.count(("job", START + MINUTE)) == 2


def test_after_an_outage_workers_come_before_those_who_take_over(world: World) -> None:
    """Longer than a lease: those of the living are over as well, and they renew them once the store is back."""
    world.beat("a", followed(Overlap.SKIP, max_attempts=2))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hold = hand.start(START + MINUTE)
    world.backend().away = True
    world.run(70 * SECOND)
    world.backend().away = False
    world.run(5 * SECOND)
    assert hand.backend.heartbeat([hold]) == [True]
    world.run(20 * SECOND)
    assert hand.states()[1] == ("running", None) and world.outbox.slots.count(("job", START + MINUTE)) == 1


@pytest.mark.parametrize("max_attempts", [3, None])
def test_an_attempt_that_its_worker_gave_back_is_sent_however_many_slots_have_come(
    world: World, max_attempts: int | None
) -> None:
    """Its worker was granted the next attempt of a run whose first body died, and stops before the body begins. The
    record looks like a claim whose beat had no broker, and the message of the first attempt is stale."""
    one = followed(max_attempts=max_attempts)
    world.beat("a", one)
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.start(START + MINUTE, acks_late=True)
    world.clock.advance(40 * SECOND)
    start = Start(job="job", slot=START + MINUTE, attempt=1, retries=0, token="second", worker="w", terms=hand.terms)
    granted = hand.backend.start([start])[0]
    assert (granted.answer, granted.attempt) == (GateAnswer.START, 2)
    world.clock.advance(80 * SECOND)
    back = GiveBack(job="job", slot=START + MINUTE, attempt=2, retries=0, token="second", message_attempt=1)
    assert hand.backend.give_back([back]) == [True]
    sent = []
    world.outbox.mood = lambda dispatch: sent.append((dispatch.slot, dispatch.attempt, dispatch.terms))
    world.run(30 * SECOND)
    assert (START + MINUTE, 2, one.terms) in sent
    assert hand.states()[1] == ("queued", None)


@pytest.mark.parametrize("acks_late", [False, True])
def test_unset_max_attempts_is_as_stock(world: World, acks_late: bool) -> None:
    """Early: lost at the next sweep. Late: left to the broker's redelivery until the queue limit."""
    world.beat("a", followed(Overlap.SKIP))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.start(START + MINUTE, acks_late=acks_late)
    world.run(45 * SECOND)
    assert hand.states()[1][0] == ("running" if acks_late else "lost")
    if acks_late:
        world.run(HOUR)
        assert hand.states()[1] == ("lost", "worker-lost")
    assert world.outbox.slots.count(("job", START + MINUTE)) == 1


@pytest.mark.parametrize("had_workers", [False, True])
def test_a_run_that_nobody_starts(world: World, had_workers: bool) -> None:
    world.beat("a", followed(Overlap.SKIP))
    hand = Hand(world)
    if had_workers:
        hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
    world.run(MINUTE + SECOND)
    world.run(HOUR + 2 * MINUTE)
    expected = ("lost-in-queue", "queue-timeout") if had_workers else ("dispatched", "no-gate-seen")
    assert hand.states()[1] == expected
    assert hand.states()[61][0] in ("queued", "skipped") and hand.states()[62][0] == "queued"


def test_jobs_without_workers_are_not_followed_until_one_is_seen(world: World) -> None:
    """Else a fleet of stock workers would leave every run unsettled for a day."""
    world.beat("a", followed())
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    assert hand.states()[1] == ("dispatched", None)
    hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
    world.run(MINUTE)
    assert hand.states()[2] == ("queued", None)
    assert world.events_of(events.NoWorkers) == []


def test_a_message_says_of_its_run_what_the_claim_says(world: World) -> None:
    """A worker takes a run that is followed, and whose record was dropped, for one that has ended. So a message of one
    that nobody follows must not say that it is: workers may come later than its record can last."""
    said = {}
    world.outbox.mood = lambda dispatch: said.update({(dispatch.slot - START) // MINUTE: dispatch.terms})
    one = followed()
    world.beat("a", one)
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
    world.run(MINUTE)
    assert said == {1: None, 2: one.terms}
    assert [hand.states()[slot][0] for slot in (1, 2)] == ["dispatched", "queued"]


def test_a_message_that_is_published_again_says_the_same(world: World) -> None:
    """The first worker is seen between the two."""
    said = []

    def unclear_once(dispatch: Dispatch) -> None:
        said.append(dispatch.terms)
        if len(said) == 1:
            hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
            world.beats["a"]._roster.show_again()
            raise PublishUnclear("cut")

    world.outbox.mood = unclear_once
    world.beat("a", followed())
    hand = Hand(world)
    world.run(MINUTE + 5 * SECOND)
    assert said == [None, None]
    assert hand.states()[1] == ("dispatched", None)


def test_a_claim_that_is_asked_for_again_is_what_it_was(world: World) -> None:
    """Its record is of the first question, before the first worker was seen."""
    said = []
    world.outbox.mood = lambda dispatch: said.append(dispatch.terms)
    world.beat("a", followed())
    hand = Hand(world)
    world.lose_a_reply_of("claim")
    hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
    world.beats["a"]._roster.show_again()
    world.run(5 * SECOND)
    assert said == [None]
    assert hand.states()[1] == ("dispatched", None)


def test_what_was_taken_over_is_said_to_be_followed_where_it_is(world: World) -> None:
    said = []
    world.outbox.mood = lambda dispatch: said.append((dispatch.attempt, dispatch.terms))
    one = followed(max_attempts=2)
    world.beat("a", one)
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.start(START + MINUTE)
    world.run(45 * SECOND)
    assert said == [(1, one.terms), (2, one.terms)]


def test_no_worker_that_asks_is_said_once(world: World) -> None:
    world.beat("a", followed(max_attempts=1))
    world.run(10 * MINUTE)
    assert [event.jobs for event in world.events_of(events.NoWorkers)] == [("job",)]


def test_a_job_that_was_removed_ends_its_runs_after_the_queue_limit(world: World) -> None:
    world.beat("a", followed(max_attempts=3))
    hand = Hand(world)
    world.run(MINUTE + SECOND)
    hand.start(START + MINUTE)
    world.beats["a"].load({})
    world.run(10 * MINUTE)
    assert hand.states()[1] == ("running", None)
    world.run(HOUR)
    assert hand.states()[1] == ("lost", "job-removed")


def test_a_slot_that_waits_for_a_removed_job_ends_after_the_queue_limit(world: World) -> None:
    world.beat("a", followed(Overlap.QUEUE_ONE))
    hand = Hand(world)
    hand.backend.worker_seen(Worker(owner="o", label="w", version="1"))
    world.run(2 * MINUTE + SECOND)
    assert [hand.states()[slot][0] for slot in (1, 2)] == ["queued", "waiting"]
    world.beats["a"].load({})
    world.run(HOUR - MINUTE + 10 * SECOND)
    assert [hand.states()[slot] for slot in (1, 2)] == [("lost-in-queue", "queue-timeout"), ("waiting", None)]
    world.run(2 * MINUTE)
    assert hand.states()[2] == ("superseded", "job-removed")
