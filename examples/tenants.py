"""One job for each tenant, made in a loop.

A job is known by its name, so each tenant has slots, history and options of its own, and one that fails spoils no
other's. ``offset="auto"`` gives each name its own place on the grid: a hundred hourly jobs do not start at once.

    celery -A tenants worker -l info --without-gossip --without-mingle --without-heartbeat
    celery -A tenants beat -l info          # as many as you like

    celery -A tenants anarchon next
    celery -A tenants anarchon history sync-acme

Environment: CELERY_BROKER_URL, CELERY_ANARCHON_BACKEND (any), TENANTS ("acme=1h,globex=15m").
"""

from __future__ import annotations

import os

from celery import Celery
from celery.utils.log import get_task_logger

from celery_anarchon import Anarchon, current_run

logger = get_task_logger(__name__)

# Files in the working directory, so that it runs without a server. Take Redis or RabbitMQ and a shared store for work.
app = Celery("tenants", broker=os.environ.get("CELERY_BROKER_URL", "sqla+sqlite:///tenants-broker.db"))
app.conf.task_ignore_result = True

anarchon = Anarchon(app, backend=os.environ.get("CELERY_ANARCHON_BACKEND", "sqlite:///tenants-store.db"))

TENANTS = dict(pair.split("=") for pair in os.environ.get("TENANTS", "acme=10s,globex=15s,initech=1m").split(","))
"""Tenant -> how often. All beats must have the same list; one that changes goes out with a restart of the beats."""


@app.task(name="tenants.sync")
def sync(tenant: str) -> None:
    run = current_run()
    logger.info("synced %s for %s", tenant, run.slot.isoformat() if run else "somebody")


for tenant, interval in TENANTS.items():
    # Any text will do as a name, on every store; no two may be equal.
    anarchon.every(f"sync-{tenant}", interval, sync, kwargs={"tenant": tenant}, offset="auto")
