from __future__ import annotations

import importlib.util
import sys
from typing import Any

from celery_anarchon.testing import report_lines

# Where a store's driver is not installed its suites do not exist, except on the Python on which all of them must run.
_ALL = sys.version_info[:2] == (3, 11)
collect_ignore = [] if _ALL or importlib.util.find_spec("psycopg") else ["test_postgres.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = report_lines()
    if lines:
        terminalreporter.section("conformance")
        for line in lines:
            terminalreporter.write_line(line)
