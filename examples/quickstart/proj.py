"""A Celery app like any other. Only its three last settings are about celery-anarchon, and none of them is needed."""

from __future__ import annotations

from celery import Celery
from celery.schedules import crontab

# A broker without a server: a SQLite file in the working directory. Fine to look at; take Redis or RabbitMQ for work.
app = Celery("proj", broker="sqla+sqlite:///quickstart-broker.db")
app.conf.timezone = "Europe/Paris"
app.conf.task_ignore_result = True

app.conf.beat_schedule = {
    # Plain entries work as they are.
    "refresh": {"task": "proj.refresh", "schedule": 1},
    "greet": {"task": "proj.greet", "schedule": 3, "args": ["world"]},
    # Job options go where stock beat accepts and ignores them.
    "collect": {
        "task": "proj.collect",
        "schedule": 2,
        "options": {"expires": 60, "anarchon": {"jitter": 0.5, "offset": 1}},
    },
    "report": {
        "task": "proj.report",
        "schedule": crontab(hour=3, minute=0),
        "options": {"anarchon": {"catch_up": "6h"}},
    },
}

# Where the beats meet; without this line it is ./anarchon.db, and a warning.
app.conf.anarchon_backend = "sqlite:///quickstart-store.db"
# What a killed beat had claimed is taken over this many seconds later. The default is 30.
app.conf.anarchon_lease = 5
# `celery beat` alone, and `celery worker -B`, take this scheduler; else say -S celery_anarchon.Scheduler.
app.conf.beat_scheduler = "celery_anarchon.Scheduler"


@app.task(name="proj.refresh")
def refresh() -> str:
    return "fresh"


@app.task(name="proj.greet")
def greet(name: str) -> str:
    return f"hello {name}"


@app.task(name="proj.collect", bind=True)
def collect(self) -> str:
    run = self.request.anarchon
    return f"{run['job']} of {run['slot']}, sent by {run['beat']}"


@app.task(name="proj.report")
def report() -> str:
    return "all is well"
