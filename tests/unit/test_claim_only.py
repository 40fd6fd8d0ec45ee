"""The loop on a store that only takes claims: the winner alone answers for its slot."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine import MINUTE, SECOND, START, Failing, World, job

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimRequest, ClaimResult
from celery_anarchon.model import Answer, Millis
from celery_anarchon.publishing import Dispatch, PublishUnclear
from celery_anarchon.timetable import At


@pytest.fixture
def world() -> World:
    return World(claim_only={})


def minutes(*numbers: int, name: str = "job") -> list[tuple[str, Millis]]:
    return [(name, START + number * MINUTE) for number in numbers]


def given_up(world: World) -> list[tuple[str, str, Millis]]:
    return [(str(event.state), event.reason, event.newest) for event in world.events_of(events.SlotsGivenUp)]


def test_a_fleet_sends_each_slot_once(world: World) -> None:
    jobs = [job(f"job-{number}") for number in range(20)]
    for name in "abc":
        world.beat(name, *jobs)
    world.run(5 * MINUTE)
    wanted = [slot for number in range(20) for slot in minutes(0, 1, 2, 3, 4, 5, name=f"job-{number}")]
    assert sorted(world.outbox.slots) == sorted(wanted)
    assert world.states("job-3") == {slot: "dispatched" for _, slot in minutes(0, 1, 2, 3, 4, 5)}


# --- the start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "after", "sent"),
    [
        ({}, 59 * SECOND, [0]),
        ({}, 61 * SECOND, [1]),
        ({"max_late": 5 * SECOND}, 4 * SECOND, [0]),
        ({"max_late": 5 * SECOND}, 6 * SECOND, []),
    ],
)
def test_a_beat_looks_back_max_late_when_it_starts(world: World, options: Any, after: Millis, sent: list[int]) -> None:
    world.clock.advance(after)
    world.beat("a", job(**options)).tick()
    assert world.outbox.slots == minutes(*sent)
    assert given_up(world) == []


def test_looking_back_counts_from_the_moment_a_slot_falls_due(world: World) -> None:
    late = job(jitter=50 * SECOND)
    world.beat("a", late)
    world.run(2 * MINUTE)
    (event,) = [event for event in world.events_of(events.Sent) if event.slot == START + MINUTE]
    world.beats.pop("a").close()
    due = START + MINUTE + event.late
    world.clock.advance(due + 50 * SECOND - world.clock.wall())
    world.beat("b", late).tick()
    assert not world.events_of(events.SlotsGivenUp), "nothing is noted as too late at a start"


def test_what_others_sent_before_it_started_is_taken(world: World) -> None:
    world.beat("a", job(every=10 * SECOND))
    world.run(MINUTE)
    before = list(world.outbox.slots)
    world.beat("b", job(every=10 * SECOND)).tick()
    assert world.outbox.slots == before


def test_an_instant_of_the_past_is_nobodys_business(world: World) -> None:
    world.beat("a", job(timetable=At(START - 10 * MINUTE)))
    world.run(MINUTE)
    assert world.outbox.slots == []
    assert world.events_of(events.SlotsGivenUp) == []


def test_a_timetable_that_fails_at_the_start_is_one_jobs_trouble(world: World) -> None:
    broken = Failing(MINUTE)
    broken.fails = True
    world.beat("a", job("bad", timetable=broken), job("good"))
    world.run(MINUTE)
    assert world.outbox.slots == minutes(0, 1, name="good")


# --- WON licenses one publish (protocol H14) --------------------------------------------------------------------------


def test_a_store_that_says_won_again_is_published_for_once(world: World) -> None:
    """won-again-publishes: the schedule is edited and edited back, so the beat looks back and asks again."""
    beat = world.beat("a", job())
    world.run(MINUTE)
    beat.load({})
    beat.load({"job": job()})
    beat.tick()
    won = [event.slot for event in world.events_of(events.Claimed) if event.answer is Answer.WON]
    assert won.count(START + MINUTE) == 2, "it was not asked again"
    assert world.outbox.slots == minutes(0, 1)


def test_a_slot_in_hand_is_not_published_twice(world: World) -> None:
    beat = world.beat("a", job())
    world.run(SECOND)
    world.outbox.mood = _unclear
    world.run(MINUTE)
    beat.load({})
    beat.load({"job": job()})
    world.run(2 * SECOND)
    world.outbox.mood = None
    world.run(2 * SECOND)
    assert world.outbox.slots == minutes(0, 1)


def test_the_journal_is_short(world: World) -> None:
    beat = world.beat("a", job(every=SECOND))
    world.run(20 * MINUTE)
    assert 300 <= len(beat._journal._held) <= 302


# --- lost answers -----------------------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_again_as_the_same_owner(world: World) -> None:
    """unknown-is-taken, unknown-is-won."""
    world.beat("a", job())
    world.beat("b", job())
    world.run(SECOND)
    for name in "ab":
        world.backend(name).lose_reply_of = {"claim"}
    world.run(MINUTE)
    assert world.outbox.slots == minutes(0)
    for name in "ab":
        world.backend(name).lose_reply_of = set()
    world.run(6 * SECOND)
    assert world.outbox.slots == minutes(0, 1)
    assert world.states("job")[START + MINUTE] == "dispatched"


def test_a_doubted_slot_is_sent_though_the_plan_has_gone_on(world: World) -> None:
    """Nobody else can: its claim may be this beat's. The slots after it collapse as usual."""
    world.beat("a", job(every=10 * SECOND))
    world.run(SECOND)
    world.backend().lose_reply_of = {"claim"}
    world.run(10 * SECOND)
    world.backend().away = True
    world.run(30 * SECOND)
    world.backend().away, world.backend().lose_reply_of = False, set()
    world.run(6 * SECOND)
    assert world.outbox.slots[1:] == [("job", START + 10 * SECOND), ("job", START + 40 * SECOND)]
    assert world.states("job")[START + 10 * SECOND] == "dispatched"
    assert ("superseded", "newer-slot", START + 30 * SECOND) in given_up(world)


