"""Real beats on a folder: one message for each slot."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import Fleet, events_of, filesystem_broker, filesystem_messages, wait_until
from celery_anarchon.verdict import Kind, judge

pytestmark = pytest.mark.fleet

APP = """
import json, os
from celery import Celery

app = Celery("proj")
app.conf.update(json.loads(os.environ["SETTINGS"]))
"""


def test_three_beats_one_killed(tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text(APP)
    settings = {
        **filesystem_broker(tmp_path / "broker"),
        "anarchon_backend": f"folder://{tmp_path}/claims",
        "beat_schedule": {"job": {"task": "proj.work", "schedule": 1}},
        "timezone": "UTC",
        # Else Celery's own entry of four in the morning may fall due.
        "result_expires": None,
    }

    def newest() -> int:
        return max((event.slot for event in events_of(filesystem_messages(tmp_path / "broker"))), default=0)

    def quiet() -> bool:
        now = time.time_ns() // 1_000_000
        return 400 < now % 1_000 < 600 and newest() >= now // 1_000 * 1_000

    with Fleet("proj", tmp_path, {"SETTINGS": json.dumps(settings)}) as fleet:
        beats = [fleet.beat(name) for name in ("one", "two", "three")]
        for beat in beats:
            beat.wait_for_log("beat: Waking up", 60)
        start = time.time_ns() // 1_000_000
        wait_until(lambda: newest() > start + 2_000, 60, lambda: "no message for two seconds")
        # Between two slots: without leases, what a beat had claimed and not sent would be lost with it.
        wait_until(quiet, 60, lambda: "no quiet moment")
        beats[0].kill()
        wait_until(lambda: newest() > start + 5_000, 60, lambda: "no message after the kill")
        end = newest()
    slots = [("job", slot) for slot in expected_interval(1_000, 0, start, end)]
    verdict = judge(slots, events_of(filesystem_messages(tmp_path / "broker")), window=(start, end))
    assert verdict.kind is Kind.VALID, verdict
