"""Payments: rather not at all than twice.

``max_attempts=1`` starts one body for each slot, whatever happens to its worker, its message or its beat. Each write is
keyed by the run's slot, so that a body which was cut off can be finished by hand without charging anybody again.

    celery -A billing worker -l info --without-gossip --without-mingle --without-heartbeat
    celery -A billing beat -l info          # as many as you like

    celery -A billing anarchon history charge
    python -c "import billing; billing.bill('2026-03-01T06:00:00+00:00')"       # what a dead worker left open

Environment: CELERY_BROKER_URL, CELERY_ANARCHON_BACKEND (a store with leases), BILLING_CRON, BILLING_LEASE,
BILLING_LEDGER (a SQLite file), BILLING_PACE (seconds that a payment takes).
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing

from celery import Celery
from celery.utils.log import get_task_logger

from celery_anarchon import Anarchon, current_run

logger = get_task_logger(__name__)

# Files in the working directory, so that it runs without a server. Take Redis or RabbitMQ and a shared store for work.
app = Celery("billing", broker=os.environ.get("CELERY_BROKER_URL", "sqla+sqlite:///billing-broker.db"))
app.conf.timezone = "Europe/Paris"
app.conf.task_ignore_result = True
# So long after a worker's death its run ends as lost.
app.conf.anarchon_lease = os.environ.get("BILLING_LEASE", "30s")

anarchon = Anarchon(app, backend=os.environ.get("CELERY_ANARCHON_BACKEND", "sqlite:///billing-store.db"))

LEDGER = os.environ.get("BILLING_LEDGER", "billing-ledger.db")
PACE = float(os.environ.get("BILLING_PACE", "0.5"))
SUBSCRIPTIONS = {"ann": 990, "bob": 1990, "cleo": 990}
"""Customer -> cents."""


# Acknowledged late, so that a message whose body has not started outlives its worker. It may be delivered again after
# that, too: the gate refuses it.
@app.task(name="billing.charge", acks_late=True)
def charge() -> None:
    run = current_run()
    if run is None:
        raise RuntimeError("only for slots of the schedule: there is no time to key the charges by; see bill()")
    logger.info("body of %s, attempt %d", run.slot.isoformat(), run.attempt)
    bill(run.slot.isoformat())


def bill(slot: str) -> None:
    """Charge everybody for *slot*, once, however often this is called."""
    with closing(sqlite3.connect(LEDGER, timeout=30)) as ledger:
        ledger.execute(
            "CREATE TABLE IF NOT EXISTS charges (slot TEXT, customer TEXT, cents INT, UNIQUE (slot, customer))"
        )
        for customer, cents in SUBSCRIPTIONS.items():
            with ledger:
                made = ledger.execute(
                    "INSERT OR IGNORE INTO charges VALUES (?, ?, ?)", (slot, customer, cents)
                ).rowcount
                if made:
                    pay(customer, cents, idempotency_key=f"{slot}/{customer}")


def pay(customer: str, cents: int, idempotency_key: str) -> None:
    """What would call the payment provider. Good ones take such a key, and charge once for each."""
    time.sleep(PACE)
    logger.info("charged %s %d cents (%s)", customer, cents, idempotency_key)


# The first of the month, 06:00 in Paris. (A sixth field would be seconds.)
anarchon.cron("charge", os.environ.get("BILLING_CRON", "0 6 1 * *"), charge, seconds=True, max_attempts=1)
