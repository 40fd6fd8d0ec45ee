"""A broker that is away, killed and frozen: a private Redis, with real beats on a SQLite store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer
from support.beats import ENOUGH, Beats, until
from support.sites import RedisBroker
from support.stage import wall

from celery_anarchon.model import Millis

pytestmark = pytest.mark.fleet

EVERY = 10
"""Seconds between slots: longer than a beat waits between two looks for its broker, so that it is back in time."""


def beats_on(broker: RedisServer, folder: Path, jobs: dict[str, Any], **settings: Any) -> Beats:
    return Beats(folder, jobs, settings, broker=RedisBroker(broker.url))


def until_before_a_slot() -> Millis:
    """Wait until the next slot is between 2 and 4 s away; that slot."""
    until(lambda: 2_000 <= EVERY * 1000 - wall() % (EVERY * 1000) <= 4_000, "the time before a slot")
    return (wall() // (EVERY * 1000) + 1) * EVERY * 1000


def state_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "the broker is" in line]


def outage(fleet: Beats, go: Callable[[], None], come: Callable[[], None], slots: int) -> tuple[Millis, Millis]:
    """Let the broker be away over *slots* slots; the first of them, and the one after them."""
    beats = fleet.beats("a", "b", "c")
    until(fleet.count, "a first message")
    first = until_before_a_slot()
    go()
    after = first + slots * EVERY * 1000
    until(lambda: wall() > after - EVERY * 1000 + 1_500, "the slots to pass")
    come()
    until(lambda: any(slot >= after for _, slot in fleet.count()), "the next slot")
    for beat in beats:
        # One that has sent nothing since says so once the broker has been up for a while.
        beat.wait_for_log("the broker is back", ENOUGH)
    for beat in beats:
        assert beat.stop() == 0
        assert len(state_lines(beat.output)) == 2, "one line per change of state"
    return first, after


def test_a_broker_killed_over_a_slot_gets_it_once_when_it_is_back(own_redis: RedisServer, tmp_path: Path) -> None:
    fleet = beats_on(own_redis, tmp_path, {"job": EVERY})
    with fleet.fleet:
        first, after = outage(fleet, own_redis.process.kill, own_redis.process.start, 1)
    sent = fleet.count()
    assert ("job", first) in sent
    assert ("job", after) in sent
    assert all(len(ids) == 1 for ids in sent.values())


def test_slots_missed_by_the_broker_collapse_to_the_latest(own_redis: RedisServer, tmp_path: Path) -> None:
    fleet = beats_on(own_redis, tmp_path, {"job": EVERY})
    with fleet.fleet:
        first, after = outage(fleet, own_redis.process.kill, own_redis.process.start, 2)
    sent = fleet.count()
    assert ("job", first) not in sent
    assert ("job", first + EVERY * 1000) in sent
    assert ("job", after) in sent
    assert all(len(ids) == 1 for ids in sent.values())
    store = fleet.store()
    states = {round(run.slot.timestamp() * 1000): str(run.state) for run in store.history("job", 50)}
    store.close()
    assert states[first] == "superseded"


def test_a_broker_that_is_away_at_the_start_is_waited_for(own_redis: RedisServer, tmp_path: Path) -> None:
    own_redis.process.kill()
    fleet = beats_on(own_redis, tmp_path, {"job": 1})
    with fleet.fleet:
        beat = fleet.start("early")
        beat.wait_for_log("the broker is away")
        own_redis.process.start()
        until(fleet.count, "a message")
        assert beat.stop() == 0
    assert all(len(ids) == 1 for ids in fleet.count().values())


def test_a_message_that_cannot_be_sent_ends_its_slot_only(own_redis: RedisServer, tmp_path: Path) -> None:
    broken = {"schedule": 1, "options": {"serializer": "no-such-serializer"}}
    fleet = beats_on(own_redis, tmp_path, {"broken": broken, "good": 1})
    with fleet.fleet:
        beat = fleet.beat("a")
        until(lambda: len(fleet.count()) >= 3, "messages of the other job")
        # The end of a slot is told behind the batch in which it fails.
        assert beat.stop() == 0
        store = fleet.store()
        runs = store.history("broken", 50)
        store.close()
    assert {job for job, _ in fleet.count()} == {"good"}
    assert len(runs) >= 2
    assert {(str(run.state), run.reason) for run in runs} == {("not-sent", "publish-error")}


@pytest.mark.long
def test_a_frozen_broker_stops_nobody_for_good(own_redis: RedisServer, tmp_path: Path) -> None:
    """Connections stay open, nothing answers: the beats must notice by themselves."""
    fleet = beats_on(own_redis, tmp_path, {"job": EVERY})
    with fleet.fleet:
        beats = fleet.beats("a", "b")
        until(fleet.count, "a first message")
        own_redis.process.pause()
        for beat in beats:
            beat.wait_for_log("the broker is away", 90)
        own_redis.process.resume()
        for beat in beats:
            beat.wait_for_log("the broker is back", 90)
        since = wall()
        until(lambda: any(slot > since for _, slot in fleet.count()), "a slot after it", 90)
    assert all(len(set(ids)) == 1 for ids in fleet.count().values())
