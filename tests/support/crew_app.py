"""The app that worker tests start for real: one ``Anarchon(app)`` line, tasks that write down when their bodies run.

CREW_CONFIG is JSON: Celery's settings, ``anarchon`` (arguments of ``Anarchon``), ``jobs``: name -> entry of
``beat_schedule`` with ``seconds`` for its schedule. CREW_JOURNAL is the file of lines that bodies write. CREW_GATE=no:
without the line. CREW_ASKS: the name under which this process writes down each call of its store as well.
CREW_FREEZES: a file; while it is there, a worker that was allowed to start a run removes it, and stops before it knows.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject

from celery_anarchon import Anarchon, current_run, every
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import GRANTED

config = json.loads(os.environ["CREW_CONFIG"])
journal = os.environ["CREW_JOURNAL"]
jobs: dict[str, Any] = config.pop("jobs", {})
arguments: dict[str, Any] = config.pop("anarchon", {})
gated = os.environ.get("CREW_GATE", "yes") == "yes"

app = Celery("crew", set_as_current=False)
app.conf.update(config)
app.conf.beat_schedule = {
    name: {**{key: value for key, value in entry.items() if key != "seconds"}, "schedule": every(entry["seconds"])}
    for name, entry in jobs.items()
}
if gated:
    anarchon = Anarchon(app, **arguments)


def append(line: dict[str, Any]) -> None:
    # One write of one line: appended whole, whoever else writes.
    handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def note_calls(name: str) -> None:
    """Of whatever client of the store this process makes."""
    kind = type(backend_from(config["anarchon_backend"]))

    def noting(call: str) -> Any:
        honest = getattr(kind, call)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread().name
            append({"event": "asks", "by": name, "call": call, "thread": thread, "at": time.monotonic()})
            return honest(self, *args, **kwargs)

        return noted

    for call in {"settle_and_start", *RunBackend.__abstractmethods__} - {"describe"}:
        setattr(kind, call, noting(call))


if "CREW_ASKS" in os.environ:
    note_calls(os.environ["CREW_ASKS"])


def freeze_at_a_yes(file: Path) -> None:
    kind = type(backend_from(config["anarchon_backend"]))

    def freezing(call: str) -> Any:
        honest = getattr(kind, call)

        def frozen(self: Any, *args: Any) -> Any:
            answers = honest(self, *args)
            started = answers[1] if call == "settle_and_start" else answers
            if file.exists() and started[0].answer in GRANTED:
                file.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            return answers

        return frozen

    for call in ("start", "settle_and_start"):
        setattr(kind, call, freezing(call))


if "CREW_FREEZES" in os.environ:
    freeze_at_a_yes(Path(os.environ["CREW_FREEZES"]))


def write(task: Task, event: str, **more: Any) -> None:
    run = current_run()
    line = {
        "event": event,
        "at": time.monotonic(),
        "pid": os.getpid(),
        "id": task.request.id,
        "retries": task.request.retries,
        "worker": task.request.hostname,
        **more,
    }
    if run is not None:
        line |= {"job": run.job, "slot": round(run.slot.timestamp() * 1000), "attempt": run.attempt}
        if event == "end":
            line["lost"] = run.lost
    append(line)


def define(name: str, **options: Any) -> Any:
    return app.task(name=name, bind=True, **options)


def body(task: Task, seconds: float = 0.0, until: str | None = None) -> float:
    """Run for so long, or until a file is there."""
    write(task, "start")
    end = time.monotonic() + seconds
    while time.monotonic() < end or (until is not None and not Path(until).exists()):
        time.sleep(0.01)
    write(task, "end")
    return seconds


define("work")(body)
define("late", acks_late=True)(body)
define("late.lost", acks_late=True, reject_on_worker_lost=True)(body)


@define("fail")
def fail(task: Task) -> None:
    write(task, "start")
    raise ValueError("as wished")


@define("ignore")
def ignore(task: Task) -> None:
    write(task, "start")
    raise Ignore


@define("reject", acks_late=True)
def reject(task: Task) -> None:
    write(task, "start")
    raise Reject("as wished", requeue=False)


@define("again", max_retries=5)
def again(task: Task) -> None:
    write(task, "start")
    if task.request.retries < 2:
        raise task.retry(countdown=0.1)


def die(task: Task) -> None:
    write(task, "start")
    os.kill(os.getpid(), signal.SIGKILL)


define("die")(die)
define("die.late", acks_late=True)(die)
define("die.lost", acks_late=True, reject_on_worker_lost=True)(die)


@define("watch")
def watch(task: Task, seconds: float = 60.0, until: str | None = None) -> bool:
    """Run until told to be lost, or until a file is there."""
    write(task, "start")
    run = current_run()
    assert run is not None
    end = time.monotonic() + seconds
    while not run.lost and time.monotonic() < end and not (until is not None and Path(until).exists()):
        time.sleep(0.02)
    write(task, "end")
    return run.lost


@app.task(name="nothing")
def nothing() -> None:
    """For benchmarks."""
