"""The signals of a beat: each is sent when the store and the broker have said so, with what a receiver needs."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from support.ticking import run_until

from celery_anarchon import Anarchon, MemoryBackend, Scheduler, signals, wire
from celery_anarchon.backends.memory import MemoryStore
from celery_anarchon.backends.runs import Worker
from celery_anarchon.events import ClaimUnresolved, Settled
from celery_anarchon.model import RunState
from celery_anarchon.testing.clock import ManualClock

START = 1_774_746_000_000
MINUTE = 60_000


class Stage:
    """A beat on a clock that is moved by hand, and what receivers of all signals were told."""

    def __init__(self) -> None:
        self.clock = ManualClock(wall=START)
        self.store = MemoryStore(self.clock)
        self.app = Celery("proj", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
        self.app.conf.update(timezone="UTC", result_expires=None)
        self.anarchon = Anarchon(self.app, backend=MemoryBackend(store=self.store))
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.receivers = [self._connect(name) for name in signals.__all__]
        self.beat: Any = None

    def _connect(self, name: str) -> Any:
        def hear(sender: Any = None, signal: Any = None, **told: Any) -> None:
            assert sender is self.app
            self.told.append((name, told))

        getattr(signals, name).connect(hear, sender=self.app)
        return hear

    def start(self) -> None:
        kind = type("Beat", (Scheduler,), {"clock": self.clock})
        self.beat = kind(app=self.app)

    def run(self, span: int) -> None:
        run_until(self.clock, self.clock.wall() + span, self.beat.tick)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [told for kind, told in self.told if kind == name]

    def named(self, slot: int, job: str = "job") -> dict[str, Any]:
        return {"job": job, "slot": wire.moment(slot), "run_id": self.anarchon.run_id(job, slot)}


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    if made.beat is not None:
        made.beat.close()
    made.app.close()


def test_a_message_that_the_broker_has(stage: Stage) -> None:
    stage.anarchon.every("job", "1m", "task")
    stage.start()
    stage.run(2 * MINUTE)
    told = stage.of("run_dispatched")
    assert [(one.pop("late") < 1, one) for one in told] == [
        (True, {**stage.named(START + number * MINUTE), "attempt": 1}) for number in (1, 2)
    ]
    assert {name for name, _ in stage.told} == {"run_dispatched"}


def test_a_slot_that_would_overlap(stage: Stage) -> None:
    stage.anarchon.every("job", "1m", "task", overlap="skip")
    stage.start()
    stage.run(2 * MINUTE)
    assert len(stage.of("run_dispatched")) == 1
    assert stage.of("run_skipped") == [{**stage.named(START + 2 * MINUTE), "reason": "overlap"}]


def test_slots_that_are_too_late(stage: Stage) -> None:
    stage.anarchon.every("job", "1m", "task", max_late=50)
    stage.start()
    stage.run(MINUTE)
    stage.beat.close()
    stage.clock.advance(3 * MINUTE + 55_000)
    stage.start()
    stage.run(5_000)
    assert stage.of("run_misfired") == [{**stage.named(START + 4 * MINUTE), "count": 3, "reason": "max-late"}]


def test_a_message_that_nobody_starts(stage: Stage) -> None:
    reader = MemoryBackend(store=stage.store)
    reader.open("proj")
    reader.worker_seen(Worker(owner="w", label="w", version="1"))
    stage.anarchon.every("job", "1h", "task", queue_timeout="2m")
    stage.start()
    stage.run(65 * MINUTE)
    ending = {**stage.named(START + 60 * MINUTE), "attempt": None, "reason": stage.of("run_lost")[0]["reason"]}
    assert stage.of("run_lost") == [ending]
    assert stage.of("run_settled") == [{**ending, "state": RunState.LOST_IN_QUEUE}]


def test_a_claim_that_was_never_answered(stage: Stage) -> None:
    """On a store without leases; that it comes to this: tests/unit/test_claim_only.py."""
    stage.start()
    stage.beat.fanout.emit(ClaimUnresolved(job="job", slot=START))
    assert stage.of("claim_lost") == [{**stage.named(START), "reason": "no-answer"}]


def test_a_receiver_that_raises_hinders_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def broken(**_: Any) -> None:
        raise KeyError("mine")

    signals.run_dispatched.connect(broken, sender=stage.app)
    stage.anarchon.every("job", "1m", "task")
    stage.start()
    with caplog.at_level(logging.ERROR):
        stage.run(2 * MINUTE)
    assert len(stage.of("run_dispatched")) == 2
    assert "mine" in caplog.text
    assert [str(run.state) for run in stage.anarchon.history("job")] == ["dispatched", "dispatched"]


@pytest.mark.parametrize("state", [RunState.LOST, RunState.FAILED])
def test_a_run_that_its_worker_ends_as_lost(state: RunState) -> None:
    """Its process died: nobody else will say so."""
    app = Celery("signals", set_as_current=False)
    told: list[tuple[str, Any]] = []

    def hear(signal: Any, **given: Any) -> None:
        told.append((signal.name, given["attempt"]))

    signals.run_lost.connect(hear, sender=app)
    try:
        assert signals.wants(Settled), "those of each run are made only if somebody hears them"
        signals.teller(app, "namespace")(Settled(job="job", slot=1_000, attempt=2, state=state, reason="worker-lost"))
    finally:
        signals.run_lost.disconnect(hear, sender=app)
    assert told == ([("run_lost", 2)] if state is RunState.LOST else [])
