"""The gate in a real worker of this process: which messages run, what the record says, what the broker is told."""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.worker.components import Beat, Pool
from celery.worker.state import requests
from support.shop import LEASE, Shop, until

from celery_anarchon import Anarchon, current_run
from celery_anarchon.backends.base import Confirmation
from celery_anarchon.backends.runs import Start
from celery_anarchon.model import GateAnswer, OnUnknown, Overlap, RunState, Terms
from celery_anarchon.signals import claim_lost, run_settled
from celery_anarchon.wire import instant
from celery_anarchon.worker import GateStep


@pytest.fixture(params=["solo", "threads"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.param)


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "state", "reason"),
    [
        ("quick", RunState.SUCCEEDED, None),
        ("fails", RunState.FAILED, "exception"),
        ("ignores", RunState.SUCCEEDED, "ignored"),
        ("rejects", RunState.FAILED, "rejected"),
        ("retries", RunState.SUCCEEDED, None),
        ("no-such-task", RunState.LOST_IN_QUEUE, "unknown-task"),
    ],
)
def test_each_outcome_settles_the_run(shop: Shop, task: str, state: RunState, reason: str | None) -> None:
    with shop.working() as worker:
        slot = shop.queued("job")
        shop.send(task, "job", slot)
        run = shop.ends("job", slot, state, reason)
    assert run.attempt == 1
    if state is not RunState.LOST_IN_QUEUE:
        assert run.worker == worker.hostname
        assert run.started_at is not None and run.ended_at is not None and run.late == 0.005
    bodies = {"retries": [("job", 1, 0), ("job", 1, 1), ("job", 1, 2)], "no-such-task": []}
    assert shop.bodies == bodies.get(task, [("job", 1, 0)])
    assert shop.backend.living("job") == []


def test_an_expired_message_ends_in_the_queue(shop: Shop) -> None:
    slot = shop.queued("job")
    shop.send("quick", "job", slot, expires=-1)
    with shop.working():
        shop.ends("job", slot, RunState.LOST_IN_QUEUE, "expired")
    assert shop.bodies == []


def test_a_time_limit_that_the_pool_cannot_enforce(shop: Shop) -> None:
    slot = shop.queued("job")
    with shop.working():
        task_id = shop.send("slow", "job", slot, time_limit=0.3)
        shop.ends("job", slot, RunState.TIMED_OUT, "time-limit")
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is True, "the body was not told"
    assert shop.run("job", slot) == shop.ends("job", slot, RunState.TIMED_OUT, "time-limit")


# --- which deliveries run ---------------------------------------------------------------------------------------------


def test_a_copy_never_runs(shop: Shop) -> None:
    """Beside the run and after it: acknowledged, counted, and no trace in the result."""
    slot = shop.queued("job")
    with shop.working():
        task_id = shop.send("slow", "job", slot)
        assert shop.begun.wait(20)
        if shop.pool == "threads":
            shop.send("slow", "job", slot)
            until(lambda: shop.run("job", slot).refused == 1)  # type: ignore[union-attr]
        shop.go.set()
        shop.ends("job", slot, RunState.SUCCEEDED)
        refused = shop.run("job", slot).refused  # type: ignore[union-attr]
        shop.send("slow", "job", slot)
        until(lambda: shop.run("job", slot).refused == refused + 1)  # type: ignore[union-attr]
        assert shop.app.AsyncResult(task_id).get(timeout=20) is False
        until(shop.is_empty)
    assert shop.bodies == [("job", 1, 0)]


def test_a_claim_whose_confirm_is_late_runs_and_stays_as_it_ended(shop: Shop) -> None:
    slot = shop.claimed("job")
    with shop.working():
        shop.send("quick", "job", slot)
        shop.ends("job", slot, RunState.SUCCEEDED)
        assert shop.backend.confirm([Confirmation(job="job", slot=slot, owner="beat", attempt=1, late=5)]) == [False]
        shop.ends("job", slot, RunState.SUCCEEDED)


def test_a_run_that_a_beat_without_worker_side_sent(shop: Shop) -> None:
    slot = shop.queued("job", None)
    assert shop.run("job", slot).state is RunState.DISPATCHED  # type: ignore[union-attr]
    with shop.working():
        shop.send("quick", "job", slot, terms=None)
        shop.ends("job", slot, RunState.SUCCEEDED)


