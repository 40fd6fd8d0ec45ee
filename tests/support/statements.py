"""What a call costs SQLite: the statements that it executes, and the steps that these take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from celery_anarchon.backends.sqlite import SqliteBackend


@contextmanager
def statements_of(backend: SqliteBackend) -> Iterator[list[tuple[str, Any]]]:
    """Each statement of *backend* meanwhile, with its parameters; of many rows at once with those of the first."""
    seen: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters[0] if isinstance(parameters, list) else parameters))

    engine: Any = backend._source._engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def steps_of(backend: SqliteBackend, call: Callable[[], Any], each: int = 1) -> int:
    """How often SQLite's machine has made *each* steps in *call*. Not seconds: those are another figure every time."""
    (connection,) = backend._source._connections._idle
    driver = connection.connection.dbapi_connection
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    driver.set_progress_handler(count, each)
    try:
        call()
    finally:
        driver.set_progress_handler(None, 0)
    return counted
