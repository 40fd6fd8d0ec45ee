"""Notifications from an outbox: each run sends whatever is outstanding, so a slot that is lost is made up by the next.

That asks nothing of the store but "was I first?", and any store can say that: those that only take claims, too. The
default is such a one, Redis with ``strategy=script``, on the Redis that is the broker already.

    python -m pip install "celery-anarchon[redis]"
    python broker_notifications.py "Your parcel has left" "Your parcel is here"
    celery -A broker_notifications worker -l info
    celery -A broker_notifications beat -l info             # as many as you like

Environment: CELERY_BROKER_URL, CELERY_ANARCHON_BACKEND (any), NOTIFY_EVERY, NOTIFY_OUTBOX (a SQLite file).
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing

from celery import Celery
from celery.utils.log import get_task_logger

from celery_anarchon import Anarchon, current_run

logger = get_task_logger(__name__)

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
STORE = os.environ.get("CELERY_ANARCHON_BACKEND", "redis://localhost:6379/0?strategy=script&prefix=notifications:")

app = Celery("broker_notifications", broker=BROKER)
app.conf.task_ignore_result = True

anarchon = Anarchon(app, backend=STORE)


def outbox() -> sqlite3.Connection:
    """The application's own database: what is to be told is written there together with the reason to tell it."""
    connection = sqlite3.connect(os.environ.get("NOTIFY_OUTBOX", "outbox.db"), timeout=30, isolation_level=None)
    connection.execute("CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY, text TEXT, sent TEXT)")
    return connection


@app.task(name="broker_notifications.notify")
def notify() -> int:
    run = current_run()
    slot = run.slot.isoformat() if run else "by hand"
    with closing(outbox()) as connection:
        # Runs are not followed on a store that only takes claims, so two may meet here: one waits for the other. A body
        # that dies sends its last one again.
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute("SELECT id, text FROM outbox WHERE sent IS NULL ORDER BY id").fetchall()
        for number, text in rows:
            logger.info("notified: %s", text)
            connection.execute("UPDATE outbox SET sent = ? WHERE id = ?", (slot, number))
        connection.execute("COMMIT")
    logger.info("outbox of %s: %d", slot, len(rows))
    return len(rows)


def add(*texts: str) -> None:
    with closing(outbox()) as connection:
        connection.executemany("INSERT INTO outbox (text) VALUES (?)", [(text,) for text in texts])


anarchon.every("notify", os.environ.get("NOTIFY_EVERY", "1m"), notify, timeout="30s")

if __name__ == "__main__":
    add(*sys.argv[1:])
