"""What the gate costs a worker's main process, per task: tracked, untracked, and without the gate, in one run.

    python tests/benchmarks/gate.py [--tasks 2000] [--turns 3]

Prefork, two children, an empty task, Redis as broker and store. The figures are CPU milliseconds of the main process by
the kernel's account, so they depend little on what else the machine does.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import redis
from figures import Table, command
from servers import redis_server
from support.beats import until
from support.crew import Crew
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.model import OnUnknown, Terms

SIZES = {"tasks": 2_000, "turns": 3}
TINY = {"tasks": 5, "turns": 1}

TICKS = os.sysconf("SC_CLK_TCK")
TERMS = Terms(lease=30_000, queue_timeout=3_600_000)


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / TICKS


@contextmanager
def a_worker(folder: Path, url: str, gate: str) -> Iterator[tuple[Crew, int]]:
    folder.mkdir()
    settings = {
        "worker_prefetch_multiplier": 16,
        "anarchon_lease": 30,
        "anarchon_heartbeat": 10,
        "result_backend": None,
    }
    crew = Crew(folder, f"{url[:-1]}1?prefix={folder.name}:", url, settings=settings)
    try:
        worker = crew.fleet.worker("worker", "-c", "2", pool="prefork", loglevel="WARNING", CREW_GATE=gate)
        with redis.Redis.from_url(url, **RESP2) as raw:
            until(lambda: raw.client_list(), "clients")
            crew.app().send_task("nothing")
            until(lambda: not raw.llen("celery"), "the worker")
        yield crew, worker.pid
    finally:
        crew.close()


def one(folder: Path, url: str, kind: str, count: int) -> float:
    """CPU milliseconds of the main process for each of *count* tasks."""
    with a_worker(folder, url, "no" if kind == "without" else "yes") as (crew, pid), redis.Redis.from_url(url) as raw:
        headers = [{"plain": 1}] * count
        if kind == "tracked":
            first = crew.reader.now() - count
            jobs = [f"job-{number}" for number in range(count)]
            crew.reader.claim(
                [ClaimRequest(job=job, slot=first, owner="b", beat="b", lease=60_000, terms=TERMS) for job in jobs]
            )
            crew.reader.confirm([Confirmation(job=job, slot=first, owner="b", attempt=1, late=1) for job in jobs])
            headers = [
                {
                    "anarchon": {
                        **wire.header(
                            namespace=crew.reader.namespace, job=job, slot=first, attempt=1, late=1, beat="b"
                        ),
                        **wire.terms_header(TERMS, OnUnknown.REPEAT),
                    }
                }
                for job in jobs
            ]
        app = crew.app()
        before = cpu_ms(pid)
        for header in headers:
            app.send_task("nothing", headers=header, task_id=str(uuid.uuid4()))
        until(lambda: not raw.llen("celery") and not raw.hlen("unacked"), "the end of all tasks", 600)
        if kind == "tracked":
            until(lambda: not any(crew.reader.living(job) for job in jobs[-5:]), "the last ends")
        return (cpu_ms(pid) - before) / count


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    table = Table(f"The gate: CPU ms of a worker's main process for each of {sizes.tasks:,} tasks")
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name), private=True) as server:
        found: dict[str, list[float]] = {"without": [], "untracked": [], "tracked": []}
        for turn in range(sizes.turns):
            for kind, figures in found.items():
                figures.append(one(Path(name) / f"{kind}{turn}", server.url, kind, sizes.tasks))
    median = {kind: statistics.median(figures) for kind, figures in found.items()}
    for kind, figure in median.items():
        table.add(kind, cpu_ms=figure, gate_ms=figure - median["without"])
    yield table


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
