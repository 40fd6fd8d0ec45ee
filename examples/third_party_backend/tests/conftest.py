from __future__ import annotations

from typing import Any

from celery_anarchon.testing import report_lines


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many clauses were asked, and which do not apply."""
    terminalreporter.section("conformance")
    for line in report_lines():
        terminalreporter.write_line(line)
