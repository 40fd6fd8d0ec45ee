"""Real beats on hosts whose clocks are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import RedisServer
from support.beats import Beats, until
from support.clocks import ShiftedClock
from support.sites import RedisStore
from support.stage import all_sent_once, quiet, settle, wall

from celery_anarchon.model import Millis
from celery_anarchon.testing.fleet import ManagedProcess

pytestmark = pytest.mark.fleet

QUICK = {"anarchon_lease": 2, "anarchon_heartbeat": 0.5}
DAY = 86_400


def fleet_on(redis: RedisServer, folder: Path) -> Beats:
    return Beats(folder, {"a": 1, "b": 2}, dict(QUICK), RedisStore(redis.url))


def start_off(fleet: Beats, name: str, seconds: int) -> tuple[ManagedProcess, ShiftedClock]:
    clock = ShiftedClock(fleet.folder, name, seconds)
    clock.check(seconds)
    return fleet.beat(name, **clock.env), clock


def go_on(fleet: Beats, seconds: int) -> None:
    since = wall()
    until(lambda: any(slot > since + seconds * 1000 for _, slot in fleet.count()), f"{seconds} s of slots")


def senders(fleet: Beats, since: Millis) -> set[int]:
    return {int(event.beat.rpartition(":")[2]) for event in fleet.events() if event.slot > since}


def known_slots(fleet: Beats) -> list[Millis]:
    store = fleet.store()
    runs = [run for job in fleet.jobs for run in store.history(job, 1_000)]
    store.close()
    return [round(run.slot.timestamp() * 1000) for run in runs]


def test_clocks_three_minutes_apart(redis: RedisServer, tmp_path: Path) -> None:
    fleet = fleet_on(redis, tmp_path)
    with fleet.fleet:
        right = fleet.beat("right")
        start = wall()
        ahead, _ = start_off(fleet, "ahead", 180)
        behind, _ = start_off(fleet, "behind", -180)
        joined = wall()
        go_on(fleet, 3)
        assert senders(fleet, joined) == {right.pid}
        for wrong in (ahead, behind):
            wrong.wait_for_log("this beat claims nothing while another one's clock is right")
        # Without a right clock slots go on, by the store's.
        quiet(fleet)
        right.kill()
        for wrong in (ahead, behind):
            wrong.wait_for_log("slots follow the store's clock")
        go_on(fleet, 3)
        end = wall()
        settle(fleet, end)
        all_sent_once(fleet, start, end)
        late = [message.run["late"] for message in fleet.broker.messages() if message.run]
        assert max(late) < 60, "by no clock that is minutes off"


def test_a_day_ahead_burns_nothing_of_tomorrow(redis: RedisServer, tmp_path: Path) -> None:
    fleet = fleet_on(redis, tmp_path)
    with fleet.fleet:
        start_off(fleet, "tomorrow", DAY)
        start = wall()
        # Alone, then beside another whose clock jumps while it runs.
        go_on(fleet, 2)
        jumps, clock = start_off(fleet, "jumps", 0)
        go_on(fleet, 1)
        clock.set(DAY)
        jumps.wait_for_log("the system clock stepped")
        go_on(fleet, 2)
        assert max(known_slots(fleet)) < wall() + 10_000
        clock.set(0)
        jumps.wait_for_log("within anarchon_max_skew again")
        end = wall()
        settle(fleet, end)
        all_sent_once(fleet, start, end)
