"""``celery anarchon demo``: several real beats and a real worker on one schedule, one beat killed, and the count.

Belongs here: the play. Does not belong here: what one sees of it (:mod:`.demo_view`), the app that is played
(:mod:`.demo_app`), and what is right: :mod:`celery_anarchon.verdict` decides, over :mod:`celery_anarchon.oracle`.

The demo stands between beats and worker: it reads each message that a beat wrote, then hands it on. So the verdict
rests on the messages themselves, and not on what the store, a log or a worker says about them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_anarchon.cli import demo_app
from celery_anarchon.cli.common import WRONG, guarded, json_option, leave, show_json
from celery_anarchon.cli.demo_view import View, tell, view_for
from celery_anarchon.cli.processes import ManagedProcess, NotInTime, ProcessGroup, celery_command, clean_environment
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Millis
from celery_anarchon.oracle import expected_interval
from celery_anarchon.verdict import Event, JobSlot, Kind, Verdict, event_of, judge, named, read_events

APP = "celery_anarchon.cli.demo_app"

START_TIMEOUT = 60.0
TAKEOVER_TIMEOUT = demo_app.LEASE + demo_app.HEARTBEAT + 8
"""Seconds after which a slot that was not sent is missing: within lease + heartbeat another beat had to send it."""

WORKER_TIMEOUT = 10.0
STOP_TIMEOUT = 15.0

QUIET = 0.3
"""Seconds without a message in which a beat is killed: between two slots, not in the middle of a publish, after which
nobody can know whether the message is out."""

_LOOK = 0.03


@click.command("demo", cls=CeleryCommand)
@click.option("--beats", type=click.IntRange(1, 50), default=3, show_default=True, help="How many beats.")
@click.option("--seconds", type=click.IntRange(4), default=20, show_default=True, help="How long they are watched.")
@click.option("--keep", is_flag=True, help="Keep the folder with the store, the messages and the logs.")
@json_option
@click.pass_context
@guarded
def demo(ctx: click.Context, beats: int, seconds: int, keep: bool, as_json: bool) -> None:
    """Several beats on one schedule, no server needed: who sends what, while one of them is killed."""
    folder = Path(tempfile.mkdtemp(prefix="anarchon-demo-"))
    play = Play(folder, beats, seconds)
    try:
        # SIGTERM and SIGHUP as Ctrl-C: no child is left behind.
        with (
            _signals_handled_by(_stop_demo, signal.SIGTERM, signal.SIGHUP),
            view_for(as_json, no_color=ctx.obj.no_color) as view,
            play,
        ):
            result = play.run(view)
        if keep:
            (folder / "verdict.json").write_text(json.dumps(result.verdict.as_json(), indent=2) + "\n")
    finally:
        if keep:
            click.echo(f"kept: {folder}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        show_json(result.as_json())
    else:
        tell(result)
    if result.trouble:
        click.echo(result.trouble.log, err=True)
        leave(WRONG, result.trouble)
    if result.verdict.kind is not Kind.VALID:
        leave(WRONG, result.verdict.reason)


# --- the play ---------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """What spoils the demo itself; the text says it in one line."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log
        """The last lines of whoever is to blame."""


class Tap:
    """Takes each message that beats wrote, notes it, and hands it on to the worker."""

    def __init__(self, sent: Path, queue: Path) -> None:
        self._sent = sent
        self._queue = queue
        self.events: list[Event] = []
        self.unreadable = 0
        self.last_at = 0.0
        """Monotonic time of the last message."""

    def run(self) -> list[Event]:
        """Hand on what is there; the events of that. A message that is just being written is no JSON yet, and waits for
        the next time."""
        new: list[Event] = []
        for path in sorted(self._sent.iterdir()):
            try:
                headers = json.loads(path.read_bytes())["headers"]
            except ValueError:
                continue
            event = event_of(headers)
            if event is None:
                self.unreadable += 1
            else:
                new.append(event)
            self.last_at = time.monotonic()
            path.rename(self._queue / path.name)
        self.events += new
        return new

    @property
    def left(self) -> int:
        """Files that never became messages."""
        return sum(1 for _ in self._sent.iterdir())


