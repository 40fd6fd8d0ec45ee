"""The run on its worker, in fleets of two beats and two workers on real stores: every outcome, copies, lost leases."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.beats import ENOUGH, until
from support.crew import HEARTBEAT, LEASE, OVERDUE, Crew, job
from support.redis_servers import RESP2

from celery_anarchon import wire
from celery_anarchon.model import OnUnknown, Run, RunState, Terms

pytestmark = pytest.mark.fleet

LONG = os.environ.get("ANARCHON_PROFILE") == "long"
VISIBILITY, BODY = (5, 20) if LONG else (2, 8)
"""Seconds until the broker delivers again what was not acknowledged, and of a body that is longer."""

LASTING = {"anarchon_lease": 60.0, "anarchon_heartbeat": HEARTBEAT}
"""Leases that nobody waits for the end of."""

ENDS = {RunState.SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, RunState.LOST, RunState.LOST_IN_QUEUE}


def test_every_outcome(crew: Callable[..., Crew], pool: str) -> None:
    """Each ends its run in the right state, for the right reason, and frees its guard: no run stays behind."""
    outcomes: dict[str, tuple[dict[str, Any], RunState, str | None]] = {
        "works": (job("work", 5), RunState.SUCCEEDED, None),
        "fails": (job("fail", 5), RunState.FAILED, "exception"),
        "ignores": (job("ignore", 5), RunState.SUCCEEDED, "ignored"),
        "rejects": (job("reject", 5), RunState.FAILED, "rejected"),
        "retries": (job("again", 5), RunState.SUCCEEDED, None),
        # Where the pool cannot stop it the body goes on to its end, with solo before all others.
        "too-long": (job("work", 5, args=[3], timeout=1), RunState.TIMED_OUT, "time-limit"),
        "expires": (job("work", 5, options={"expires": -1}, queue_timeout=60), RunState.LOST_IN_QUEUE, "expired"),
        "unknown": (job("no.such.task", 5), RunState.LOST_IN_QUEUE, "unknown-task"),
        "skips": (job("work", 5, overlap="skip"), RunState.SUCCEEDED, None),
    }
    if pool == "prefork":
        # The other pools have no soft limit, and no process beside the worker's that could die.
        outcomes |= {
            "soft": (job("work", 5, args=[30], options={"soft_time_limit": 1}), RunState.TIMED_OUT, "soft-time-limit"),
            "dies": (job("die", 5), RunState.LOST, "worker-lost"),
            "dies-late": (job("die.late", 5), RunState.LOST, "worker-lost"),
        }
    fleet = crew(jobs={name: entry for name, (entry, _, _) in outcomes.items()})
    for name in ("one", "two"):
        fleet.worker(name, pool, 3)
    beats = fleet.beats("a", "b")

    def ended(name: str) -> Run | None:
        runs = [run for run in fleet.reader.history(name, 100) if run.state in ENDS]
        return runs[-1] if runs else None

    found = {name: until(lambda name=name: ended(name), name, 120) for name in outcomes}
    assert [beat.stop() for beat in beats] == [0, 0]
    assert {name: (run.state, run.reason) for name, run in found.items()} == {
        name: (state, reason) for name, (_, state, reason) in outcomes.items()
    }
    assert all(run.attempt == 1 for run in found.values())
    for name, run in found.items():
        slot = wire.instant(run.slot)
        starts = [line["retries"] for line in fleet.lines("start", job=name, slot=slot)]
        expected = {"retries": [0, 1, 2], "expires": [], "unknown": []}
        assert starts == expected.get(name, [0]), name
    # Nothing is left that would hold a guard: what was sent meanwhile ends as well.
    until(lambda: not any(fleet.reader.living(name) for name in outcomes), "the end of all runs")


# threads cannot end a body, and solo does not listen while it runs one.
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_revoked_in_its_body(crew: Callable[..., Crew], pool: str) -> None:
    """The guard is free at once: the next slot runs."""
    fleet = crew(jobs={"long": job("watch", 1, args=[60], overlap="skip")})
    for name in ("one", "two"):
        fleet.worker(name, pool, 1)
    fleet.beats("a", "b")
    start = fleet.started()[0]
    fleet.app().control.revoke(start["id"], terminate=True)
    assert fleet.ended("long", start["slot"], RunState.FAILED).reason == "revoked"
    assert fleet.started(2)[1]["slot"] > start["slot"]


def test_revoked_before_its_start(crew: Callable[..., Crew]) -> None:
    fleet = crew(jobs={"long": job("watch", 1, args=[60])})
    for name in ("one", "two"):
        fleet.worker(name, concurrency=1)
    fleet.beats("a", "b")
    running = fleet.started(2)
    waiting = until(
        lambda: [run for run in fleet.reader.living("long") if run.state is RunState.QUEUED], "a queued run"
    )
    control = fleet.app().control
    control.revoke(waiting[0].run_id)
    for start in running:
        control.revoke(start["id"], terminate=True)
    run = fleet.ended("long", wire.instant(waiting[0].slot), RunState.LOST_IN_QUEUE)
    assert run.reason == "revoked"
    assert fleet.lines("start", slot=wire.instant(run.slot)) == []


def test_a_beat_frozen_before_its_confirm(crew: Callable[..., Crew], pool: str) -> None:
    """It has published and not told; another takes over and publishes again: one body."""
    fleet = crew(jobs={"job": job("work", 2)})
    hook = fleet.folder / "hook"
    hook.touch()
    first = fleet.fleet.beat(
        "first", scheduler="crew_hooks:HookedScheduler", FLEET_HOOK=f"after-publish:pause:{hook}", FLEET_CONFIG="{}"
    )
    until(lambda: first.state == "T", "the pause of the first beat")
    fleet.beat("second")
    # Both messages are there before any worker is.
    until(lambda: any(count > 1 for count in Counter(fleet.waiting_ids()).values()), "the second message")
    for name in ("one", "two"):
        fleet.worker(name, pool)
    start = fleet.started()[0]
    until(lambda: (run := fleet.run("job", start["slot"])) is not None and run.refused >= 1, "the refused copy")
    first.thaw()
    fleet.started(3)
    slots = [line["slot"] for line in fleet.lines("start")]
    assert len(slots) == len(set(slots))
    fleet.ended("job", start["slot"], RunState.SUCCEEDED)


def test_redelivered_while_it_runs(crew: Callable[..., Crew], pool: str) -> None:
    """A visibility timeout shorter than the body, late acknowledgement: stock executes it again and again."""
    fleet = crew(
        jobs={"job": job("late", args=[BODY], overlap="skip")},
        settings={
            "broker_transport_options": {**OVERDUE, "visibility_timeout": VISIBILITY},
            # Else a machine that stands still for two seconds makes the redelivery an attempt of its own.
            "anarchon_lease": 15.0,
            "anarchon_heartbeat": HEARTBEAT,
        },
    )
    fleet.worker("one", pool)
    fleet.worker("two", pool)
    if pool != "prefork":
        # Without an event loop kombu looks for what to deliver again at its start only: one with other queues looks.
        fleet.worker("looks", "prefork", 1, "-Q", "other")
    fleet.beats("a", "b")
    start = fleet.started()[0]
    run = fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    until(lambda: (run := fleet.run("job", start["slot"])) is not None and run.refused >= 1, "the refused copy")
    assert len(fleet.lines("start", slot=start["slot"])) == 1
    assert run.attempt == 1
    # The result is the body's, not the refused copy's.
    assert fleet.app().AsyncResult(start["id"]).get(timeout=ENOUGH) == BODY


def test_a_worker_frozen_past_its_lease(crew: Callable[..., Crew], pool: str) -> None:
    """Another takes over; when it wakes its body is told, its end is refused, the record keeps the truth."""
    fleet = crew(jobs={"job": job("watch", args=[300], kwargs={"until": "go"}, max_attempts=2, overlap="skip")})
    first = fleet.worker("first", pool, 1)
    fleet.beats("a", "b")
    start = fleet.started()[0]
    fleet.freeze(first)
    over = fleet.lease_until("job", start["slot"])
    fleet.worker("second", pool, 1)
    again = fleet.started(2, slot=start["slot"])[1]
    assert (again["attempt"], again["retries"]) == (2, 0)
    run = fleet.run("job", start["slot"])
    assert run is not None and run.started_at is not None and over <= wire.instant(run.started_at)
    first.send(signal.SIGCONT, group=True)
    told = until(lambda: fleet.lines("end", slot=start["slot"], attempt=1), "the end of the first body")[0]
    assert told["lost"] is True
    first.wait_for_log("its record stands|is not this worker's any more", ENOUGH)
    run = fleet.run("job", start["slot"])
    assert run is not None and (run.state, run.attempt) == (RunState.RUNNING, 2)
    assert run.worker is not None and run.worker.startswith("second")
    (fleet.folder / "go").touch()
    run = fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    assert (run.attempt, run.worker) == (2, again["worker"])


def test_a_worker_frozen_before_it_knows(crew: Callable[..., Crew], pool: str) -> None:
    """It was allowed to start a run, and hears it only when another has the next attempt: no second body."""
    fleet = crew(jobs={"job": job("watch", args=[300], kwargs={"until": "go"}, max_attempts=2, overlap="skip")})
    file = fleet.folder / "freeze"
    file.touch()
    first = fleet.worker("first", pool, 1, CREW_FREEZES=str(file))
    fleet.beats("a", "b")
    until(lambda: first.state == "T", "the freeze")
    fleet.worker("second", pool, 1)
    start = fleet.started()[0]
    assert (start["attempt"], start["worker"].partition("@")[0]) == (2, "second")
    first.thaw()
    first.wait_for_log("refused: the message is of an earlier attempt", ENOUGH)
    run = fleet.run("job", start["slot"])
    assert run is not None and (run.state, run.attempt, run.refused) == (RunState.RUNNING, 2, 1)
    (fleet.folder / "go").touch()
    fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    assert len(fleet.lines("start", slot=start["slot"])) == 1


def lose_connections(raw: Any) -> None:
    """All but its own."""
    own = str(raw.client_id())
    for client in raw.client_list():
        if client["id"] != own:
            raw.client_kill_filter(_id=client["id"])


@pytest.mark.parametrize("pool", ["prefork"])
def test_a_broker_lost_before_the_body_begins(crew: Callable[..., Crew], pool: str) -> None:
    """Celery forgets what its pool has not begun, for the broker delivers it again; and so does its worker here."""
    fleet = crew(
        jobs={
            "long": job("work", 1, kwargs={"until": "go"}, overlap="skip"),
            "short": job("work", 1, max_attempts=1, overlap="skip"),
        },
        # What a lost connection leaves is delivered again.
        settings={"broker_transport_options": OVERDUE, **LASTING},
    )
    slots = dict(fleet.sent_to_nobody(2))
    with redis.Redis.from_url(fleet.broker, **RESP2) as raw:
        messages = {json.loads(one)["headers"]["anarchon"]["job"]: one for one in raw.lrange("celery", 0, -1)}
        raw.delete("celery")
        worker = fleet.worker("worker", pool, 1)
        raw.lpush("celery", messages["long"])
        fleet.started(1, job="long")
        # The first loss makes room in the worker for one more, behind the body that runs.
        lose_connections(raw)
        worker.wait_for_log("Connected to redis", ENOUGH, times=2)
        raw.lpush("celery", messages["short"])
        fleet.ended("short", slots["short"], RunState.RUNNING)
        lose_connections(raw)
        worker.wait_for_log("goes back: the broker was lost before its body began", ENOUGH)
        assert not fleet.lines("start", job="short")
        (fleet.folder / "go").touch()
        for name in ("long", "short"):
            fleet.ended(name, slots[name], RunState.SUCCEEDED)
    assert [len(fleet.lines("start", job=name)) for name in ("long", "short")] == [1, 1]


@pytest.mark.parametrize("pool", ["prefork"])
def test_a_stop_while_it_asks(crew: Callable[..., Crew], pool: str) -> None:
    """What a cold stop finds on its way to the pool has cost nothing, and runs elsewhere at once."""
    fleet = crew(jobs={"job": job("work", 1, max_attempts=1, overlap="skip")}, settings=LASTING)
    slots = dict(fleet.sent_to_nobody(1))
    file = fleet.folder / "freeze"
    file.touch()
    first = fleet.worker("first", pool, 1, CREW_FREEZES=str(file))
    until(lambda: first.state == "T", "the freeze")
    first.send(signal.SIGQUIT)
    first.thaw()
    first.wait(ENOUGH)
    (run,) = fleet.reader.history("job", 1)
    assert (run.state, run.attempt) == (RunState.QUEUED, 1)
    fleet.worker("second", pool, 1)
    fleet.ended("job", slots["job"], RunState.SUCCEEDED)
    assert [line["attempt"] for line in fleet.lines("start")] == [1]


def test_queued_messages_hold_no_lease(crew: Callable[..., Crew]) -> None:
    """Waiting is not dying: without a worker for many leases, then all of them run, once."""
    fleet = crew(jobs={"job": job("work", 1)})
    # A worker that was seen, so that runs are followed.
    fleet.worker("early").stop()
    fleet.beats("a", "b")
    until(lambda: fleet.waiting() >= 8, "messages of four leases")
    living = fleet.reader.living("job")
    assert len(living) >= 8 and {run.state for run in living} <= {RunState.QUEUED, RunState.CLAIMED}
    for name in ("late-comer", "later-comer"):
        fleet.worker(name)
    for run in living:
        fleet.ended("job", wire.instant(run.slot), RunState.SUCCEEDED)
    starts = [line["slot"] for line in fleet.lines("start")]
    assert len(set(starts)) == len(starts)


def test_copies_of_its_message(crew: Callable[..., Crew], pool: str) -> None:
    """A body of several leases, kept; copies of its message, refused, on its own worker or on another."""
    fleet = crew(jobs={"long": job("late", args=[2.5 * LEASE], max_attempts=2, overlap="skip")})
    fleet.worker("one", pool, 4)
    fleet.worker("two", pool, 4)
    beats = fleet.beats("a", "b")
    start = fleet.started(job="long")[0]
    header = wire.header(
        namespace=fleet.reader.namespace, job="long", slot=start["slot"], attempt=1, late=0, beat="hand"
    )
    header |= wire.terms_header(Terms(lease=2_000, queue_timeout=60_000, max_attempts=2), OnUnknown.SKIP)
    for _ in range(2):
        fleet.app().send_task("late", [1], task_id=start["id"], headers={"anarchon": header})
    run = fleet.ended("long", start["slot"], RunState.SUCCEEDED)
    assert run.attempt == 1
    until(lambda: (run := fleet.run("long", start["slot"])) is not None and run.refused == 2, "the refused copies")
    assert len(fleet.lines("start", job="long", slot=start["slot"])) == 1
    assert fleet.app().AsyncResult(start["id"]).get(timeout=ENOUGH) == 2.5 * LEASE
    assert [beat.stop() for beat in beats] == [0, 0]
    # Those of the copies too: the broker would deliver them again in an hour.
    until(lambda: fleet.waiting() == 0, "the acknowledgement of every message")


# Celery refuses -B with gevent.
@pytest.mark.parametrize(
    "pool", ["prefork", *(pytest.param(pool, marks=pytest.mark.long) for pool in ("threads", "solo"))]
)
def test_the_default_scheduler(crew: Callable[..., Crew], pool: str) -> None:
    """``worker -B`` and ``beat`` without -S, after the one line; stock workers run what we send."""
    fleet = crew(jobs={f"job-{number}": job("work", 1) for number in range(4)})
    embedded = [
        fleet.worker(name, pool, 1, "-B", "-s", str(fleet.folder / "schedule")) for name in ("embedded", "embedded-too")
    ]
    start = fleet.started(8)[0]
    assert fleet.ended(start["job"], start["slot"], RunState.SUCCEEDED)
    assert [worker.stop(30) for worker in embedded] == [0, 0]
    assert not list(fleet.folder.glob("schedule*"))
    beats = fleet.beats("a", "b")
    stock = [fleet.worker(name, pool, CREW_GATE="no") for name in ("stock-one", "stock-two")]

    def ended(name: str) -> list[dict[str, Any]]:
        return [line for line in fleet.lines("end") if line["worker"].startswith(name)]

    until(lambda: ended("stock-one") and ended("stock-two"), "bodies on both")
    assert all(line["job"] in fleet.jobs and line["lost"] is False for line in ended("stock"))
    assert [beat.stop() for beat in beats] == [0, 0]
    assert [worker.stop(30) for worker in stock] == [0, 0]
    ids = [line["id"] for line in fleet.lines("start")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("outage", ["short", "kept", "taken over"])
def test_a_store_away_in_a_run(crew: Callable[..., Crew], pool: str, outage: str) -> None:
    """3 s, less than the lease: nothing. Two leases: told; then the run is this worker's still, if nobody has taken it
    over, or its end is refused."""
    lease = 15.0 if outage == "short" else LEASE
    fleet = crew(
        apart=True,
        jobs={"job": job("watch", args=[300], kwargs={"until": "go"}, max_attempts=2, overlap="skip")},
        settings={"anarchon_lease": lease, "anarchon_heartbeat": HEARTBEAT},
    )
    workers = {name: fleet.worker(name, pool, 1) for name in ("one", "two")}
    beats = fleet.beats("a", "b")
    start = fleet.started()[0]
    worker = workers[start["worker"].partition("@")[0]]
    if outage == "kept":
        # Nobody is there who could take it over.
        assert [beat.stop() for beat in beats] == [0, 0]
    with fleet.away():
        if outage == "short":
            # In which nothing is to happen.
            time.sleep(3)
        else:
            end = until(lambda: fleet.lines("end"), "the body to be told")[0]
            assert end["lost"] is True
        if outage == "taken over":
            worker.send(signal.SIGSTOP, group=True)
    if outage == "short":
        assert fleet.lines("end") == []
        (fleet.folder / "go").touch()
    if outage == "taken over":
        until(lambda: [run for run in fleet.reader.living("job") if run.attempt == 2], "the takeover")
        worker.send(signal.SIGCONT, group=True)
        worker.wait_for_log("its record stands|is not this worker's any more", ENOUGH)
        # On either: the broker may have given it to the one that was frozen, which had asked it for more.
        again = fleet.started(2, slot=start["slot"])[1]
        assert again["attempt"] == 2
        (fleet.folder / "go").touch()
    run = fleet.ended("job", start["slot"], RunState.SUCCEEDED)
    assert run.attempt == (2 if outage == "taken over" else 1)
    if outage == "short":
        assert fleet.lines("end", slot=start["slot"])[0]["lost"] is False
        assert not worker.has_written("is not this worker's any more")
