"""A slot is sent or given up, and told so once, when the answer to its claim was lost and the store went away then."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from support.engine import SECOND, START, World, job

from celery_anarchon import events
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Answer, Coalesce, Millis

FIRST = START + 10 * SECOND


@pytest.fixture
def world() -> World:
    return World()


def refuse(*_: Any) -> Any:
    raise OutcomeUnknown("the reply was lost")


def lose_a_claim_and_the_store(world: World, away: Millis, *, applied: bool) -> None:
    backend = world.backend()
    if applied:
        world.lose_a_reply_of("claim")
    else:
        backend.claim = refuse  # type: ignore[method-assign]
        world.run(FIRST - world.clock.wall())
        del backend.claim
    backend.away = True
    world.run(away)
    backend.away = False


def told(world: World, slots: list[Millis]) -> dict[Millis, str]:
    """What was said of each slot, in one word."""
    sent = Counter(slot for _, slot in world.outbox.slots)
    given_up = Counter(event.newest for event in world.events_of(events.SlotsGivenUp))
    assert all(event.total == 1 for event in world.events_of(events.SlotsGivenUp))
    assert sent + given_up == Counter(slots)
    return {slot: "dispatched" if slot in sent else "given up" for slot in slots}


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("away", [12 * SECOND, 17 * SECOND])
@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "superseded (newer-slot)"),
        ({"max_late": 5 * SECOND}, "misfire (max-late)"),
        ({"catch_up": 0}, "misfire (catch-up)"),
        ({"coalesce": Coalesce.ALL}, "dispatched"),
    ],
    ids=str,
)
def test_one_verdict_for_a_claim_without_an_answer(
    world: World, options: dict[str, Any], end: str, away: Millis, applied: bool
) -> None:
    world.beat("a", job(every=10 * SECOND, **options))
    lose_a_claim_and_the_store(world, away, applied=applied)
    world.run(START + 95 * SECOND - world.clock.wall())
    slots = [START + number * 10 * SECOND for number in range(1, 10)]
    verdicts = told(world, slots)
    states = world.states("job")
    assert states[FIRST] == end
    for slot in slots:
        assert (states[slot] == "dispatched") == (verdicts[slot] == "dispatched")
    assert world.events_of(events.TookOver) == []


def test_a_claim_whose_lease_is_over_is_sent_and_not_told_as_given_up(world: World) -> None:
    """A claim is a promise, and whoever takes it over keeps it: here that is this very beat."""
    world.beat("a", job(every=10 * SECOND))
    lose_a_claim_and_the_store(world, 45 * SECOND, applied=True)
    world.run(30 * SECOND)
    assert world.outbox.slots.count(("job", FIRST)) == 1
    assert world.states("job")[FIRST] == "dispatched"
    (event,) = world.events_of(events.SlotsGivenUp)
    assert (event.total, event.newest) == (3, START + 40 * SECOND)


def test_it_is_counted_out_where_it_is_not_listed(world: World) -> None:
    """Of many slots that are given up only the latest are listed, and the one in doubt is the oldest."""
    world.beat("a", job(every=SECOND, history_size=5))
    world.run(5 * SECOND)
    sent = len(world.outbox.slots)
    world.lose_a_reply_of("claim")
    world.backend().away = True
    world.run(20 * SECOND)
    world.backend().away = False
    world.run(40 * SECOND)
    given_up = world.events_of(events.SlotsGivenUp)
    assert [event.total for event in given_up if event.newest == START + (sent + 1) * SECOND] == [1]
    total = sum(event.total for event in given_up)
    assert len(set(world.outbox.slots)) == len(world.outbox.slots)
    assert total + len(world.outbox.slots) == (world.clock.wall() - START) // SECOND


def test_another_beat_that_has_it_is_the_one_to_tell(world: World) -> None:
    for name in "ab":
        world.beat(name, job(every=10 * SECOND))
    lose_a_claim_and_the_store(world, 12 * SECOND, applied=False)
    world.run(30 * SECOND)
    assert world.outbox.slots.count(("job", FIRST)) == 1
    assert world.events_of(events.SlotsGivenUp) == []
    assert [event.answer for event in world.events_of(events.Claimed, "a") if event.slot == FIRST] == [Answer.TAKEN]


@pytest.mark.parametrize("seed", range(80))
def test_one_verdict_whatever_fails(seed: int) -> None:
    """A store that is away or loses answers, again and again, and now and then the broker as well."""
    chance, world = random.Random(seed), World()
    options: list[dict[str, Any]] = [{}, {"max_late": 20 * SECOND}, {"catch_up": 15 * SECOND}, {"catch_up": 0}]
    world.beat("a", job(every=10 * SECOND, **chance.choice(options)))
    world.run(SECOND)
    backend = world.backend()
    for _ in range(12):
        backend.away, world.outbox.away = chance.random() < 0.25, chance.random() < 0.08
        calls = ("claim", "confirm", "takeover", "give_up", "record")
        backend.lose_reply_of = {call for call in calls if chance.random() < 0.25}
        world.run(chance.randrange(1, 20) * SECOND)
    backend.away, world.outbox.away, backend.lose_reply_of = False, False, set()
    world.run(90 * SECOND)
    sent = [slot for _, slot in world.outbox.slots]
    assert len(set(sent)) == len(sent)
    assert not set(sent) & {event.newest for event in world.events_of(events.SlotsGivenUp)}
    states = world.states("job")
    assert list(states) == list(range(FIRST, world.clock.wall() + 1, 10 * SECOND)), "nothing goes without a word"
    assert {slot for slot, state in states.items() if state == "dispatched"} == set(sent)
