"""The examples of "choosing by what a job needs", each with a real beat and workers: what its page promises."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from servers import RedisServer
from support.beats import ENOUGH, until
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.model import Run, RunState
from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import Fleet, ManagedProcess

pytestmark = pytest.mark.fleet

EXAMPLES = Path(__file__).parents[2] / "examples"
STORE = "anarchon.db"

LINE = re.compile(
    r"^\[(?P<at>[-\d]+ [:\d]+,\d+): INFO/[^\]]+\] (?P<task>[\w.]+)\[[-\w]+\]: (?P<text>.*)$", re.MULTILINE
)
"""What a task logs."""


class Example:
    """Beat and workers of one example, in a folder of their own."""

    def __init__(self, name: str, folder: Path, env: dict[str, str]) -> None:
        shutil.copy(EXAMPLES / f"{name}.py", folder)
        self.folder = folder
        self.fleet = Fleet(name, folder, env)
        self.workers: list[ManagedProcess] = []

    def start(self, *workers: str, pool: str = "prefork", bodies: int = 1, **env: str) -> list[ManagedProcess]:
        """The workers, consuming, each with room for so many bodies; then a beat, which has ticked."""
        # A store that nobody made yet is made by the first of them.
        started = [self.fleet.worker(name, "-c", str(bodies), pool=pool, **env) for name in workers]
        for worker in started:
            worker.wait_for_log(r" ready\.", ENOUGH)
        self.workers += started
        if "beat" not in self.fleet.processes:
            self.fleet.beat("beat", scheduler=None).wait_for_log("beat: Waking up", ENOUGH)
        return started

    def lines(self) -> list[re.Match[str]]:
        """What bodies logged, on any worker, in the order of their times."""
        return sorted(
            (line for worker in self.workers for line in LINE.finditer(worker.log.read_text())),
            key=lambda line: line["at"],
        )

    def told(self, pattern: str) -> list[re.Match[str]]:
        """Those of them that say this."""
        return [match for line in self.lines() if (match := re.search(pattern, line["text"]))]

    def spans(self, pattern: str) -> list[tuple[str, str, Any]]:
        """Of each body, which *pattern* finds in what it logs: when it logged the first and the last of it."""
        found: dict[Any, tuple[str, str]] = {}
        for line in self.lines():
            match = re.search(pattern, line["text"])
            if match:
                begin, _ = found.get(match.groups(), (line["at"], ""))
                found[match.groups()] = begin, line["at"]
        return sorted((begin, end, body) for body, (begin, end) in found.items())

    def history(self, job: str, store: str = STORE) -> list[Run]:
        url = store if "://" in store else f"sqlite:///{self.folder / store}"
        with closing(backend_from(url)) as backend:
            backend.open(self.fleet.app_module, create=False)
            return backend.history(job, 1_000)

    def python(self, code: str) -> None:
        subprocess.run([sys.executable, "-c", code], cwd=self.folder, env=self.fleet.env, check=True)


@pytest.fixture
def example(tmp_path: Path, own_redis: RedisServer) -> Iterator[Callable[..., Example]]:
    """An example with a Redis of its own as broker and, unless it is told another store, a file."""
    with ExitStack() as stack:

        def build(name: str, **env: str) -> Example:
            given = {"CELERY_BROKER_URL": own_redis.url, "CELERY_ANARCHON_BACKEND": f"sqlite:///{STORE}", **env}
            built = Example(name, tmp_path, {key: value for key, value in given.items() if value})
            stack.callback(built.fleet.close)
            return built

        yield build


def each_slot_once(slots: list[str], every: int) -> None:
    """No slot of the grid twice, and none left out between the first and the last."""
    moments = [wire.instant(datetime.fromisoformat(slot)) for slot in slots]
    first, last = min(moments), max(moments)
    # Its own first slot says where the grid lies.
    grid = expected_interval(every, first % every, first - 1, last)
    assert sorted(moments) == list(grid)


def same(written: str, slot: str) -> bool:
    """Whether a header's slot is the one that a body logged."""
    return wire.parse_time(written) == wire.instant(datetime.fromisoformat(slot))


def test_billing(example: Callable[..., Example], own_redis: RedisServer) -> None:
    """The worker is killed in the middle of a body, and its message is delivered again: never a second body."""
    billing = example("billing", BILLING_CRON="* * * * * */5", BILLING_LEASE="6s")
    (first,) = billing.start("first", BILLING_PACE="60")
    slot = until(lambda: billing.told(r"^body of (\S+), attempt 1$"), "a body")[0][1]
    with Redis.from_url(own_redis.url, **RESP2) as raw:
        held = [json.loads(found) for found in raw.hvals("unacked")]
        first.send(signal.SIGKILL, group=True)
        first.wait()
        # As its broker does with what a dead consumer had.
        ((message, queue),) = [
            (message, queue) for message, _, queue in held if same(message["headers"]["anarchon"]["slot"], slot)
        ]
        raw.rpush(queue, json.dumps(message))
    billing.start("second", BILLING_PACE="0.01")

    def lost() -> list[Run]:
        return [run for run in billing.history("charge") if run.state is RunState.LOST]

    (run,) = until(lost, "the end of the run whose worker died")
    assert (run.slot, run.attempt) == (datetime.fromisoformat(slot), 1)
    until(lambda: lost()[0].refused >= 1, "the message that came again")
    # The next slot is a fresh run.
    until(lambda: [said for said in billing.told(r"^charged cleo .*\((\S+)/cleo\)$") if said[1] > slot], "another slot")
    bodies = [said[1] for said in billing.told(r"^body of (\S+), attempt 1$")]
    assert len(bodies) == len(set(bodies)) == len(billing.told("^body of"))

    # What it left open is finished by hand, however often.
    for _ in range(2):
        billing.python(f"import billing; billing.PACE = 0; billing.bill({slot!r})")
    with closing(sqlite3.connect(billing.folder / "billing-ledger.db", timeout=30)) as ledger:
        charged = ledger.execute("SELECT customer FROM charges WHERE slot = ? ORDER BY customer", (slot,)).fetchall()
    assert charged == [("ann",), ("bob",), ("cleo",)]


