"""For each clause a backend that breaks it, in the way in which somebody once did.

Belongs here: backends that are wrong in one way each. ``tests/conformance/test_saboteurs.py`` runs the suites on them
and requires that very clause to fail: a clause that no saboteur can break proves nothing.
"""

from __future__ import annotations

from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.testing.claimonly import ClaimOnlyMemory
from celery_anarchon.testing.claimsaboteurs import CLAIM_SABOTEURS
from celery_anarchon.testing.leasesaboteurs import LEASE_SABOTEURS
from celery_anarchon.testing.lifesaboteurs import LIFE_SABOTEURS
from celery_anarchon.testing.onestepsaboteurs import ONE_STEP_SABOTEURS
from celery_anarchon.testing.runsaboteurs import RUN_SABOTEURS

SABOTEURS: dict[str, tuple[type[MemoryBackend] | type[SqliteBackend] | type[ClaimOnlyMemory], ...]] = {
    **CLAIM_SABOTEURS,
    **LEASE_SABOTEURS,
    **LIFE_SABOTEURS,
    **RUN_SABOTEURS,
    **ONE_STEP_SABOTEURS,
}
"""Clause -> the backends that break it."""
