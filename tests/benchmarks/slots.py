"""What the next slot costs: ours, croniter and Celery's own arithmetic side by side in one run; and many jobs at once.

    python tests/benchmarks/slots.py [--jobs 10000] [--rounds 300] [-o slots.json]

Each figure is the median of calls at instants spread over two years, in a zone that changes its clock. Ours and
croniter's are asked for the slot after an instant; Celery's for the time that remains, which is how beat learns it.
Ours is the search itself: where many jobs have one rule, most are answered out of what it found for another.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab
from croniter import croniter
from figures import Table, command, environment

from celery_anarchon.crontable import _shared, cron_from_text
from celery_anarchon.entries import jobs_of

SIZES = {"jobs": 10_000, "rounds": 300}
TINY = {"jobs": 20, "rounds": 3}

ZONE = ZoneInfo("Europe/Paris")
BEGIN = 1_767_225_600_000
STEP = 7 * 3_600_000 + 1_234_567

TEXTS = (
    "* * * * *",
    "*/15 * * * *",
    "30 2 * * *",
    "0 9 * * 1-5",
    "0 0 31 * *",
    "0 0 29 2 *",
    "0 0 1 1 *",
    "*/20 8-18 * * 1-5",
)


RATIOS = ("croniter/ours", "celery/ours")


def median(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds: of the second of two rounds, so that what is worked out once for all is not counted."""
    for call in calls:
        call()
    taken = []
    for call in calls:
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
    return statistics.median(taken) / 1000


def one(text: str, rounds: int) -> dict[str, float]:
    instants = [BEGIN + number * STEP for number in range(rounds)]
    moments = [datetime.fromtimestamp(instant / 1000, timezone.utc).astimezone(ZONE) for instant in instants]
    ours = cron_from_text(text, ZONE)

    searches = [croniter(text, moment, ret_type=datetime, implement_cron_bug=True) for moment in moments]

    def search(number: int) -> Any:
        return searches[number].get_next(start_time=moments[number])

    app = Celery("bench", set_as_current=False, timezone="Europe/Paris")
    minute, hour, day, month, weekday = text.split()
    frozen = [moments[0]]
    stock = crontab(minute, hour, weekday, day, month, app=app, nowfun=lambda: frozen[0])

    def remain(number: int) -> Any:
        frozen[0] = moments[number]
        return stock.remaining_estimate(moments[number])

    figures = {
        "ours": median([lambda at=at: ours._next(at) for at in instants]),  # type: ignore[misc]
        "croniter": median([lambda n=n: search(n) for n in range(rounds)]),  # type: ignore[misc]
        "celery": median([lambda n=n: remain(n) for n in range(rounds)]),  # type: ignore[misc]
    }
    figures["croniter/ours"] = figures["croniter"] / figures["ours"]
    figures["celery/ours"] = figures["celery"] / figures["ours"]
    return figures


def many(jobs: int) -> dict[str, float]:
    """A schedule of *jobs* crontabs in a hundred spellings: reading it, and the first slot of each."""
    app = Celery("bench", set_as_current=False, timezone="Europe/Paris")
    app.conf.result_expires = None
    app.conf.beat_schedule = {f"job-{n}": {"task": "t", "schedule": crontab(n % 60, n % 5)} for n in range(jobs)}
    _shared.cache_clear()
    begin = time.perf_counter()
    found, _ = jobs_of(app)
    read = time.perf_counter() - begin
    begin = time.perf_counter()
    for job in found:
        job.timetable.next(BEGIN)
    asked = time.perf_counter() - begin
    return {
        "read s": read,
        "next of each s": asked,
        "enumerators": len({id(job.timetable) for job in found}),
    }


APP = """
from celery import Celery
from celery.schedules import crontab

app = Celery("many", broker="memory://", timezone="Europe/Paris")
app.conf.beat_schedule = {{
    f"job-{{n:06}}": {{"task": "t", "schedule": crontab(n % 60, n % 5)}} for n in range({jobs})
}}
"""


def next_command(jobs: int) -> dict[str, float]:
    """``celery anarchon next`` as a user calls it, the start of Python and of Celery's command line included."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "many.py").write_text(APP.format(jobs=jobs))
        words = [sys.executable, "-m", "celery", "-A", "many", "anarchon", "next", "--count", "10", "--json"]
        taken, used = [], []
        for _ in range(3):
            begin, before = time.perf_counter(), os.times()
            subprocess.run(words, cwd=folder, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
            taken.append(time.perf_counter() - begin)
            after = os.times()
            # What others do on the machine meanwhile does not count here.
            used.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"wall s": statistics.median(taken), "cpu s": statistics.median(used)}


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    each = Table("The slot after an instant, us")
    for text in TEXTS:
        each.add(text, **one(text, sizes.rounds))
    each.add(
        "median of all",
        **{name: statistics.median(row[name] for row in each.rows.values()) for name in ("ours", *RATIOS)},
    )
    yield each
    schedule = Table(
        "A schedule of crontabs in a hundred spellings: reading it, the first slot of each, and the command"
    )
    schedule.add(f"{sizes.jobs:,} jobs", **many(sizes.jobs))
    for jobs in (sizes.jobs, 1):
        schedule.add(f"celery anarchon next, {jobs:,} job{'s' if jobs > 1 else ''}", **next_command(jobs))
    yield schedule


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
