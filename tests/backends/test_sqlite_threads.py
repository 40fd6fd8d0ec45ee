"""SQLite with several threads of one process on one connection of the app."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool
from support.opened import claimed_by_threads

from celery_anarchon import SqliteBackend


def test_threads_that_share_the_one_connection_of_an_engine() -> None:
    """What one of them is in the middle of is no transaction of the app."""
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    try:
        with closing(SqliteBackend(engine)) as backend:
            backend.open("app")
            claimed_by_threads(backend)
    finally:
        engine.dispose()