def test_nightly_export(example: Callable[..., Example]) -> None:
    """Longer than its interval: no two bodies at once. Stopped cold in the middle: the other worker goes on, with the
    parts that are missing."""
    export = example(
        "nightly_export",
        EXPORT_CRON="* * * * * */2",
        EXPORT_LEASE="12s",
        EXPORT_PARTS="8",
        EXPORT_PACE="0.8",
    )
    export.start("one", "two", bodies=2)
    until(lambda: export.told("^end "), "the first export")
    done = len(export.told("^end "))
    # In the middle of a later one.
    part = until(lambda: export.told(r"^part (\S+)/2, attempt 1$")[done:], "the third part")[0]
    slot = part[1]
    busy = next(worker for worker in export.workers if worker.has_written(rf"part {slot}/2, attempt 1"))
    busy.send(signal.SIGQUIT)
    until(lambda: export.told(f"^end {slot}, attempt 2$"), "the next attempt's end")
    numbers = [int(said[1]) for said in export.told(rf"^part {slot}/(\d+), attempt")]
    # One that was written and not told any more is there as well.
    assert len(numbers) == len(set(numbers)), "a part was written twice"
    assert sorted(path.name for path in (export.folder / "exports" / slot).glob("*.csv")) == [
        f"{number:03}.csv" for number in range(8)
    ]
    spans = export.spans(r"^(?:begin|part|end) (\w+)(?:/\d)?, attempt (\d)$")
    assert len(spans) >= 3
    for (_, end, _), (begin, _, what) in itertools.pairwise(spans):
        assert end <= begin, f"{what} began at {begin}, before the one before it ended at {end}: {spans}"
    runs = export.history("export")
    ids = {run.run_id for run in runs}
    skipped = [run for run in runs if run.state is RunState.SKIPPED]
    assert skipped and all(run.blocked_by in ids for run in skipped)


def test_cache_refresh(example: Callable[..., Example], tmp_path: Path) -> None:
    """On its defaults, which need no server: each slot once, on the broker that is a file."""
    cache = example("cache_refresh", CELERY_BROKER_URL="", CELERY_ANARCHON_BACKEND="", REFRESH_EVERY="1s")
    cache.start("worker", pool="solo")
    until(lambda: len(cache.told("^refreshed for")) >= 4, "four runs")
    each_slot_once([said[1] for said in cache.told(r"^refreshed for (\S+)$")], 1_000)
    assert json.loads((tmp_path / "cache.json").read_text())["fresh"] > 0
    assert {run.state for run in cache.history("refresh", "refresh-store.db")} <= {
        *(RunState.SUCCEEDED, RunState.RUNNING, RunState.QUEUED, RunState.CLAIMED, RunState.DISPATCHED)
    }


def test_broker_notifications(example: Callable[..., Example], own_redis: RedisServer) -> None:
    """On a store that only takes claims, the broker itself: each slot once, each text once."""
    store = f"{own_redis.url}?strategy=script&prefix=notifications:"
    notify = example("broker_notifications", CELERY_ANARCHON_BACKEND=store, NOTIFY_EVERY="1s")
    subprocess.run(
        [sys.executable, "broker_notifications.py", "it has left", "it is here"],
        cwd=notify.folder,
        env=notify.fleet.env,
        check=True,
    )
    notify.start("worker")
    until(lambda: notify.told("^outbox of .*: 2$"), "both texts")
    notify.python("import broker_notifications; broker_notifications.add('it was opened')")
    until(lambda: notify.told("^outbox of .*: 1$"), "the third one")
    assert [said[1] for said in notify.told("^notified: (.*)$")] == ["it has left", "it is here", "it was opened"]
    each_slot_once([said[1] for said in notify.told(r"^outbox of (\S+): \d$")], 1_000)
    assert {run.state for run in notify.history("notify", store)} <= {RunState.CLAIMED, RunState.DISPATCHED}


def test_tenants(example: Callable[..., Example]) -> None:
    """Each tenant has its own slots, each once, at its own place on the grid."""
    intervals = {"acme": 1_000, "globex": 2_000, "initech": 1_000}
    tenants = example("tenants", TENANTS=",".join(f"{name}={every}ms" for name, every in intervals.items()))
    tenants.start("worker")

    def slots(tenant: str) -> list[str]:
        return [said[1] for said in tenants.told(rf"^synced {tenant} for (\S+)$")]

    until(lambda: all(len(slots(tenant)) >= 3 for tenant in intervals), "three runs of each tenant")
    places: dict[str, Any] = {}
    for tenant, every in intervals.items():
        found = slots(tenant)
        each_slot_once(found, every)
        places[tenant] = timedelta(milliseconds=wire.instant(datetime.fromisoformat(found[0])) % 1_000)
        assert {run.job for run in tenants.history(f"sync-{tenant}")} == {f"sync-{tenant}"}
    assert len(set(places.values())) == len(places), places
