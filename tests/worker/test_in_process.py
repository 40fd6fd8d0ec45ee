"""Pools that call bodies in the worker's own process: what waits for a thread, and errors that no callback hears of."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Task
from celery.bootsteps import TERMINATE
from celery.exceptions import Reject
from celery.worker import state
from kombu.transport.memory import Channel
from support.shop import LEASE, TERMS, Shop, until

from celery_anarchon import current_run
from celery_anarchon.model import RunState, Terms


@pytest.fixture(autouse=True)
def unacknowledged_messages_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with any other broker, when the connection of a worker is closed."""
    monkeypatch.setattr(Channel, "do_restore", True)


ONCE = Terms(lease=LEASE, queue_timeout=60_000, max_attempts=1)


def states(shop: Shop, slots: dict[str, int]) -> list[RunState]:
    runs = [shop.run(job, slot) for job, slot in slots.items()]
    return [run.state for run in runs if run is not None]


def has_cancelled(executor: Any) -> bool:
    """Whether its shutdown has thrown out what waited."""
    with executor._shutdown_lock:
        return bool(executor._shutdown)


@contextmanager
def warm_stop(shop: Shop, worker: Any) -> Iterator[None]:
    """As SIGTERM; in its block bodies may end."""
    state.should_stop = 0
    threading.Thread(target=shop._nudge, args=(worker,), daemon=True).start()
    try:
        yield
        until(lambda: worker.blueprint.state == TERMINATE)
    finally:
        state.should_stop = None


def six_runs(shop: Shop) -> dict[str, int]:
    """Of two threads: two bodies, and four starts that were granted and wait."""
    slots = {f"job-{number}": shop.queued(f"job-{number}", ONCE) for number in range(6)}
    for job, slot in slots.items():
        shop.send("slow", job, slot, terms=ONCE)
    until(lambda: len(shop.bodies) == 2 and states(shop, slots) == [RunState.RUNNING] * 6)
    return slots


def test_a_warm_stop_gives_back_what_waits_for_a_thread() -> None:
    """Each rolling deploy would have lost them: released, with no attempt left, and never a body."""
    shop = Shop("threads")
    with shop.working() as worker:
        slots = six_runs(shop)
        with warm_stop(shop, worker):
            until(lambda: has_cancelled(worker.pool.executor))
            shop.go.set()
    assert sorted(states(shop, slots)) == [RunState.QUEUED] * 4 + [RunState.SUCCEEDED] * 2
    with shop.working():
        runs = [shop.ends(job, slot, RunState.SUCCEEDED) for job, slot in slots.items()]
    assert [run.attempt for run in runs] == [1] * 6
    assert sorted(shop.bodies) == [(job, 1, 0) for job in sorted(slots)], "one body each"


def test_a_stop_that_leaves_threads_alone_releases_none_that_runs() -> None:
    """Cold, in this process: what waits goes back and does not begin afterwards; what runs is not another's yet."""
    shop = Shop("threads")
    with shop.working() as worker:
        slots = six_runs(shop)
    assert sorted(states(shop, slots)) == [RunState.QUEUED] * 4 + [RunState.RUNNING] * 2
    assert {run.reason for job in slots for run in shop.backend.living(job)} == {None}
    shop.go.set()
    worker.pool.executor.shutdown()
    assert len(shop.bodies) == 2


# --- errors -----------------------------------------------------------------------------------------------------------


def breaking(shop: Shop) -> None:
    """Tasks that end in what is no failure of a task to Celery."""

    def body(task: Task) -> None:
        run = current_run()
        assert run is not None
        shop.bodies.append((run.job, run.attempt, task.request.retries))

    def refuse(*_: Any) -> None:
        raise Reject("too late")

    @shop.app.task(name="exits", bind=True, shared=False)
    def exits(task: Task) -> None:
        body(task)
        raise SystemExit(3)

    @shop.app.task(name="exits-late", bind=True, shared=False, acks_late=True)
    def exits_late(task: Task) -> None:
        body(task)
        raise SystemExit(3)

    @shop.app.task(name="memory", bind=True, shared=False)
    def memory(task: Task) -> None:
        body(task)
        raise MemoryError("no more")

    class RejectsAfterwards(Task):  # type: ignore[misc]
        on_success = refuse

    @shop.app.task(name="rejects-afterwards", bind=True, base=RejectsAfterwards, shared=False)
    def rejects_afterwards(task: Task) -> None:
        body(task)


@pytest.mark.parametrize("pool", ["threads", "solo"])
@pytest.mark.parametrize(
    ("task", "reason"), [("exits", "exception"), ("memory", "exception"), ("rejects-afterwards", "rejected")]
)
def test_an_error_that_no_callback_hears_of_ends_the_run(pool: str, task: str, reason: str) -> None:
    """It was held, and its lease renewed, for as long as the worker lived: with overlap=skip the job ran no more."""
    shop = Shop(pool)
    breaking(shop)
    with shop.working():
        slot = shop.queued("job")
        shop.send(task, "job", slot)
        shop.ends("job", slot, RunState.FAILED, reason)
    assert shop.bodies == [("job", 1, 0)]
    assert shop.backend.living("job") == []


def test_a_body_that_ended_its_worker_is_not_given_back() -> None:
    """solo: the error leaves the gate and stops the worker. The message comes again, and max_attempts=1 is one body."""
    shop = Shop("solo")
    breaking(shop)
    with shop.working():
        slot = shop.queued("job", ONCE)
        shop.send("exits-late", "job", slot, terms=ONCE)
        shop.ends("job", slot, RunState.FAILED, "exception")
    with shop.working():
        until(lambda: shop.run("job", slot).refused == 1)  # type: ignore[union-attr]
    assert shop.bodies == [("job", 1, 0)]
    shop.ends("job", slot, RunState.FAILED, "exception")


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_timeout_counts_from_the_beginning_of_the_body() -> None:
    """Recorded as timed out while it waited, its guard was free, and the body began later all the same."""
    shop = Shop("threads")
    busy = [threading.Event(), threading.Event()]

    @shop.app.task(name="busy", shared=False)
    def be_busy(number: int) -> None:
        busy[number].set()
        assert shop.go.wait(20)

    with shop.working():
        for number, begun in enumerate(busy):
            be_busy.delay(number)
            assert begun.wait(20)
        slot = shop.queued("job", TERMS)
        shop.send("quick", "job", slot, time_limit=0.5)
        until(lambda: shop.run("job", slot).state is RunState.RUNNING)  # type: ignore[union-attr]
        # Heartbeats, at each of which what is over its time is ended.
        time.sleep(1)
        assert shop.bodies == [] and shop.run("job", slot).state is RunState.RUNNING  # type: ignore[union-attr]
        shop.go.set()
        shop.ends("job", slot, RunState.SUCCEEDED)
