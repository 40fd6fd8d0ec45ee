"""For all tests: what CI does not forgive, private servers, and names that no other test uses."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer, redis_server

MARKERS = {
    "race": "many processes or threads want the same thing at the same moment",
    "fleet": "starts real beats (and workers, and a broker)",
    "long": "takes minutes; run by hand",
}

IN_CI = bool(os.environ.get("CI"))


def pytest_configure(config: pytest.Config) -> None:
    known = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    for name, meaning in MARKERS.items():
        if name not in known:
            config.addinivalue_line("markers", f"{name}: {meaning}")


# A skipped test is a question that nobody asked. On a laptop that may be; where the gate is, what cannot run must fail.


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    _fail_what_is_skipped(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    outcome: Any = yield
    _fail_what_is_skipped(outcome.get_result())


def _fail_what_is_skipped(report: Any) -> None:
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"CI is set, and this was skipped: {reason}"


@pytest.fixture
def namespace() -> str:
    """A table name or key prefix of this test alone: a store that others use is never flushed."""
    return f"t_{uuid.uuid4().hex[:16]}"


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that the tests of this run share. Keep to a `namespace`, and do not stop it."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Servers of this file's own, of every kind: each is started when it is first asked for."""
    # Here: most tests have none of its drivers.
    from support.columns import Servers

    with Servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test alone: it may be killed, paused and restarted."""
    with redis_server(tmp_path, private=True) as server:
        yield server
