"""Redeliveries that the store waits for, in a real worker of this process: ``acks_late`` without ``max_attempts``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from celery import Task
from celery.exceptions import Reject
from celery.worker import state
from support.shop import TERMS, Shop, until

from celery_anarchon import current_run
from celery_anarchon.backends.runs import Start
from celery_anarchon.model import GateAnswer, RunState, Terms

AGAIN = {"delivery_info": {"redelivered": True}}
"""As RabbitMQ and Redis mark it; the broker in memory keeps it and sets none itself."""


@pytest.fixture(params=["solo", "threads"])
def shop(request: pytest.FixtureRequest) -> Shop:
    shop = Shop(request.param)

    def note() -> None:
        run = current_run()
        assert run is not None
        shop.bodies.append((run.job, run.attempt, 0))

    @shop.app.task(name="late", shared=False, acks_late=True)
    def late() -> int:
        note()
        return 7

    @shop.app.task(name="late.slow", shared=False, acks_late=True)
    def late_slow() -> int:
        note()
        shop.begun.set()
        assert shop.go.wait(20)
        return 7

    @shop.app.task(name="puts-back", bind=True, shared=False, acks_late=True)
    def puts_back(task: Task) -> int:
        note()
        if len(shop.bodies) < 3:
            raise Reject("not now", requeue=True)
        return 7

    return shop


def held_elsewhere(shop: Shop, job: str, terms: Terms = TERMS) -> int:
    """A run whose worker was killed just now."""
    slot = shop.queued(job, terms)
    gone = Start(job=job, slot=slot, attempt=1, retries=0, token="gone", worker="gone", terms=terms, acks_late=True)
    assert shop.backend.start([gone])[0].answer is GateAnswer.START
    return slot


def unacknowledged(worker: Any) -> int:
    qos = worker.consumer.task_consumer.channel.qos
    return len(set(qos._delivered) - set(qos._dirty))


def test_a_killed_workers_message_goes_on_when_its_lease_is_over(shop: Shop) -> None:
    with shop.working() as worker:
        slot = held_elsewhere(shop, "job")
        task_id = shop.send("late", "job", slot, **AGAIN)
        until(lambda: shop.workers.asked >= 1)
        assert unacknowledged(worker) == 1
        run = shop.ends("job", slot, RunState.SUCCEEDED)
        assert shop.app.AsyncResult(task_id).get(timeout=20) == 7
        until(lambda: unacknowledged(worker) == 0)
    assert (run.attempt, shop.bodies) == (2, [("job", 2, 0)])
    # No hot loop: a heartbeat is 0.2 s here.
    assert all(later - earlier > 0.15 for earlier, later in pairwise(shop.workers.asked_at))


def test_a_body_that_puts_its_message_back_runs_again(shop: Shop) -> None:
    """The broker is told first: the message is back before the store knows that the run is free."""
    with shop.working() as worker:
        slot = shop.queued("job")
        shop.send("puts-back", "job", slot, **AGAIN)
        run = shop.ends("job", slot, RunState.SUCCEEDED)
        until(lambda: unacknowledged(worker) == 0)
    assert (run.attempt, shop.bodies) == (3, [("job", 1, 0), ("job", 2, 0), ("job", 3, 0)])


@pytest.mark.parametrize("shop", ["threads"], indirect=True)
def test_a_redelivery_beside_its_run_waits_for_the_end(shop: Shop) -> None:
    """One body, its result; the copies acknowledged and counted, and a command finds the one that runs."""
    with shop.working() as worker:
        slot = shop.queued("job")
        task_id = shop.send("late.slow", "job", slot, **AGAIN)
        assert shop.begun.wait(20)
        shop.send("late.slow", "job", slot, **AGAIN)
        until(lambda: (run := shop.run("job", slot)) is not None and run.refused >= 2)
        assert unacknowledged(worker) == 2
        assert state.requests[task_id] in state.active_requests
        # A third one is one too many.
        shop.send("late.slow", "job", slot, **AGAIN)
        until(lambda: len(worker.consumer.task_consumer.channel.qos._delivered) and shop.is_empty())
        until(lambda: unacknowledged(worker) == 2)
        shop.go.set()
        run = shop.ends("job", slot, RunState.SUCCEEDED)
        until(lambda: unacknowledged(worker) == 0)
        assert shop.app.AsyncResult(task_id).get(timeout=20) == 7
    assert (run.attempt, shop.bodies) == (1, [("job", 1, 0)])


def test_held_redeliveries_keep_no_others_away(shop: Shop) -> None:
    """A worker that may fetch as many as it executes, and holds as many: the next message comes all the same."""
    shop.app.conf.worker_prefetch_multiplier = 1
    terms = Terms(lease=600_000, queue_timeout=600_000)
    with shop.working() as worker:
        for job in ("one", "two"):
            shop.send("late", job, held_elsewhere(shop, job, terms), terms=terms, **AGAIN)
        until(lambda: len(worker._process_task._waiting) == 2)
        slot = shop.queued("job")
        shop.send("quick", "job", slot)
        shop.ends("job", slot, RunState.SUCCEEDED)
        assert unacknowledged(worker) == 2
    assert shop.bodies == [("job", 1, 0)]
