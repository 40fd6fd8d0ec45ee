"""Real fleets in which not all is as a beat left it: another application's messages, a store that was wiped, workers
without the gate, a store that cannot be asked."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support import raw_stores
from support.beats import ENOUGH, until
from support.crew import LEASE, OVERDUE, Crew, job
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.model import RunState

pytestmark = pytest.mark.fleet

LOST_CLAIM = "lost claim: the store had no record of it"


def all_started_once(fleet: Crew) -> None:
    """No body ran twice."""
    ids = [line["id"] for line in fleet.lines("start")]
    assert len(set(ids)) == len(ids)


# --- another application's messages -----------------------------------------------------------------------------------


def test_messages_of_another_namespace(crew: Callable[..., Crew]) -> None:
    """Two applications with two beats each share a queue: the workers of one run the other's messages, untracked, and
    follow their own."""
    fleet = crew(jobs={"own": job("work", 1, overlap="skip")})
    for name in ("one", "two"):
        fleet.worker(name)
    theirs = {"foreign": job("work", 1, max_attempts=2, queue_timeout=3)}
    config = json.dumps({**fleet.config, "anarchon_backend": fleet.other, "jobs": theirs})
    beats = [*fleet.beats("a", "b"), *fleet.beats("c", "d", CREW_CONFIG=config)]
    fleet.started(5, job="own")
    foreign = fleet.started(5, job="foreign")
    reader = backend_from(fleet.other)
    reader.open("crew", create=False)
    # Their store was told of no start by anybody, and sends none of them again.
    first = until(
        lambda: [run for run in reader.history("foreign", 100) if run.state is RunState.DISPATCHED],
        "the end of the first that waited for queue_timeout",
    )[-1]
    assert first.reason == "no-gate-seen"
    for beat in beats:
        assert beat.stop() == 0
    sent = {run.run_id: run for run in reader.history("foreign", 100)}
    reader.close()
    assert {line["id"] for line in foreign} <= set(sent)
    assert {run.started_at for run in sent.values()} == {None} and {run.attempt for run in sent.values()} == {1}
    all_started_once(fleet)
    assert fleet.reader.history("foreign", 100) == []
    until(lambda: not fleet.reader.living("own"), "the end of its own runs")
    own = {run.run_id for run in fleet.reader.history("own", 100) if run.state is RunState.SUCCEEDED}
    assert {line["id"] for line in fleet.lines("start", job="own")} == own


# --- a store that was wiped -------------------------------------------------------------------------------------------


def test_a_store_that_was_wiped_runs_what_is_queued(crew: Callable[..., Crew]) -> None:
    """Each body once, recorded from its message and said; and what comes afterwards is as ever."""
    fleet = crew(jobs={"job": job("work", 1)})
    queued = fleet.sent_to_nobody(5)
    raw_stores.wipe(fleet.store)
    assert fleet.reader.history("job", 100) == []
    workers = [fleet.worker(name) for name in ("one", "two")]
    for name, slot in queued:
        run = fleet.ended(name, slot, RunState.SUCCEEDED)
        assert (run.attempt, run.refused) == (1, 0)
    assert sum(worker.output.count(LOST_CLAIM) for worker in workers) == len(queued)
    beats = fleet.beats("a", "b")
    fleet.started(len(queued) + 5)
    assert [beat.stop() for beat in beats] == [0, 0]
    all_started_once(fleet)
    until(lambda: not fleet.reader.living("job"), "the end of all runs")
    assert {run.state for run in fleet.reader.history("job", 1_000)} == {RunState.SUCCEEDED}
    assert sum(worker.output.count(LOST_CLAIM) for worker in workers) == len(queued)


def test_a_store_that_was_wiped_overlaps_nothing(crew: Callable[..., Crew]) -> None:
    """A message without a record beside a living run of its job, which says ``overlap=skip``: dropped, and said."""
    fleet = crew(jobs={"job": job("work", 1, overlap="skip")})
    ((_, old),) = fleet.sent_to_nobody()
    raw_stores.wipe(fleet.store)
    fleet.beats("a", "b")
    new = wire.instant(until(lambda: fleet.reader.living("job"), "the next run")[0].slot)
    # The old message is the first of the queue.
    until(lambda: fleet.waiting() == 2, "its message")
    workers = [fleet.worker(name, concurrency=1) for name in ("one", "two")]
    fleet.ended("job", new, RunState.SUCCEEDED)
    until(lambda: any(worker.has_written("another run of the job lives") for worker in workers), "the refusal")
    fleet.started(3)
    assert fleet.lines("start", slot=old) == []
    all_started_once(fleet)


def test_a_store_that_is_wiped_under_a_run(crew: Callable[..., Crew]) -> None:
    """Its body is told, its end is refused, and the next slot is fresh."""
    fleet = crew(jobs={"job": job("watch", 1, args=[300], kwargs={"until": "go"}, overlap="skip")})
    workers = {name: fleet.worker(name, concurrency=1) for name in ("one", "two")}
    fleet.beats("a", "b")
    start = fleet.started()[0]
    raw_stores.wipe(fleet.store)
    told = until(lambda: fleet.lines("end", slot=start["slot"]), "the end of its body")[0]
    assert told["lost"] is True
    worker = workers[start["worker"].partition("@")[0]]
    worker.wait_for_log("its record stands|is not this worker's any more", ENOUGH)
    again = fleet.started(2)[1]
    assert again["slot"] > start["slot"] and again["attempt"] == 1
    (fleet.folder / "go").touch()
    fleet.ended("job", again["slot"], RunState.SUCCEEDED)
    all_started_once(fleet)


# --- workers without the gate -----------------------------------------------------------------------------------------


def test_workers_with_and_without_the_gate(crew: Callable[..., Crew]) -> None:
    """Each message runs once, whoever gets it. What no gate saw ends at its queue limit, and is not sent again."""
    # Several at once: of messages that come one by one, some brokers give all to the same worker.
    fleet = crew(jobs={f"job-{number}": job("work", 1, max_attempts=3, queue_timeout=3) for number in range(4)})
    fleet.worker("gated")
    fleet.worker("stock", CREW_GATE="no")
    beats = fleet.beats("a", "b")

    def by(worker: str) -> set[tuple[str, int]]:
        return {(line["job"], line["slot"]) for line in fleet.lines("end") if line["worker"].startswith(worker)}

    until(lambda: len(by("gated")) >= 3 and len(by("stock")) >= 3, "three bodies on each")
    for name, slot in by("stock"):
        assert fleet.ended(name, slot, RunState.LOST_IN_QUEUE).reason == "queue-timeout"
    for name, slot in by("gated"):
        run = fleet.ended(name, slot, RunState.SUCCEEDED)
        assert run.worker is not None and run.worker.startswith("gated")
    assert [beat.stop() for beat in beats] == [0, 0]
    assert not any(beat.has_written("no worker that asks the store") for beat in beats)
    all_started_once(fleet)
    assert {run.attempt for name in fleet.jobs for run in fleet.reader.history(name, 1_000)} == {1}


def test_workers_without_the_gate_alone(crew: Callable[..., Crew]) -> None:
    """Said once by each beat; a run that nobody follows is no lost one, and holds its guard no longer than that."""
    fleet = crew(jobs={"job": job("work", 1, overlap="skip", queue_timeout=3)})
    workers = [fleet.worker(name, CREW_GATE="no") for name in ("one", "two")]
    beats = fleet.beats("a", "b")
    first, second = (line["slot"] for line in fleet.started(2))
    assert fleet.ended("job", first, RunState.DISPATCHED).reason == "no-gate-seen"
    assert second > first
    fleet.ended("job", second, RunState.DISPATCHED)
    all_started_once(fleet)
    assert [beat.stop() for beat in beats] == [0, 0]
    assert [beat.output.count("no worker that asks the store is there, and job rely") for beat in beats] == [1, 1]
    # What a worker with the gate says first.
    assert not any(worker.has_written("store: ") for worker in workers)


# --- a store that cannot be asked -------------------------------------------------------------------------------------


def test_a_body_that_starts_without_an_answer(crew: Callable[..., Crew], pool: str) -> None:
    """on_unknown=repeat, in processes: the run is followed once the store answers, and its body is told the truth."""
    fleet = crew(
        apart=True,
        jobs={"job": job("watch", args=[300], kwargs={"until": "go"}, overlap="skip", on_unknown="repeat")},
        settings={"anarchon_gate_wait": 1.0},
    )
    ((_, slot),) = fleet.sent_to_nobody()
    with fleet.away():
        workers = {name: fleet.worker(name, pool, 1) for name in ("one", "two")}
        start = fleet.started()[0]
    workers[start["worker"].partition("@")[0]].wait_for_log("followed from here on", ENOUGH)
    first = fleet.lease_until("job", slot)
    until(lambda: fleet.lease_until("job", slot) > first + LEASE * 1000, "its heartbeats")
    assert fleet.lines("end") == []
    (fleet.folder / "go").touch()
    run = fleet.ended("job", slot, RunState.SUCCEEDED)
    assert (start["slot"], run.attempt, run.refused) == (slot, 1, 0)
    assert fleet.lines("end")[0]["lost"] is False


def test_a_message_that_is_not_waited_for_longer(crew: Callable[..., Crew]) -> None:
    """on_unknown=skip: acknowledged without a body once ``anarchon_gate_wait`` is over; the store is told when it is
    back, and the guard is free."""
    fleet = crew(
        apart=True,
        jobs={"job": job("work", 1, overlap="skip", on_unknown="skip")},
        settings={"anarchon_gate_wait": 1.0},
    )
    ((_, slot),) = fleet.sent_to_nobody()
    with fleet.away():
        for name in ("one", "two"):
            fleet.worker(name)
        until(lambda: fleet.waiting() == 0, "its message to be dropped")
    assert fleet.ended("job", slot, RunState.LOST_IN_QUEUE).reason == "store-unknown"
    fleet.beats("a", "b")
    start = fleet.started()[0]
    assert start["slot"] > slot
    fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    assert fleet.lines("start", slot=slot) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_held_message_outlives_its_worker(crew: Callable[..., Crew], how: signal.Signals) -> None:
    """Held while the store is away, by a worker that dies or is stopped meanwhile: another runs it, as attempt 1."""
    fleet = crew(
        apart=True,
        jobs={"job": job("work", overlap="skip")},
        # Delivered again, but not before the first is gone: it would take its own message once more, and what Redis has
        # popped for a client that is killed before it reads it is lost with it. Until the message is held two calls of
        # 5 s wait for the store.
        settings={"anarchon_gate_wait": 600.0, "broker_transport_options": {**OVERDUE, "visibility_timeout": 20}},
    )
    ((_, slot),) = fleet.sent_to_nobody()
    with fleet.away():
        first = fleet.worker("first")
        first.wait_for_log("they are held", ENOUGH)
        first.send(how, group=how is signal.SIGKILL)
        first.wait(ENOUGH)
    assert fleet.lines("start") == []
    fleet.worker("second")
    assert fleet.ended("job", slot, RunState.SUCCEEDED).attempt == 1
    assert len(fleet.lines("start", slot=slot)) == 1


@pytest.mark.parametrize("refuses", [False, True], ids=["silent", "refuses"])
def test_no_hot_loop_while_the_store_is_away(crew: Callable[..., Crew], refuses: bool) -> None:
    """A worker with twenty held messages asks as often as with one, and leaves the broker in peace; then each runs."""
    fleet = crew(
        apart=True,
        refuses=refuses,
        jobs={f"job-{number}": job("work", 1) for number in range(10)},
        settings={"anarchon_gate_wait": 600.0, "worker_prefetch_multiplier": 10},
    )
    queued = fleet.sent_to_nobody(40)
    names = ("one", "two")

    def asked(name: str) -> list[dict[str, Any]]:
        # Its keeper has a thread of its own.
        return fleet.lines("asks", by=name, thread="MainThread")

    with fleet.away(), redis.Redis.from_url(fleet.broker, **RESP2) as broker:
        for name in names:
            fleet.worker(name, CREW_ASKS=name)
        # Every message but those beyond what they may fetch is held by one of them.
        until(lambda: fleet.unacknowledged() == 40, "all messages to be fetched")
        begun, since = int(broker.info("stats")["total_commands_processed"]), time.monotonic()
        before = {name: len(fleet.lines("asks", by=name)) for name in names}
        looks = {name: len(asked(name)) for name in names}
        until(lambda: all(len(asked(name)) >= looks[name] + 3 for name in names), "three more looks")
        passed = time.monotonic() - since
        commands = int(broker.info("stats")["total_commands_processed"]) - begun
        calls = {name: len(fleet.lines("asks", by=name)) - before[name] for name in names}
        assert fleet.lines("start") == []
    for name in names:
        lines = asked(name)[: looks[name] + 3]
        times = [line["at"] for line in lines]
        assert all(later - earlier >= 0.5 for earlier, later in itertools.pairwise(times)), lines
        # Heartbeats of its presence are calls, too.
        assert calls[name] / passed <= 5, (calls, passed)
    assert commands / passed <= 200, (commands, passed)
    for name, slot in queued:
        run = fleet.ended(name, slot, RunState.SUCCEEDED)
        assert (run.attempt, run.refused) == (1, 0)
    all_started_once(fleet)
