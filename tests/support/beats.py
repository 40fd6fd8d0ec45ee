"""Fleets of this project's own tests: beats of :mod:`beat_app` on one SQLite file, and what lies in their broker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing.fleet import Fleet, ManagedProcess, events_of, filesystem_broker, filesystem_messages
from celery_anarchon.verdict import Event

T = TypeVar("T")
SUPPORT = Path(__file__).parent
SCHEDULER = "beat_app:HookedScheduler"
ENOUGH = 60.0
"""Seconds after which something that must happen counts as not happening: a bound, never a figure."""


def until(condition: Callable[[], T], what: str, seconds: float = ENOUGH) -> T:
    """Wait for *condition*, and no longer than it takes."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.01)
    return found


@dataclass
class Beats:
    """Beats of one schedule. ``read`` tells what their broker holds; without one it is a broker of files."""

    folder: Path
    jobs: dict[str, Any]
    """name -> seconds, or an entry without its task."""
    settings: dict[str, Any] = field(default_factory=dict)
    read: Callable[[], list[Event]] | None = None

    def __post_init__(self) -> None:
        self.store_path = self.folder / "anarchon.db"
        broker = filesystem_broker(self.folder) if self.read is None else {}
        config = {
            **broker,
            "anarchon_backend": f"sqlite:///{self.store_path}",
            "timezone": "UTC",
            "jobs": self.jobs,
            **self.settings,
        }
        self.fleet = Fleet("beat_app", self.folder, {"PYTHONPATH": str(SUPPORT), "FLEET_CONFIG": json.dumps(config)})
        self.queue = self.folder / "queue"

    def start(self, name: str, hook: str = "") -> ManagedProcess:
        """Start a beat. *hook*: see :mod:`beat_app`."""
        return self.fleet.beat(name, scheduler=SCHEDULER, FLEET_HOOK=hook)

    def beat(self, name: str, hook: str = "") -> ManagedProcess:
        """Start a beat and wait until it has ticked."""
        process = self.start(name, hook)
        process.wait_for_log("beat: Waking up", ENOUGH)
        return process

    def beats(self, *names: str) -> list[ManagedProcess]:
        """Start several at once and wait until all have ticked."""
        started = [self.start(name) for name in names]
        for process in started:
            process.wait_for_log("beat: Waking up", ENOUGH)
        return started

    def events(self) -> list[Event]:
        """Every message in the broker."""
        if self.read is not None:
            return self.read()
        return events_of(filesystem_messages(self.folder))

    def count(self) -> dict[tuple[str, Millis], list[str]]:
        """(job, slot) -> the task ids of its messages."""
        counted: dict[tuple[str, Millis], list[str]] = {}
        for event in self.events():
            counted.setdefault((event.job, event.slot), []).append(event.task_id)
        return counted

    def store(self) -> SqliteBackend:
        """The store, for reading."""
        backend = SqliteBackend(self.store_path)
        backend.open("fleet", create=False)
        return backend
