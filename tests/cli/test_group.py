"""The command group as ``celery`` finds it, in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon.cli import COMMANDS
from celery_anarchon.cli.processes import clean_environment

PROJ = """
from celery import Celery

app = Celery("proj", broker="memory://")
app.conf.beat_schedule = {"report": {"task": "proj.report", "schedule": 60}}
"""


def celery(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "celery", *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "proj.py").write_text(PROJ)
    return tmp_path


def test_next(folder: Path) -> None:
    done = celery(folder, "-A", "proj", "anarchon", "next", "--at", "2026-03-29T00:00:00Z", "--count", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{"job": "report", "slot": "2026-03-29T00:01:00.000Z"}]


def test_exit_codes_reach_the_shell(folder: Path) -> None:
    done = celery(folder, "-A", "proj", "anarchon", "next", "reprot")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: no job 'reprot' (did you mean 'report'?)\n"


def test_without_an_app(folder: Path) -> None:
    done = celery(folder, "anarchon", "next")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: which app? Call it as: celery -A proj anarchon ...\n"


def test_an_app_out_of_celeryconfig(folder: Path) -> None:
    (folder / "celeryconfig.py").write_text('beat_schedule = {"a": {"task": "t", "schedule": 60}}\n')
    done = celery(folder, "anarchon", "next", "--count", "1", "--json", "a")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["job"] == "a"


def test_help_lists_everything(call: Callable[..., Any]) -> None:
    answer = call("--help")
    assert answer.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in answer.out
        assert call(name, "--help").code == 0


def test_a_slip_of_the_pen(call: Callable[..., Any]) -> None:
    answer = call("statsu")
    assert answer.code == 2
    assert "status" in answer.err


def test_every_celery_command_imports_the_group_so_it_is_light() -> None:
    code = (
        "import celery.bin.celery, sys; before = set(sys.modules); import celery_anarchon.cli;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    # Nothing, where the entry point has imported it already.
    assert set(eval(done.stdout)) <= {"celery_anarchon", "celery_anarchon.cli"}
    code = "import celery.bin.celery, sys; print([m for m in ('rich', 'sqlalchemy', 'croniter') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
