"""The conformance kit: what a backend must do, as tests that its author inherits.

    class MyHarness(BackendHarness):            # how to reach the store, and past the backend
        traits = MyBackend.traits
        ...

    class TestMyBackend(LeaseSuite):            # ClaimSuite for a backend without leases,
        harness_class = MyHarness               # RunSuite for one that follows runs

That is all. Needs ``pip install "celery-anarchon[testing]"``. Nothing outside of this package imports it.
"""

from __future__ import annotations

import pkgutil

import pytest

# Before the modules are imported: their asserts then say both sides.
for _module in pkgutil.iter_modules(__path__):
    pytest.register_assert_rewrite(f"{__name__}.{_module.name}")

from celery_anarchon.testing.claims import CONFORMANCE_VERSION, ClaimSuite  # noqa: E402
from celery_anarchon.testing.clock import ManualClock  # noqa: E402
from celery_anarchon.testing.harness import BackendHarness, clauses_of, report_lines  # noqa: E402
from celery_anarchon.testing.leases import LeaseSuite  # noqa: E402
from celery_anarchon.testing.runs import RunSuite  # noqa: E402

__all__ = [
    "CONFORMANCE_VERSION",
    "BackendHarness",
    "ClaimSuite",
    "LeaseSuite",
    "ManualClock",
    "RunSuite",
    "clauses_of",
    "report_lines",
]
