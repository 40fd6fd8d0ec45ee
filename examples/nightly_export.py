"""An export that may take longer than its interval, and survives deploys.

``overlap="skip"``: while one runs, the next slot is recorded as skipped. ``max_attempts=3``: if its worker dies, the
run goes on elsewhere. A worker that is stopped cold in the middle hands over at once. The next attempt writes what is
missing, because parts are keyed by the run's slot. ``current_run().lost`` tells a body that another has taken over.

    celery -A nightly_export worker -l info --without-gossip --without-mingle --without-heartbeat
    celery -A nightly_export beat -l info           # as many as you like

    celery -A nightly_export anarchon history export

Environment: CELERY_BROKER_URL, CELERY_ANARCHON_BACKEND (a store with leases), EXPORT_CRON, EXPORT_LEASE, EXPORT_FOLDER,
EXPORT_PARTS (how many), EXPORT_PACE (seconds that a part takes).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from celery.utils.log import get_task_logger

from celery_anarchon import Anarchon, current_run

logger = get_task_logger(__name__)

# Files in the working directory, so that it runs without a server. Take Redis or RabbitMQ and a shared store for work.
app = Celery("nightly_export", broker=os.environ.get("CELERY_BROKER_URL", "sqla+sqlite:///export-broker.db"))
app.conf.timezone = "Europe/Paris"
app.conf.task_ignore_result = True
# So long after a worker's death another one goes on. Workers that are stopped say so, and nobody waits.
app.conf.anarchon_lease = os.environ.get("EXPORT_LEASE", "30s")

anarchon = Anarchon(app, backend=os.environ.get("CELERY_ANARCHON_BACKEND", "sqlite:///export-store.db"))

FOLDER = Path(os.environ.get("EXPORT_FOLDER", "exports"))
PARTS = int(os.environ.get("EXPORT_PARTS", "20"))
PACE = float(os.environ.get("EXPORT_PACE", "0.5"))


@app.task(name="nightly_export.export")
def export() -> str:
    run = current_run()
    if run is None:
        raise RuntimeError("only for slots of the schedule: there is no time to key the parts by")
    slot = f"{run.slot:%Y%m%dT%H%M%SZ}"
    target = FOLDER / slot
    target.mkdir(parents=True, exist_ok=True)
    logger.info("begin %s, attempt %d", slot, run.attempt)
    for number in range(PARTS):
        if run.lost:
            # Frozen or cut off for longer than the lease: another attempt may be at work, so leave it to that.
            logger.info("lost %s, attempt %d", slot, run.attempt)
            return "lost"
        part = target / f"{number:03}.csv"
        if not part.exists():
            write(part, number)
            logger.info("part %s/%d, attempt %d", slot, number, run.attempt)
    logger.info("end %s, attempt %d", slot, run.attempt)
    return slot


def write(part: Path, number: int) -> None:
    """What would ask the database. A part is there as a whole or not at all."""
    time.sleep(PACE)
    half = part.with_suffix(f".{os.getpid()}")
    half.write_text(f"part,{number}\n")
    half.replace(part)


anarchon.cron(
    "export",
    # 02:00 in Paris. (A sixth field would be seconds.)
    os.environ.get("EXPORT_CRON", "0 2 * * *"),
    export,
    seconds=True,
    overlap="skip",
    max_attempts=3,
    # After a whole night without beats: the export that was missed is still wanted in the morning.
    catch_up="12h",
)
