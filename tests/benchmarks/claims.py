"""Batches of claims on each store: ours, and on Redis, PostgreSQL and SQLite the same commands by hand beside it.

    python tests/benchmarks/claims.py [--batch 1000] [--rounds 30] [--more 1] [-o claims.json]

The best of all rounds, which other load disturbs least. By hand means: on PostgreSQL and SQLite one transaction that
locks the jobs, reads the clock, and inserts what has no record; on Redis the very bytes of the same script call, packed
beforehand and with a reply that nobody reads into values, and, as the least that a claim could be, SET NX PX for each
row in one pipeline. MORE: RabbitMQ and NATS too, ours alone: there each claim is a message of its own.
"""

from __future__ import annotations

import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psycopg
from figures import Table, command
from support.postgres_servers import private_postgres
from support.redis_servers import private_server

from celery_anarchon.backends import backend_from_url
from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.backends.postgres import PostgresBackend
from celery_anarchon.backends.redis import RedisBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Answer, Millis

SIZES = {"batch": 1_000, "rounds": 30, "more": 1}
TINY = {"batch": 5, "rounds": 1, "more": 0}

BARE_POSTGRES = (
    "select job, floor from bare_jobs where job = any(%s::text[]) order by job for update",
    "select cast(floor(extract(epoch from clock_timestamp()) * 1000) as bigint)",
    "insert into bare (job, slot, state, owner, attempt, lease_until, claimed_at, beat)"
    " select job, slot, 'claimed', owner, 1, 30000, 0, beat"
    " from unnest(%s::text[], %s::bigint[], %s::text[], %s::text[])"
    " as given(job, slot, owner, beat)"
    " on conflict do nothing returning job, slot, owner",
)
BARE_SQLITE = (
    "insert into bare (job, slot, state, owner, attempt, lease_until, claimed_at, beat)"
    " select column1, column2, 'claimed', column3, 1, 30000, 0, column4 from (values {}) where true"
    " on conflict do nothing returning job, slot, owner"
)


def best(rounds: int, *runs: Callable[[int], None]) -> list[float]:
    """The shortest time of each of *runs*, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, its_times in zip(runs, times, strict=True):
            began = time.perf_counter()
            run(number)
            its_times.append(time.perf_counter() - began)
    return [min(its_times[1:]) for its_times in times]


def ours(backend: Any, asked: list[list[ClaimRequest]], answer: Answer) -> Callable[[int], None]:
    def run(number: int) -> None:
        assert {result.answer for result in backend.claim(asked[number])} == {answer}

    return run


def requests(jobs: list[str], base: Millis, rounds: int, owner: str) -> list[list[ClaimRequest]]:
    """Those of each round, made beforehand: they are the caller's."""
    return [
        [ClaimRequest(job=job, slot=base + number, owner=owner, beat="b", lease=30_000) for job in jobs]
        for number in range(rounds + 1)
    ]


def bare_postgres(connection: Any, jobs: list[str]) -> Callable[[int], None]:
    lock, clock, insert = BARE_POSTGRES

    def run(number: int) -> None:
        connection.execute("begin isolation level read committed")
        connection.execute(lock, [jobs]).fetchall()
        connection.execute(clock).fetchone()
        values = [jobs, [number] * len(jobs), ["a"] * len(jobs), ["b"] * len(jobs)]
        assert len(connection.execute(insert, values).fetchall()) == len(jobs)
        connection.execute("commit")

    return run


def bare_sqlite(connection: sqlite3.Connection, jobs: list[str]) -> Callable[[int], None]:
    insert = BARE_SQLITE.format(", ".join(["(?, ?, ?, ?)"] * len(jobs)))

    def run(number: int) -> None:
        connection.execute("begin immediate")
        values = [value for job in jobs for value in (job, number, "a", "b")]
        assert len(connection.execute(insert, values).fetchall()) == len(jobs)
        connection.execute("commit")

    return run


# --- Redis by hand ----------------------------------------------------------------------------------------------------


class Raw:
    """A connection that reads replies and makes nothing of them."""

    _END = b"$3\r\nend\r\n"

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, packed: bytes) -> bytes:
        """Send commands; all replies, errors among them told apart by their first letter."""
        self._socket.sendall(packed + pack(b"ECHO", b"end"))
        found = bytearray()
        while not found.endswith(self._END):
            found += self._socket.recv(1 << 18)
        return bytes(found)

    def close(self) -> None:
        self._socket.close()


def pack(*words: Any) -> bytes:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


class _Kept(Exception):
    pass


def calls_of(backend: Any, asked: list[ClaimRequest]) -> bytes:
    """What *backend* would send for these claims, packed."""
    kept: list[Any] = []

    def keep(calls: Any, **_: Any) -> Any:
        kept.extend(calls)
        raise _Kept

    with patch.object(backend, "_reply", keep), suppress(_Kept):
        backend.claim(asked)
    return b"".join(pack(*call.by_digest()) for call in kept)


