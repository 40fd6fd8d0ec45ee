"""What the next slot costs: ours, croniter and Celery's own arithmetic side by side in one run; and many jobs at once.

    python tests/benchmarks/slots.py [--jobs 10000] [--rounds 300] [-o slots.json]

Prints medians and ratios, and writes them as JSON; asserts nothing, because a machine is not a test.

Each figure is the median of calls at instants spread over two years, in a zone that changes its clock. Ours and
croniter's are asked for the slot after an instant; Celery's for the time that remains, which is how beat learns it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import celery
import croniter as croniter_package
from celery import Celery
from celery.schedules import crontab
from croniter import croniter

from celery_anarchon.crontable import _shared, cron_from_text
from celery_anarchon.entries import jobs_of

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
        "ours": median([lambda at=at: ours.next(at) for at in instants]),  # type: ignore[misc]
        "croniter": median([lambda n=n: search(n) for n in range(rounds)]),  # type: ignore[misc]
        "celery": median([lambda n=n: remain(n) for n in range(rounds)]),  # type: ignore[misc]
    }
    figures["croniter/ours"] = figures["croniter"] / figures["ours"]
    figures["celery/ours"] = figures["celery"] / figures["ours"]
    return {name: round(value, 2) for name, value in figures.items()}


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
        "jobs": jobs,
        "read s": round(read, 3),
        "next of each s": round(asked, 3),
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


def command(jobs: int) -> dict[str, float]:
    """``celery anarchon next`` as a user calls it, the start of Python and of Celery's command line included, and
    without one job beside it."""
    figures = {}
    for number in (jobs, 1):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "many.py").write_text(APP.format(jobs=number))
            words = [sys.executable, "-m", "celery", "-A", "many", "anarchon", "next", "--count", "10", "--json"]
            taken, used = [], []
            for _ in range(3):
                begin, before = time.perf_counter(), os.times()
                subprocess.run(
                    words, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, check=True, stdout=subprocess.DEVNULL
                )
                taken.append(time.perf_counter() - begin)
                after = os.times()
                used.append(after.children_user + after.children_system - before.children_user - before.children_system)
            figures[f"{number} jobs s"] = round(statistics.median(taken), 2)
            # What others do on the machine meanwhile does not count here.
            figures[f"{number} jobs cpu s"] = round(statistics.median(used), 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("-o", "--output", type=Path, help="write the figures there, as JSON")
    given = parser.parse_args()

    print(f"{'next slot, us':<22} {'ours':>8} {'croniter':>9} {'celery':>8} {'croniter/ours':>14} {'celery/ours':>12}")
    crontabs = {}
    for text in TEXTS:
        figures = crontabs[text] = one(text, given.rounds)
        print(
            f"{text:<22} {figures['ours']:>8.1f} {figures['croniter']:>9.1f} {figures['celery']:>8.1f} "
            f"{figures['croniter/ours']:>14.1f} {figures['celery/ours']:>12.1f}"
        )
    slowest = max(figures["ours"] for figures in crontabs.values())
    ratio = {
        name: round(statistics.median(figures[name] for figures in crontabs.values()), 2)
        for name in ("ours", "croniter/ours", "celery/ours")
    }
    print(f"median of all: ours {ratio['ours']} us; slowest of ours {slowest} us")
    schedule = many(given.jobs)
    print(
        f"a schedule of {given.jobs} crontabs: read in {schedule['read s']} s, next of each in "
        f"{schedule['next of each s']} s, {schedule['enumerators']} enumerators"
    )
    called = command(given.jobs)
    print("celery anarchon next: " + ", ".join(f"{name[:-2]} in {value} s" for name, value in called.items()))
    report = {
        "python": platform.python_version(),
        "celery": celery.__version__,
        "croniter": getattr(croniter_package, "__version__", ""),
        "next slot us": crontabs,
        "median": ratio,
        "slowest us": slowest,
        "schedule": schedule,
        "celery anarchon next": called,
    }
    text = json.dumps(report, indent=2)
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
