"""Stores that do what they are asked, and whose answers do not come."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from celery_anarchon.backends.base import ClaimBackend


class Losing(Protocol):
    losing: bool
    lost: int


@contextmanager
def losing_replies(lines: Sequence[Losing]) -> Iterator[None]:
    """All of *lines* lose them; one at least has to have been lost when this ends."""
    before = sum(line.lost for line in lines)
    for line in lines:
        line.losing = True
    try:
        yield
        assert sum(line.lost for line in lines) > before, "no reply was lost"
    finally:
        for line in lines:
            line.losing = False


@contextmanager
def losing_commits(client: ClaimBackend, words: str) -> Iterator[None]:
    """Of a client of SQLite or libSQL: each is made, and then told as an error in these words."""

    def lose(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement == "COMMIT":
            raise OperationalError(statement, None, sqlite3.OperationalError(words))

    engine = client._source._engine  # type: ignore[attr-defined]
    event.listen(engine, "after_cursor_execute", lose)
    try:
        yield
    finally:
        event.remove(engine, "after_cursor_execute", lose)
