from __future__ import annotations

from typing import Any

from celery_anarchon.testing import report_lines


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = report_lines()
    if lines:
        terminalreporter.section("conformance")
        for line in lines:
            terminalreporter.write_line(line)