@dataclass
class BeatSeen:
    """What one sees of a beat."""

    name: str
    process: ManagedProcess
    sent: list[Event] = field(default_factory=list)
    killed_at: Millis | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    verdict: Verdict
    window: tuple[Millis, Millis]
    killed: str | None
    by_beat: dict[str, int]
    """Messages of slots within the window."""
    executed: int
    trouble: Trouble | None

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": str(Kind.UNKNOWN if self.trouble else self.verdict.kind),
            "slots": self.verdict.expected,
            "sent_once": self.verdict.sent_once,
            "missing": named(self.verdict.missing),
            "duplicate": named(self.verdict.duplicate + self.verdict.same_id_twice),
            "killed": self.killed,
            "by_beat": self.by_beat,
        }


class Play:
    """The processes of one demo, from start to end. A context manager: none of them outlives it."""

    def __init__(self, folder: Path, beats: int, seconds: int) -> None:
        self.folder = folder
        self.seconds = seconds
        for name in (demo_app.SENT, demo_app.QUEUE, demo_app.CONTROL):
            (folder / name).mkdir()
        # Bound beforehand: two processes that declare a queue at once would read each other's half-written file.
        (folder / demo_app.CONTROL / "celery.exchange").write_text(json.dumps([["celery", "", "celery"]]))
        self.tap = Tap(folder / demo_app.SENT, folder / demo_app.QUEUE)
        self.beats: dict[str, BeatSeen] = {}
        self._names = [f"beat-{number}" for number in range(1, beats + 1)]
        self._clock = SystemClock()
        self._processes = ProcessGroup(
            folder, clean_environment(**{demo_app.FOLDER: str(folder), demo_app.PARENT: str(os.getpid())})
        )
        self.window: tuple[Millis, Millis] = (0, 0)
        self.killed: BeatSeen | None = None

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not cut this short: it ends within seconds by itself.
        with _signals_handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._processes.close()

    def run(self, view: View) -> Result:
        """Play, and judge."""
        trouble = None
        try:
            self._start()
            view.begin(self)
            self._watch(view)
            self._settle(view)
            self._stop()
        except Trouble as error:
            trouble = error
        return self._judge(trouble)

    def _start(self) -> None:
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        self._processes.start("worker", celery_command(APP, "worker", "-P", "solo", "-l", "INFO", *quiet))
        for name in self._names:
            process = self._processes.start(
                name,
                celery_command(APP, "beat", "-S", "celery_anarchon.Scheduler", "-l", "DEBUG"),
                **{demo_app.NAME: name},
            )
            self.beats[name] = BeatSeen(name, process)
        # Celery writes this when a tick is over, so from then on this beat knows its jobs.
        awaited = {**dict.fromkeys(self.beats, "beat: Waking up"), "worker": " ready\\."}
        for name, pattern in awaited.items():
            process = self._processes[name]
            if not self._until(partial(process.has_written, pattern), START_TIMEOUT):
                raise Trouble(f"{name} is not up after {START_TIMEOUT:g} s", process.tail(8))
        # Half a second off the slots, which are whole seconds: no slot is near an edge.
        after = (self._clock.wall() + 500) // 1000 * 1000 + 500
        self.window = (after, after + self.seconds * 1000)

    def _watch(self, view: View) -> None:
        after, until = self.window
        half = (after + until) // 2
        while (now := self._clock.wall()) < until:
            self._look()
            # At half time, or at three quarters where the machine is too busy for a quiet moment.
            if self.killed is None and now >= half and (self._is_quiet(now) or 2 * now >= half + until):
                self._kill_last_sender()
            view.update(self)
            time.sleep(_LOOK)

    def _is_quiet(self, now: Millis) -> bool:
        return time.monotonic() - self.tap.last_at >= QUIET and now % 1000 <= 900

    def _kill_last_sender(self) -> None:
        if len(self.beats) == 1:
            return
        last = self.tap.events[-1] if self.tap.events else None
        victim = (self._beat_of(last) if last else None) or next(iter(self.beats.values()))
        victim.process.kill()
        victim.killed_at = self._clock.wall()
        self.killed = victim

    def _settle(self, view: View) -> None:
        """Give a takeover the time that it may take. What is missing then is the verdict's to say."""
        owed = set(self._expected())

        def all_sent() -> bool:
            view.update(self)
            return owed <= {(event.job, event.slot) for event in self.tap.events}

        self._until(all_sent, TAKEOVER_TIMEOUT)

    def _stop(self) -> None:
        """Stop the beats, let the worker finish what they sent, and stop it."""
        living = [beat.process for beat in self.beats.values() if beat is not self.killed]
        for process in living:
            process.send(signal.SIGTERM)
        for process in living:
            self._see_end(process)
        self._look(beats_run=False)
        self._until(lambda: len(self._executed()) >= len(self.tap.events), WORKER_TIMEOUT, beats_run=False)
        worker = self._processes["worker"]
        worker.send(signal.SIGTERM)
        self._see_end(worker)
        sent, ran = Counter(self.tap.events), Counter(self._executed())
        if sent != ran:
            raise Trouble(f"of {sent.total()} messages the worker ran {(sent & ran).total()} once", worker.tail(8))

    def _see_end(self, process: ManagedProcess) -> None:
        try:
            code = process.wait(STOP_TIMEOUT)
        except NotInTime:
            raise Trouble(f"{process.name} does not stop", process.tail(8)) from None
        if code:
            raise Trouble(f"{process.name} was stopped and ended with {code}", process.tail(8))

    def _until(self, condition: Callable[[], bool], timeout: float, *, beats_run: bool = True) -> bool:
        """Whether *condition* came true in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self._look(beats_run=beats_run)
            time.sleep(_LOOK)
        return True

    def _look(self, *, beats_run: bool = True) -> None:
        """Take in what was sent since the last look, and see that everybody is there."""
        for event in self.tap.run():
            beat = self._beat_of(event)
            if beat is not None:
                beat.sent.append(event)
        for name, process in self._processes.processes.items():
            must_run = name == "worker" or (beats_run and (self.killed is None or self.killed.name != name))
            if must_run and not process.running:
                raise Trouble(f"{name} ended by itself ({process.returncode})", process.tail(8))

    def _beat_of(self, event: Event) -> BeatSeen | None:
        for beat in self.beats.values():
            if event.beat.endswith(f":{beat.process.pid}"):
                return beat
        return None

    # --- what came of it ----------------------------------------------------------------------------------------------

    def _expected(self) -> list[JobSlot]:
        return [
            (job, slot)
            for job, seconds in demo_app.JOBS.items()
            for slot in expected_interval(seconds * 1000, 0, *self.window)
        ]

    def _executed(self) -> list[Event]:
        try:
            return read_events((self.folder / demo_app.EXECUTED).read_text().splitlines())[0]
        except FileNotFoundError:
            return []

    def _judge(self, trouble: Trouble | None) -> Result:
        after, until = self.window
        return Result(
            verdict=judge(
                self._expected() if until else [],
                self.tap.events,
                window=self.window,
                unreadable=self.tap.unreadable + self.tap.left,
            ),
            window=self.window,
            killed=None if self.killed is None else self.killed.name,
            by_beat={
                beat.name: sum(after < event.slot <= until for event in beat.sent) for beat in self.beats.values()
            },
            executed=len(self._executed()),
            trouble=trouble,
        )


@contextmanager
def _signals_handled_by(handler: Any, *numbers: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _stop_demo(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
