"""A worker of this very process with the gate, its store in memory, and messages of runs made by hand."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, Task
from celery.bootsteps import TERMINATE
from celery.contrib.testing import worker as testing
from celery.exceptions import Ignore, Reject
from support.waiting import wait_for

from celery_anarchon import Anarchon, MemoryBackend, current_run, wire
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.backends.memory import MemoryStore
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, OnUnknown, Run, RunState, Terms

LEASE = 2_000
TERMS = Terms(lease=LEASE, queue_timeout=60_000)


class Flaky(MemoryBackend):
    """A store that a test can switch off, for the worker only."""

    away = False
    deaf = False
    """What is asked is applied, and no answer comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked_at: list[float] = []
        """time.monotonic of each question."""

    @property
    def asked(self) -> int:
        return len(self.asked_at)

    def start(self, starts: Any) -> Any:
        self.asked_at.append(time.monotonic())
        if self.away:
            raise BackendUnavailable("switched off")
        answers = super().start(starts)
        if self.deaf:
            raise OutcomeUnknown("no answer")
        return answers

    def heartbeat(self, holds: Any) -> Any:
        if self.away:
            raise BackendUnavailable("switched off")
        return super().heartbeat(holds)

    def settle(self, settlements: Any) -> Any:
        if self.away:
            raise BackendUnavailable("switched off")
        return super().settle(settlements)


class Shop:
    """An app with a worker, a store, and messages of runs made by hand."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.store = MemoryStore(SystemClock())
        self.backend = MemoryBackend(store=self.store)
        self.backend.open("shop")
        self.workers = Flaky(store=self.store)
        self.app = Celery(f"shop-{uuid.uuid4().hex}", broker=f"memory://{uuid.uuid4().hex}", set_as_current=False)
        self.app.conf.update(
            anarchon_lease=LEASE / 1000,
            anarchon_heartbeat=0.2,
            # Longer than any test: where a worker loses patience is a test's own matter.
            anarchon_gate_wait=60,
            anarchon_app_name="shop",
            result_backend="cache+memory://",
            worker_pool=pool,
            task_acks_late=False,
            worker_hijack_root_logger=False,
            broker_transport_options={"polling_interval": 0.02},
            # Queues in memory are shared by all apps of a process.
            task_default_queue=self.app.main,
        )
        self.anarchon = Anarchon(self.app, backend=self.workers)
        self.bodies: list[tuple[str, int, int]] = []
        self.go = threading.Event()
        self.begun = threading.Event()
        self.slot = self.backend.now() - 1_000
        self.answered = 0.0
        shop = self

        def define(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
            return self.app.task(name=name, bind=True, shared=False, **options)  # type: ignore[no-any-return]

        def note(task: Task) -> Any:
            run = current_run()
            assert run is not None
            shop.bodies.append((run.job, run.attempt, task.request.retries))
            return run

        @self.app.task(name="nudge", shared=False)
        def nudge() -> None:
            pass

        @define("quick")
        def quick(task: Task) -> int:
            note(task)
            return 7

        @define("slow")
        def slow(task: Task) -> Any:
            run = note(task)
            shop.begun.set()
            assert shop.go.wait(20)
            return run.lost

        @define("fails")
        def fails(task: Task) -> None:
            note(task)
            raise KeyError("no")

        @define("ignores")
        def ignores(task: Task) -> None:
            note(task)
            raise Ignore

        @define("rejects", acks_late=True)
        def rejects(task: Task) -> None:
            note(task)
            raise Reject("no", requeue=False)

        @define("retries", max_retries=5)
        def retries(task: Task) -> None:
            note(task)
            if task.request.retries < 2:
                raise task.retry(countdown=0.05)

    def claimed(self, job: str, terms: Terms | None = TERMS, owner: str = "beat") -> int:
        """A new claim of *job*; its slot."""
        self.slot += 1
        request = ClaimRequest(job=job, slot=self.slot, owner=owner, beat="beat", lease=60_000, terms=terms)
        assert self.backend.claim([request])[0].answer is Answer.WON
        return self.slot

    def queued(self, job: str, terms: Terms | None = TERMS) -> int:
        slot = self.claimed(job, terms)
        assert self.backend.confirm([Confirmation(job=job, slot=slot, owner="beat", attempt=1, late=5)]) == [True]
        return slot

    def send(
        self,
        task: str,
        job: str,
        slot: int,
        *,
        attempt: int = 1,
        terms: Terms | None = TERMS,
        on_unknown: OnUnknown = OnUnknown.REPEAT,
        namespace: str | None = None,
        **options: Any,
    ) -> str:
        namespace = namespace or self.backend.namespace
        header = wire.header(namespace=namespace, job=job, slot=slot, attempt=attempt, late=5, beat="beat")
        if terms is not None:
            header.update(wire.terms_header(terms, on_unknown))
        task_id = wire.run_id(namespace, job, slot)
        self.app.send_task(task, task_id=task_id, headers={"anarchon": header}, **options)
        return task_id

    def run(self, job: str, slot: int) -> Run | None:
        found = [run for run in self.backend.history(job, 100) if wire.instant(run.slot) == slot]
        return found[0] if found else None

    def ends(self, job: str, slot: int, state: RunState, reason: str | None = None) -> Run:
        run = until(lambda: (found := self.run(job, slot)) is not None and found.state is state and found)
        assert run.reason == reason
        return run

    @contextmanager
    def working(self) -> Iterator[Any]:
        with testing.start_worker(
            self.app, pool=self.pool, concurrency=2, perform_ping_check=False, shutdown_timeout=30, loglevel="INFO"
        ) as worker:
            yield worker
            threading.Thread(target=self._nudge, args=(worker,), daemon=True).start()

    def _nudge(self, worker: Any) -> None:
        """A worker that is told to stop notices it with its next message, or seconds later."""
        while worker.blueprint.state != TERMINATE:
            self.app.send_task("nudge", headers={})
            threading.Event().wait(0.05)

    def is_empty(self) -> bool:
        with self.app.connection_for_read() as connection:
            return bool(connection.default_channel.queue_declare(self.app.main, passive=True).message_count == 0)


def until(condition: Callable[[], Any], patience: float = 20) -> Any:
    """What *condition* answers once it is true."""
    return wait_for(condition, "what the caller looks for", patience)
