"""Runs on their workers on SQLite, beside the reference."""

from __future__ import annotations

import pytest
from conformance.harnesses import SqliteHarness
from conformance.test_run_machine import run_machine_for

TestSqliteRunMachine = run_machine_for(SqliteHarness, 60, 40)
TestSqliteRunMachineLong = pytest.mark.long(run_machine_for(SqliteHarness, 300, 60))
