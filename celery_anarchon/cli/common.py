"""What the commands share: exit codes, errors in one line, the app and its jobs, output.

Belongs here: what at least two commands need. Does not belong here: what a command says.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec

import click
from celery import Celery

from celery_anarchon.entries import definitions_of, jobs_of
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.options import nearest

WELL, WRONG, USAGE, UNREACHABLE = 0, 1, 2, 3
"""Exit codes: well; something was found wrong; usage or configuration; the store cannot be reached."""

NONE = "-"
"""What a table shows for nothing."""

_PIPE_WIDTH = 160

P = ParamSpec("P")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


# --- the end ----------------------------------------------------------------------------------------------------------


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Instead of a traceback one line and an exit code, for whatever a person can put right."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ConfigurationError as error:
            leave(USAGE, error)
        except (BackendUnavailable, OutcomeUnknown) as error:
            leave(UNREACHABLE, f"the store does not answer: {error}")

    return wrapper


def leave(code: int, *words: object) -> NoReturn:
    """Say each of *words* in a line on stderr, and end with *code*."""
    for each in words:
        click.echo(f"Error: {' '.join(str(each).split())}", err=True)
    raise SystemExit(code)


# --- the app ----------------------------------------------------------------------------------------------------------


def app_of(ctx: click.Context) -> Celery:
    """The app of ``-A``, with every job that its modules and its handlers define.

    :raises ConfigurationError: there is none, or its modules cannot be imported.
    """
    app: Celery = ctx.obj.app
    if app.main in (None, "default") and not ctx.find_root().params.get("app") and not app.conf.beat_schedule:
        raise ConfigurationError("which app? Call it as: celery -A proj anarchon ...")
    try:
        app.loader.import_default_modules()
        # Jobs that are added in on_after_finalize are there only now.
        app.finalize()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the app's modules cannot be imported: {type(error).__name__}: {error}") from error
    return app


class Schedule:
    """The app's jobs, and what is wrong with the entries that are none."""

    def __init__(self, app: Celery) -> None:
        """
        :raises ConfigurationError: a scheduler-wide setting is wrong.
        """
        jobs, self.errors = jobs_of(app)
        self.jobs: Mapping[str, Job] = {job.name: job for job in jobs}
        self._names = set(definitions_of(app))

    def job(self, name: str) -> Job:
        """The job of that name.

        :raises ConfigurationError: its entry is bad, or there is none; with the nearest name.
        """
        if name in self.jobs:
            return self.jobs[name]
        if name in self._names:
            for error in self.errors:
                if f"job {name!r}" in str(error):
                    raise error
        raise ConfigurationError(f"no job {name!r}{nearest(name, self._names)}")

    def complain(self) -> None:
        """Name every bad entry, and end with WRONG; nothing when there is none."""
        if self.errors:
            leave(WRONG, *self.errors)


# --- output -----------------------------------------------------------------------------------------------------------


def show_json(data: Any) -> None:
    """*data* on stdout, in ASCII: no terminal's and no pipe's encoding can spoil it."""
    click.echo(json.dumps(data, indent=2))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """*rows* on stdout. Names are shown as they are, whatever rich would make of their brackets."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # A pipe has no width; rich would fold at 80.
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
