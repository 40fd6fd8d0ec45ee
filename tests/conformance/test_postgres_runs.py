"""Runs on their workers on PostgreSQL, beside the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg")

from conformance.postgres_harness import PostgresHarness  # noqa: E402
from conformance.test_run_machine import run_machine_for  # noqa: E402
from support.postgres_servers import private_postgres  # noqa: E402
from support.run_storm import storm  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for all; each test has tables of its own."""
    with private_postgres(tmp_path_factory.mktemp("postgres")) as running:
        PostgresHarness.server = running
        yield running


TestPostgresRunMachine = run_machine_for(PostgresHarness, 10, 30)
TestPostgresRunMachineLong = pytest.mark.long(run_machine_for(PostgresHarness, 200, 60))


def test_a_storm_of_batches_keeps_every_promise(tmp_path: Path) -> None:
    """Here transactions run side by side: a deadlock would be told."""
    with PostgresHarness(tmp_path) as harness:
        storm(harness, threads=6, rounds=25)
