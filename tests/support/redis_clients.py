"""Backends on a Redis of a test's own, and a look past them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from servers import missing
from support.redis_servers import Private

from celery_anarchon.backends.redis import RedisBackend


@contextmanager
def opened(server: Any, prefix: str, kind: Any = RedisBackend, **options: Any) -> Iterator[RedisBackend]:
    backend = kind(server, prefix=prefix, **options)
    try:
        backend.open("app")
        yield backend
    finally:
        backend.close()


def base(backend: RedisBackend) -> int:
    return backend.now() - 3_600_000


def stats(server: Private, command: str) -> int:
    """How often the server has run that command."""
    with server.client() as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def valkey_driver() -> Any:
    if importlib.util.find_spec("valkey") is None:
        missing("no driver valkey")
    return importlib.import_module("valkey")
