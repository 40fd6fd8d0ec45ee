"""Real beats on one SQLite file and one file-system broker, and the messages they left there."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from celery_anarchon import wire
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Millis

T = TypeVar("T")
SUPPORT = Path(__file__).parent
ENOUGH = 60.0
"""Seconds after which something that must happen counts as not happening: a bound, never a figure."""


def until(condition: Callable[[], T], what: str, seconds: float = ENOUGH) -> T:
    """Wait for *condition*, and no longer than it takes."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.01)
    return found


@dataclass(frozen=True)
class Message:
    """What a beat sent, read from the broker and not from the product."""

    job: str
    slot: Millis
    task_id: str
    beat: str
    written: float


@dataclass
class Process:
    """One beat or worker, in a session of its own."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str, seconds: float = ENOUGH) -> None:
        def there() -> bool:
            assert self.popen.poll() is None or words in self.text, f"{self.name} ended:\n{self.text}"
            return words in self.text

        until(there, f"{words!r} in the log of {self.name}", seconds)

    def send(self, number: int) -> None:
        if self.popen.poll() is None:
            os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and everything it started; its exit code."""
        self.send(number)
        self.send(signal.SIGCONT)
        code = self.popen.wait(timeout=ENOUGH)
        return code

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait(timeout=ENOUGH)


@dataclass
class Fleet:
    """Beats of one schedule."""

    folder: Path
    jobs: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    broker: str | None = None
    """A broker's URL; without one, files."""
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = self.folder / "queue"
        for folder in (self.queue, self.folder / "control"):
            folder.mkdir(exist_ok=True)
        self.store_path = self.folder / "anarchon.db"

    def config(self) -> dict[str, Any]:
        files = {
            "broker_url": "filesystem://",
            "broker_transport_options": {
                "data_folder_in": str(self.queue),
                "data_folder_out": str(self.queue),
                "control_folder": str(self.folder / "control"),
            },
        }
        return {
            **(files if self.broker is None else {"broker_url": self.broker}),
            "anarchon_backend": f"sqlite:///{self.store_path}",
            "timezone": "UTC",
            "jobs": self.jobs,
            **self.settings,
        }

    def environment(self, hook: str | None = None, **extra: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(SUPPORT),
            "PYTHONUNBUFFERED": "1",
            "FLEET_CONFIG": json.dumps(self.config()),
            "FLEET_HOOK": hook or "",
            **extra,
        }

    def start(self, name: str, *arguments: str, **environment: Any) -> Process:
        """Start ``celery -A beat_app <arguments>``."""
        log = self.folder / f"{name}-{len(self.processes)}.log"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "beat_app", *arguments],
                env=self.environment(**environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def beat(self, name: str, hook: str | None = None, scheduler: str = "beat_app:HookedScheduler") -> Process:
        """Start a beat and wait until it has begun."""
        process = self.start(name, "beat", "-S", scheduler, "-l", "DEBUG", hook=hook)
        process.wait_for("beat: Waking up")
        return process

    def beats(self, *names: str) -> list[Process]:
        """Start several at once."""
        started = [self.start(name, "beat", "-S", "beat_app:HookedScheduler", "-l", "DEBUG") for name in names]
        for process in started:
            process.wait_for("beat: Waking up")
        return started

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    # --- what they did ------------------------------------------------------------------------------------------------

    def messages(self) -> list[Message]:
        """Every message in the queue's folder; one that is being written is not there yet."""
        found = []
        for path in sorted(self.queue.glob("*.celery.msg")):
            try:
                found.append(decoded(path.read_text(), path.stat().st_mtime))
            except (ValueError, FileNotFoundError):
                continue
        return found

    def count(self) -> dict[tuple[str, Millis], list[str]]:
        """(job, slot) -> the task ids of its messages."""
        counted: dict[tuple[str, Millis], list[str]] = {}
        for message in self.messages():
            counted.setdefault((message.job, message.slot), []).append(message.task_id)
        return counted

    def store(self) -> SqliteBackend:
        backend = SqliteBackend(self.store_path)
        backend.open("fleet", create=False)
        return backend


def decoded(text: str, written: float = 0.0) -> Message:
    """A message out of kombu's envelope."""
    envelope = json.loads(text)
    headers = envelope["headers"]
    base64.b64decode(envelope["body"], validate=True)
    run = headers["anarchon"]
    return Message(run["job"], wire.parse_time(run["slot"]), headers["id"], run["beat"], written)


def expected(every: Millis, after: Millis, until_: Millis) -> list[Millis]:
    """The slots of an interval in (after, until], from first principles."""
    return [slot for slot in range(after - after % every, until_ + 1, every) if slot > after]
