"""The quickstart, as its README says it, with one of the two beats killed on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH

from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import Fleet, Message, events_of, sqlite_messages, wait_until
from celery_anarchon.verdict import Kind, judge

pytestmark = pytest.mark.fleet

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
JOBS = {"refresh": (1000, 0), "greet": (3000, 0), "collect": (2000, 1000)}
"""Job -> every, offset."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    shutil.copy(EXAMPLE / "proj.py", tmp_path)
    with Fleet("proj", tmp_path) as fleet:
        yield fleet


def messages(fleet: Fleet) -> list[Message]:
    return sqlite_messages(fleet.folder / "quickstart-broker.db")


def ask(fleet: Fleet, *arguments: str) -> Any:
    command = [sys.executable, "-m", "celery", "-A", "proj", "anarchon", *arguments, "--json"]
    done = subprocess.run(command, cwd=fleet.folder, env=fleet.env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_two_beats_one_killed(fleet: Fleet) -> None:
    worker = fleet.worker("worker")
    worker.wait_for_log(r" ready\.", 60)
    beats = [fleet.beat(name, scheduler=None) for name in ("one", "two")]
    for beat in beats:
        beat.wait_for_log("beat: Waking up", 60)
    began = time.time_ns() // 1_000_000

    def some_after(began: int) -> None:
        """As many as are due in three seconds."""
        wait_until(
            lambda: len([event for event in events_of(messages(fleet)) if event.slot > began]) >= 6,
            ENOUGH,
            lambda: f"six messages of slots after {began}",
        )

    some_after(began)
    assert {beat["label"].rpartition(":")[2] for beat in ask(fleet, "status")["beats"]} == {
        str(beat.pid) for beat in beats
    }
    beats[0].kill()
    some_after(time.time_ns() // 1_000_000)
    ended = time.time_ns() // 1_000_000

    # What the killed one may have held is sent within lease + heartbeat, and a jitter delays by half a second at most.
    expected = [
        (job, slot) for job, (every, offset) in JOBS.items() for slot in expected_interval(every, offset, began, ended)
    ]
    wait_until(
        lambda: {(event.job, event.slot) for event in events_of(messages(fleet))} >= set(expected),
        ENOUGH,
        lambda: f"these were not sent: {judge(expected, events_of(messages(fleet))).missing}",
    )
    assert beats[1].stop() == 0
    # But for Celery's own entry, which falls due at four in the morning.
    sent = [message for message in messages(fleet) if message.task != "celery.backend_cleanup"]
    # The beat may have been killed between a publish and its confirm: one id, twice.
    verdict = judge(expected, events_of(sent), window=(began, ended), allow_same_id=True)
    assert verdict.kind is Kind.VALID, verdict
    assert len(events_of(sent)) == len(sent)

    for message in sent:
        worker.wait_for_log(rf"Task {message.task}\[{message.task_id}\] succeeded", ENOUGH)
    latest = ask(fleet, "history", "collect")[0]
    assert (latest["state"], latest["beat"].rpartition(":")[2]) == ("dispatched", str(beats[1].pid))
    assert [slot["job"] for slot in ask(fleet, "next", "report", "--count", "1")] == ["report"]


def test_the_readme_gives_commands_that_exist() -> None:
    from celery_anarchon.cli import COMMANDS

    text = (EXAMPLE / "README.md").read_text()
    named = {line.split()[4] for line in text.splitlines() if line.strip().startswith("celery -A proj anarchon")}
    assert named and named <= set(COMMANDS)
