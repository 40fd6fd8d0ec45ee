from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from conformance.harnesses import SqliteHarness
from sqlalchemy import Connection

from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.testing import RunSuite
from celery_anarchon.testing.contenders import race


class TestSqlite(RunSuite):
    harness_class = SqliteHarness


class InDelete(SqliteBackend):
    """On a file that stays in journal mode DELETE, as where a WAL cannot be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source.prepare = self._prepare

    def _prepare(self, connection: Connection, create: bool) -> None:
        mode = self._patiently(lambda: connection.exec_driver_sql("PRAGMA journal_mode=DELETE").scalar_one())
        assert mode == "delete"


class DeleteHarness(SqliteHarness):
    backend = InDelete


class TestSqliteInDelete(RunSuite):
    harness_class = DeleteHarness
    race_threads: ClassVar[int] = 10
    race_slots: ClassVar[int] = 20
    race_processes: ClassVar[tuple[int, int]] = (3, 3)


@pytest.mark.long
def test_fifty_contenders_in_ten_processes_for_a_thousand_slots(tmp_path: Path) -> None:
    with SqliteHarness(tmp_path) as harness:
        base = harness.connect().now() - 10_000_000
        winners = race(harness, "race", range(base, base + 1_000), processes=10, threads=5, patience=900)
        assert {len(owners) for owners in winners.values()} == {1}
