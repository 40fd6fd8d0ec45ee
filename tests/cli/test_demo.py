"""The demo, as a person starts it: from any folder, and nothing is left when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon.cli.processes import ManagedProcess, ProcessGroup, clean_environment, wait_until

pytestmark = pytest.mark.fleet

CELERY = [str(Path(sys.executable).with_name("celery")), "anarchon", "demo"]


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """Started in a folder that would disturb whatever looks around, with temporary files in another one."""
    (tmp_path / "celery.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "celeryconfig.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "tmp").mkdir()
    environment = clean_environment(
        TMPDIR=str(tmp_path / "tmp"),
        CELERY_BROKER_URL="redis://127.0.0.1:1/0",
        CELERY_ANARCHON_BACKEND="sqlite:////no/such/folder/x.db",
    )
    with ProcessGroup(tmp_path, environment) as group:
        yield group


def left_behind(folder: Path) -> list[str]:
    """Processes of a demo whose files are in *folder*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def run(group: ProcessGroup, *arguments: str, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [*CELERY, *arguments],
        cwd=group.folder,
        env={**group.env, **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert left_behind(group.folder / "tmp") == []
    return done.returncode, done.stdout, done.stderr


def test_a_perfect_verdict_with_a_beat_killed(group: ProcessGroup) -> None:
    code, out, err = run(group, "--beats", "3", "--seconds", "6", "--json")
    assert (code, err) == (0, ""), out + err
    result = json.loads(out)
    assert list(result) == ["verdict", "slots", "sent_once", "missing", "duplicate", "killed", "by_beat"]
    assert (result["verdict"], result["missing"], result["duplicate"]) == ("valid", [], [])
    # 1 s twice, 2 s, 3 s and 5 s, in six seconds.
    assert 6 + 6 + 3 + 2 + 1 <= result["slots"] == result["sent_once"] <= 6 + 6 + 3 + 2 + 2
    assert list(result["by_beat"]) == ["beat-1", "beat-2", "beat-3"]
    assert sum(result["by_beat"].values()) == result["slots"]
    assert result["killed"] in result["by_beat"]
    assert list((group.folder / "tmp").iterdir()) == []


def test_beats_that_share_no_store_are_found_out(group: ProcessGroup) -> None:
    code, out, err = run(group, "--seconds", "4", "--keep", ANARCHON_DEMO_SABOTAGE="own-store")
    assert code == 1, out + err
    assert "sent twice" in out and "verdict: invalid" in out and "judged: every slot after 20" in out
    kept = Path(err.splitlines()[0].removeprefix("kept: "))
    assert json.loads((kept / "verdict.json").read_text())["verdict"] == "invalid"
    assert {"worker.log", "beat-1.log", "anarchon.db"} <= {path.name for path in kept.iterdir()}


def test_a_worker_that_does_nothing_is_found_out(group: ProcessGroup) -> None:
    code, out, err = run(group, "--beats", "1", "--seconds", "4", "--json", ANARCHON_DEMO_SABOTAGE="no-worker")
    assert code == 1
    assert (json.loads(out)["verdict"], json.loads(out)["killed"]) == ("unknown", None)
    assert "messages the worker ran 0" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_stopped_it_leaves_nothing(group: ProcessGroup, number: int) -> None:
    demo = start_demo(group)
    demo.send(number)
    assert demo.wait(30) != 0
    assert left_behind(group.folder / "tmp") == []
    assert list((group.folder / "tmp").iterdir()) == []


def test_killed_it_leaves_no_process(group: ProcessGroup) -> None:
    demo = start_demo(group)
    demo.kill()
    wait_until(lambda: not left_behind(group.folder / "tmp"), 30, lambda: "they live")


def start_demo(group: ProcessGroup) -> ManagedProcess:
    demo = group.start("demo", [*CELERY, "--seconds", "60"])
    demo.wait_for_log("judged: every slot", 120)
    assert len(left_behind(group.folder / "tmp")) >= 5
    return demo


def test_usage(group: ProcessGroup) -> None:
    code, out, err = run(group, "--beats", "0")
    assert (code, out) == (2, "")
    assert "--beats" in err
