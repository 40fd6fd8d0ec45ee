"""Runs on their workers on SQL tables: batches, what a look costs, and many that want the same at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from conformance.harnesses import MemoryHarness, SqliteHarness
from hypothesis import HealthCheck, given, settings
from support.run_storm import storm
from support.statements import statements_of, steps_of

from celery_anarchon.backends.base import Confirmation, LapsedClaim, Sighting, Takeover, Terms
from celery_anarchon.backends.runs import (
    GiveBack,
    LapsedEnd,
    NextTry,
    RunBackend,
    RunHold,
    Settlement,
    Unstarted,
)
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Answer, GateAnswer, Millis, RunState
from celery_anarchon.testing.harness import LONG
from celery_anarchon.testing.runforms import PLAIN, QUEUE_ONE, SKIP, TWICE, ask_run, delivery, held, send, slot_of

# --- batches ----------------------------------------------------------------------------------------------------------

OWNERS = st.sampled_from(["x", "y"])
TOKENS = st.sampled_from(["t", "u"])
ALL_TERMS = st.sampled_from([None, PLAIN, SKIP, QUEUE_ONE, TWICE])
ENDS = st.sampled_from([RunState.SUCCEEDED, RunState.FAILED])
KEY = {"job": st.sampled_from(["a", "b"]), "slot": st.integers(0, 3)}
ATTEMPT = {"attempt": st.sampled_from([1, 1, 1, 2])}
FENCE = {**KEY, **ATTEMPT, "retries": st.sampled_from([0, 0, 1]), "token": TOKENS}
STARTS = st.builds(
    lambda job, slot, token, attempt, retries, of, late: delivery(
        job, slot, token, attempt, retries, of or PLAIN, acks_late=late
    ),
    **KEY,
    **ATTEMPT,
    token=TOKENS,
    retries=st.sampled_from([0, 0, 1]),
    of=ALL_TERMS,
    late=st.booleans(),
)
CLAIMS = st.builds(ask_run, **KEY, owner=OWNERS, of=ALL_TERMS)
CALLS: dict[str, st.SearchStrategy[Any]] = {
    "claim": CLAIMS,
    "confirm": st.builds(Confirmation, **KEY, **ATTEMPT, owner=OWNERS, late=st.just(1), delay=st.sampled_from([0, 9])),
    "takeover": st.builds(
        Takeover, **KEY, from_attempt=st.integers(1, 2), owner=OWNERS, beat=st.just("b"), lease=st.just(LONG)
    ),
    "start": STARTS,
    "heartbeat": st.builds(RunHold, **FENCE),
    "settle": st.builds(Settlement, **FENCE, state=ENDS, reason=st.sampled_from([None, "why"])),
    "retrying": st.builds(NextTry, **FENCE, delay=st.sampled_from([0, 9])),
    "give_back": st.builds(GiveBack, **FENCE, message_attempt=st.just(1)),
    "release": st.builds(RunHold, **FENCE),
    "unstarted": st.builds(Unstarted, **KEY, **ATTEMPT, retries=st.integers(0, 2), reason=st.just("expired")),
    "end_lapsed": st.builds(
        LapsedEnd,
        **KEY,
        **ATTEMPT,
        was=st.sampled_from([RunState.QUEUED, RunState.RUNNING, RunState.RETRYING]),
        state=st.sampled_from([RunState.LOST, RunState.DISPATCHED]),
        reason=st.sampled_from(["worker-lost", "job-removed"]),
    ),
    "lapse": st.tuples(*KEY.values()),
}
BATCHES = st.one_of(
    *(
        st.tuples(st.just(name), st.lists(item, min_size=1, max_size=8))
        for name, item in [*CALLS.items(), ("claim", CLAIMS), ("start", STARTS), ("confirm", CALLS["confirm"])]
    )
)


class Side:
    """A store, and where its slots begin."""

    def __init__(self, harness: MemoryHarness | SqliteHarness) -> None:
        self.harness = harness
        self.client: RunBackend = harness.connect_run()
        self.base: Millis = self.client.now() - 3_600_000

    def do(self, name: str, items: list[Any]) -> Any:
        if name == "lapse":
            for job, slot in set(items):
                raw = self.harness.raw_read(job, self.base + slot)
                if raw is not None and raw["lease_until"] is not None:
                    self.harness.lapse(job, self.base + slot, 2 * LONG + 1)
            return None
        return getattr(self.client, name)([replace(item, slot=self.base + item.slot) for item in items])

    def keeps(self) -> Any:
        lapsed: list[LapsedClaim] = self.client.lapsed(100)
        runs = [
            (job, slot_of(run) - self.base, run.state, run.attempt, run.reason, run.worker, run.refused)
            for job in ("a", "b")
            for run in self.client.history(job, 100)
        ]
        over = {(found.job, found.slot - self.base, found.attempt, found.state, found.abandoned) for found in lapsed}
        return runs, over, [(found.job, found.slot - self.base) for found in self.client.waiting(100)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(BATCHES, min_size=1, max_size=12))
def test_a_batch_is_what_its_rows_are_one_after_the_other(tmp_path: Path, calls: list[tuple[str, list[Any]]]) -> None:
    """The same run twice, slots of one job that may not overlap, owners that compete: in the order of the batch."""
    with SqliteHarness(tmp_path) as mine, MemoryHarness(tmp_path) as reference:
        store, honest = Side(mine), Side(reference)
        for name, items in calls:
            assert store.do(name, items) == honest.do(name, items), name
            assert store.keeps() == honest.keeps(), name


def test_a_run_of_which_only_its_message_is_known_was_not_abandoned(tmp_path: Path) -> None:
    """No beat holds it, and none has given it up: what a sweeper does with such a claim is not for it."""
    with SqliteHarness(tmp_path) as harness:
        client = harness.connect_run()
        slot = client.now() - 3_600_000
        assert client.start([delivery("job", slot, "t")])[0].answer is GateAnswer.UNKNOWN
        harness.lapse("job", slot)
        assert [(found.state, found.abandoned) for found in client.lapsed(9)] == [(RunState.RUNNING, False)]


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "anarchon.db")
    backend.open("app")
    yield backend
    backend.close()


def holds(jobs: int, slot: Millis) -> list[RunHold]:
    return [held(f"job {number}", slot, "t") for number in range(jobs)]


def a_life(backend: SqliteBackend, jobs: int, slot: Millis, of: Terms = SKIP) -> None:
    """Every call of the contract, on one run of each job."""
    names = [f"job {number}" for number in range(jobs)]
    backend.claim([ask_run(job, slot, "x", of) for job in names])
    backend.confirm([Confirmation(job=job, slot=slot, owner="x", attempt=1, late=0) for job in names])
    backend.claim([ask_run(job, slot + 1, "x", of) for job in names])
    backend.claim([ask_run(job, slot + 1, "x", QUEUE_ONE) for job in names])
    backend.claim([ask_run(job, slot + 2, "x", QUEUE_ONE) for job in names])
    backend.claim([ask_run(job, slot + 3, "x", QUEUE_ONE) for job in names])
    backend.start([delivery(job, slot, "t", of=of) for job in names])
    backend.start([delivery(job, slot, "copy", of=of) for job in names])
    backend.start([delivery(job, slot + 9, "t", of=of) for job in names])
    backend.heartbeat(holds(jobs, slot))
    backend.give_back([GiveBack(**vars(hold), message_attempt=1) for hold in holds(jobs, slot)])
    backend.start([delivery(job, slot, "t", of=of) for job in names])
    backend.retrying([NextTry(**vars(hold)) for hold in holds(jobs, slot)])
    backend.start([delivery(job, slot, "t", retries=1, of=of) for job in names])
    again = [replace(hold, retries=1) for hold in holds(jobs, slot)]
    backend.release(again)
    backend.lapsed(10)
    backend.takeover([Takeover(job=job, slot=slot, from_attempt=1, owner="y", beat="", lease=LONG) for job in names])
    backend.end_lapsed(
        [
            LapsedEnd(job=job, slot=slot, attempt=1, was=RunState.RUNNING, state=RunState.LOST, reason="worker-lost")
            for job in names
        ]
    )
    backend.unstarted([Unstarted(job=job, slot=slot, attempt=2, retries=0, reason="expired") for job in names])
    backend.settle([Settlement(**vars(hold), state=RunState.SUCCEEDED) for hold in again])
    backend.waiting(10)
    backend.claim([ask_run(job, slot + 3, "x", QUEUE_ONE) for job in names])
    backend.living("job 0")
    backend.release_job("job 0")


def test_the_number_of_statements_does_not_grow_with_the_rows(backend: SqliteBackend) -> None:
    slot = backend.now() - 3_600_000
    with statements_of(backend) as one:
        a_life(backend, 1, slot)
    with statements_of(backend) as many:
        a_life(backend, 40, slot + 1_000)
    assert len(many) == len(one)


def test_slots_of_one_job_that_may_not_overlap_are_decided_by_as_many_statements_as_one(backend: SqliteBackend) -> None:
    slot = backend.now() - 3_600_000
    send(backend, "few", slot, SKIP)
    send(backend, "many", slot, SKIP)
    with statements_of(backend) as one:
        backend.claim([ask_run("few", slot + 1, "x", SKIP)])
    with statements_of(backend) as many:
        results = backend.claim([ask_run("many", slot + number, "x", SKIP) for number in range(1, 200)])
    assert {result.answer for result in results} == {Answer.SKIPPED}
    assert len(many) == len(one)


def test_who_has_released_a_run_holds_it_no_more(backend: SqliteBackend, tmp_path: Path) -> None:
    """A late heartbeat must not take back what another worker may go on with (handover-before-stop)."""
    slot = backend.now() - 3_600_000
    send(backend, "job", slot, TWICE)
    backend.start([delivery("job", slot, "t", of=TWICE)])
    assert backend.release([held("job", slot, "t")]) == [True]
    assert backend.heartbeat([held("job", slot, "t")]) == [False]
    assert backend.settle([Settlement(**vars(held("job", slot, "t")), state=RunState.SUCCEEDED)]) == [False]
    with closing(sqlite3.connect(tmp_path / "anarchon.db")) as connection:
        assert connection.execute("SELECT state, token FROM anarchon_runs").fetchall() == [("running", None)]
    assert [run.reason for run in backend.lapsed(9)] == ["worker-stopped"]


# --- what a look costs ------------------------------------------------------------------------------------------------


def test_every_statement_finds_its_runs_by_an_index(backend: SqliteBackend, tmp_path: Path) -> None:
    """And unsettled runs of a job never by the primary key, which would be a walk over the settled ones."""
    with statements_of(backend) as seen:
        a_life(backend, 2, backend.now() - 3_600_000)
    plans: dict[str, list[str]] = {}
    with closing(sqlite3.connect(tmp_path / "anarchon.db")) as connection:
        for statement, parameters in seen:
            if "anarchon_runs" in statement and "anarchon_runs_meta" not in statement:
                rows = connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
                plans[statement] = [row[3] for row in rows]
    assert len(plans) >= 20
    allowed = ("SCAN given", "SCAN 2 CONSTANT ROWS", "SCAN anarchon_runs USING INDEX anarchon_runs_waits")
    walks = {
        statement: step
        for statement, plan in plans.items()
        for step in plan
        if (step.startswith("SCAN") and not step.startswith(allowed)) or "PRIMARY KEY (job=?)" in step
        if "anarchon_runs_jobs" not in step
    }
    assert walks == {}
    used = {name for plan in plans.values() for step in plan for name in ("_lease", "_alive", "_waits") if name in step}
    assert used == {"_lease", "_alive", "_waits"}


def test_no_statement_is_prepared_anew_because_of_what_it_is_given(backend: SqliteBackend) -> None:
    """A parameter that is compared with the condition of a partial index costs that: a third of a small call."""
    with statements_of(backend) as seen:
        a_life(backend, 1, backend.now() - 3_600_000)
    assert not [statement for statement, _ in seen if "state = ?" in statement.partition("WHERE")[2]]


LOOKS: dict[str, Callable[[SqliteBackend, Millis], Any]] = {
    "lapsed": lambda backend, slot: backend.lapsed(10),
    "waiting": lambda backend, slot: backend.waiting(10),
    "living": lambda backend, slot: backend.living("job"),
    "claim": lambda backend, slot: backend.claim([ask_run("job", slot + 500_000, "x", SKIP)]),
    "start": lambda backend, slot: backend.start([delivery("job", slot + 600_000, "t", of=SKIP)]),
    "release_job": lambda backend, slot: backend.release_job("job"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_does_not_grow_with_what_is_settled(look: str, backend: SqliteBackend) -> None:
    slot = backend.now() - 3_600_000

    def steps(at: Millis) -> int:
        return steps_of(backend, lambda: LOOKS[look](backend, at))

    backend.register([Sighting(job="job", fingerprint="f")])
    # Both times another run of the job is queued, and another slot waits.
    send(backend, "job", slot + 1, PLAIN)
    backend.claim([ask_run("job", slot + 2, "x", QUEUE_ONE)])
    few = steps(slot)
    backend.release_job("job")
    settled = range(10_000, 13_000)
    backend.claim([ask_run("job", slot + number, "x") for number in settled])
    backend.confirm([Confirmation(job="job", slot=slot + n, owner="x", attempt=1, late=0) for n in settled])
    backend.release_job("job")
    backend.claim([ask_run("job", slot + 2, "x", QUEUE_ONE)])
    backend.release_job("job")
    send(backend, "job", slot + 400_000, PLAIN)
    backend.claim([ask_run("job", slot + 400_001, "x", QUEUE_ONE)])
    assert steps(slot + 1) < 3 * few + 200


# --- many at once -----------------------------------------------------------------------------------------------------


def test_a_storm_of_batches_keeps_every_promise(tmp_path: Path) -> None:
    with SqliteHarness(tmp_path) as harness:
        storm(harness, threads=4, rounds=25)
