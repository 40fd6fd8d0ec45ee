"""How late messages are, and how long none comes when a beat is killed: ours beside stock and redbeat, in one run.

    python tests/benchmarks/lateness.py [--jobs 100] [--minutes 1] [--seconds 20] [--kills 2] [--lock 25]

Real beats on a private Redis. A message's lateness is the time from its slot until a reader that waits for it has it.
The gap is the time between the last message before a SIGKILL and the next one, less the interval of the job; redbeat
runs with a lock of LOCK seconds, its default being 25 minutes.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import Table, command, environment

SIZES = {"jobs": 100, "minutes": 1, "seconds": 20, "kills": 2, "lock": 25}
TINY = {"jobs": 5, "minutes": 0, "seconds": 1, "kills": 1, "lock": 5}

OURS = "celery_anarchon.Scheduler"
STOCK = "celery.beat.PersistentScheduler"
REDBEAT = "redbeat.RedBeatScheduler"
ENOUGH = 120.0


@dataclass
class Arrivals:
    """What a reader that waits for messages has seen: when, and the slot that the message names, in seconds."""

    server: Any
    queue: str
    seen: list[tuple[float, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        from celery_anarchon.testing.fleet import decode_message, events_of

        with self.server.client() as raw:
            while not self._over.is_set():
                found = raw.brpop(self.queue, timeout=1)
                if found is not None:
                    now = time.time()
                    events = list(events_of([decode_message(found[1])]))
                    self.seen.append((now, events[0].slot / 1000 if events else None))

    def wait_for(self, count: int) -> None:
        from support.beats import until

        until(lambda: len(self.seen) >= count, f"{count} messages in {self.queue}", ENOUGH)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def a_fleet(server: Any, scheduler: str, **settings: Any) -> Iterator[tuple[Any, Arrivals]]:
    """Beats that can be started, and what arrives of them."""
    from celery_anarchon.testing.fleet import Fleet

    with server.client() as raw:
        raw.flushall()
    config = {
        "broker_url": server.url,
        "task_default_queue": "bench",
        "anarchon_backend": f"{server.url}?prefix=late:",
        "redbeat_redis_url": server.url,
        **settings,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet("bench_app", Path(folder), environment(BENCH=json.dumps(config))) as fleet,
    ):
        arrivals = Arrivals(server, "bench")
        try:

            def start(name: str) -> Any:
                file = () if scheduler != STOCK else ("-s", str(Path(folder) / "schedule"))
                return fleet.beat(name, *file, scheduler=scheduler, loglevel="INFO")

            yield start, arrivals
        finally:
            arrivals.close()


def _add(table: Table, row: str, late: list[float]) -> None:
    ordered = sorted(late)
    table.add(
        row,
        messages=len(ordered),
        p50_ms=statistics.median(ordered) * 1000,
        p99_ms=ordered[math.ceil(len(ordered) * 0.99) - 1] * 1000,
        most_ms=ordered[-1] * 1000,
    )


def at_the_minute(table: Table, server: Any, sizes: SimpleNamespace) -> None:
    for row, scheduler, beats in (("stock", STOCK, 1), ("ours, 1 beat", OURS, 1), ("ours, 2 beats", OURS, 2)):
        with a_fleet(server, scheduler, jobs=sizes.jobs, every=0) as (start, arrivals):
            for number in range(beats):
                start(f"beat{number}").wait_for_log("beat: Starting", ENOUGH)
            arrivals.wait_for(sizes.jobs * sizes.minutes)
            # A fresh beat of stock sends what it thinks it missed; a minute has its first second.
            late = [(at - slot if slot else at % 60) for at, slot in arrivals.seen]
            _add(table, f"{sizes.jobs} crontabs at the minute: {row}", late[: sizes.jobs * sizes.minutes])


def every_second(table: Table, server: Any, sizes: SimpleNamespace) -> None:
    jobs = max(1, sizes.jobs // 10)
    for beats in (1, 2) if sizes.minutes else (2,):
        with a_fleet(server, OURS, jobs=jobs, every=1.0) as (start, arrivals):
            for number in range(beats):
                start(f"beat{number}")
            arrivals.wait_for(jobs * (sizes.seconds + 2))
            late = [at - slot for at, slot in arrivals.seen if slot][2 * jobs :]
            _add(table, f"{jobs} jobs every second: ours, {beats} beat{'s' if beats > 1 else ''}", late)


def gaps(table: Table, server: Any, sizes: SimpleNamespace) -> None:
    redbeat = {"beat_max_loop_interval": sizes.lock / 5, "redbeat_lock_timeout": sizes.lock}
    for row, scheduler, settings in (
        ("ours, two beats", OURS, {}),
        (f"redbeat, two beats, lock of {sizes.lock} s", REDBEAT, redbeat),
    ):
        found = []
        for _ in range(sizes.kills):
            with a_fleet(server, scheduler, jobs=1, every=1.0, **settings) as (start, arrivals):
                first = start("first")
                arrivals.wait_for(1)
                start("second").wait_for_log("beat: Starting", ENOUGH)
                arrivals.wait_for(len(arrivals.seen) + 1)
                first.kill()
                before = len(arrivals.seen)
                arrivals.wait_for(before + 1)
                found.append(arrivals.seen[before][0] - arrivals.seen[before - 1][0] - 1.0)
        table.add(row, kills=len(found), shortest_s=max(0.0, min(found)), longest_s=max(0.0, *found, 0.0))


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    from support.redis_servers import private_server

    with tempfile.TemporaryDirectory() as folder, private_server(Path(folder)) as server:
        late = Table("Lateness: from the slot until a waiting reader has the message")
        if sizes.minutes:
            at_the_minute(late, server, sizes)
        every_second(late, server, sizes)
        yield late
        killed = Table("One job every second, one beat killed: how much longer than a second no message came")
        gaps(killed, server, sizes)
        yield killed


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
