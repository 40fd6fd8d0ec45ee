"""celery-anarchon: a Celery beat scheduler for any number of beats, with exactly one dispatch per schedule slot.

Public names are loaded when first asked for: importing the package imports neither Celery nor a store's driver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Anarchon": "celery_anarchon.app",
    "Scheduler": "celery_anarchon.scheduler",
    "every": "celery_anarchon.ownschedules",
    "cron": "celery_anarchon.ownschedules",
    "at": "celery_anarchon.ownschedules",
    "run_id": "celery_anarchon.app",
    "current_run": "celery_anarchon.current",
    "Run": "celery_anarchon.model",
    "RunState": "celery_anarchon.model",
    "RedisBackend": "celery_anarchon.backends.redis",
    "ValkeyBackend": "celery_anarchon.backends.redis",
    "RabbitMQBackend": "celery_anarchon.backends.rabbitmq",
    "NatsBackend": "celery_anarchon.backends.nats",
    "PostgresBackend": "celery_anarchon.backends.postgres",
    "SqliteBackend": "celery_anarchon.backends.sqlite",
    "MemoryBackend": "celery_anarchon.backends.memory",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from celery_anarchon.app import Anarchon as Anarchon
    from celery_anarchon.app import run_id as run_id
    from celery_anarchon.backends.memory import MemoryBackend as MemoryBackend
    from celery_anarchon.backends.nats import NatsBackend as NatsBackend
    from celery_anarchon.backends.postgres import PostgresBackend as PostgresBackend
    from celery_anarchon.backends.rabbitmq import RabbitMQBackend as RabbitMQBackend
    from celery_anarchon.backends.redis import RedisBackend as RedisBackend
    from celery_anarchon.backends.redis import ValkeyBackend as ValkeyBackend
    from celery_anarchon.backends.sqlite import SqliteBackend as SqliteBackend
    from celery_anarchon.current import current_run as current_run
    from celery_anarchon.model import Run as Run
    from celery_anarchon.model import RunState as RunState
    from celery_anarchon.ownschedules import at as at
    from celery_anarchon.ownschedules import cron as cron
    from celery_anarchon.ownschedules import every as every
    from celery_anarchon.scheduler import Scheduler as Scheduler


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
