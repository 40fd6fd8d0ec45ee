"""Real beats on a libSQL server, and on a SQLite file: many begin at once, and one is killed over a claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet.test_postgres_fleet import JOBS, QUICK, eight_at_once, killed_over_a_claim
from support.beats import Beats
from support.libsql_servers import private_sqld

pytestmark = pytest.mark.fleet


def test_three_beats_and_one_is_killed_over_a_claim(tmp_path: Path) -> None:
    with private_sqld(tmp_path / "sqld") as server:
        fleet = Beats(tmp_path, JOBS, {**QUICK, "anarchon_backend": server.url})
        try:
            query = "select job, slot from anarchon_runs where state = 'claimed' and beat like ?"
            waited = killed_over_a_claim(
                fleet,
                tmp_path / "die",
                lambda label: [(row["job"], int(row["slot"])) for row in server.ask(query, f"%{label}")],
            )
            print(f"\nslots of the dead beat waited {waited[0]:.2f} to {waited[1]:.2f} s, with a lease of 2 s")
        finally:
            fleet.fleet.close()


def test_eight_beats_on_an_empty_server(tmp_path: Path) -> None:
    with private_sqld(tmp_path / "sqld") as server:
        fleet = Beats(tmp_path, JOBS, {"anarchon_backend": server.url})
        try:
            eight_at_once(fleet)
        finally:
            fleet.fleet.close()


def test_eight_beats_make_one_file(tmp_path: Path) -> None:
    fleet = Beats(tmp_path, JOBS)
    try:
        eight_at_once(fleet)
    finally:
        fleet.fleet.close()