def bare_redis(raw: Raw, packed: list[bytes], sign: bytes) -> Callable[[int], None]:
    """*packed*: the commands of each round; *sign*: what must be in the reply."""

    def run(number: int) -> None:
        reply = raw.ask(packed[number])
        assert sign in reply and b"-ERR" not in reply and b"-NOSCRIPT" not in reply, reply[:200]

    return run


# --- the stores -------------------------------------------------------------------------------------------------------

Contender = tuple[str, Any, dict[str, Callable[[int], None]]]
"""A store's name, our backend, and what is done by hand."""


@contextmanager
def redis_store(folder: Path, jobs: list[str], rounds: int) -> Iterator[Contender]:
    with private_server(folder / "redis") as server, closing(Raw(server.port)) as raw:
        ours_, bare = RedisBackend(server.url, prefix="ours:"), RedisBackend(server.url, prefix="bare:")
        for backend in (ours_, bare):
            backend.open("bench")
            # The server knows the script from here on.
            backend.claim(requests(["none"], 1_000, 0, "a")[0])
        script = [calls_of(bare, asked) for asked in requests(jobs, ours_.now() - 10_000_000, rounds, "a")]
        least = [
            b"".join(pack("SET", f"least:{job}:{number}", "a", "NX", "PX", 30_000) for job in jobs)
            for number in range(rounds + 1)
        ]
        yield (
            "Redis",
            ours_,
            {"same commands": bare_redis(raw, script, b"won"), "SET NX": bare_redis(raw, least, b"+OK")},
        )
        ours_.close()
        bare.close()


@contextmanager
def postgres_store(folder: Path, jobs: list[str]) -> Iterator[Contender]:
    with private_postgres(folder / "postgres", ("fsync=on", "full_page_writes=on")) as server:
        ours_, bare = PostgresBackend(server.url), PostgresBackend(server.url, "bare")
        ours_.open("bench")
        bare.open("bench")
        with psycopg.connect(server.url, autocommit=True, prepare_threshold=None) as by_hand:
            by_hand.execute("insert into bare_jobs (job) select unnest(%s::text[])", [jobs])
            yield "PostgreSQL", ours_, {"same commands": bare_postgres(by_hand, jobs)}
        ours_.close()
        bare.close()


@contextmanager
def sqlite_store(folder: Path, jobs: list[str]) -> Iterator[Contender]:
    path = folder / "anarchon.db"
    ours_, bare = SqliteBackend(path), SqliteBackend(path, "bare")
    ours_.open("bench")
    bare.open("bench")
    with closing(sqlite3.connect(path, isolation_level=None)) as by_hand:
        by_hand.execute("pragma synchronous=full")
        yield "SQLite", ours_, {"same commands": bare_sqlite(by_hand, jobs)}
    ours_.close()
    bare.close()


@contextmanager
def message_stores(folder: Path) -> Iterator[Iterator[Contender]]:
    """Those where a claim is a message; their servers take a while to start."""
    from support.nats_servers import nats_server
    from support.rabbitmq_servers import rabbitmq_server

    def opened() -> Iterator[Contender]:
        for name, server in (("RabbitMQ, queue", rabbit), ("NATS", nats)):
            backend = backend_from_url(server.url)
            backend.open("bench")
            yield name, backend, {}
            backend.close()

    for name in ("rabbit", "nats"):
        (folder / name).mkdir()
    with rabbitmq_server(folder / "rabbit") as rabbit, nats_server(folder / "nats") as nats:
        yield opened()


# --- the table --------------------------------------------------------------------------------------------------------


def compare(table: Table, contender: Contender, sizes: SimpleNamespace, jobs: list[str]) -> None:
    name, backend, by_hand = contender
    base = _now(backend) - 50_000
    winner = ours(backend, requests(jobs, base, sizes.rounds, "a"), Answer.WON)
    loser = ours(backend, requests(jobs, base, sizes.rounds, "late"), Answer.TAKEN)
    *bare, won, lost = best(sizes.rounds, *by_hand.values(), winner, loser)
    table.add(name, won_ms=won * 1000, lost_ms=lost * 1000, claims_per_s=sizes.batch / won)
    for what, seconds in zip(by_hand, bare, strict=True):
        table.add(name, **{f"{what} ms": seconds * 1000, f"ours / {what}": won / seconds})


def _now(backend: Any) -> Millis:
    return backend.now() if hasattr(backend, "now") else round(time.time() * 1000)


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    jobs = [f"job {number:05}" for number in range(sizes.batch)]
    table = Table(f"Claims in batches of {sizes.batch:,}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for store in (
            redis_store(folder, jobs, sizes.rounds),
            postgres_store(folder, jobs),
            sqlite_store(folder, jobs),
        ):
            with store as contender:
                compare(table, contender, sizes, jobs)
        if sizes.more:
            few = SimpleNamespace(batch=min(sizes.batch, 100), rounds=min(sizes.rounds, 5))
            with message_stores(folder) as contenders:
                for contender in contenders:
                    compare(table, contender, few, jobs[: few.batch])
            table.notes.append(f"RabbitMQ and NATS: batches of {few.batch}")
    yield table


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
