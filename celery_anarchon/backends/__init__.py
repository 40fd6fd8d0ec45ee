"""The stores. The contract is :mod:`.base`, the choice by URL :mod:`.registry`; each driver loads when it is asked for."""

from celery_anarchon.backends.base import ClaimBackend, LeaseBackend, Traits
from celery_anarchon.backends.registry import backend_from_url

__all__ = ["ClaimBackend", "LeaseBackend", "Traits", "backend_from_url"]