def test_a_row_without_an_answer_is_asked_again_and_the_others_are_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.beat("a", job("one"), job("two"))
    world.run(SECOND)
    backend = world.backend()
    honest = type(backend).claim

    def claim(requests: list[ClaimRequest]) -> list[Any]:
        return [
            type(result)(Answer.UNKNOWN) if request.job == "two" else result
            for request, result in zip(requests, honest(backend, requests), strict=True)
        ]

    monkeypatch.setattr(backend, "claim", claim)
    world.run(MINUTE)
    assert world.outbox.slots[2:] == minutes(1, name="one")
    monkeypatch.undo()
    world.run(2 * SECOND)
    assert world.outbox.slots[2:] == [*minutes(1, name="one"), *minutes(1, name="two")]
    assert world.events_of(events.ClaimUnresolved) == []


@pytest.mark.parametrize("knows_owner", [True, False])
def test_a_claim_that_cannot_be_resolved_is_lost_and_said(knows_owner: bool) -> None:
    world = World(claim_only={"knows_owner": knows_owner})
    world.beat("a", job())
    world.run(SECOND)
    world.backend().lose_reply_of = {"claim"}
    world.run(MINUTE)
    world.backend().lose_reply_of = set()
    world.run(6 * SECOND)
    assert world.outbox.slots == (minutes(0, 1) if knows_owner else minutes(0))
    said = [(event.job, event.slot) for event in world.events_of(events.ClaimUnresolved)]
    assert said == ([] if knows_owner else minutes(1))


