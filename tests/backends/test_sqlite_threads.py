"""SQLite with several threads of one process on one connection of the app."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from celery_anarchon import SqliteBackend
from celery_anarchon.model import Answer
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import claim


def test_threads_that_share_the_one_connection_of_an_engine() -> None:
    """What one of them is in the middle of is no transaction of the app."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    try:
        with closing(SqliteBackend(engine)) as backend:
            backend.open("app")
            slot = backend.now() - 60_000
            answers: list[Answer] = []

            def claims(owner: str) -> None:
                answers.extend(claim(backend, "job", slot + number, owner) for number in range(20))

            at_once([lambda owner=owner: claims(owner) for owner in "abcd"])
            assert sorted(answers) == [Answer.TAKEN] * 60 + [Answer.WON] * 20
    finally:
        engine.dispose()
