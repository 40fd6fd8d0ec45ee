from __future__ import annotations

from typing import ClassVar

from conformance.harnesses import ClaimOnlyHarness, MemoryHarness, OwnerlessHarness

from celery_anarchon.testing import ClaimSuite, RunSuite


class TestMemory(RunSuite):
    harness_class = MemoryHarness
    race_slots: ClassVar[int] = 1_000


class TestClaimOnly(ClaimSuite):
    harness_class = ClaimOnlyHarness
    race_slots: ClassVar[int] = 1_000


class TestClaimOnlyWithoutOwners(ClaimSuite):
    harness_class = OwnerlessHarness


def test_what_a_store_without_leases_is_not_asked() -> None:
    left = TestClaimOnly.not_collected
    assert {name.split("_")[1] for name, why in left.items() if why == "exact_history"} >= {"C8", "C15", "C17", "C18"}
    assert {name.split("_")[1] for name, why in left.items() if why == "leases"} == {"C17"}
    assert "C20" not in " ".join(left)
    ownerless = TestClaimOnlyWithoutOwners.not_collected
    assert {name.split("_")[1] for name, why in ownerless.items() if why == "knows_owner"} == {"C2", "C3"}
