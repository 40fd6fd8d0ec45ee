"""What one due job costs among N idle ones: ours, and stock beat's tick beside it, in one run.

    python tests/benchmarks/tick.py [--most 100000]

Medians; ``idle.py`` has the same of whole beats.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from celery import Celery, beat
from figures import Table, command

from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.options import JobOptions
from celery_anarchon.publishing import Dispatch
from celery_anarchon.testing.clock import ManualClock
from celery_anarchon.timetable import Interval

SIZES = {"most": 100_000}
TINY = {"most": 200}

START: Millis = 1_774_746_000_000
ROUNDS = 200


class Sink:
    def check(self) -> None: ...

    def publish(self, dispatch: Dispatch) -> None: ...

    def close(self) -> None: ...


def ours(idle: int) -> float:
    clock = ManualClock(wall=START)
    dispatcher = Dispatcher(
        backend=MemoryBackend(store=MemoryStore(clock)), publisher=Sink(), owner="owner", label="bench", clock=clock
    )
    dispatcher.open()
    day = Interval(86_400_000, 3_600_000)
    jobs = {f"idle-{n}": Job(name=f"idle-{n}", timetable=day, options=JobOptions()) for n in range(idle)}
    jobs["busy"] = Job(name="busy", timetable=Interval(1_000), options=JobOptions())
    dispatcher.load(jobs)
    dispatcher.tick()

    def due() -> None:
        clock.advance(1_000)
        dispatcher.tick()

    return median(due)


def stock(idle: int) -> float:
    app = Celery("bench", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
    app.conf.beat_schedule = {f"idle-{n}": {"task": "t", "schedule": 86_400.0} for n in range(idle)}
    app.conf.beat_schedule["busy"] = {"task": "t", "schedule": 3_600.0}
    scheduler = beat.Scheduler(app=app)
    scheduler.apply_entry = lambda *_args, **_kwargs: None
    scheduler.__dict__["producer"] = None
    scheduler.tick()
    return median(scheduler.tick, rounds=5 if idle > 10_000 else 50)


def median(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    table = Table("One tick among idle jobs, the dispatcher alone on a store in memory")
    for idle in (100, sizes.most):
        due, none = ours(idle), stock(idle)
        table.add(f"{idle:,} idle", ours_one_due_us=due * 1e6, stock_none_due_us=none * 1e6, stock_over_ours=none / due)
    few, many = table.rows.values()
    table.add("many over few", **{name: many[name] / few[name] for name in ("ours one due us", "stock none due us")})
    yield table


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
