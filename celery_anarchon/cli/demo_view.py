"""What one sees of ``celery anarchon demo`` while it plays, and at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import click

from celery_anarchon.cli import demo_app
from celery_anarchon.cli.common import NONE
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Millis
from celery_anarchon.verdict import Kind
from celery_anarchon.wire import time_text

if TYPE_CHECKING:
    from celery_anarchon.cli.demo import Play, Result


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


def view_for(as_json: bool, *, no_color: bool) -> View:
    if as_json:
        return Silent()
    return Table(no_color) if sys.stdout.isatty() else Lines()


def _clock_time(at: Millis) -> str:
    return time_text(at)[11:19]


def _setting(play: Play) -> Iterator[str]:
    jobs = ", ".join(f"{job} {seconds} s" for job, seconds in demo_app.JOBS.items())
    beats = "1 beat" if len(play.beats) == 1 else f"{len(play.beats)} beats"
    yield f"{beats} and a worker are up; jobs: {jobs}"
    yield f"judged: every slot after {time_text(play.window[0])} until {time_text(play.window[1])}"


def tell(result: Result) -> None:
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
