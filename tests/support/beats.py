"""Fleets of this project's own tests: beats of :mod:`beat_app` on one store, and what lies in their broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from support.sites import Broker, FilesBroker, SqliteStore, Store
from support.waiting import wait_for

from celery_anarchon.backends import ClaimBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing.fleet import Fleet, ManagedProcess, events_of
from celery_anarchon.verdict import Event

T = TypeVar("T")
SUPPORT = Path(__file__).parent
SCHEDULER = "beat_app:HookedScheduler"
ENOUGH = 60.0
"""Seconds after which something that must happen counts as not happening: a bound, never a figure."""

SLACK: Millis = 10_000
"""What a loaded machine may add to the time that a takeover takes: to a tick, a publish, a delivery. Small enough that
one which nobody looks for comes too late."""


def until(condition: Callable[[], T], what: str, seconds: float = ENOUGH) -> T:
    """Wait for *condition*, and no longer than it takes."""
    return wait_for(condition, what, seconds)


@dataclass
class Beats:
    """Beats of one schedule; without more words on one SQLite file, with a broker of files."""

    folder: Path
    jobs: dict[str, Any]
    """name -> seconds, or an entry without its task."""
    settings: dict[str, Any] = field(default_factory=dict)
    home: Store = None  # type: ignore[assignment]
    broker: Broker = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.home = self.home or SqliteStore(self.folder)
        self.broker = self.broker or FilesBroker(self.folder)
        config = {
            **self.broker.settings,
            "anarchon_backend": self.home.url,
            "timezone": "UTC",
            # Else Celery has an entry of its own, which is due once a day, at four, in the middle of a window.
            "result_expires": None,
            "jobs": self.jobs,
            **self.settings,
        }
        self.fleet = Fleet("beat_app", self.folder, {"PYTHONPATH": str(SUPPORT), "FLEET_CONFIG": json.dumps(config)})

    def start(self, name: str, hook: str = "", **env: str) -> ManagedProcess:
        """Start a beat. *hook*: see :mod:`beat_app`."""
        return self.fleet.beat(name, scheduler=SCHEDULER, FLEET_HOOK=hook, **env)

    def beat(self, name: str, hook: str = "", **env: str) -> ManagedProcess:
        """Start a beat and wait until it has ticked."""
        process = self.start(name, hook, **env)
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
        return events_of(self.broker.messages())

    def count(self) -> dict[tuple[str, Millis], list[str]]:
        """(job, slot) -> the task ids of its messages."""
        counted: dict[tuple[str, Millis], list[str]] = {}
        for event in self.events():
            counted.setdefault((event.job, event.slot), []).append(event.task_id)
        return counted

    def store(self) -> ClaimBackend:
        """The store, for reading. Close it."""
        return self.home.reader()
