"""A cache refresh: cheap and frequent, and a missed one does not matter.

``jitter`` keeps jobs of the same second from hitting the database together. A short ``max_late`` drops what could not
be sent in time, and ``expires`` what no worker took in time: after an outage the cache is refreshed once, not a hundred
times. None of these needs leases, so any store will do. (On one with leases beat warns that ``max_late`` is shorter
than a takeover takes. Here that is meant.)

    celery -A cache_refresh worker -l info --without-gossip --without-mingle --without-heartbeat
    celery -A cache_refresh beat -l info            # as many as you like

Environment: CELERY_BROKER_URL, CELERY_ANARCHON_BACKEND (any), REFRESH_EVERY, REFRESH_FILE.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from celery import Celery
from celery.utils.log import get_task_logger

from celery_anarchon import Anarchon, current_run

logger = get_task_logger(__name__)

# Files in the working directory, so that it runs without a server. Take Redis or RabbitMQ and a shared store for work.
app = Celery("cache_refresh", broker=os.environ.get("CELERY_BROKER_URL", "sqla+sqlite:///refresh-broker.db"))
app.conf.task_ignore_result = True

anarchon = Anarchon(app, backend=os.environ.get("CELERY_ANARCHON_BACKEND", "sqlite:///refresh-store.db"))

CACHE = Path(os.environ.get("REFRESH_FILE", "cache.json"))


@app.task(name="cache_refresh.refresh")
def refresh() -> None:
    half = CACHE.with_suffix(f".{os.getpid()}")
    half.write_text(json.dumps({"fresh": time.time()}))
    half.replace(CACHE)
    run = current_run()
    logger.info("refreshed for %s", run.slot.isoformat() if run else "somebody")


anarchon.every(
    "refresh",
    os.environ.get("REFRESH_EVERY", "10s"),
    refresh,
    options={"expires": 20},
    jitter="500ms",
    max_late="20s",
)
