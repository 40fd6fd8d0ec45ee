"""A Redis store that goes away, is emptied, and whose replies are lost, with real beats on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis as client
from servers import RedisServer
from support.beats import Beats, until
from support.redis_servers import RESP2
from support.sites import RedisBroker, RedisStore
from support.stage import all_sent_once, settle, wall

from celery_anarchon.backends.redis.scripts import script
from celery_anarchon.model import Millis
from celery_anarchon.testing.faults import Proxy
from celery_anarchon.testing.fleet import ManagedProcess

pytestmark = pytest.mark.fleet

EVERY = 1
SLOT: Millis = 1_000 * EVERY


def until_mid_slot(fleet: Beats) -> None:
    """Not while a slot is being dispatched: what a fault in that very moment may leave is another question."""

    def settled() -> bool:
        now = wall()
        sent = fleet.count()
        all_sent = all((job, now // SLOT * SLOT) in sent for job in fleet.jobs)
        return all_sent and not fleet.home.open_claims() and wall() % SLOT < 0.7 * SLOT and wall() - now < SLOT

    until(settled, "a quiet moment between two slots")


def state_lines(beat: ManagedProcess) -> list[str]:
    return [line for line in beat.lines() if "the store is" in line]


def broker_lines(beat: ManagedProcess) -> list[str]:
    return [line for line in beat.lines() if "the broker is" in line]


@dataclass
class Outage:
    """A store of the test's own, beats that it goes away from, and when it did."""

    server: RedisServer
    fleet: Beats
    beats: list[ManagedProcess]
    spans: list[tuple[Millis, Millis]] = field(default_factory=list)

    def endure(self, go: Callable[[], None], come: Callable[[], None], seconds: float) -> None:
        """Let the store be away for that long once all beats have noticed."""
        until_mid_slot(self.fleet)
        lines = len(state_lines(self.beats[0]))
        gone = wall()
        go()
        for beat in self.beats:
            until(lambda beat=beat: len(state_lines(beat)) > lines, f"{beat.name} to notice")
        before = self.fleet.count() if self.readable else {}
        over = wall() + round(seconds * 1000)
        until(lambda: wall() > over, "time", seconds + 60)
        if self.readable:
            assert self.fleet.count() == before, "it was sent without the store"
        come()
        for beat in self.beats:
            until(lambda beat=beat: len(state_lines(beat)) > lines + 1, f"{beat.name} to notice that it is back", 90)
            # Where the broker went with it, it has to be back as well.
            until(lambda beat=beat: len(broker_lines(beat)) % 2 == 0, f"{beat.name} to have its broker back", 90)
        back = wall()
        settle(self.fleet, back + 1)
        self.spans.append((gone, back))
        self.judge()

    @property
    def readable(self) -> bool:
        """The broker is another server."""
        return not isinstance(self.fleet.broker, RedisBroker)

    def judge(self) -> None:
        """The normal rules: nothing twice, the latest missed slot sent, no hole but in the outages."""
        sent = self.fleet.count()
        gone, back = self.spans[-1]
        assert all(len(ids) == 1 for ids in sent.values()), sent
        for job in self.fleet.jobs:
            slots = sorted(slot for name, slot in sent if name == job)
            holes = set(range(slots[0], slots[-1], SLOT)) - set(slots)
            assert all(any(first < hole < last for first, last in self.spans) for hole in holes)
            with_latest = [slot for slot in slots if gone - SLOT < slot <= back]
            assert with_latest and max(with_latest) > back - SLOT - 1, "the latest missed slot was not sent"
            if holes:
                store = self.fleet.store()
                known = {round(run.slot.timestamp() * 1000): str(run.state) for run in store.history(job, 100)}
                store.close()
                assert {known.get(hole) for hole in holes} <= {"superseded", None}


@pytest.fixture(params=["files", pytest.param("the same server", marks=pytest.mark.long)])
def outage(request: pytest.FixtureRequest, own_redis: RedisServer, tmp_path: Path) -> Any:
    broker = None if request.param == "files" else RedisBroker(own_redis.url)
    fleet = Beats(tmp_path, {"a": EVERY, "b": EVERY}, {}, RedisStore(own_redis.url), broker)  # type: ignore[arg-type]
    with fleet.fleet:
        yield Outage(own_redis, fleet, fleet.beats("one", "two", "three"))


