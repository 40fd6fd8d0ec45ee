"""The stores: the contract in :mod:`.base`, the choice by URL in :mod:`.registry`, each driver only when asked for."""

from celery_anarchon.backends.base import ClaimBackend, LeaseBackend, Traits
from celery_anarchon.backends.registry import backend_from_url

__all__ = ["ClaimBackend", "LeaseBackend", "Traits", "backend_from_url"]
