"""The names of a namespace's keys, and words as bytes."""

from __future__ import annotations

import zlib
from functools import lru_cache

from celery_anarchon.model import Millis

SHARDS = 64
"""Never to be changed: where a job's keys are follows from it."""


def encoded(text: str) -> bytes:
    """Any text, also half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


class Keys:
    """The names of a namespace's keys. Each carries the tag of its shard, so that a cluster keeps a shard together."""

    def __init__(self, prefix: str) -> None:
        # The first brace of a key must be the tag's. One to one, so two prefixes never meet.
        plain = prefix.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self._start = encoded(plain)
        self.named = lru_cache(maxsize=1024)(self._named)
        """The job's name in bytes, and what :meth:`of` says of it: kept, for a worker needs both at each start and at
        each end."""

    def shard(self, job: bytes) -> int:
        return zlib.crc32(job) % SHARDS

    def leases(self, shard: int) -> bytes:
        """Sorted set: the claims and runs of the shard that somebody holds, held, or must start, by the end of that."""
        return self._key(shard, b"leases")

    def runs(self, job: bytes) -> bytes:
        """Hash: the records of a job by slot, its floor, and its fingerprints."""
        return self._key(self.shard(job), b"runs:" + job)

    def slots(self, job: bytes) -> bytes:
        """Sorted set: the slots of a job that have a record."""
        return self._key(self.shard(job), b"slots:" + job)

    def claims(self, job: bytes) -> bytes:
        """Stream: the claims of a job, where a strategy keeps them so."""
        return self._key(self.shard(job), b"claims:" + job)

    def marker(self, job: bytes, slot: Millis) -> bytes:
        """String: whose the claim of one slot is, where a strategy keeps them so."""
        return self._key(self.shard(job), b"claim:%d:%s" % (slot, job))

    def living(self, job: bytes) -> bytes:
        """Sorted set: the slots of a job that are claimed, queued, running or retrying."""
        return self._key(self.shard(job), b"living:" + job)

    def free(self, shard: int) -> bytes:
        """Sorted set: the slots of the shard that waited for the end of other runs, of which none is left."""
        return self._key(shard, b"free")

    def of(self, job: bytes) -> tuple[bytes, ...]:
        """What the operations on one run get, in the order of their scripts."""
        shard = self.shard(job)
        leases, free = self.of_shard(shard)
        return (leases, *self.of_job(shard, job), free)

    def _named(self, job: str) -> tuple[bytes, tuple[bytes, ...]]:
        name = encoded(job)
        return name, self.of(name)

    def of_job(self, shard: int, job: bytes) -> tuple[bytes, bytes, bytes]:
        """Its records, its slots, its living ones. *shard* is its own."""
        start = self._key(shard, b"")
        return b"%sruns:%s" % (start, job), b"%sslots:%s" % (start, job), b"%sliving:%s" % (start, job)

    def of_shard(self, shard: int) -> tuple[bytes, bytes]:
        """Its leases, its free ones."""
        return self.leases(shard), self.free(shard)

    @property
    def workers(self) -> bytes:
        """Hash: owner -> what a worker says of itself."""
        return self._key(0, b"workers")

    @property
    def workers_seen(self) -> bytes:
        """Sorted set: owners by when they were seen."""
        return self._key(0, b"workers-seen")

    @property
    def workers_since(self) -> bytes:
        """Hash: `since`, when the first worker with the gate was seen."""
        return self._key(0, b"workers-since")

    @property
    def beats(self) -> bytes:
        """Hash: owner -> what a beat says of itself."""
        return self._key(0, b"beats")

    @property
    def seen(self) -> bytes:
        """Sorted set: owners by when they were seen."""
        return self._key(0, b"seen")

    @property
    def meta(self) -> bytes:
        """Hash: layout, app, and how claims are stored."""
        return self._key(0, b"meta")

    def _key(self, shard: int, name: bytes) -> bytes:
        return b"%s{%d}%s" % (self._start, shard, name)
