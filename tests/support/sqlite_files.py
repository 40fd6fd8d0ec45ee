"""SQLite stores of a test's own: made, opened, refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis
from celery_anarchon.testing.harness import raised_by

Opened = Callable[..., SqliteBackend]


@contextmanager
def engine_on(path: Path, **options: Any) -> Iterator[Any]:
    engine = create_engine(f"sqlite:///{path}", **options)
    try:
        yield engine
    finally:
        engine.dispose()


def base(backend: SqliteBackend) -> Millis:
    return backend.now() - 3_600_000


def refusal(backend: SqliteBackend, *, create: bool = True) -> str:
    """The words with which it cannot be opened."""
    error = raised_by(lambda: backend.open("app", create=create))
    assert isinstance(error, ConfigurationError), repr(error)
    assert "\n" not in str(error)
    backend.close()
    return str(error)
