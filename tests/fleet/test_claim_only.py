"""Real beats on stores that only take claims: one is killed between its claim and its publish, the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, Beats, until
from support.redis_servers import private_server

from celery_anarchon.backends.registry import backend_from
from celery_anarchon.model import Millis, RunState
from celery_anarchon.oracle import expected_interval
from celery_anarchon.verdict import Kind, judge

pytestmark = pytest.mark.fleet

JOBS = {f"job-{number}": 1 + number % 2 for number in range(8)}


def wall() -> Millis:
    return time.time_ns() // 1_000_000


@pytest.fixture(params=[("redis7", "script"), ("redis7", "stream-id"), ("redis86", "idmp")], ids=lambda one: one[1])
def fleet(request: Any, tmp_path: Path) -> Iterator[Beats]:
    flavour, strategy = request.param
    with private_server(tmp_path / "server", flavour) as server:
        store = f"{server.url}?strategy={strategy}"
        beats = Beats(tmp_path, JOBS, {"anarchon_backend": store})
        yield beats
        beats.fleet.close()


def claimed_by(fleet: Beats, until_slot: Millis) -> dict[tuple[str, Millis], str]:
    """What the store's history still has as claimed, and by which beat."""
    backend = backend_from(fleet.settings["anarchon_backend"])
    backend.open("fleet", create=False)
    try:
        return {
            (name, slot): run.beat or ""
            for name in fleet.jobs
            for run in backend.history(name, 100)
            if run.state is RunState.CLAIMED and (slot := round(run.slot.timestamp() * 1000)) <= until_slot
        }
    finally:
        backend.close()


def test_each_slot_is_sent_once_but_for_those_that_died_with_their_winner(
    fleet: Beats, tmp_path: Path, record_property: Any
) -> None:
    trigger = tmp_path / "die"
    killed = fleet.start("killed", hook=f"after-claim:die:{trigger}")
    fleet.beats("one", "two")
    killed.wait_for_log("beat: Waking up", ENOUGH)
    start = wall()
    until(lambda: wall() > start + 2_500, "some slots")
    trigger.touch()
    until(lambda: not killed.running, "the beat to die with what it has won")
    died = wall()
    until(lambda: wall() > died + 3_000, "some slots without it")
    end = wall()

    def all_beyond() -> bool:
        sent = fleet.count()
        return all(any(job == name and slot > end for job, slot in sent) for name in JOBS)

    until(all_beyond, "a slot of every job after the window")
    # A confirmation may be under way; those of the dead never come.
    until(
        lambda: all(beat.endswith(f":{killed.pid}") for beat in claimed_by(fleet, end).values()),
        "claims of the dead beat only",
    )
    lost = claimed_by(fleet, end)
    owed = [(job, slot) for job, every in JOBS.items() for slot in expected_interval(every * 1000, 0, start, end)]
    verdict = judge(owed, fleet.events(), window=(start, end), excluded=lost)
    assert verdict.kind is Kind.VALID, verdict
    assert len(lost) >= 1
    assert not set(lost) & set(fleet.count()), "it is said to be lost, and was sent"
    assert all(slot <= died for _, slot in lost), "a slot was lost after the beat had died"
    assert len({event.beat for event in fleet.events()}) >= 2
    record_property("slots", verdict.expected)
    record_property("lost", len(lost))
    print(f"\n{verdict.expected} slots sent once, {len(lost)} lost with their winner")
