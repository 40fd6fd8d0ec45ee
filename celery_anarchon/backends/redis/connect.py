"""How calls reach a server: the one place that the store asks for a :class:`Source`.

A reader's path: :mod:`.source` (what a batch's replies mean), :mod:`.server`, :mod:`.cluster` and :mod:`.handed` (the
sources), :mod:`.links` (connections of our own), :mod:`.talk` (one connection), :mod:`.replies` (what an error means).
"""

from __future__ import annotations

import importlib
from typing import Any

from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.cluster import OwnCluster
from celery_anarchon.backends.redis.handed import Handed, HandedCluster
from celery_anarchon.backends.redis.links import CALL_TIMEOUT
from celery_anarchon.backends.redis.replies import Unusable
from celery_anarchon.backends.redis.server import Own
from celery_anarchon.backends.redis.source import Source
from celery_anarchon.backends.redis.talk import Driver, Wait
from celery_anarchon.errors import ConfigurationError

__all__ = ["CALL_TIMEOUT", "Source", "Unusable", "Wait", "handed_source", "own_source"]


def own_source(address: Address, product: str, wait: Wait | None) -> Source:
    """A source with connections of our own, over the driver of *product* (``redis`` or ``valkey``)."""
    try:
        driver = Driver(importlib.import_module(product))
    except ImportError as error:
        raise ConfigurationError(
            f'the driver {product} is not installed: pip install "celery-anarchon[{product}]"'
        ) from error
    return OwnCluster(address, driver, wait) if address.kind == "cluster" else Own(address, driver, wait)


def handed_source(client: Any, product: str, wait: Wait | None) -> Source:
    """A source on *client*, a client of redis-py or valkey-py (either speaks to either server)."""
    named = f"{product}=... is a {type(client).__module__}.{type(client).__qualname__}"
    roots = [kind.__module__.split(".") for kind in type(client).__mro__]
    root = next((parts[0] for parts in roots if parts[0] in ("redis", "valkey")), None)
    if root is None:
        raise ConfigurationError(f"{named}: give a URL, a mapping of connection options or a client of redis-py")
    if any("asyncio" in parts for parts in roots):
        raise ConfigurationError(f"{named}, which is for asyncio: give a client for threads")
    driver = Driver(importlib.import_module(root))
    names = {kind.__name__ for kind in type(client).__mro__}
    if names & {"RedisCluster", "ValkeyCluster"} and not any("Pipeline" in name for name in names):
        return HandedCluster(client, driver, wait)
    if names & {"Redis", "Valkey"} and not any("Pipeline" in name for name in names):
        return Handed(client, driver, wait)
    raise ConfigurationError(f"{named}: give the client itself")
