"""What a large schedule costs while nothing happens: start-up, ticks, CPU and memory, ours beside stock, in one run.

    python tests/benchmarks/idle.py [--small 10000] [--large 100000] [--watched 40] [-o idle.json]

Each row is a process of its own; ours has its store in a private Redis. Times are CPU seconds by the kernel's account
(those of the server are not in them), so they depend little on what else the machine does; "wall" is what a user waits.
Memory is resident, beyond that of the same process with its imports and an empty schedule: "a job" counts what the
app's own definitions take, too; "beat's own" is what beat adds to them. Stock, which writes its file every three
minutes, is looked at after the first time it did: what it holds grows by that.

CPU percentages are of one core, watched for a while in a loop like beat's: with nothing due, and with one job that is
due every second. Once in five minutes ours compares the whole schedule; that is in "nothing due" by its share.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import Table, apart, command

SIZES = {"small": 10_000, "large": 100_000, "watched": 40.0}
TINY = {"small": 100, "large": 100, "watched": 0.1}

SIDES = {"ours": "ours", "stock": "stock", "stock, no file": "stock_in_memory"}
PER_DAY = 86_400.0


def resident() -> float:
    """MB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def one_process(side: str, kind: str, jobs: int, url: str, watched: float) -> dict[str, float]:
    from celery import Celery
    from celery.schedules import crontab

    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(timezone="UTC", result_expires=None)
    with tempfile.TemporaryDirectory() as folder:
        make = _maker(side, app, url, folder)
        # The driver, its connections and all imports are no job's.
        app.conf.beat_schedule = {}
        make().tick()
        before = resident()
        app.conf.beat_schedule = {
            f"job-{n:06}": {"task": "bench.note", "schedule": crontab(n % 60, n % 24) if kind == "crontab" else PER_DAY}
            for n in range(jobs)
        }
        defined = resident()
        scheduler, found = _start(make)
        found["tick us"] = _median(scheduler.tick, 200 if side == "ours" else 5) * 1e6
        if side == "stock":
            scheduler.sync()
            # It compares what it has just written, once.
            scheduler.tick()
        after = resident()
        found |= {"bytes a job": (after - before) * 2**20 / jobs, "beat's own": (after - defined) * 2**20 / jobs}
        found["nothing due cpu %"] = _idle(scheduler, watched, side)
        _add_busy(scheduler, app)
        found["one a second cpu %"] = _share(scheduler, watched)
        return found


def _maker(side: str, app: Any, url: str, folder: str) -> Callable[[], Any]:
    if side == "ours":
        from celery_anarchon import Scheduler

        app.conf.anarchon_backend = f"{url}?prefix=idle:"
        return lambda: Scheduler(app)
    from celery import beat

    if side == "stock_in_memory":
        return lambda: beat.Scheduler(app)
    numbers = iter(range(100))
    return lambda: beat.PersistentScheduler(app, schedule_filename=f"{folder}/{next(numbers)}")


def _start(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    scheduler = make()
    made = time.process_time()
    scheduler.tick()
    ended = time.process_time()
    return scheduler, {
        "setup s": made - cpu,
        "first tick s": ended - made,
        "start-up s": ended - cpu,
        "start-up wall s": time.perf_counter() - wall,
    }


def _median(step: Callable[[], Any], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begin = time.process_time()
        step()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def _share(scheduler: Any, watched: float) -> float:
    """Percent of a core in a loop like that of Celery's beat service."""
    until, cpu, begin = time.monotonic() + watched, time.process_time(), time.monotonic()
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, max(0.0, scheduler.tick() or 0.0)))
    return (time.process_time() - cpu) / (time.monotonic() - begin) * 100


def _idle(scheduler: Any, watched: float, side: str) -> float:
    share = _share(scheduler, watched)
    if side == "ours":
        scheduler._definitions._compare_at = 0.0
        cpu = time.process_time()
        scheduler.tick()
        share += (time.process_time() - cpu) / scheduler.max_interval * 100
    return share


def _add_busy(scheduler: Any, app: Any) -> None:
    """One more job, due every second; all that it takes to be known is over when this returns."""
    app.conf.beat_schedule["busy"] = {"task": "bench.note", "schedule": 1.0}
    if not hasattr(scheduler, "dispatcher"):
        scheduler.update_from_dict({"busy": app.conf.beat_schedule["busy"]})
    scheduler.tick()


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    from support.redis_servers import private_server

    for kind in ("crontab", "interval"):
        for jobs in dict.fromkeys((sizes.small, sizes.large)):
            table = Table(f"{jobs:,} jobs, each a{'n' if kind == 'interval' else ''} {kind}")
            with tempfile.TemporaryDirectory() as folder:
                for row, side in SIDES.items():
                    with private_server(Path(folder) / side) as server:
                        words = {"kind": kind, "jobs": jobs, "url": server.url, "watched": sizes.watched}
                        table.add(row, **apart(one_process, side=side, **words))
            for name in ("first tick s", "start-up s", "tick us", "bytes a job", "one a second cpu %"):
                _add_ratios(table, name)
            table.notes.append(f"load of the machine: {os.getloadavg()[0]:.1f}")
            yield table


def _add_ratios(table: Table, name: str) -> None:
    """Two rows of stock's figures over ours: how many times cheaper ours is."""
    for side in ("stock", "stock, no file"):
        theirs, own = table.rows[side][name], table.rows["ours"][name]
        table.add(f"{side} / ours", **{name: theirs / own if own else None})


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
