from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from conformance.harnesses import DeleteHarness, SqliteHarness

from celery_anarchon.testing import RunSuite
from celery_anarchon.testing.contenders import race


class TestSqlite(RunSuite):
    harness_class = SqliteHarness


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
