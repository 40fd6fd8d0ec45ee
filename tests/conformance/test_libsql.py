from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from conformance.libsql_harness import LibsqlHarness
from support.libsql_servers import private_sqld

from celery_anarchon.testing import RunSuite


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with private_sqld(tmp_path_factory.mktemp("sqld")) as running:
        LibsqlHarness.server = running
        yield


class TestLibsql(RunSuite):
    harness_class = LibsqlHarness
    race_threads: ClassVar[int] = 6
    race_slots: ClassVar[int] = 20
    race_processes: ClassVar[tuple[int, int]] = (3, 2)
