from __future__ import annotations

from typing import ClassVar

from celery_anarchon.testing import LeaseSuite
from conformance.harnesses import MemoryHarness


class TestMemory(LeaseSuite):
    harness_class = MemoryHarness
    race_slots: ClassVar[int] = 1_000
