"""Real beats on a libSQL server; one is killed over a claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet.test_postgres_fleet import JOBS, QUICK, go_on, once, wall
from support.beats import Beats, until
from support.libsql_servers import private_sqld

pytestmark = pytest.mark.fleet


def test_three_beats_and_one_is_killed_over_a_claim(tmp_path: Path) -> None:
    with private_sqld(tmp_path / "sqld") as server:
        fleet = Beats(tmp_path, JOBS, {**QUICK, "anarchon_backend": server.url})
        try:
            trigger = tmp_path / "die"
            killed = fleet.beat("killed", hook=f"after-claim:die:{trigger}")
            start = wall()
            fleet.beats("a", "b")
            go_on(fleet, 1)
            trigger.touch()
            until(lambda: not killed.running, "the beat to die")
            end = go_on(fleet, 4)
            once(fleet, start, end)
            query = "select count(*) as open from anarchon_runs where state = 'claimed' and slot <= ?"
            until(lambda: server.ask(query, end) == [{"open": "0"}], "no claim left")
        finally:
            fleet.fleet.close()
