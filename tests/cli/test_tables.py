"""``anarchon create-tables``: tables for beats that may not make any."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from celery import Celery

from celery_anarchon import SqliteBackend


def test_what_is_printed_makes_the_tables(app: Celery, call: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "anarchon.db"
    app.conf.anarchon_backend = f"sqlite:///{path}?table=billing"
    answer = call("create-tables", "--sql")
    assert answer.code == 0 and not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(answer.out)
    assert call("create-tables", "--sql", "--json").json["namespace"] == "billing"
    backend = SqliteBackend(path, "billing")
    backend.open("proj")
    assert backend.register([]) == []
    backend.close()


def test_it_makes_the_tables(app: Celery, call: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "anarchon.db"
    app.conf.anarchon_backend = f"sqlite:///{path}"
    for _ in range(2):
        answer = call("create-tables")
        assert answer.code == 0 and str(path) in answer.out
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select value from anarchon_runs_meta where key = 'app'").fetchone() == ("proj",)


def test_for_postgresql_nothing_is_connected(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_backend = "postgresql://somebody:secret@nowhere.invalid/db?table=plan.runs"
    answer = call("create-tables", "--sql")
    assert answer.code == 0
    assert "CREATE SCHEMA IF NOT EXISTS plan;" in answer.out
    assert "CREATE TABLE plan.runs (" in answer.out and "secret" not in answer.out


def test_a_store_without_tables_says_so(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_backend = "memory://"
    answer = call("create-tables")
    assert answer.code == 2 and "no tables" in answer.err