def test_a_claim_that_stays_without_an_answer_is_said_to_be_lost(world: World) -> None:
    world.beat("a", job(max_late=20 * SECOND))
    world.run(SECOND)
    world.backend().lose_reply_of = {"claim"}
    world.run(MINUTE)
    world.backend().away = True
    world.run(30 * SECOND)
    world.backend().lose_reply_of, world.backend().away = set(), False
    world.run(10 * SECOND)
    assert [(event.job, event.slot) for event in world.events_of(events.ClaimUnresolved)] == minutes(1)
    assert world.outbox.slots == minutes(0)


# --- publishes that fail ----------------------------------------------------------------------------------------------


def _unclear(dispatch: Dispatch) -> None:
    raise PublishUnclear("no answer")


def test_the_winner_keeps_what_it_could_not_publish(world: World) -> None:
    a, b = world.beat("a", job()), world.beat("b", job())
    world.run(SECOND)

    def die(dispatch: Dispatch) -> None:
        world.outbox.away = True
        world.outbox.publish(dispatch)

    world.outbox.mood = die
    world.run(MINUTE)
    assert world.outbox.slots == minutes(0)
    world.outbox.mood, world.outbox.away = None, False
    world.run(10 * SECOND)
    assert world.outbox.slots == minutes(0, 1)
    assert "abandon" not in [*a.backend.calls, *b.backend.calls]  # type: ignore[attr-defined]
    assert given_up(world) == []


def test_beyond_max_late_the_winner_gives_up_and_says_so(world: World) -> None:
    world.beat("a", job(max_late=20 * SECOND))
    world.run(SECOND)

    def die(dispatch: Dispatch) -> None:
        world.outbox.away = True
        world.outbox.publish(dispatch)

    world.outbox.mood = die
    world.run(MINUTE + 30 * SECOND)
    assert given_up(world) == [("misfire", "max-late", START + MINUTE)]
    world.outbox.mood, world.outbox.away = None, False
    world.run(10 * SECOND)
    assert world.outbox.slots == minutes(0)
    assert world.states("job")[START + MINUTE] == "misfire (max-late)"


def test_an_unclear_publish_is_repeated_by_the_winner_alone(world: World) -> None:
    world.beat("a", job())
    world.beat("b", job())
    world.run(SECOND)
    world.outbox.mood = _unclear
    world.run(MINUTE + 10 * SECOND)
    world.outbox.mood = None
    world.run(10 * SECOND)
    assert world.outbox.slots == minutes(0, 1)


def test_a_publish_that_stays_unclear_ends_so(world: World) -> None:
    world.beat("a", job(max_late=20 * SECOND))
    world.run(SECOND)
    world.outbox.mood = _unclear
    world.run(MINUTE + 30 * SECOND)
    assert given_up(world) == [("misfire", "publish-unclear", START + MINUTE)]


def test_a_beat_that_was_frozen_after_its_claim_sends_within_max_late_only(world: World) -> None:
    """No lease runs out: the slot is its own, or nobody's."""
    for frozen, sent in ((40 * SECOND, minutes(0, 1)), (61 * SECOND, minutes(0))):
        world = World(claim_only={})
        beat = world.beat("a", job())
        world.run(SECOND)
        publish = beat._publish

        def freeze(won: Any, publish: Any = publish, frozen: Millis = frozen, world: World = world) -> None:
            if won:
                world.clock.advance(frozen)
            publish(won)

        beat._publish = freeze  # type: ignore[method-assign]
        world.clock.advance(59 * SECOND)
        beat.tick()
        assert world.outbox.slots == sent


# --- the stop ---------------------------------------------------------------------------------------------------------


def stuck(world: World) -> None:
    """A slot is won and cannot be published."""
    world.beat("a", job())
    world.run(SECOND)

    def die(dispatch: Dispatch) -> None:
        world.outbox.away = True
        world.outbox.publish(dispatch)

    world.outbox.mood = die
    world.run(MINUTE)
    world.outbox.mood = None


