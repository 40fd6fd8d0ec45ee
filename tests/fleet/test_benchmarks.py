"""Benchmarks are run by hand, so only this keeps them from rotting: each works, at sizes that take no time.

Nothing here looks at how large a figure is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import missing, on_path
from support.postgres_servers import find_postgres

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

ROWS = {
    "burst": [
        "stock tick",
        "redbeat",
        "django-celery-beat, SQLite",
        "ours, plain, 2 beats",
        "ours, one step, templates, 2 beats",
    ],
    "idle": ["ours", "stock", "stock, no file", "stock / ours"],
    "lateness": ["1 jobs every second: ours, 2 beats", "ours, two beats"],
    "claims": ["Redis", "PostgreSQL", "SQLite"],
    "tick": ["100 idle", "200 idle"],
    "slots": ["*/15 * * * *", "median of all", "20 jobs"],
    "gate": ["untracked, no gate", "untracked, gate", "tracked, no gate", "tracked, gate"],
}

pytestmark = pytest.mark.fleet


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=BENCHMARKS, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def rows_of(benchmark: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row: figures for table in benchmark["tables"] for row, figures in table["rows"].items()}


@pytest.mark.parametrize("name", ROWS)
def test_it_runs_and_has_its_rows(name: str, tmp_path: Path) -> None:
    if name not in ("tick", "slots") and on_path("redis-server") is None:
        missing("no redis-server on PATH")
    if name == "claims" and find_postgres() is None:
        missing("no PostgreSQL")
    file = tmp_path / "figures.json"
    run(f"{name}.py", "--tiny", "-o", str(file))
    report = json.loads(file.read_text())
    assert report["versions"]["celery"]
    found = rows_of(report["benchmarks"][name])
    assert set(ROWS[name]) <= set(found)
    assert all(figures for figures in found.values())


def test_all_of_them_go_into_one_file_and_a_failure_is_told(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run("everything.py", "--tiny", "--only", "tick", "slots", "-o", str(file))
    report = json.loads(file.read_text())
    assert list(report["benchmarks"]) == ["tick", "slots"]
    assert set(ROWS["tick"]) <= set(rows_of(report["benchmarks"]["tick"]))


def test_every_benchmark_is_tried_and_is_in_everything() -> None:
    files = {file.stem for file in BENCHMARKS.glob("*.py") if "def measure(" in file.read_text()}
    assert files == set(ROWS)
    assert f"ALL = {tuple(ROWS)!r}".replace("'", '"') in (BENCHMARKS / "everything.py").read_text()
