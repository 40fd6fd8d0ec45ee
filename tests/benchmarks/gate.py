"""What the gate costs a worker's main process, per task: tracked and untracked, with the gate and without, in one run.

    python tests/benchmarks/gate.py [--tasks 150] [--rounds 20]

Prefork, two children, an empty task, 50 jobs that run again and again, Redis as broker and store. In each round two new
workers, one with the gate and one without, work in turns: two processes of one program differ by more than the gate
costs. In a *burst* all messages are there at once; *apart* they come at 100 a second, so that hardly any two share a
call to the store. The figures are CPU milliseconds of the main process, all its threads, by the kernel's account: the
median over the rounds; and of each round's difference to the same messages without the gate, the median and the mean.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import redis
from figures import Table, command
from servers import redis_server
from support.beats import until
from support.crew import Crew
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.model import OnUnknown, Terms

SIZES = {"tasks": 150, "rounds": 20}
TINY = {"tasks": 5, "rounds": 1}

TICKS = os.sysconf("SC_CLK_TCK")
TERMS = Terms(lease=30_000, queue_timeout=3_600_000)
APART = 0.01
JOBS = 50
KINDS = tuple((message, gate) for message in ("untracked", "tracked") for gate in ("no", "yes"))
"""Whose message it is, and whether the worker has the gate."""
MODES = ("in a burst", "100 a second")


def cpu_ms(pid: int) -> float:
    """Of the process and all its threads, to the nanosecond where the kernel says so."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6
    except (FileNotFoundError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / TICKS


class Site:
    """A worker, its broker, and the run records of its store."""

    def __init__(self, crew: Crew, pid: int, raw: Any, has_gate: bool) -> None:
        self.crew = crew
        self.has_gate = has_gate
        self.pid = pid
        self.raw = raw
        self.app = crew.app()
        self._slot = crew.reader.now() - 86_400_000

    def headers(self, kind: str, count: int) -> tuple[list[str], list[dict[str, Any]]]:
        """The jobs, and the headers of each message; a tracked one has its record."""
        if kind != "tracked":
            return [], [{"plain": 1}] * count
        reader, self._slot = self.crew.reader, self._slot + count
        runs = [(f"job-{number % JOBS}", self._slot + number) for number in range(count)]
        reader.claim(
            [ClaimRequest(job=job, slot=slot, owner="b", beat="b", lease=60_000, terms=TERMS) for job, slot in runs]
        )
        reader.confirm([Confirmation(job=job, slot=slot, owner="b", attempt=1, late=1) for job, slot in runs])
        terms = wire.terms_header(TERMS, OnUnknown.REPEAT)
        named = [
            wire.header(namespace=reader.namespace, job=job, slot=slot, attempt=1, late=1, beat="b")
            for job, slot in runs
        ]
        return sorted({job for job, _ in runs}), [{wire.HEADER: {**one, **terms}} for one in named]

    def measure(self, kind: str, count: int, *, apart: bool) -> float:
        """CPU milliseconds of the main process for each of *count* tasks."""
        jobs, headers = self.headers(kind, count)
        if not apart:
            os.kill(self.pid, signal.SIGSTOP)
        before = cpu_ms(self.pid)
        for header in headers:
            self.app.send_task("nothing", headers=header, task_id=str(uuid.uuid4()))
            if apart:
                time.sleep(APART)
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: not self.raw.llen("celery") and not self.raw.hlen("unacked"), "the end of all tasks", 600)
        if self.has_gate:
            until(lambda: not any(self.crew.reader.living(job) for job in jobs), "the last ends")
        return (cpu_ms(self.pid) - before) / count


@contextmanager
def a_site(folder: Path, broker: str, store: str, gate: str) -> Iterator[Site]:
    folder.mkdir()
    settings = {
        "worker_prefetch_multiplier": 16,
        "anarchon_lease": 30,
        "anarchon_heartbeat": 10,
        "result_backend": None,
    }
    crew = Crew(folder, store, broker, settings=settings)
    try:
        worker = crew.fleet.worker("worker", "-c", "2", pool="prefork", loglevel="WARNING", CREW_GATE=gate)
        with redis.Redis.from_url(broker, **RESP2) as raw:
            crew.app().send_task("nothing")
            until(lambda: not raw.llen("celery") and not raw.hlen("unacked"), "the worker")
            yield Site(crew, worker.pid, raw, gate == "yes")
    finally:
        crew.close()


def a_round(
    folder: Path, broker: str, store: str, number: int, count: int
) -> Iterator[tuple[str, tuple[str, str], float]]:
    """The mode, the kind and the figure of each measurement with a fresh pair of workers."""
    with ExitStack() as stack:
        site = {
            gate: stack.enter_context(
                a_site(folder / f"{gate}-{number}", f"{broker[:-1]}{place}", f"{store[:-1]}{place}", gate)
            )
            for place, gate in enumerate(("no", "yes"))
        }
        first = number % len(KINDS)
        for mode in ("warm", *MODES):
            for message, gate in KINDS[first:] + KINDS[:first]:
                figure = site[gate].measure(message, count, apart=mode == MODES[1])
                if mode in MODES:
                    yield mode, (message, gate), figure


def measure(sizes: SimpleNamespace) -> Iterator[Table]:
    found: dict[str, dict[tuple[str, str], list[float]]] = {mode: {kind: [] for kind in KINDS} for mode in MODES}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "broker").mkdir()
        (folder / "store").mkdir()
        broker = stack.enter_context(redis_server(folder / "broker", private=True)).url
        store = stack.enter_context(redis_server(folder / "store", private=True)).url
        for number in range(sizes.rounds):
            for mode, kind, figure in a_round(folder, broker, store, number, sizes.tasks):
                found[mode][kind].append(figure)
    for mode, of_kind in found.items():
        table = Table(f"The gate: CPU ms of a worker's main process for each of {sizes.tasks:,} tasks, {mode}")
        for message in ("untracked", "tracked"):
            without, figures = of_kind[message, "no"], of_kind[message, "yes"]
            over = [one - other for one, other in zip(figures, without, strict=True)]
            table.add(f"{message}, no gate", cpu_ms=median(without))
            table.add(f"{message}, gate", cpu_ms=median(figures), gate_ms=median(over), mean=mean(over))
        yield table


if __name__ == "__main__":
    command(__doc__, SIZES, TINY, measure)
