"""Real beats on stores that only take claims: one is killed between its claim and its publish, the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, Beats, until
from support.redis_servers import private_server
from support.stage import wall

from celery_anarchon.backends.registry import backend_from
from celery_anarchon.model import Millis, RunState
from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import ManagedProcess
from celery_anarchon.verdict import Kind, judge

pytestmark = pytest.mark.fleet

JOBS = {f"job-{number}": 1 + number % 2 for number in range(8)}


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


class Run:
    """Beats of which some die between a claim and its publish, and the count of what was sent meanwhile."""

    def __init__(self, fleet: Beats, trigger: Path) -> None:
        self.fleet = fleet
        self.trigger = trigger
        self.dead: list[str] = []
        self.died: list[Millis] = []
        self.start: Millis = 0

    def mortal(self, name: str) -> ManagedProcess:
        return self.fleet.start(name, hook=f"after-claim:die:{self.trigger}")

    def begin(self) -> None:
        self.start = wall()

    def go_on(self, seconds: float) -> None:
        since = wall()
        until(lambda: wall() > since + round(seconds * 1000), "time", seconds + 60)

    def kill(self, beat: ManagedProcess) -> None:
        self.dead.append(f":{beat.pid}")
        self.trigger.touch()
        until(lambda: not beat.running, "the beat to die with what it has won")
        self.died.append(wall())
        Path(f"{self.trigger}.hit").unlink()

    def count(self) -> tuple[int, int]:
        """How many slots were sent once, and how many died with their winner; fails for any other."""
        end = wall()

        def all_beyond() -> bool:
            sent = self.fleet.count()
            return all(any(job == name and slot > end for job, slot in sent) for name in JOBS)

        until(all_beyond, "a slot of every job after the window")
        # A confirmation may be under way; those of the dead never come.
        until(
            lambda: all(beat.endswith(tuple(self.dead)) for beat in claimed_by(self.fleet, end).values()),
            "claims of dead beats only",
        )
        lost = claimed_by(self.fleet, end)
        owed = [
            (job, slot) for job, every in JOBS.items() for slot in expected_interval(every * 1000, 0, self.start, end)
        ]
        verdict = judge(owed, self.fleet.events(), window=(self.start, end), excluded=lost)
        assert verdict.kind is Kind.VALID, verdict
        assert not set(lost) & set(self.fleet.count()), "it is said to be lost, and was sent"
        assert all(slot <= self.died[-1] for _, slot in lost), "a slot was lost after the last beat had died"
        return verdict.expected, len(lost)


def test_each_slot_is_sent_once_but_for_those_that_died_with_their_winner(
    fleet: Beats, tmp_path: Path, record_property: Any
) -> None:
    run = Run(fleet, tmp_path / "die")
    killed = run.mortal("killed")
    fleet.beats("one", "two")
    killed.wait_for_log("beat: Waking up", ENOUGH)
    run.begin()
    run.go_on(1.5)
    run.kill(killed)
    run.go_on(2.5)
    until(lambda: len({event.beat for event in fleet.events()}) >= 2, "a second sender")
    slots, lost = run.count()
    assert lost >= 1
    record_property("slots", slots)
    record_property("lost", lost)
    print(f"\n{slots} slots sent once, {lost} lost with their winner")


@pytest.mark.long
def test_ten_deaths_and_as_many_pauses(fleet: Beats, tmp_path: Path) -> None:
    run = Run(fleet, tmp_path / "die")
    steady, frozen = fleet.beats("steady", "frozen")
    run.begin()
    for number in range(10):
        mortal = run.mortal(f"mortal-{number}")
        mortal.wait_for_log("beat: Waking up", ENOUGH)
        frozen.freeze()
        run.kill(mortal)
        run.go_on(1)
        frozen.thaw()
    assert steady.running
    slots, lost = run.count()
    print(f"\n{slots} slots sent once, {lost} lost with their winners, in ten rounds")
