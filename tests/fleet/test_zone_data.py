"""Two hosts, two releases of the zone database: real beats on one store name the disagreement before a slot differs."""

from __future__ import annotations

import importlib.resources
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, Beats, until

from celery_anarchon.testing.fleet import Fleet, ManagedProcess

pytestmark = pytest.mark.fleet

ZONE = "Europe/Paris"
WORDS = f"has other zone data for {ZONE}: some slots may be sent twice"


def zone_file(name: str) -> bytes:
    return importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


class Hosts:
    """Beats of one schedule, on a host as it should be and on one to which Paris has given up its summer time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        # Twelve hours from now, in any zone and season: nothing falls due while the test runs.
        hour = (time.gmtime().tm_hour + 12) % 24
        jobs = {"report": f"30 {hour} * * *", "busy": "* * * * *"}
        self.beats = Beats(folder, jobs, {"zone": ZONE, "anarchon_lease": 3, "anarchon_heartbeat": 0.5, **settings})
        self.fleet = Fleet("zone_app", folder, self.beats.fleet.env)
        self.paths: dict[str, str] = {}
        self.asked = 0
        for host, content in (("right", ZONE), ("stale", "Africa/Algiers")):
            file = folder / host / ZONE
            file.parent.mkdir(parents=True)
            file.write_bytes(zone_file(content))
            self.paths[host] = str(folder / host)

    def beat(self, host: str) -> ManagedProcess:
        beat = self.fleet.beat(f"beat-{host}", PYTHONTZPATH=self.paths[host])
        beat.wait_for_log("beat: Waking up", ENOUGH)
        return beat

    def ask(self, host: str, *words: str) -> tuple[int, str]:
        """The exit code and the output of a command on that host."""
        self.asked += 1
        command = self.fleet.celery(f"asked-{self.asked}", "anarchon", *words, PYTHONTZPATH=self.paths[host])
        return command.wait(ENOUGH), command.output

    def seen(self) -> dict[str, str]:
        """When each beat was last there."""
        code, output = self.ask("stale", "status", "--json")
        assert code == 0, output
        return {beat["label"]: beat["seen"] for beat in json.loads(output)["beats"]}

    def july(self, host: str) -> list[str]:
        code, output = self.ask(host, "next", "report", "--at", "2030-07-01T00:00Z", "--count", "2", "--json")
        assert code == 0, output
        return [each["slot"] for each in json.loads(output)]


def test_it_is_named_before_a_slot_differs(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    try:
        assert hosts.july("right") != hosts.july("stale"), "there is nothing to disagree about"
        right, stale = hosts.beat("right"), hosts.beat("stale")
        right.wait_for_log(f"beat .*:{stale.pid} {WORDS}", ENOUGH)
        stale.wait_for_log(f"beat .*:{right.pid} {WORDS}", ENOUGH)
        code, output = hosts.ask("right", "status")
        assert code == 1, output
        assert f"have different zone data for {ZONE}: some slots may be sent twice" in output
        assert f":{right.pid}" in output and f":{stale.pid}" in output
        assert all(job != "report" for job, _ in hosts.beats.count())

        # Named once for all heartbeats; and no more once the other is gone.
        assert right.output.count(WORDS) == 1
        stale.stop()
        code, output = hosts.ask("right", "status")
        assert (code, "zone data" in output) == (0, False), output
    finally:
        hosts.fleet.close()


def test_they_agree_with_the_packages_data(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, anarchon_packaged_tzdata=True)
    try:
        assert hosts.july("right") == hosts.july("stale")
        right, stale = hosts.beat("right"), hosts.beat("stale")
        for beat in (right, stale):
            beat.wait_for_log("zones: those of the tzdata package, release ", ENOUGH)
        first = hosts.seen()
        until(lambda: all(later > first[name] for name, later in hosts.seen().items()), "a heartbeat of both")
        second = hosts.seen()
        assert len(first) == len(second) == 2
        # Each has looked at the other by then: with this heartbeat, if not with the one before.
        until(lambda: all(later > second[name] for name, later in hosts.seen().items()), "another heartbeat")
        assert WORDS not in right.output + stale.output
    finally:
        hosts.fleet.close()
