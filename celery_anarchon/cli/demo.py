"""``celery anarchon demo``: several real beats and a real worker on one schedule, one beat killed, and the count.

Belongs here: the play, and what one sees of it. Does not belong here: what is right (:mod:`celery_anarchon.verdict`
decides, over the slots of :mod:`celery_anarchon.oracle`), and the app that is played (:mod:`.demo_app`).

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
from pathlib import Path
from typing import Any, Protocol

import click
from celery.bin.base import CeleryCommand

from celery_anarchon.cli import demo_app
from celery_anarchon.cli.common import NONE, WRONG, guarded, json_option, leave, show_json
from celery_anarchon.cli.processes import ManagedProcess, NotInTime, ProcessGroup, celery_command, clean_environment
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Millis
from celery_anarchon.oracle import expected_interval
from celery_anarchon.verdict import Event, JobSlot, Kind, Verdict, event_of, judge, named, read_events
from celery_anarchon.wire import time_text

APP = "celery_anarchon.cli.demo_app"

START_TIMEOUT = 60.0
TAKEOVER_TIMEOUT = demo_app.LEASE + demo_app.HEARTBEAT + 8
"""Seconds after which a slot that was not sent is missing: within lease + heartbeat another beat had to send it."""

WORKER_TIMEOUT = 20.0
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
        with _stoppable():
            view = _view(as_json, bool(ctx.obj and ctx.obj.no_color))
            with view, play:
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
        _say(result)
    if result.verdict.kind is not Kind.VALID or result.trouble:
        leave(WRONG, result.trouble or result.verdict.reason)


# --- the play ---------------------------------------------------------------------------------------------------------


class Tap:
    """Takes each message that beats wrote, notes it, and hands it on to the worker."""

    def __init__(self, sent: Path, queue: Path) -> None:
        self._sent = sent
        self._queue = queue
        self.events: list[Event] = []
        self.unreadable = 0
        self.last_at = 0.0
        """Monotonic time of the last message."""

    def run(self) -> None:
        """Hand on what is there. A message that is just being written is no JSON yet, and waits for the next time."""
        for path in sorted(self._sent.iterdir()):
            try:
                headers = json.loads(path.read_bytes())["headers"]
            except ValueError:
                continue
            event = event_of(headers)
            if event is None:
                self.unreadable += 1
            else:
                self.events.append(event)
            self.last_at = time.monotonic()
            path.rename(self._queue / path.name)

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
    trouble: str | None
    """What spoiled the demo itself."""

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


class Trouble(Exception):
    """The demo cannot go on; the text says why."""


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
        self._counted = 0
        self._clock = SystemClock()
        self._processes = ProcessGroup(
            folder, clean_environment(**{demo_app.FOLDER: str(folder), demo_app.PARENT: str(os.getpid())})
        )
        self._worker: ManagedProcess | None = None
        self.window: tuple[Millis, Millis] = (0, 0)
        self.killed: BeatSeen | None = None

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def run(self, view: View) -> Result:
        """Play, and judge."""
        trouble = None
        try:
            self._start()
            view.begin(self)
            self._watch(view)
            self._settle(view)
            trouble = self._stop()
        except Trouble as error:
            trouble = str(error)
        return self._judge(trouble)

    def _start(self) -> None:
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        self._worker = self._processes.start(
            "worker", celery_command(APP, "worker", "-P", "solo", "-l", "INFO", *quiet)
        )
        for name in self._names:
            process = self._processes.start(
                name,
                celery_command(APP, "beat", "-S", "celery_anarchon.Scheduler", "-l", "DEBUG"),
                **{demo_app.NAME: name},
            )
            self.beats[name] = BeatSeen(name, process)
        # Celery writes this when a tick is over, so from then on this beat knows its jobs.
        awaited = {**dict.fromkeys(self.beats, "beat: Waking up"), "worker": " ready\\."}
        self._until(
            lambda: all(self._processes[name].seen(pattern) for name, pattern in awaited.items()),
            START_TIMEOUT,
            "the beats and the worker are not up",
        )
        # Half a second off the slots, which are whole seconds: no slot is near an edge.
        after = (self._clock.wall() + 500) // 1000 * 1000 + 500
        self.window = (after, after + self.seconds * 1000)

    def _watch(self, view: View) -> None:
        after, until = self.window
        half = (after + until) // 2
        while (now := self._clock.wall()) < until:
            self._look()
            if self.killed is None and now >= half and len(self.beats) > 1 and self._is_quiet(now):
                self._kill_last_sender()
            view.update(self)
            time.sleep(_LOOK)

    def _is_quiet(self, now: Millis) -> bool:
        return time.monotonic() - self.tap.last_at >= QUIET and now % 1000 <= 900

    def _kill_last_sender(self) -> None:
        last = self.tap.events[-1] if self.tap.events else None
        victim = (self._beat_of(last) if last else None) or next(iter(self.beats.values()))
        victim.process.kill()
        victim.killed_at = self._clock.wall()
        self.killed = victim

    def _settle(self, view: View) -> None:
        """Give a takeover the time that it may take, no longer than it takes."""
        owed = set(self._expected())

        def done() -> bool:
            view.update(self)
            return owed <= {(event.job, event.slot) for event in self.tap.events}

        try:
            self._until(done, TAKEOVER_TIMEOUT, "")
        except NotInTime:
            # What is missing is the verdict's to say.
            pass

    def _stop(self) -> str | None:
        """Stop the beats, let the worker finish what they sent, stop it; what went wrong with that."""
        living = [beat for beat in self.beats.values() if beat is not self.killed]
        for beat in living:
            beat.process.send(signal.SIGTERM)
        for beat in living:
            code = beat.process.stop(STOP_TIMEOUT)
            if code:
                return f"{beat.name} was stopped and ended with {code}; its log ends with:\n{beat.process.tail()}"
        self._look(alive=False)
        try:
            self._until(
                lambda: len(self._executed()[0]) >= len(self.tap.events), WORKER_TIMEOUT, "the worker did not keep up"
            )
        except NotInTime:
            pass
        if self._worker is not None:
            self._worker.stop(STOP_TIMEOUT)
        sent = Counter((event.job, event.slot, event.task_id) for event in self.tap.events)
        ran = Counter((event.job, event.slot, event.task_id) for event in self._executed()[0])
        if sent != ran:
            return f"of {sent.total()} messages the worker ran {(sent & ran).total()} once each"
        return None

    def _until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() >= deadline:
                raise NotInTime(what)
            self._look(alive=what != "the worker did not keep up")
            time.sleep(_LOOK)

    def _look(self, *, alive: bool = True) -> None:
        self.tap.run()
        for event in self.tap.events[self._counted :]:
            beat = self._beat_of(event)
            if beat is not None:
                beat.sent.append(event)
        self._counted = len(self.tap.events)
        if alive:
            for process in self._processes.processes.values():
                if not process.running and (self.killed is None or process is not self.killed.process):
                    raise Trouble(
                        f"{process.name} ended by itself ({process.returncode}); its log ends with:\n{process.tail()}"
                    )

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

    def _executed(self) -> tuple[list[Event], int]:
        try:
            return read_events((self.folder / demo_app.EXECUTED).read_text().splitlines())
        except FileNotFoundError:
            return [], 0

    def _judge(self, trouble: str | None) -> Result:
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
            executed=len(self._executed()[0]),
            trouble=trouble,
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP end the demo as Ctrl-C does, so that no child is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what one sees ----------------------------------------------------------------------------------------------------


class View(Protocol):
    """Shows the play while it goes on."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def begin(self, play: Play) -> None: ...

    def update(self, play: Play) -> None: ...


