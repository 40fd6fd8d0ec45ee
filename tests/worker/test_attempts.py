"""Overlap, attempts, takeover and hand-over: fleets of three beats and two workers, with real stores and a broker."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable

import pytest
from support.beats import ENOUGH, SLACK, until
from support.crew import HEARTBEAT, LEASE, OVERDUE, Crew, job

from celery_anarchon import wire
from celery_anarchon.model import Run, RunState

pytestmark = pytest.mark.fleet

BEATS = ("a", "b", "c")
LONG = os.environ.get("ANARCHON_PROFILE") == "long"
BODIES = 20 if LONG else 3


def slot_of(run: Run) -> int:
    return wire.instant(run.slot)


def bodies(fleet: Crew) -> list[tuple[float, float]]:
    """Start and end of each body that ended."""
    ends = {(line["slot"], line["attempt"], line["pid"]): line["at"] for line in fleet.lines("end")}
    starts = {(line["slot"], line["attempt"], line["pid"]): line["at"] for line in fleet.lines("start")}
    return sorted((starts[key], ends[key]) for key in ends)


# --- overlap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
def test_bodies_never_intersect(crew: Callable[..., Crew], overlap: str) -> None:
    """A job of 2 s whose body takes 5 s, three beats, two workers."""
    fleet = crew(
        jobs={"job": job("work", 2, args=[5], overlap=overlap)},
        # Else a machine that stands still for two seconds makes a body lost, and another may start beside it.
        settings={"anarchon_lease": 15.0, "anarchon_heartbeat": HEARTBEAT},
    )
    for name in ("one", "two"):
        fleet.worker(name)
    beats = fleet.beats(*BEATS)
    until(lambda: len(fleet.lines("end")) >= BODIES, f"{BODIES} ends", ENOUGH + 20 * BODIES)
    for beat in beats:
        assert beat.stop() == 0
    # Without beats nobody sends what waits.
    until(lambda: all(run.state is RunState.WAITING for run in fleet.reader.living("job")), "the end of the last run")
    spans = bodies(fleet)
    assert len(spans) >= BODIES
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), spans
    runs = {slot_of(run): run for run in fleet.reader.history("job", 1_000)}
    assert len(fleet.lines("start")) == len({line["slot"] for line in fleet.lines("start")})
    if overlap == "skip":
        skipped = [run for run in runs.values() if run.state is RunState.SKIPPED]
        assert skipped
        by_id = {run.run_id: run for run in runs.values()}
        for run in skipped:
            assert run.blocked_by is not None
            blocker = by_id[run.blocked_by]
            # Only what was due while the blocker lived was skipped: the next free slot is not.
            assert blocker.ended_at is not None and run.ended_at is not None
            assert blocker.slot < run.slot and run.ended_at <= blocker.ended_at
        # And the next free slot is one of the grid, after no hole in the records.
        done = sorted((run for run in runs.values() if run.state is RunState.SUCCEEDED), key=slot_of)
        for before, after in itertools.pairwise(done):
            assert before.ended_at is not None
            assert slot_of(after) - wire.instant(before.ended_at) <= 2_000
            assert set(range(slot_of(before), slot_of(after), 2_000)) <= set(runs)
    else:
        states = [run.state for run in runs.values()]
        assert set(states) <= {RunState.SUCCEEDED, RunState.SUPERSEDED, RunState.WAITING}, states
        assert states.count(RunState.WAITING) <= 1
        # What waited is the newest of what came meanwhile, so nothing old is sent.
        done = sorted(slot for slot, run in runs.items() if run.state is RunState.SUCCEEDED)
        assert done == sorted(line["slot"] for line in fleet.lines("start"))


def test_at_most_one_waits(crew: Callable[..., Crew]) -> None:
    fleet = crew(jobs={"job": job("watch", 1, args=[60], overlap="queue_one")})
    for name in ("one", "two"):
        fleet.worker(name, concurrency=1)
    fleet.beats(*BEATS)
    start = fleet.started()[0]

    def superseded() -> list[Run]:
        return [run for run in fleet.reader.history("job", 100) if run.state is RunState.SUPERSEDED]

    # First: the one that waits may be replaced between two looks.
    replaced = until(lambda: len(found := superseded()) >= 3 and found, "three that were replaced")
    living = {run.state: slot_of(run) for run in fleet.reader.living("job")}
    assert set(living) == {RunState.RUNNING, RunState.WAITING} and living[RunState.RUNNING] == start["slot"]
    assert living[RunState.WAITING] > max(map(slot_of, replaced))


# --- attempts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["die", "die.late", "die.lost"])
def test_a_task_that_kills_its_process(crew: Callable[..., Crew], task: str) -> None:
    """Early and late acknowledgement, and put back by Celery itself: three bodies in total, then lost; and the next
    slot is fresh."""
    fleet = crew(jobs={"job": job(task, 1, max_attempts=3, overlap="skip")})
    fleet.worker("one")
    fleet.worker("two")
    fleet.beats(*BEATS)
    slot = fleet.started()[0]["slot"]
    run = fleet.ended("job", slot, RunState.LOST, seconds=90)
    assert run.attempt == 3
    assert run.sent_at is not None and run.ended_at is not None
    assert (run.ended_at - run.sent_at).total_seconds() <= 3 * (LEASE + HEARTBEAT + SLACK / 1000)
    later = until(lambda: [line for line in fleet.lines("start") if line["slot"] > slot], "the next slot", 90)
    assert later[0]["attempt"] == 1
    assert [line["attempt"] for line in fleet.lines("start", slot=slot)] == [1, 2, 3]
    assert re.search(r" lost: .*; attempt 3 was on worker (one|two)@", fleet.explain("job", slot))


@pytest.mark.parametrize("how", ["worker", "machine"])
def test_a_worker_that_dies(crew: Callable[..., Crew], how: str) -> None:
    """SIGKILL of all its processes; SIGSTOP of them and of a beat, as when their machine is gone: the next attempt is
    another's, and starts within lease + heartbeat, by the store's clock."""
    fleet = crew(jobs={"job": job("watch", 1, args=[100], max_attempts=2, overlap="skip")})
    workers = {name: fleet.worker(name, concurrency=1) for name in ("first", "second")}
    beats = fleet.beats(*BEATS)
    start = fleet.started()[0]
    victim = start["worker"].partition("@")[0]
    if how == "worker":
        workers[victim].send(signal.SIGKILL, group=True)
    else:
        fleet.freeze(workers[victim], beats[0])
    over = fleet.lease_until("job", start["slot"])
    again = fleet.started(2, slot=start["slot"])[1]
    assert again["attempt"] == 2 and not again["worker"].startswith(victim)
    run = fleet.run("job", start["slot"])
    assert run is not None and run.started_at is not None
    # A heartbeat may have been on its way when the lease was read.
    assert over <= wire.instant(run.started_at) <= over + 2 * HEARTBEAT * 1000 + SLACK


def test_payments(crew: Callable[..., Crew]) -> None:
    """max_attempts=1: the worker dies in the body, the message is redelivered: never a second body."""
    fleet = crew(
        jobs={"job": job("late", 1, args=[30], max_attempts=1, overlap="skip")},
        settings={"broker_transport_options": OVERDUE},
    )
    workers = {name: fleet.worker(name, concurrency=1) for name in ("first", "second")}
    fleet.beats(*BEATS)
    start = fleet.started()[0]
    workers[start["worker"].partition("@")[0]].send(signal.SIGKILL, group=True)
    run = fleet.ended("job", start["slot"], RunState.LOST)
    assert (run.attempt, run.reason) == (1, "attempts-used-up")
    until(lambda: (run := fleet.run("job", start["slot"])) is not None and run.refused >= 1, "the redelivery")
    assert len(fleet.lines("start", slot=start["slot"])) == 1


def test_unset_attempts_as_stock(crew: Callable[..., Crew]) -> None:
    """Early acknowledgement: lost with its worker. Late: the redelivery is the next attempt."""
    fleet = crew(
        jobs={"early": job("watch", 1, args=[100], overlap="skip"), "late": job("late", 1, args=[6], overlap="skip")},
        settings={"broker_transport_options": OVERDUE},
    )
    first = fleet.worker("first", concurrency=2)
    fleet.beats(*BEATS)
    early, late = fleet.started(job="early")[0], fleet.started(job="late")[0]
    fleet.worker("second")
    first.send(signal.SIGKILL, group=True)
    assert fleet.ended("early", early["slot"], RunState.LOST).reason == "worker-lost"
    assert fleet.ended("late", late["slot"], RunState.SUCCEEDED).attempt == 2
    assert len(fleet.lines("start", job="late", slot=late["slot"])) == 2


# --- hand-over --------------------------------------------------------------------------------------------------------


def test_a_warm_shutdown_waits_under_its_lease(crew: Callable[..., Crew]) -> None:
    """SIGTERM with a body of several leases: nobody takes it over. What was not started goes back, uncounted."""
    fleet = crew(jobs={"job": job("work", 20, args=[3 * LEASE], max_attempts=2), "other": job("work", 1)})
    first = fleet.worker("first", concurrency=1)
    fleet.beats(*BEATS)
    start = fleet.started(job="job")[0]
    until(lambda: fleet.unacknowledged(), "a message that waits in the worker")
    unstarted = [slot_of(run) for run in fleet.reader.living("other")]
    assert unstarted
    # It takes what is sent from here on, and what the first gives back.
    fleet.worker("second")
    first.send(signal.SIGTERM)
    assert first.wait(60) == 0
    run = fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    assert (run.attempt, len(fleet.lines("start", job="job", slot=start["slot"]))) == (1, 1)
    for slot in unstarted:
        assert fleet.ended("other", slot, RunState.SUCCEEDED).attempt == 1
        assert len(fleet.lines("start", job="other", slot=slot)) == 1


@pytest.mark.parametrize("soft", [False, True])
def test_a_cold_shutdown_hands_over(crew: Callable[..., Crew], soft: bool) -> None:
    """SIGQUIT, at once or after a soft wait: another worker goes on before any lease is over."""
    import celery

    if soft and not hasattr(celery.Celery().conf, "worker_soft_shutdown_timeout"):
        pytest.xfail("this Celery has no soft shutdown")
    fleet = crew(
        jobs={"job": job("watch", 1, args=[100], max_attempts=2, overlap="skip")},
        settings={"anarchon_lease": 60, "anarchon_heartbeat": 1, "worker_soft_shutdown_timeout": 1.0 if soft else 0.0},
    )
    first = fleet.worker("first", concurrency=1)
    fleet.beats(*BEATS)
    start = fleet.started()[0]
    second = fleet.worker("second", concurrency=1)
    first.send(signal.SIGQUIT)
    again = fleet.started(2, slot=start["slot"])[1]
    assert again["attempt"] == 2 and again["worker"].startswith("second")
    assert again["at"] - start["at"] < 60, "it waited for the lease"
    first.wait(30)
    assert second.running


# --- what is lost on the way ------------------------------------------------------------------------------------------


def test_a_purged_queue_frees_its_guard(crew: Callable[..., Crew]) -> None:
    fleet = crew(jobs={"job": job("work", 1, overlap="skip", queue_timeout=9)})
    # Seen, so that runs are followed; then away.
    fleet.worker("early").stop()
    beats = fleet.beats(*BEATS)
    holder = until(lambda: fleet.reader.living("job"), "a queued run")[0]
    slot = slot_of(holder)
    until(lambda: fleet.waiting(), "its message")
    fleet.app().control.purge()
    assert fleet.ended("job", slot, RunState.LOST_IN_QUEUE).reason == "queue-timeout"
    for name in ("late", "later"):
        fleet.worker(name)
    assert fleet.started()[0]["slot"] > slot
    assert [beat.stop() for beat in beats] == [0, 0, 0]
    # Five skips in a row were said, once by a beat, with the way out.
    warning = (
        f"job: 5 slots in a row skipped, because run {holder.run_id} of {wire.time_text(slot)} is queued; "
        "if it is dead: celery -A ... anarchon release job"
    )
    said = [beat.output.count(warning) for beat in beats]
    assert 1 in said and max(said) == 1, said
    skipped = next(run for run in fleet.reader.history("job", 1_000) if run.blocked_by == holder.run_id)
    assert f" skipped: an earlier run of the job was still going on (overlap=skip); the other run: {holder.run_id}" in (
        fleet.explain("job", slot_of(skipped))
    )
    assert " lost: no worker started it, or its next try, within queue_timeout" in fleet.explain("job", slot)


def test_a_person_lets_go(crew: Callable[..., Crew]) -> None:
    """``release`` frees the guard of a run whose message is gone, long before its limit."""
    fleet = crew(jobs={"job": job("work", 1, overlap="skip", queue_timeout=600)})
    fleet.worker("early").stop()
    fleet.beats(*BEATS)
    slot = slot_of(until(lambda: fleet.reader.living("job"), "a queued run")[0])
    until(lambda: fleet.waiting(), "its message")
    fleet.app().control.purge()
    for name in ("late", "later"):
        fleet.worker(name)
    command = fleet.fleet.celery("release", "anarchon", "release", "job")
    assert command.wait(ENOUGH) == 0, command.output
    assert f"job {wire.time_text(slot)} released" in command.output
    assert fleet.started()[0]["slot"] > slot
    assert fleet.ended("job", slot, RunState.LOST_IN_QUEUE, RunState.LOST).reason == "released"