def test_a_stop_sends_what_was_won(world: World) -> None:
    stuck(world)
    world.outbox.away = False
    world.beats["a"].close()
    assert world.outbox.slots == minutes(0, 1)
    assert world.states("job")[START + MINUTE] == "dispatched"


def test_a_stop_says_what_it_could_not_send(world: World) -> None:
    stuck(world)
    world.beats["a"].close()
    assert world.outbox.slots == minutes(0)
    assert given_up(world) == [("not-sent", "beat-stopped", START + MINUTE)]
    assert world.states("job")[START + MINUTE] == "not-sent (beat-stopped)"


def test_a_stop_says_which_claims_have_no_answer(world: World) -> None:
    world.beat("a", job())
    world.run(SECOND)
    world.backend().lose_reply_of = {"claim"}
    world.run(MINUTE)
    world.beats["a"].close()
    assert [(event.job, event.slot) for event in world.events_of(events.ClaimUnresolved)] == minutes(1)


def test_a_stop_in_mid_burst_finishes_what_was_won(world: World) -> None:
    jobs = [job(f"job-{number}") for number in range(10)]
    beat = world.beat("a", *jobs)
    world.run(SECOND)
    won: list[str] = []
    beat.stopping = lambda: bool(won)
    world.outbox.after = lambda dispatch: won.append(dispatch.job.name)
    world.clock.advance(59 * SECOND)
    beat.tick()
    beat.close()
    claimed = {event.job for event in world.events_of(events.Claimed) if event.slot == START + MINUTE}
    assert sorted(world.outbox.slots[10:]) == sorted((name, START + MINUTE) for name in claimed)


# --- the history ------------------------------------------------------------------------------------------------------


def test_the_history_is_kept_short(world: World) -> None:
    world.beat("a", job(every=SECOND, history_size=5))
    world.run(2 * MINUTE)
    space = world.claims.spaces["claims"]
    assert len(space.history["job"]) <= 5 + 10
    assert len(space.marks) > 100, "claims were forgotten with the history"


def test_an_idle_beat_sleeps(world: World) -> None:
    beat = world.beat("a", job(every=60 * MINUTE))
    world.run(MINUTE)
    assert beat.tick() == 300.0


def test_a_bug_in_a_store_is_no_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.beat("a", job())
    world.run(SECOND)
    backend = world.backend()
    honest = type(backend).claim

    def claim(requests: Any) -> Any:
        honest(backend, requests)
        raise KeyError("slot")

    monkeypatch.setattr(backend, "claim", claim)
    world.run(MINUTE)
    monkeypatch.undo()
    world.run(6 * SECOND)
    assert world.outbox.slots == minutes(0, 1)


def test_no_lease_is_asked_for(world: World) -> None:
    world.beat("a", job())
    world.run(2 * MINUTE)
    assert set(world.backend().calls) <= {"open", "now", "claim", "confirm", "tidy"}


def test_a_slot_that_the_store_calls_too_old_is_said_to_be_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.beat("a", job())
    world.run(SECOND)
    monkeypatch.setattr(world.backend(), "claim", lambda requests: [ClaimResult(Answer.TOO_OLD)] * len(requests))
    world.run(MINUTE)
    assert world.outbox.slots == minutes(0)
    assert given_up(world) == [("misfire", "too-old", START + MINUTE)]


def test_a_timetable_that_fails_when_its_slot_is_won_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Failing(MINUTE)
    jobs = [job("a", timetable=broken, jitter=SECOND), job("b")]
    world.beat("a", *jobs)
    world.run(5 * SECOND)
    backend, honest = world.backend(), world.backend().claim

    def then_it_fails(requests: Any) -> Any:
        broken.fails = any(request.job == "a" for request in requests)
        return honest(requests)

    monkeypatch.setattr(backend, "claim", then_it_fails)
    world.run(MINUTE)
    assert {*minutes(1, name="a"), *minutes(1, name="b")} <= set(world.outbox.slots)
    assert world.events_of(events.StoreChanged) == []
