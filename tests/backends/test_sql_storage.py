"""Storage under load: rows that are made, updated and dropped all the time leave no more room taken than they need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.postgres_servers import private_postgres

from celery_anarchon.backends.base import ClaimRequest, Confirmation, Keep
from celery_anarchon.backends.postgres import PostgresBackend
from celery_anarchon.backends.sqlite import SqliteBackend

JOBS, RETENTION, SECONDS = [f"job {number}" for number in range(100)], 60_000, 300


@pytest.fixture(params=["postgres", "sqlite"])
def store(request: Any, tmp_path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A backend, and how many bytes it takes."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            path = tmp_path / "anarchon.db"
            backend: Any = SqliteBackend(path)
            yield stack.enter_context(closing(backend)), lambda: path.stat().st_size
            return
        # As it comes, but for the pause between looks: a minute, of five, is too coarse for a test.
        server = stack.enter_context(private_postgres(tmp_path, ("autovacuum_naptime=15s",)))
        backend = stack.enter_context(closing(PostgresBackend(server.url)))

        def size() -> int:
            with server.client() as client:
                query = "select sum(pg_total_relation_size(oid)) from pg_class where relname like 'anarchon%%'"
                found = client.execute(query.replace("%%", "%") + " and relkind = 'r'").fetchone()
            return int(found[0]) if found else 0

        yield backend, size


@pytest.mark.long
def test_storage_is_flat_under_a_hundred_jobs_a_second(store: Any) -> None:
    backend, size = store
    backend.open("app")
    began = backend.now()
    slot, sizes, last = began // 1_000 * 1_000, [], 0
    while slot < began + SECONDS * 1_000:
        slot += 1_000
        time.sleep(max(0, (slot - backend.now()) / 1000))
        asked = [ClaimRequest(job=job, slot=slot, owner="a", beat="b", lease=30_000) for job in JOBS]
        backend.claim(asked)
        assert all(backend.confirm([Confirmation(job=job, slot=slot, owner="a", attempt=1, late=1) for job in JOBS]))
        if slot >= last + 5_000:
            last = slot
            keeps = [Keep(job=job, decided=slot, history_size=1_000_000, history_ttl=RETENTION) for job in JOBS]
            backend.tidy(keeps)
            sizes.append(size())
    rows = len(backend.history(JOBS[0], 1_000))
    print(f"\n{backend.name}: {rows} rows a job; KiB each half minute: {[at // 1024 for at in sizes[::6]]}")
    assert rows <= 70
    # From when the first rows were dropped, twice their age, to the end.
    early, late = max(sizes[18:30]), max(sizes[-12:])
    assert late <= early * 1.25
