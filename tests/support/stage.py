"""What the fleet tests share: fleets on each kind of store and broker, and the count of what they sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.beats import SLACK, Beats, until
from support.sites import Broker, Store

from celery_anarchon.model import Millis, RunState
from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import ManagedProcess
from celery_anarchon.verdict import Kind, Verdict, judge


def wall() -> Millis:
    return time.time_ns() // 1_000_000


SITES = ["sqlite, files", "redis, redis", "redis, rabbitmq"]
"""Store and broker. On the second both are one server."""


def on(*in_ci: str) -> pytest.MarkDecorator:
    """Run on each of SITES; on those that are not named here only with the long tests."""
    sites = [pytest.param(site, marks=() if site in in_ci else pytest.mark.long) for site in SITES]
    return pytest.mark.parametrize("stage", sites, indirect=True)


class Stage:
    """Makes fleets on one kind of store and broker, and ends them, whatever happens."""

    def __init__(self, folder: Path, home: Callable[[Path], Store], broker: Callable[[Path], Broker]) -> None:
        self.folder = folder
        self.home = home
        self.broker = broker
        self.fleets: list[Beats] = []

    def fleet(self, jobs: dict[str, Any], **settings: Any) -> Beats:
        folder = self.folder / f"fleet-{len(self.fleets)}"
        folder.mkdir()
        fleet = Beats(folder, jobs, settings, self.home(folder), self.broker(folder))
        self.fleets.append(fleet)
        return fleet


def quiet(fleet: Beats) -> None:
    """Wait for a moment in which nothing is claimed and no slot is near: whoever is killed then was not between publish
    and confirm, where a second message with the same id is the stated limit."""
    until(lambda: 300 < wall() % 1_000 < 700 and not fleet.home.open_claims(), "a quiet moment")


def settle(fleet: Beats, end: Millis) -> None:
    """Wait until every job was sent once more after *end* and nothing is held any more."""

    def all_beyond() -> bool:
        sent = fleet.count()
        return all(any(job == name and slot > end for job, slot in sent) for name in fleet.jobs)

    until(all_beyond, "a slot of every job after the window")
    until(lambda: not [claim for claim in fleet.home.open_claims() if claim[1] <= end], "no claim left of the window")


def count_window(fleet: Beats, start: Millis, end: Millis) -> Verdict:
    """What was sent against the slots in (start, end] of the oracle, which is not the product's own slot code."""
    owed = [
        (job, slot)
        for job, every in fleet.jobs.items()
        for slot in expected_interval(round(every * 1000), 0, start, end)
    ]
    return judge(owed, fleet.events(), window=(start, end))


def all_sent_once(fleet: Beats, start: Millis, end: Millis) -> int:
    """Exactly one message for each slot of the window, and none twice anywhere; how many slots that were."""
    verdict = count_window(fleet, start, end)
    assert verdict.kind is Kind.VALID, verdict
    return verdict.expected


def claims_left_by(fleet: Beats, dead: ManagedProcess) -> list[tuple[str, Millis]]:
    """What a beat had claimed, and not told the end of, when it died."""
    with closing(fleet.store()) as store:
        runs = [run for job in fleet.jobs for run in store.history(job, 50)]
    mine = [run for run in runs if run.state is RunState.CLAIMED and (run.beat or "").endswith(f":{dead.pid}")]
    return [(run.job, round(run.slot.timestamp() * 1000)) for run in mine]


def taken_over_in_time(fleet: Beats, claims: list[tuple[str, Millis]], lease: Millis, heartbeat: Millis) -> None:
    """Each was sent by another beat, after its lease and at most a heartbeat later; by the store's clock."""
    with closing(fleet.store()) as store:
        for job, slot in claims:
            run = next(run for run in store.history(job, 1_000) if round(run.slot.timestamp() * 1000) == slot)
            assert run.claimed_at is not None and run.sent_at is not None
            waited = (run.sent_at - run.claimed_at).total_seconds() * 1000
            assert lease <= waited <= lease + heartbeat + SLACK, run


def sent_last(fleet: Beats, among: list[ManagedProcess]) -> ManagedProcess:
    by_pid = {str(process.pid): process for process in among}
    for event in sorted(fleet.events(), key=lambda event: -event.slot):
        process = by_pid.get(event.beat.rpartition(":")[2])
        if process is not None:
            return process
    raise AssertionError("none of these beats has sent anything")
