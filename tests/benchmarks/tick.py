"""What one due job costs among N idle ones: ours, and stock beat's tick beside it, in one run.

    python tests/benchmarks/tick.py [--most 100000]

Prints medians and ratios; asserts nothing, because a machine is not a test.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Callable

from celery import Celery, beat

from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.options import JobOptions
from celery_anarchon.publishing import Dispatch
from celery_anarchon.testing.clock import ManualClock
from celery_anarchon.timetable import Interval

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=100_000)
    most = parser.parse_args().most
    print(f"{'idle jobs':>10} {'ours, one due':>15} {'stock, none due':>17}")
    figures = {}
    for idle in (100, most):
        figures[idle] = ours(idle), stock(idle)
        print(f"{idle:>10} {figures[idle][0] * 1e6:>12.0f} us {figures[idle][1] * 1e6:>14.0f} us")
    ratios = [figures[most][side] / figures[100][side] for side in (0, 1)]
    print(f"{'ratio':>10} {ratios[0]:>15.2f} {ratios[1]:>17.2f}")


if __name__ == "__main__":
    main()
