"""Many jobs due at once: how many messages a second reach a Redis broker, ours beside its peers, in one run.

    python tests/benchmarks/burst.py [--jobs 5000] [--rounds 2] [--slots 8] [--most 30] [--fleet 4] [-o burst.json]

Each contender runs in a process of its own on an empty private Redis, which is our store as well. A contender that is
not through after MOST seconds is stopped, and its rate is that of what it sent; one that is gets ROUNDS, and the best
counts. Ours is measured at SLOTS slots, for beats learn the templates of messages when they make the first ones, and
each learns those of its own part of the burst. Messages are counted in the broker, and ours by (job, slot): each must
be there exactly once.

Rates depend on what else the machine does. "cpu ms each", the CPU time of the contender and of the server for one
message, hardly does: the ratios of both are shown.
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

SIZES = {"jobs": 5_000, "rounds": 2, "slots": 8, "most": 30.0, "fleet": 4}
TINY = {"jobs": 40, "rounds": 1, "slots": 1, "most": 5.0, "fleet": 2}

QUEUE = "burst"
PREFIX = "burst:"
TASK = "bench.note"
BATCH = 500
LONG_AGO = 7_200
STOCK, REDBEAT, KOMBU = "stock tick", "redbeat", "kombu batch, no schedule, no claim"


def an_app(url: str, **settings: Any) -> Any:
    from celery import Celery

    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(timezone="UTC", result_expires=None, task_default_queue=QUEUE, **settings)
    return app


def schedule(jobs: int, interval: float) -> dict[str, Any]:
    return {f"job-{number:06}": {"task": TASK, "schedule": interval} for number in range(jobs)}


class Meter:
    """What passes from one look to the next: time, and CPU seconds of this process and of the server."""

    def __init__(self, url: str) -> None:
        from redis import Redis

        self._server = Redis.from_url(url)
        self._server.ping()

    def look(self) -> dict[str, float]:
        server = self._server.info("cpu")
        return {
            "at": time.time(),
            "own": time.process_time(),
            "server": server["used_cpu_user"] + server["used_cpu_sys"],
        }

    def since(self, begin: dict[str, float], sent: int) -> dict[str, float]:
        end = self.look()
        return {
            "sent": sent,
            "seconds": end["at"] - begin["at"],
            "cpu": end["own"] - begin["own"] + end["server"] - begin["server"],
        }


# --- the peers, each in a process of its own --------------------------------------------------------------------------


def _ticks(scheduler: Any, url: str, jobs: int, most: float) -> dict[str, float]:
    """Stock's tick sends one message, and answers 0 when it did."""
    meter, sent = Meter(url), 0
    begin = meter.look()
    while sent < jobs and time.time() - begin["at"] < most:
        sent += scheduler.tick() == 0
    return meter.since(begin, sent)


def stock_tick(url: str, jobs: int, most: float) -> dict[str, float]:
    from datetime import timedelta

    from celery import beat

    app = an_app(url, beat_schedule=schedule(jobs, 3600.0))
    with tempfile.TemporaryDirectory() as folder:
        scheduler = beat.PersistentScheduler(app, schedule_filename=str(Path(folder) / "schedule"))
        for entry in scheduler.schedule.values():
            entry.last_run_at = app.now() - timedelta(seconds=LONG_AGO)
        found = _ticks(scheduler, url, jobs, most)
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
        return _ticks(DatabaseScheduler(an_app(url)), url, jobs, most)


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
    meter = Meter(url)
    begin = meter.look()
    scheduler.tick()
    return meter.since(begin, jobs)


def sent_one_by_one(url: str, jobs: int, most: float, batch: bool = False) -> dict[str, float]:
    """What Celery needs for the messages alone: no schedule, no claim. *batch*: kombu's own, where it has one."""
    from contextlib import nullcontext

    app = an_app(url)
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection, auto_declare=False)
        app.send_task(TASK, producer=producer)
        meter, sent = Meter(url), 0
        begin = meter.look()
        with producer.batch(max_size=BATCH) if batch else nullcontext():
            while sent < jobs and time.time() - begin["at"] < most:
                app.send_task(TASK, (), {}, producer=producer, retry=False)
                sent += 1
        return {**meter.since(begin, sent), "before": 1}


# --- ours -------------------------------------------------------------------------------------------------------------


