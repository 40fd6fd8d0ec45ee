"""The Celery app of ``celery anarchon demo``. Its processes are told by their environment where things lie."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from urllib.parse import quote

from celery import Celery, Task

from celery_anarchon.verdict import event_line, event_of

FOLDER = "ANARCHON_DEMO_FOLDER"
NAME = "ANARCHON_DEMO_NAME"
PARENT = "ANARCHON_DEMO_PARENT"
SABOTAGE = "ANARCHON_DEMO_SABOTAGE"
"""``own-store`` gives beat-1 a store of its own, ``no-worker`` makes tasks do nothing: the verdict must show it."""

JOBS: dict[str, int] = {"refresh-cache": 1, "send-outbox": 1, "collect-metrics": 2, "renew-tokens": 3, "export": 5}
"""Job -> seconds."""

LEASE, HEARTBEAT = 2.0, 0.6
"""Short, so that what the killed beat held is taken over while one looks on."""

SENT, QUEUE, CONTROL, EXECUTED = "sent", "queue", "control", "executed.jsonl"
"""Beats write into SENT, the worker reads from QUEUE; the demo itself stands in between."""

folder = Path(os.environ.get(FOLDER, "."))
sabotage = os.environ.get(SABOTAGE)
store = "own.db" if sabotage == "own-store" and os.environ.get(NAME) == "beat-1" else "anarchon.db"

app = Celery("anarchon-demo", set_as_current=False)
app.conf.update(
    broker_url="filesystem://",
    broker_transport_options={
        "data_folder_in": str(folder / QUEUE),
        "data_folder_out": str(folder / SENT),
        "control_folder": str(folder / CONTROL),
        "polling_interval": 0.05,
    },
    broker_connection_retry_on_startup=True,
    result_expires=None,
    task_ignore_result=True,
    timezone="UTC",
    worker_enable_remote_control=False,
    anarchon_backend=f"sqlite:///{quote(str(folder / store))}",
    anarchon_lease=LEASE,
    anarchon_heartbeat=HEARTBEAT,
    beat_schedule={name: {"task": "demo.note", "schedule": seconds} for name, seconds in JOBS.items()},
)


@app.task(name="demo.note", bind=True)  # type: ignore[untyped-decorator]
def note(self: Task) -> None:
    """Write down which run this is."""
    event = event_of({"id": self.request.id, "anarchon": self.request.anarchon})
    if event is None or sabotage == "no-worker":
        return
    target = os.open(folder / EXECUTED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(target, event_line(event).encode())
    finally:
        os.close(target)


def _end_with(parent: int) -> None:
    """Nobody is left to stop this process once the demo was killed itself."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)
    os._exit(1)


if os.environ.get(PARENT):
    threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()
