"""Three real beats, and schedule classes of other packages and of projects: one message for each slot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support.beats import ENOUGH, Beats, until
from support.stage import wall

from celery_anarchon.model import Millis
from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import Fleet
from celery_anarchon.verdict import Kind, judge
from celery_anarchon.wire import instant

pytestmark = pytest.mark.fleet

MINUTE: Millis = 60_000
CLOCKED_AFTER = 60
GRIDS = {"rrule": 2_000, "third": 3_000, "shifts": 2_000, "tz-aware": MINUTE, "holidays": MINUTE}
CHAINS = ("jittered", *(f"wall-{number}" for number in range(8)))


@pytest.fixture
def begin() -> Millis:
    """A whole second that rules count from: an even one, a moment ago."""
    return wall() // 2_000 * 2_000


@pytest.fixture
def beats(tmp_path: Path, begin: Millis) -> Iterator[Beats]:
    moment = datetime.fromtimestamp(begin / 1000, timezone.utc).isoformat()
    settings = {"begin": moment, "clocked_after": CLOCKED_AFTER, "anarchon_lease": 2, "anarchon_heartbeat": 0.5}
    made = Beats(tmp_path, {}, settings)
    made.fleet = Fleet("custom_app", tmp_path, made.fleet.env)
    yield made
    made.fleet.close()


def test_one_message_for_each_slot(beats: Beats, begin: Millis) -> None:
    # All at once: the first run of each chained job is theirs to race for.
    fleet = [beats.fleet.beat(name) for name in "abc"]
    for beat in fleet:
        beat.wait_for_log("beat: Waking up", ENOUGH)
    start = wall()
    minute = start // MINUTE * MINUTE + MINUTE
    clocked = begin + CLOCKED_AFTER * 1_000
    # Until a minute begins, for the crontabs; meanwhile one of three stops, and one is restarted.
    until(lambda: wall() > start + 3_000, "some seconds", 10)
    fleet[0].stop()
    fleet[1].restart()
    fleet[1].wait_for_log("beat: Waking up", ENOUGH)
    end = max(minute, clocked) + 1_500
    seen = ("rrule", "third", "shifts", *CHAINS)
    until(
        lambda: (
            set(seen) <= {job for job, slot in beats.count() if slot > end}
            and all(sum(job == name for job, _ in beats.count()) > 6 for name in CHAINS)
        ),
        "a slot of every quick job after the window, and some of each chain",
        240,
    )

    owed = [(job, slot) for job, every in GRIDS.items() for slot in expected_interval(every, 0, start, end)]
    owed.append(("clocked", clocked))
    judged = [event for event in beats.events() if event.job not in CHAINS]
    verdict = judge(owed, judged, window=(start, end))
    assert verdict.kind is Kind.VALID, verdict

    store = beats.store()
    for name in CHAINS:
        runs = list(reversed(store.history(name, 1_000)))
        ids = {slot: sent for (job, slot), sent in beats.count().items() if job == name}
        assert all(len(sent) == 1 for sent in ids.values()), ids
        sent = {instant(run.slot) for run in runs if run.sent_at is not None}
        assert len(sent) > 5
        # The fleet goes on: what is new since the history was read is later than all of it.
        assert sent <= set(ids)
        assert all(slot >= instant(runs[-1].slot) for slot in set(ids) - sent)
        for before, after in itertools.pairwise(runs):
            assert before.claimed_at is not None and after.claimed_at is not None
            assert instant(after.slot) == instant(before.claimed_at) + 1
            assert instant(after.claimed_at) - instant(before.claimed_at) >= 1_000
    store.close()
    log = fleet[1].output
    assert "job 'jittered': the slots of class custom_app.Jittered are not known beforehand" in log
    assert "it calls datetime.now() (custom_app.py, line" in log
