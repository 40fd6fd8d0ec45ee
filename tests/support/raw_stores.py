"""Into the store of a crew past its backend, by its URL: what a run's row or lease says, and a store that was wiped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import redis
from support.redis_servers import RESP2

from celery_anarchon.model import Millis

OURS = ("", "_jobs", "_sights", "_beats", "_workers")
"""What a namespace's tables are called after its name. The charter stays: that of a table says what it looks like."""


def lease_until(url: str, job: str, slot: int) -> Millis:
    """When the lease of the run is over, by the store's clock."""
    place, name = _parts(url)
    if place.startswith("redis"):
        with redis.Redis.from_url(place, **RESP2) as raw:
            shards = [raw.zrange(key, 0, -1, withscores=True) for key in raw.keys(f"{name}{{*}}leases")]
        starts, ends = f"{slot}:".encode(), f":{job}".encode()
        scores = [
            score for shard in shards for lease, score in shard if lease.startswith(starts) and lease.endswith(ends)
        ]
        assert len(scores) == 1, scores
        return int(scores[0])
    with _database(place) as link:
        row = link.execute(f"SELECT lease_until FROM {name} WHERE job = '{job}' AND slot = {slot}").fetchone()
    return int(row[0])


def wipe(url: str) -> None:
    """Leave nothing of the namespace."""
    place, name = _parts(url)
    if place.startswith("redis"):
        with redis.Redis.from_url(place, **RESP2) as raw:
            assert raw.delete(*raw.keys(f"{name}*")) > 0
        return
    with _database(place) as link:
        gone = [link.execute(f"DELETE FROM {name}{suffix}").rowcount for suffix in OURS]
    assert gone[0] > 0


def _parts(url: str) -> tuple[str, str]:
    place, _, option = url.partition("?")
    return place, option.partition("=")[2] or "anarchon_runs"


@contextmanager
def _database(place: str) -> Iterator[Any]:
    """A connection; what it did is committed in the end."""
    if place.startswith("sqlite"):
        with closing(sqlite3.connect(place.removeprefix("sqlite:///"), timeout=30)) as file, file:
            yield file
    else:
        with psycopg.connect(place) as link:
            yield link