def a_beat(url: str, jobs: int, period: int, one_step: bool, templates: bool) -> list[list[dict[str, float]]]:
    """Tick as beat does, until told to measure *rounds* slots from *first* on, and those are over."""
    from celery.signals import before_task_publish

    from celery_anarchon import Scheduler

    app = an_app(
        url,
        beat_schedule=schedule(jobs, float(period)),
        anarchon_backend=f"{url}?prefix={PREFIX}",
        anarchon_one_step=one_step,
        # On a machine that stands still for a while the slots of that while are sent as well, and the count is right.
        anarchon_coalesce="all",
    )
    if not templates:
        # Whoever listens may change any message, so each is built anew.
        before_task_publish.connect(_listen)
    scheduler = Scheduler(app)
    scheduler.tick()
    meter = Meter(url)
    tell("ready")
    first, rounds, found, last = math.inf, 0, [], 0
    while True:
        begin = meter.look()
        wait = scheduler.tick()
        slot = int(begin["at"]) // period * period
        if slot != last and slot >= first:
            found.append([begin, meter.look()])
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
    """The best round of a fleet: from the slot until its last message is out; and until its last beat is through, which
    by then knows of each slot who sent it."""
    period = max(2, math.ceil(sizes.jobs / 500))
    words = {"url": server.url, "jobs": sizes.jobs, "period": period, "one_step": one_step, "templates": templates}
    with together([Apart(a_beat, **words) for _ in range(beats)]) as fleet:
        for beat in fleet:
            assert beat.hear() == "ready"
        # Room for what fell due while the others came up.
        first = math.ceil(time.time() / period + 0.5) * period
        for beat in fleet:
            beat.say([first, sizes.slots])
        by_beat = [beat.result() for beat in fleet]
    slots = [first + number * period for number in range(sizes.slots)]
    _check(server, sizes, slots)
    rounds = []
    for slot, round_of in zip(slots, zip(*by_beat, strict=True), strict=True):
        begins, ends = zip(*round_of, strict=True)
        begin = max(slot, min(look["at"] for look in begins))
        cpu = max(look["server"] for look in ends) - min(look["server"] for look in begins)
        cpu += sum(end["own"] - start["own"] for start, end in round_of)
        rounds.append(
            {
                "sent": sizes.jobs,
                "seconds": _last_sent(server, sizes, slot) - begin,
                "through": max(look["at"] for look in ends) - begin,
                "cpu": cpu,
            }
        )
    return best(rounds)


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The shortest time and the least CPU, each of its own round: what else the machine does only adds."""
    measured = [name for name in ("seconds", "through", "cpu") if name in rounds[0]]
    return {**rounds[0], **{name: min(one[name] for one in rounds) for name in measured}}


def _last_sent(server: Any, sizes: SimpleNamespace, slot: int) -> float:
    """When the last message of that slot was in its queue, by its record and the server's clock; in two steps: when
    its batch was confirmed."""
    from celery_anarchon.backends.redis import RedisBackend

    store = RedisBackend(server.url, prefix=PREFIX)
    store.open("bench", create=False)
    try:
        runs = [run for job in schedule(sizes.jobs, 0) for run in store.history(job, 2 * sizes.slots + 4)]
    finally:
        store.close()
    sent = [run.sent_at.timestamp() for run in runs if run.sent_at is not None and run.slot.timestamp() == slot]
    assert len(sent) == sizes.jobs
    return max(sent)


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
        peers(table, server, sizes)
        modes = {"plain": (False, True)}
        if apart(one_step_is_there, url=server.url):
            modes |= {"one step, no templates": (True, False), "one step, templates": (True, True)}
        else:
            table.notes.append("this version has no one-step mode")
        for mode, (one_step, templates) in modes.items():
            for beats in (1, 2, 4):
                if beats > (sizes.fleet if templates else 1):
                    break
                with server.client() as raw:
                    raw.flushall()
                add(table, f"ours, {mode}, {_beats(beats)}", ours(server, sizes, beats, one_step, templates))
    table.notes.append(f"{os.cpu_count()} cores for the beats and the Redis together; load {os.getloadavg()[0]:.1f}")
    yield table
    yield ratios(table, list(modes))


def add(table: Table, row: str, found: dict[str, float]) -> None:
    sent, seconds = found["sent"], found["seconds"]
    through = {"through_s": found["through"]} if "through" in found else {}
    table.add(
        row, sent=sent, seconds=seconds, per_second=sent / seconds, cpu_ms_each=found["cpu"] * 1000 / sent, **through
    )


def peers(table: Table, server: Any, sizes: SimpleNamespace) -> None:
    def peer(row: str, function: Any, **words: Any) -> None:
        rounds: list[dict[str, float]] = []
        for _ in range(sizes.rounds):
            with server.client() as raw:
                raw.flushall()
                found = apart(function, url=server.url, jobs=sizes.jobs, most=sizes.most, **words)
                there = raw.llen(QUEUE)
            assert there == found["sent"] + found.get("before", 0), f"{row}: {there} messages"
            rounds.append(found)
            if found["seconds"] > sizes.most / 3:
                # What takes so long is hardly disturbed by what comes and goes.
                break
        add(table, row, best(rounds))

    peer(STOCK, stock_tick)
    peer("apply_async loop, no schedule", sent_one_by_one)
    peer(REDBEAT, redbeat_tick)
    peer("django-celery-beat, SQLite", database_tick)
    if _kombu_batches():
        peer(KOMBU, sent_one_by_one, batch=True)
    else:
        table.notes.append("this kombu has no Producer.batch")


def ratios(table: Table, modes: list[str]) -> Table:
    """How many times as many messages a second, and how many times less CPU for each."""
    found = Table("The same as ratios: messages a second, and (cpu) CPU time for a message")
    for row in (STOCK, REDBEAT, KOMBU):
        name = row.partition(",")[0]
        table.ratio(found, f"x {name}", "per second", row)
        table.ratio(found, f"x {name} (cpu)", "cpu ms each", row, inverse=True)
    for mode in modes:
        one = table.rows[f"ours, {mode}, 1 beat"]["per second"]
        for row, figures in table.rows.items():
            if row.startswith(f"ours, {mode}, "):
                found.add(row, x_one_beat=figures["per second"] / one)
    return found


def _beats(count: int) -> str:
    return "1 beat" if count == 1 else f"{count} beats"


def _kombu_batches() -> bool:
    from kombu import Producer

    return hasattr(Producer, "batch")


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