def test_an_earlier_attempt_is_stale(shop: Shop) -> None:
    slot = shop.queued("job")
    terms = Terms(lease=LEASE, queue_timeout=60_000, max_attempts=3)
    start = Start(job="job", slot=slot, attempt=2, retries=0, token="elsewhere", worker="other", terms=terms)
    assert shop.backend.start([start])[0].answer is GateAnswer.START
    with shop.working():
        shop.send("quick", "job", slot, attempt=1)
        until(lambda: shop.run("job", slot).refused == 1)  # type: ignore[union-attr]
    assert shop.bodies == []


def test_another_namespace_runs_untracked(shop: Shop) -> None:
    with shop.working():
        task_id = shop.send("quick", "job", shop.slot, namespace="billing")
        assert shop.app.AsyncResult(task_id).get(timeout=20) == 7
    assert shop.run("job", shop.slot) is None


def test_a_store_that_was_wiped(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Recorded from the message and started, and said; not beside a living run that it may not overlap."""
    told: list[Any] = []
    slot = shop.slot

    @run_settled.connect(sender=shop.app)
    def ended(job: str, state: RunState, attempt: int, **_: Any) -> None:
        told.append((job, attempt, state))

    @claim_lost.connect(sender=shop.app)
    def hear(job: str, slot: datetime, run_id: str, reason: str, **_: Any) -> None:
        told.append((job, instant(slot), run_id == shop.anarchon.run_id(job, slot), reason))

    with shop.working():
        shop.send("quick", "job", shop.slot)
        shop.ends("job", shop.slot, RunState.SUCCEEDED)
        assert "lost claim" in caplog.text
        shop.queued("strict", terms := Terms(lease=LEASE, queue_timeout=60_000, overlap=Overlap.SKIP))
        shop.send("quick", "strict", shop.slot - 500, terms=terms)
        until(lambda: "another run of the job lives" in caplog.text)
    assert shop.bodies == [("job", 1, 0)]
    assert told == [("job", slot, True, "no-record"), ("job", 1, RunState.SUCCEEDED)]


def test_a_retry_carries_the_attempt_that_was_granted(shop: Shop) -> None:
    """Mutant retry-keeps-old-header (H3): the gate grants a redelivery attempt 2, and its retry would be stale."""
    terms = Terms(lease=LEASE, queue_timeout=60_000, max_attempts=2)
    slot = shop.queued("job", terms)
    gone = Start(job="job", slot=slot, attempt=1, retries=0, token="gone", worker="gone", terms=terms)
    assert shop.backend.start([gone])[0].answer is GateAnswer.START
    record = shop.store.spaces[shop.backend.namespace].find("job", slot)
    assert record is not None
    record.lease_until = 0
    with shop.working():
        shop.send("retries", "job", slot, attempt=1, terms=terms)
        run = shop.ends("job", slot, RunState.SUCCEEDED)
    assert (run.attempt, shop.bodies) == (2, [("job", 2, 0), ("job", 2, 1), ("job", 2, 2)])


def test_a_message_that_expires_while_its_answer_is_out(shop: Shop) -> None:
    """Mutant ask-then-expire (H11): its start may have been granted, so it is not reported as gone before its start."""
    shop.workers.deaf = True
    slot = shop.queued("job")
    with shop.working():
        task_id = shop.send("quick", "job", slot, expires=3600)
        until(lambda: shop.workers.asked >= 2)
        assert shop.run("job", slot).state is RunState.RUNNING  # type: ignore[union-attr]
        # Expiry is a time; here it is an event.
        requests[task_id].expires = datetime.now(timezone.utc) - timedelta(seconds=1)
        shop.workers.deaf = False
        shop.ends("job", slot, RunState.FAILED, "expired")
    assert shop.bodies == []


# --- leases -----------------------------------------------------------------------------------------------------------


def test_the_lease_is_kept_while_the_body_runs(shop: Shop) -> None:
    slot = shop.queued("job")
    with shop.working():
        task_id = shop.send("slow", "job", slot)
        assert shop.begun.wait(20)
        record = shop.store.spaces[shop.backend.namespace].find("job", slot)
        assert record is not None and record.lease_until is not None
        first = record.lease_until
        until(lambda: record.lease_until > first + 2 * LEASE)
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is False
        shop.ends("job", slot, RunState.SUCCEEDED)


def test_a_lease_begins_when_it_is_asked_for(shop: Shop) -> None:
    """The store counts from before its answer is here: a slow answer makes the lease shorter, never longer."""
    slot, started = shop.queued("job"), shop.workers.start

    def slow_start(starts: Any) -> Any:
        answers = started(starts)
        time.sleep(0.3)
        shop.answered = time.monotonic()
        return answers

    shop.workers.start = slow_start  # type: ignore[method-assign]
    # No heartbeat renews it before it was looked at.
    shop.app.conf.anarchon_heartbeat, shop.app.conf.anarchon_lease = 600, 1800
    terms = Terms(lease=1_800_000, queue_timeout=60_000)
    with shop.working() as worker:
        shop.send("slow", "job", slot, terms=terms)
        assert shop.begun.wait(20)
        (held,) = worker._process_task._keeper._held.values()
        assert held.until <= shop.answered - 0.3 + 1800
        shop.go.set()
        shop.ends("job", slot, RunState.SUCCEEDED)


def test_a_run_that_was_taken_over_is_told_and_cannot_settle(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    terms = Terms(lease=LEASE, queue_timeout=60_000, max_attempts=2)
    slot = shop.queued("job", terms)
    with shop.working():
        task_id = shop.send("slow", "job", slot, terms=terms)
        assert shop.begun.wait(20)
        record = shop.store.spaces[shop.backend.namespace].find("job", slot)
        assert record is not None
        record.attempt, record.token = 2, "another"
        until(lambda: "lost" in caplog.text)
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is True
        until(lambda: "its record stands" in caplog.text)
    assert (record.state, record.attempt, record.token) == (RunState.RUNNING, 2, "another")


def test_a_store_that_is_away_while_a_body_runs(shop: Shop) -> None:
    """Shorter than the lease: nothing. Longer: told; and kept, if the store still says so afterwards."""
    slot = shop.queued("job")
    with shop.working() as worker:
        task_id = shop.send("slow", "job", slot)
        assert shop.begun.wait(20)
        shop.workers.away = True
        side = worker._process_task.__self__ if hasattr(worker._process_task, "__self__") else worker._process_task
        keeper = side._keeper
        token = next(iter(keeper._held))
        until(lambda: keeper.lost(token) is True)
        shop.workers.away = False
        until(lambda: keeper.lost(token) is False)
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is False
        shop.ends("job", slot, RunState.SUCCEEDED)


def test_the_keeper_starts_when_all_has_been_forked(shop: Shop) -> None:
    """An embedded beat that was forked while the keeper's thread held a lock hung for ever. Steps that do not say what
    they follow start in any order."""
    worker = shop.app.WorkController(app=shop.app, pool=shop.pool, beat=True, concurrency=1)
    assert {Pool, Beat} <= set(GateStep.requires)
    started = [step.alias for step in worker.steps]
    assert started.index("GateStep") > max(started.index("Pool"), started.index("Beat"))


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("anarchon_backend", "nowhere://", "nowhere"),
        ("anarchon_lease", 0, "anarchon_lease"),
        ("anarchon_gate_wiat", 5, "anarchon_gate_wait"),
        ("anarchon_app_name", 5, "anarchon_app_name"),
    ],
)
def test_a_wrong_setting_ends_a_worker_in_words(
    setting: str, value: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("proj", broker="memory://", set_as_current=False)
    Anarchon(app)
    app.conf.update({"anarchon_backend": f"memory://{uuid.uuid4()}", setting: value})
    with pytest.raises(SystemExit) as caught:
        app.WorkController(app=app, pool="solo", hostname="w")
    assert caught.value.code == 2
    assert [record.exc_info for record in caplog.records if words in record.getMessage()] == [None]


# --- a store that cannot be asked -------------------------------------------------------------------------------------


def test_held_until_the_store_answers(shop: Shop) -> None:
    shop.workers.away = True
    slot = shop.queued("job")
    with shop.working():
        shop.send("quick", "job", slot)
        until(lambda: shop.workers.asked >= 2)
        assert shop.bodies == []
        shop.workers.away = False
        shop.ends("job", slot, RunState.SUCCEEDED)
    assert shop.bodies == [("job", 1, 0)]


def test_an_answer_that_was_lost_is_asked_for_again(shop: Shop) -> None:
    """As the same delivery: else it would be refused as a copy of itself."""
    shop.workers.deaf = True
    slot = shop.queued("job")
    with shop.working():
        shop.send("quick", "job", slot)
        until(lambda: shop.workers.asked >= 2)
        shop.workers.deaf = False
        run = shop.ends("job", slot, RunState.SUCCEEDED)
    assert (run.attempt, run.refused, shop.bodies) == (1, 0, [("job", 1, 0)])


@pytest.mark.parametrize("how", ["away", "deaf"])
def test_repeat_is_followed_once_the_store_answers(shop: Shop, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """on_unknown=repeat: the body runs without an answer; with one, its lease is kept and its end is told."""
    shop.app.conf.anarchon_gate_wait = 0.7
    setattr(shop.workers, how, True)
    slot = shop.queued("job")
    with shop.working():
        task_id = shop.send("slow", "job", slot, on_unknown=OnUnknown.REPEAT)
        assert shop.begun.wait(20)
        until(shop.is_empty)
        setattr(shop.workers, how, False)
        until(lambda: "followed from here on" in caplog.text)
        record = shop.store.spaces[shop.backend.namespace].find("job", slot)
        assert record is not None and record.state is RunState.RUNNING and record.lease_until is not None
        first = record.lease_until
        until(lambda: record.lease_until > first + LEASE)
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is False
        run = shop.ends("job", slot, RunState.SUCCEEDED)
    assert (run.attempt, run.refused, shop.bodies) == (1, 0, [("job", 1, 0)])


def test_repeat_beside_another_that_has_the_run(shop: Shop) -> None:
    """The store's late no: the body is told, and the record stays the other's."""
    shop.app.conf.anarchon_gate_wait = 0.7
    shop.workers.away = True
    # The other's lease outlasts the wait until the store is asked again, on any machine.
    terms = Terms(lease=600_000, queue_timeout=600_000)
    slot = shop.queued("job", terms)
    with shop.working():
        task_id = shop.send("slow", "job", slot, terms=terms, on_unknown=OnUnknown.REPEAT)
        assert shop.begun.wait(20)
        other = Start(job="job", slot=slot, attempt=1, retries=0, token="elsewhere", worker="other", terms=terms)
        assert shop.backend.start([other])[0].answer is GateAnswer.START
        shop.workers.away = False
        until(lambda: shop.run("job", slot).refused == 1)  # type: ignore[union-attr]
        shop.go.set()
        assert shop.app.AsyncResult(task_id).get(timeout=20) is True
        # The keeper has told what it had to tell: the next run's end.
        after = shop.queued("after")
        shop.send("quick", "after", after)
        shop.ends("after", after, RunState.SUCCEEDED)
    run = shop.run("job", slot)
    assert run is not None and (run.state, run.worker) == (RunState.RUNNING, "other")


def test_on_unknown_skip(shop: Shop) -> None:
    shop.app.conf.anarchon_gate_wait = 0.7
    shop.workers.deaf = True
    slot = shop.queued("job")
    with shop.working():
        shop.send("quick", "job", slot, on_unknown=OnUnknown.SKIP)
        shop.ends("job", slot, RunState.LOST_IN_QUEUE, "store-unknown")
        until(shop.is_empty)
    assert shop.bodies == []


def test_no_hot_loop_while_the_store_is_away(shop: Shop) -> None:
    """Twenty held messages ask as often as one does."""
    shop.workers.away = True
    slots = [shop.queued("job") for _ in range(20)]
    with shop.working():
        for slot in slots:
            shop.send("quick", "job", slot)
        # Looks at 0, 0.5 and 1.5 s: the first to come asks for all.
        until(lambda: shop.workers.asked >= 3)
        first, second, third = shop.workers.asked_at[:3]
        assert second - first >= 0.5 and third - second >= 1.0
        shop.workers.away = False
        for slot in slots:
            shop.ends("job", slot, RunState.SUCCEEDED)
    assert len(shop.bodies) == 20


def test_untracked_tasks_do_not_know(shop: Shop) -> None:
    @shop.app.task(name="plain", shared=False)
    def plain() -> bool:
        return current_run() is None

    with shop.working():
        assert plain.delay().get(timeout=20) is True
    assert shop.workers.asked == 0
