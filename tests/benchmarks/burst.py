"""Many jobs due at once: how many messages a second reach a Redis broker, ours beside its peers, in one run.

    python tests/benchmarks/burst.py [--jobs 5000] [--rounds 3] [--most 30] [-o burst.json]

Each contender runs in a process of its own on an empty private Redis, which is our store as well. A contender that is
not through after MOST seconds is stopped, and its rate is that of what it sent. Messages are counted in the broker, and
ours by (job, slot): each must be there exactly once.
"""

from __future__ import annotations

import math
import os
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import Apart, Table, apart, command, tell, together, told

SIZES = {"jobs": 5_000, "rounds": 3, "most": 30.0}
TINY = {"jobs": 40, "rounds": 1, "most": 5.0}

QUEUE = "burst"
TASK = "bench.note"
BATCH = 500
LONG_AGO = 7_200


def an_app(url: str, **settings: Any) -> Any:
    from celery import Celery

    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(timezone="UTC", result_expires=None, task_default_queue=QUEUE, **settings)
    return app


def schedule(jobs: int, interval: float) -> dict[str, Any]:
    return {f"job-{number:06}": {"task": TASK, "schedule": interval} for number in range(jobs)}


# --- the peers, each in a process of its own --------------------------------------------------------------------------


def _ticks(scheduler: Any, jobs: int, most: float) -> dict[str, float]:
    """Stock's tick sends one message, and answers 0 when it did."""
    sent, begin, cpu = 0, time.perf_counter(), time.process_time()
    while sent < jobs and time.perf_counter() - begin < most:
        sent += scheduler.tick() == 0
    return {"sent": sent, "seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}


def stock_tick(url: str, jobs: int, most: float) -> dict[str, float]:
    from datetime import timedelta

    from celery import beat

    app = an_app(url, beat_schedule=schedule(jobs, 3600.0))
    with tempfile.TemporaryDirectory() as folder:
        scheduler = beat.PersistentScheduler(app, schedule_filename=str(Path(folder) / "schedule"))
        for entry in scheduler.schedule.values():
            entry.last_run_at = app.now() - timedelta(seconds=LONG_AGO)
        found = _ticks(scheduler, jobs, most)
        scheduler.close()
    return found


def database_tick(url: str, jobs: int, most: float) -> dict[str, float]:
    from datetime import timedelta

    import django
    from django.conf import settings

    with tempfile.TemporaryDirectory() as folder:
        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder) / "django.db")}},
            DEFAULT_AUTO_FIELD="django.db.models.AutoField",
            USE_TZ=True,
            SECRET_KEY="bench",
        )
        django.setup()
        from django.core.management import call_command
        from django.utils import timezone
        from django_celery_beat.models import IntervalSchedule, PeriodicTask
        from django_celery_beat.schedulers import DatabaseScheduler

        call_command("migrate", verbosity=0)
        hour = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.HOURS)
        before = timezone.now() - timedelta(seconds=LONG_AGO)
        PeriodicTask.objects.bulk_create(
            PeriodicTask(name=name, task=TASK, interval=hour, last_run_at=before) for name in schedule(jobs, 0)
        )
        return _ticks(DatabaseScheduler(an_app(url)), jobs, most)


