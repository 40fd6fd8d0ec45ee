"""Beats and workers of :mod:`crew_app` on one store and one Redis broker, and what their bodies wrote down."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from support import raw_stores
from support.beats import ENOUGH, until
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import Millis, Run, RunState
from celery_anarchon.testing.fleet import Fleet, ManagedProcess
from celery_anarchon.wire import time_text

SUPPORT = Path(__file__).parent

OVERDUE = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    # A worker that is killed while it looks for them keeps all others from looking, as long as this.
    "unacked_mutex_expire": 2,
}
"""Redis as a broker that delivers again, and soon, what was not acknowledged."""

LEASE = 2.0
HEARTBEAT = 0.4


def job(task: str, seconds: float = 1, *, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """An entry of the schedule; job options in *more*, arguments of the task in ``args`` and ``kwargs``."""
    parts = {key: more.pop(key) for key in ("args", "kwargs") if key in more}
    return {"task": task, "seconds": seconds, "options": {**(options or {}), "anarchon": more}, **parts}


@dataclass
class Crew:
    """*store*: a URL. *broker*: a Redis of this test's own, whose keys it may delete."""

    folder: Path
    store: str
    broker: str
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    anarchon: dict[str, Any] = field(default_factory=dict)
    away: Callable[[], AbstractContextManager[None]] = nullcontext
    """The store answers nobody, as long as this lasts."""
    other: str = ""
    """Another namespace on the same server."""

    def __post_init__(self) -> None:
        self.config = {
            "broker_url": self.broker,
            "result_backend": self.broker,
            "anarchon_backend": self.store,
            "anarchon_lease": LEASE,
            "anarchon_heartbeat": HEARTBEAT,
            "timezone": "UTC",
            "worker_prefetch_multiplier": 1,
            "broker_connection_retry_on_startup": True,
            "beat_max_loop_interval": 1,
            "jobs": self.jobs,
            "anarchon": self.anarchon,
            **self.settings,
        }
        self.journal = self.folder / "journal"
        env = {
            "PYTHONPATH": str(SUPPORT),
            "CREW_CONFIG": json.dumps(self.config),
            "CREW_JOURNAL": str(self.journal),
        }
        self.fleet = Fleet("crew_app", self.folder, env)
        self._reader: RunBackend | None = None

    def close(self) -> None:
        self.fleet.close()
        if self._reader is not None:
            self._reader.close()

    # --- processes ----------------------------------------------------------------------------------------------------

    def beat(self, name: str = "beat", **env: str) -> ManagedProcess:
        """Start a beat and wait until it has ticked."""
        return self.beats(name, **env)[0]

    def beats(self, *names: str, **env: str) -> list[ManagedProcess]:
        """Start them, and wait until each has ticked."""
        started = [self.fleet.beat(name, scheduler=None, **env) for name in names]
        for process in started:
            process.wait_for_log("beat: Waking up", ENOUGH)
        return started

    def worker(
        self, name: str = "worker", pool: str = "prefork", concurrency: int = 2, *args: str, **env: str
    ) -> ManagedProcess:
        """Start a worker and wait until it consumes."""
        process = self.fleet.worker(name, "-c", str(concurrency), *args, pool=pool, **env)
        process.wait_for_log("ready", ENOUGH)
        return process

    def freeze(self, *processes: ManagedProcess) -> None:
        """SIGSTOP to all of them and their children. On a file not while one writes: what is frozen then keeps the
        lock, and nobody can go on before it thaws."""
        with self.away() if self.store.startswith("sqlite") else nullcontext():
            for process in processes:
                process.send(signal.SIGSTOP, group=True)
            until(lambda: all(process.state == "T" for process in processes), "the freeze")

    def sent_to_nobody(self, count: int = 1) -> list[tuple[str, int]]:
        """Have two beats send so many messages at least, of runs that are followed: their jobs and slots. Then no beat
        is there, and no worker."""
        # A worker that was seen, so that runs are followed.
        self.worker("early").stop()
        beats = self.beats("first-beat", "second-beat")
        until(lambda: self.waiting() >= count, f"{count} messages")
        assert [beat.stop() for beat in beats] == [0, 0]
        queued = [(run.job, wire.instant(run.slot)) for job in self.jobs for run in self.reader.living(job)]
        assert len(queued) == self.waiting()
        return queued

    # --- what happened ------------------------------------------------------------------------------------------------

    def lines(self, event: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """What bodies wrote, in the order in which they wrote it."""
        text = self.journal.read_text() if self.journal.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return [
            line
            for line in lines
            if event in (None, line["event"]) and all(line.get(name) == value for name, value in wanted.items())
        ]

    def started(self, count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
        """The starts, once there are so many."""
        return until(lambda: len(found := self.lines("start", **wanted)) >= count and found, f"{count} starts {wanted}")

    @property
    def reader(self) -> RunBackend:
        if self._reader is None:
            backend = backend_from(self.store)
            backend.open("crew", create=True)
            assert isinstance(backend, RunBackend)
            self._reader = backend
        return self._reader

    def run(self, job: str, slot: int) -> Run | None:
        return next((run for run in self.reader.history(job, 1_000) if wire.instant(run.slot) == slot), None)

    def ended(self, job: str, slot: int, *states: RunState, seconds: float = ENOUGH) -> Run:
        """The run, once it is in one of *states*."""

        def found() -> Run | None:
            run = self.run(job, slot)
            return run if run is not None and run.state in states else None

        return until(found, f"{job} {slot} {states}, not {self.run(job, slot)}", seconds)

    def lease_until(self, job: str, slot: int) -> Millis:
        """When the lease of the run is over, by the store's clock; read past the backend."""
        return raw_stores.lease_until(self.store, job, slot)

    def explain(self, job: str, slot: int) -> str:
        """What ``celery anarchon explain`` prints."""
        command = self.fleet.celery(f"explain-{job}-{slot}", "anarchon", "explain", job, time_text(slot))
        assert command.wait(ENOUGH) == 0, command.output
        (line,) = command.output.splitlines()
        return line

    # --- messages by hand ---------------------------------------------------------------------------------------------

    def app(self) -> Any:
        """An app that sends to the same broker, and knows no task and no store."""
        from celery import Celery

        app = Celery("sender", broker=self.broker, backend=self.broker, set_as_current=False)
        app.conf.broker_transport_options = self.settings.get("broker_transport_options", {})
        return app

    def waiting(self) -> int:
        """Messages in the queue, and those that somebody has and did not acknowledge."""
        with redis.Redis.from_url(self.broker, **RESP2) as raw:
            return int(raw.llen("celery")) + int(raw.hlen("unacked"))

    def unacknowledged(self) -> int:
        """Messages that a worker has and did not acknowledge."""
        with redis.Redis.from_url(self.broker, **RESP2) as raw:
            return int(raw.hlen("unacked"))

    def waiting_ids(self) -> list[str]:
        """The task ids of the messages in the queue."""
        with redis.Redis.from_url(self.broker, **RESP2) as raw:
            return [json.loads(message)["headers"]["id"] for message in raw.lrange("celery", 0, -1)]
