"""What the gate costs a worker's main process, per task: tracked, untracked, and without the gate, in one run.

    python tests/benchmarks/gate.py [TASKS]

Prefork, two children, an empty task, Redis as broker and store. The figures are CPU milliseconds of the main process by
the kernel's account, so they depend little on what else the machine does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import redis
from servers import redis_server
from support.beats import until
from support.crew import Crew
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.model import OnUnknown, Terms

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


def measure(folder: Path, url: str, kind: str, count: int) -> float:
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


def main(count: int = 2_000) -> None:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder), private=True) as server:
        found: dict[str, list[float]] = {"without": [], "untracked": [], "tracked": []}
        for turn in range(3):
            for kind, figures in found.items():
                figures.append(measure(Path(folder) / f"{kind}{turn}", server.url, kind, count))
        median = {kind: round(sorted(figures)[1], 3) for kind, figures in found.items()}
        print(
            json.dumps(
                {
                    "tasks": count,
                    "main_process_cpu_ms_per_task": median,
                    "gate_ms_per_tracked_task": round(median["tracked"] - median["without"], 3),
                    "gate_ms_per_untracked_task": round(median["untracked"] - median["without"], 3),
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
