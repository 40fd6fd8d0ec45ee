"""Batches of claims on PostgreSQL and SQLite: ours, and the same SQL by hand beside it, in one run.

    python tests/benchmarks/claims.py [--batch 1000] [--rounds 30]

Prints the best of all rounds, which other load disturbs least, and ratios; asserts nothing, because a machine is not a
test. A ratio of 0.5 means that a batch takes
twice as long as its bare SQL: one transaction that locks the jobs, reads the clock, and inserts what has no record.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psycopg
from support.postgres_servers import private_postgres

from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.backends.postgres import PostgresBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Answer, Millis

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


@contextmanager
def stores(folder: Path, jobs: list[str]) -> Iterator[list[tuple[str, Any, Callable[[int], None]]]]:
    """Name, our backend, the same by hand, each on tables of its own."""
    path = folder / "anarchon.db"
    with private_postgres(folder / "postgres", ("fsync=on", "full_page_writes=on")) as server:
        backends: list[Any] = [PostgresBackend(server.url), SqliteBackend(path)]
        bare = PostgresBackend(server.url, "bare"), SqliteBackend(path, "bare")
        for backend in (*backends, *bare):
            backend.open("bench")
        with (
            psycopg.connect(server.url, autocommit=True, prepare_threshold=None) as by_hand,
            closing(sqlite3.connect(path, isolation_level=None)) as by_hand_too,
        ):
            by_hand.execute("insert into bare_jobs (job) select unnest(%s::text[])", [jobs])
            by_hand_too.execute("pragma synchronous=full")
            yield [
                ("PostgreSQL", backends[0], bare_postgres(by_hand, jobs)),
                ("SQLite", backends[1], bare_sqlite(by_hand_too, jobs)),
            ]
        for backend in (*backends, *bare):
            backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    jobs = [f"job {number:05}" for number in range(options.batch)]
    with tempfile.TemporaryDirectory() as folder, stores(Path(folder), jobs) as all_stores:
        for name, backend, by_hand in all_stores:
            base = backend.now() - 10_000_000
            winner = ours(backend, requests(jobs, base, options.rounds, "a"), Answer.WON)
            loser = ours(backend, requests(jobs, base, options.rounds, "late"), Answer.TAKEN)
            bare, won, lost = best(options.rounds, by_hand, winner, loser)
            rate = options.batch / won
            print(
                f"{name:11} batch of {options.batch}: bare {bare * 1000:7.1f} ms, won {won * 1000:7.1f} ms "
                f"({rate:,.0f} claims/s, ratio {bare / won:.2f}), lost {lost * 1000:7.1f} ms"
            )


if __name__ == "__main__":
    main()