class Silent:
    """For ``--json``: nothing but the result."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, play: Play) -> None:
        pass

    def update(self, play: Play) -> None:
        pass


class Lines(Silent):
    """Where stdout is no terminal: a line for what happens, and one every second."""

    def __init__(self) -> None:
        self._second = 0
        self._killed = False

    def __enter__(self) -> Lines:
        click.echo("starting ...")
        return self

    def begin(self, play: Play) -> None:
        for line in _setting(play):
            click.echo(line)

    def update(self, play: Play) -> None:
        if play.killed is not None and not self._killed:
            self._killed = True
            click.echo(f"killed {play.killed.name}, the last one to send, with SIGKILL")
        second = int(time.monotonic())
        if second > self._second:
            self._second = second
            counts = "  ".join(
                f"{beat.name} {len(beat.sent)}{' (killed)' if beat.killed_at else ''}" for beat in play.beats.values()
            )
            click.echo(f"{time_text(SystemClock().wall())}  {counts}")


class Table:
    """On a terminal: a table that lives."""

    def __init__(self, no_color: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(no_color=no_color)
        self._live = Live(console=self._console, auto_refresh=False)
        self._next = 0.0

    def __enter__(self) -> Table:
        self._console.print("starting ...")
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, play: Play) -> None:
        for line in _setting(play):
            self._console.print(line, highlight=False)

    def update(self, play: Play) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.1
            self._live.update(self._picture(play), refresh=True)

    def _picture(self, play: Play) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(title_justify="left", show_edge=False)
        for column in ("beat", "pid", "messages", "last one", ""):
            table.add_column(column, justify="right" if column == "messages" else "left")
        for beat in play.beats.values():
            last = beat.sent[-1] if beat.sent else None
            table.add_row(
                beat.name,
                str(beat.process.pid),
                str(len(beat.sent)),
                NONE if last is None else f"{_clock_time(last.slot)} {last.job}",
                "" if beat.killed_at is None else f"[red]killed {_clock_time(beat.killed_at)}[/red]",
            )
        return table


def _view(as_json: bool, no_color: bool) -> View:
    if as_json:
        return Silent()
    return Table(no_color) if click.get_text_stream("stdout").isatty() else Lines()


def _clock_time(at: Millis) -> str:
    return time_text(at)[11:19]


def _setting(play: Play) -> Iterator[str]:
    jobs = ", ".join(f"{job} {seconds} s" for job, seconds in demo_app.JOBS.items())
    yield f"{len(play.beats)} beats and a worker are up; jobs: {jobs}"
    yield f"judged: every slot after {time_text(play.window[0])} until {time_text(play.window[1])}"


def _say(result: Result) -> None:
    verdict = result.verdict
    for name, sent in result.by_beat.items():
        click.echo(f"{name} sent {sent}{', until it was killed' if name == result.killed else ''}")
    for word, slots in (
        ("missing", verdict.missing),
        ("sent twice", verdict.duplicate),
        ("sent twice under one task id", verdict.same_id_twice),
        ("no slot of the schedule", verdict.unexpected),
    ):
        for job, slot in slots[:10]:
            click.echo(f"{word}: {job} {time_text(slot)}")
        if len(slots) > 10:
            click.echo(f"{word}: {len(slots) - 10} more")
    if verdict.outside:
        click.echo(f"{verdict.outside} messages before and after that time: looked at for duplicates only")
    click.echo(f"the worker ran {result.executed} tasks")
    if result.trouble:
        return
    if verdict.kind is Kind.VALID:
        click.echo(f"verdict: valid: {verdict.expected} slots, each sent exactly once")
    else:
        click.echo(f"verdict: {verdict.kind}: of {verdict.expected} slots {verdict.sent_once} were sent exactly once")
