"""The Celery app of the beats that benchmarks start for real.

BENCH is JSON: Celery settings, and ``jobs`` and ``every``: how many jobs there are, and their interval in seconds; 0
means a crontab of every minute.
"""

from __future__ import annotations

import json
import os

from celery import Celery
from celery.schedules import crontab

config = json.loads(os.environ["BENCH"])
jobs: int = config.pop("jobs")
every: float = config.pop("every")

app = Celery("bench", set_as_current=False)
app.conf.update(config, timezone="UTC", result_expires=None)
app.conf.beat_schedule = {
    f"job-{number:04}": {"task": "bench.note", "schedule": every or crontab()} for number in range(jobs)
}
