"""The Celery app of fleets whose hosts have different zone data. FLEET_CONFIG: see :mod:`beat_app`; ``jobs`` are cron
texts, meant in ``zone``."""

from __future__ import annotations

import json
import os

from celery import Celery

from celery_anarchon import cron

config = json.loads(os.environ["FLEET_CONFIG"])
zone, jobs = config.pop("zone"), config.pop("jobs")

app = Celery("fleet", set_as_current=False)
app.conf.update(config)
app.conf.beat_schedule = {
    name: {"task": "fleet.note", "schedule": cron(text, timezone=zone)} for name, text in jobs.items()
}