def go_away_in_every_way(outage: Outage, stopped: float, killed: float | None, frozen: float) -> None:
    process = outage.server.process
    outage.endure(process.stop, process.start, stopped)
    if killed is not None:
        outage.endure(process.kill, process.start, killed)
    outage.endure(process.pause, process.resume, frozen)
    for beat in outage.beats:
        words = ["away" if "is away" in line else "back" for line in state_lines(beat)]
        assert words == ["away", "back"] * len(outage.spans), "one line for each change of state"
        assert "Traceback" not in beat.output
        assert beat.stop() == 0


def test_a_store_that_is_stopped_and_frozen(outage: Outage) -> None:
    go_away_in_every_way(outage, 1, None, 1)


@pytest.mark.long
def test_a_store_that_is_away_for_long(outage: Outage) -> None:
    go_away_in_every_way(outage, 20, 5, 60)
    print(f"\n{len(outage.fleet.count())} slots sent, none twice")


def test_a_store_that_is_emptied(own_redis: RedisServer, tmp_path: Path) -> None:
    settings = {"anarchon_lease": 6, "anarchon_heartbeat": 1}
    fleet = Beats(tmp_path, {"a": EVERY, "b": EVERY}, settings, RedisStore(own_redis.url))
    with fleet.fleet:
        beats = fleet.beats("one", "two", "three")
        start = wall()
        until(fleet.count, "a message")
        until_mid_slot(fleet)
        with client.Redis.from_url(own_redis.url, **RESP2) as raw:
            raw.flushall()
        flushed = wall()

        def warnings() -> list[str]:
            return [line for beat in beats for line in beat.lines() if "lost keys" in line]

        until(warnings, "a word about it")
        until(lambda: any(slot > flushed + 2 * SLOT for _, slot in fleet.count()), "slots after it")
        # A beat that comes now sees each job for the first time: nothing of the past.
        beats.append(fleet.beat("four"))
        end = wall()
        settle(fleet, end)
        all_sent_once(fleet, start, end)
        assert len(warnings()) == 1
        for beat in beats:
            assert beat.running and not state_lines(beat)


def lost_replies(fleet: Beats, line: Proxy, rounds: int) -> int:
    """Lose the replies to claims, and to confirmations, again and again; how many were lost."""
    fleet.beats("one", "two")
    start = wall()
    until(fleet.count, "a message")
    for number in range(rounds):
        for name in ("claim", "confirm"):
            digest = script(name).digest
            line.may_lose = lambda asked, reply, digest=digest: digest in asked and b"NOSCRIPT" not in reply
            before = line.lost
            line.losing = True
            until(lambda before=before: line.lost > before, f"a lost reply to {name}, round {number}")
            line.losing = False
            since = wall()
            until(lambda since=since: any(slot > since for _, slot in fleet.count()), "the next slot")
    end = wall()
    settle(fleet, end)
    all_sent_once(fleet, start, end)
    return line.lost


JOBS = {f"job-{number}": 1 for number in range(5)}


@pytest.mark.parametrize(
    ("rounds", "clients"),
    [
        (1, "our own"),
        (1, "the app's, which repeats"),
        pytest.param(10, "our own", marks=pytest.mark.long),
        pytest.param(10, "the app's, which repeats", marks=pytest.mark.long),
    ],
)
def test_a_lost_reply_costs_nothing(redis: RedisServer, tmp_path: Path, rounds: int, clients: str) -> None:
    port = int(redis.url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as line:
        store = RedisStore(redis.url, f"redis://127.0.0.1:{line.port}/0")
        own = {"own_client": {"port": line.port, "prefix": store.namespace}} if clients != "our own" else {}
        fleet = Beats(tmp_path, JOBS, own, store)
        with fleet.fleet:
            print(f"\n{lost_replies(fleet, line, rounds)} replies lost, each slot sent once")


@pytest.mark.long
def test_a_slow_and_a_broken_line(redis: RedisServer, tmp_path: Path) -> None:
    """Half a second for each answer, and connections that break: late is all that it makes."""
    port = int(redis.url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as line:
        fleet = Beats(tmp_path, {"a": EVERY}, {}, RedisStore(redis.url, f"redis://127.0.0.1:{line.port}/0"))
        with fleet.fleet:
            fleet.beats("one", "two")
            start = wall()
            line.delay = 0.25
            since = wall()
            until(lambda: any(slot > since for _, slot in fleet.count()), "a slot over a slow line")
            until_mid_slot(fleet)
            line.delay = 0.0
            line.reset()
            end = wall()
            settle(fleet, end)
            all_sent_once(fleet, start, end)
