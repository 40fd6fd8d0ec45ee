from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_anarchon.cli import anarchon


class Answer:
    """What a command printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app without jobs and without a store."""
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.update(timezone="UTC", result_expires=None, beat_schedule={})
    yield app
    app.close()


@pytest.fixture
def call(app: Celery) -> Callable[..., Answer]:
    """Call ``celery -A app anarchon ...`` in this process. Whatever is no proper end of a command fails the test."""

    def call(*arguments: str) -> Answer:
        context = CLIContext(app=app, no_color=True, workdir=None)
        result = CliRunner().invoke(anarchon, arguments, obj=context)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call