def redbeat_tick(url: str, jobs: int, most: float) -> dict[str, float]:
    from datetime import timedelta

    from redbeat import RedBeatScheduler, RedBeatSchedulerEntry

    app = an_app(url, redbeat_redis_url=url, redbeat_lock_key=None, beat_schedule={})
    scheduler = RedBeatScheduler(app)
    scheduler.lock_key = None
    before = app.now() - timedelta(seconds=LONG_AGO)
    for name, definition in schedule(jobs, 3600.0).items():
        RedBeatSchedulerEntry(name, app=app, last_run_at=before, **definition).save()
    scheduler.producer  # noqa: B018 - the connection is made before the clock runs
    begin, cpu = time.perf_counter(), time.process_time()
    scheduler.tick()
    return {"sent": jobs, "seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}


def sent_one_by_one(url: str, jobs: int, most: float, batch: bool = False) -> dict[str, float]:
    """What Celery needs for the messages alone: no schedule, no claim. *batch*: kombu's own, where it has one."""
    from contextlib import nullcontext

    app = an_app(url)
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection, auto_declare=False)
        app.send_task(TASK, producer=producer)
        begin, cpu = time.perf_counter(), time.process_time()
        sent = 0
        with producer.batch(max_size=BATCH) if batch else nullcontext():
            while sent < jobs and time.perf_counter() - begin < most:
                app.send_task(TASK, (), {}, producer=producer, retry=False)
                sent += 1
        return {"sent": sent, "seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "before": 1}


# --- ours -------------------------------------------------------------------------------------------------------------


def a_beat(url: str, jobs: int, period: int, one_step: bool, templates: bool) -> list[dict[str, float]]:
    """Tick as beat does, until told to measure *rounds* slots from *first* on, and those are over."""
    from celery.signals import before_task_publish

    from celery_anarchon import Scheduler

    app = an_app(
        url,
        beat_schedule=schedule(jobs, float(period)),
        anarchon_backend=f"{url}?prefix=burst:",
        anarchon_one_step=one_step,
        # On a machine that stands still for a while the slots of that while are sent as well, and the count is right.
        anarchon_coalesce="all",
    )
    if not templates:
        # Whoever listens may change any message, so each is built anew.
        before_task_publish.connect(_listen)
    scheduler = Scheduler(app)
    scheduler.tick()
    tell("ready")
    first, rounds, found, last = math.inf, 0, [], 0
    while True:
        began, cpu = time.time(), time.process_time()
        wait = scheduler.tick()
        slot = int(began) // period * period
        if slot != last and slot >= first:
            found.append({"began": began, "ended": time.time(), "cpu": time.process_time() - cpu})
        last = slot
        if rounds and len(found) == rounds:
            scheduler.close()
            return found
        if select.select([sys.stdin], [], [], max(0.0, wait))[0]:
            first, rounds = told()


def _listen(**_: Any) -> None:
    pass


def one_step_is_there(url: str) -> bool:
    """Whether this version has it, and this Redis and kombu allow it."""
    from celery_anarchon import Scheduler

    app = an_app(url, anarchon_backend=f"{url}?prefix=there:", anarchon_one_step=True, beat_schedule={})
    try:
        Scheduler(app).close()
    except SystemExit:
        return False
    return True


def ours(server: Any, sizes: SimpleNamespace, beats: int, one_step: bool, templates: bool) -> dict[str, float]:
    """The best round of a fleet: from the slot until its last beat is through."""
    period = max(2, math.ceil(sizes.jobs / 500))
    words = {"url": server.url, "jobs": sizes.jobs, "period": period, "one_step": one_step, "templates": templates}
    with together([Apart(a_beat, **words) for _ in range(beats)]) as fleet:
        for beat in fleet:
            assert beat.hear() == "ready"
        # Room for what fell due while the others came up.
        first = math.ceil(time.time() / period + 0.5) * period
        for beat in fleet:
            beat.say([first, sizes.rounds])
        by_beat = [beat.result() for beat in fleet]
    best = {"sent": sizes.jobs, "seconds": math.inf, "cpu": 0.0}
    for number, round_of in enumerate(zip(*by_beat, strict=True)):
        begin = max(first + number * period, min(one["began"] for one in round_of))
        seconds = max(one["ended"] for one in round_of) - begin
        if seconds < best["seconds"]:
            best |= {"seconds": seconds, "cpu": sum(one["cpu"] for one in round_of)}
    _check(server, sizes, [first + number * period for number in range(sizes.rounds)])
    return best


def _check(server: Any, sizes: SimpleNamespace, slots: list[int]) -> None:
    """No measured slot without its message, and none with two."""
    from celery_anarchon.testing.fleet import events_of, redis_messages

    with server.client() as raw:
        counted = Counter((event.job, event.slot // 1000) for event in events_of(redis_messages(raw, QUEUE)))
    for slot in slots:
        numbers = [counted[job, slot] for job in schedule(sizes.jobs, 0)]
        assert set(numbers) == {1}, f"{numbers.count(0)} of {len(numbers)} lack a message, {max(numbers)} at most"


# --- the table --------------------------------------------------------------------------------------------------------


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    from support.redis_servers import private_server

    table = Table(f"{sizes.jobs:,} jobs due at once, messages per second into Redis")
    with tempfile.TemporaryDirectory() as folder, private_server(Path(folder)) as server:

        def add(row: str, found: dict[str, float]) -> None:
            rate = found["sent"] / found["seconds"]
            table.add(row, sent=found["sent"], seconds=found["seconds"], per_second=rate)
            table.add(row, cpu_ms_each=found["cpu"] * 1000 / found["sent"])
            with server.client() as raw:
                raw.flushall()

        def peer(row: str, function: Any, **words: Any) -> None:
            found = apart(function, url=server.url, jobs=sizes.jobs, most=sizes.most, **words)
            with server.client() as raw:
                there = raw.llen(QUEUE)
            assert there == found["sent"] + found.get("before", 0), f"{row}: {there} messages"
            add(row, found)

        peer("stock tick", stock_tick)
        peer("stock apply_async loop, no schedule", sent_one_by_one)
        peer("redbeat", redbeat_tick)
        peer("django-celery-beat, SQLite", database_tick)
        if _kombu_batches():
            peer("kombu Producer.batch, no schedule, no claim", sent_one_by_one, batch=True)
        else:
            table.notes.append("this kombu has no Producer.batch")
        modes = {"plain": (False, True)}
        if apart(one_step_is_there, url=server.url):
            modes |= {"one step, no templates": (True, False), "one step, templates": (True, True)}
        else:
            table.notes.append("this version has no one-step mode")
        for mode, (one_step, templates) in modes.items():
            for beats in (1, 2, 4) if templates else (1,):
                add(f"ours, {mode}, {_beats(beats)}", ours(server, sizes, beats, one_step, templates))
    table.ratio("x stock", "per second", "stock tick")
    table.ratio("x redbeat", "per second", "redbeat")
    table.ratio("x kombu batch", "per second", "kombu Producer.batch, no schedule, no claim")
    for mode in modes:
        one = table.rows[f"ours, {mode}, 1 beat"]["per second"]
        for row, figures in table.rows.items():
            if row.startswith(f"ours, {mode}, "):
                figures["x one beat"] = figures["per second"] / one
    table.notes.append(f"{os.cpu_count()} cores for the beats and the Redis together; ours: the best of the rounds")
    yield table


def _beats(count: int) -> str:
    return "1 beat" if count == 1 else f"{count} beats"


def _kombu_batches() -> bool:
    from kombu import Producer

    return hasattr(Producer, "batch")


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
