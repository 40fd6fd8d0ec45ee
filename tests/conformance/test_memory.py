from __future__ import annotations

from typing import ClassVar

from conformance.harnesses import MemoryHarness

from celery_anarchon.testing import RunSuite


class TestMemory(RunSuite):
    harness_class = MemoryHarness
    race_slots: ClassVar[int] = 1_000
