"""Claim and message as one write: beats that are killed and stopped at any moment, and stock workers that read what was
written."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, SUPPORT, Beats, until
from support.one_step_storm import Storm
from support.redis_servers import Private, private_server
from support.sites import RedisBroker, RedisStore
from support.stage import Stage, all_sent_once, settle, wall

from celery_anarchon import wire
from celery_anarchon.testing.fleet import Fleet
from celery_anarchon.verdict import Kind

pytestmark = pytest.mark.fleet


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Private]:
    with private_server(tmp_path / "redis", options=("--save", "")) as running:
        yield running


@pytest.fixture
def storm(request: Any, server: Private) -> Iterator[Storm]:
    made = Storm(server, one_step=request.param)
    yield made
    made.close()


# --- killed -----------------------------------------------------------------------------------------------------------

ONE_STEP, TWO_STEPS = (
    pytest.mark.parametrize("storm", [True], indirect=True),
    pytest.mark.parametrize("storm", [False], indirect=True),
)


def kill(storm: Storm, times: int) -> None:
    storm.first()
    for _ in range(times):
        storm.kill_one()
    verdict = storm.verdict()
    print(f"\n{storm.kills} kills, {verdict.expected} slots, {verdict.sent_once} sent once")
    assert verdict.kind is Kind.VALID, verdict
    assert not verdict.same_id_twice, verdict


@ONE_STEP
def test_beats_killed_at_any_moment_lose_and_double_nothing(storm: Storm) -> None:
    kill(storm, 8)


@ONE_STEP
@pytest.mark.long
def test_two_hundred_kills(storm: Storm) -> None:
    kill(storm, 200)


@TWO_STEPS
def test_the_same_kills_find_the_window_of_two_steps(storm: Storm) -> None:
    """Or the test above proves nothing. A message that is out before its confirm is sent again."""
    storm.first()
    for _ in range(60):
        storm.kill_one()
        claimed = Counter((event.job, event.slot) for event in storm.events())
        if max(claimed.values()) > 1:
            return
    verdict = storm.verdict()
    assert verdict.duplicate or verdict.same_id_twice, f"{storm.kills} kills, and no message came twice"


# --- stopped ----------------------------------------------------------------------------------------------------------


def stop(stage: Stage, server: Private, rounds: int) -> list[float]:
    """A beat gets SIGTERM at any moment of its work; how long each needed to end."""
    stage.home, stage.broker = lambda _: RedisStore(server.url), lambda _: RedisBroker(server.url)
    fleet: Beats = stage.fleet({f"job-{number}": 1 for number in range(40)}, anarchon_coalesce="all")
    chance = random.Random(1)
    took, start = [], 0
    for number in range(rounds):
        beat = fleet.beat(f"beat-{number}")
        assert "claim and enqueue in one step" in beat.output
        start = start or wall()
        left = 1_000 - wall() % 1_000
        time.sleep(max(0.0, left + chance.uniform(-20, 60)) / 1000)  # the very thing: any moment around a burst
        begun = time.monotonic()
        assert beat.stop() == 0
        took.append(time.monotonic() - begun)
        assert fleet.home.open_claims() == [], beat.output[-3000:]
    last = fleet.beat("last")
    end = wall()
    settle(fleet, end)
    assert last.stop() == 0
    print(f"\n{all_sent_once(fleet, start, end)} slots, sent once each, over {rounds} stops")
    return took


def test_a_stop_at_any_moment_leaves_nothing_unsent(stage: Stage, server: Private) -> None:
    stop(stage, server, 2)


@pytest.mark.long
def test_fifty_stops_within_two_seconds_each(stage: Stage, server: Private) -> None:
    took = stop(stage, server, 50)
    print(f"\nlongest of {len(took)} stops: {max(took):.2f} s")
    assert max(took) < 2


# --- read by stock workers --------------------------------------------------------------------------------------------

SENT_AS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {"options": {"queue": "named"}},
    "priority 3": {"options": {"priority": 3}},
    "priority 9": {"options": {"priority": 9}},
    "expiring queue": {"options": {"queue": "brief"}},
    "topic": {"options": {"exchange": "news", "routing_key": "news.sports.goal", "queue": "sports"}},
    "direct": {"options": {"queue": "bound", "exchange": "straight", "routing_key": "a-key"}},
    "fanout": {"options": {"queue": "everyone"}},
    "route": {"task": "by.route"},
    "pickle": {"options": {"serializer": "pickle"}},
    "msgpack": {"options": {"serializer": "msgpack"}},
    "compressed": {"options": {"compression": "zlib"}},
    "countdown": {"options": {"countdown": 0.5}},
    "expires": {"options": {"expires": 600}},
    "headers": {"options": {"headers": {"mine": 1}}},
}
TIMES = {"topic": 2, "fanout": 2, "a group": 2}
"""Bodies of one slot that say so, where that is not 1: two queues, two workers, two tasks. The second task of a chain
does not know its slot."""


@pytest.mark.parametrize("options", [{}, {"global_keyprefix": "pre:"}], ids=["plain", "key prefix"])
def test_stock_workers_read_what_is_written(stage: Stage, server: Private, tmp_path: Path, options: Any) -> None:
    config = {
        "broker_url": server.url,
        "broker_transport_options": options,
        "anarchon_backend": f"{server.url}?prefix=mine:",
        "anarchon_one_step": True,
        "timezone": "UTC",
        "every": 1.5,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
        "jobs": {name: {"task": "note", "args": [1, "ü"], **entry} for name, entry in SENT_AS.items()},
    }
    # A worker that takes pickles does not like to be root, which tests often are.
    env = {"PYTHONPATH": str(SUPPORT), "ONE_STEP_CONFIG": json.dumps(config), "C_FORCE_ROOT": "1"}
    with Fleet("one_step_app", tmp_path, env) as fleet, server.client() as raw:
        for name in ("one", "two"):
            fleet.worker(name).wait_for_log(r"ready\.", ENOUGH)
        fleet.beat("beat")

        def ran() -> dict[str, Counter[str]]:
            found: dict[str, Counter[str]] = {}
            for line in map(json.loads, raw.lrange("journal", 0, -1)):
                found.setdefault(line["job"], Counter())[line["slot"]] += 1
            return found

        wanted = {*SENT_AS, "a chain", "a group"}

        def all_ran() -> bool:
            found = ran()
            return all(
                len([slot for slot, times in found.get(name, {}).items() if times == TIMES.get(name, 1)]) >= 2
                for name in wanted
            )

        until(all_ran, "two slots of each")
        for name, found in ran().items():
            assert name is None or max(found.values()) <= TIMES.get(name, 1), name
        lines = [json.loads(line) for line in raw.lrange("journal", 0, -1)]
        for line in lines:
            if line["job"] in SENT_AS:
                assert line["args"] == [[1, "ü"], {}]
                assert line["id"] == wire.run_id("mine:", line["job"], wire.parse_time(line["slot"]))
        assert any(line["job"] is None and line["args"] == [[2], {}] for line in lines), "the end of a chain"
        assert {line["queue"] for line in lines if line["job"] == "route"} == {"routed"}
