"""The model of the run protocol holds, and each of its mutants is caught.

Here the configurations that take seconds; all of them with "tox -e long". What is built of it, is asked of stores by
the clauses of the conformance kit; `tests/conformance/test_saboteurs.py` names the saboteur of each mutant.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("run_protocol.py")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(MODEL), "--quiet", *arguments], capture_output=True, text=True, timeout=3_600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "config", ["no-gate", "claim-only", "mixed", "plain-1", "plain-repeat", "plain-trim", "plain-forgets-unstarted"]
)
def test_the_protocol_of_this_release_holds(config: str) -> None:
    assert config in run("--config", config)


@pytest.mark.parametrize(
    "mutant",
    [
        "publish-after-abandon",
        "owner-is-hostname",
        "won-again-publishes",
        "unknown-is-won",
        "unknown-is-taken",
        "repeat-never-asks",
    ],
)
def test_its_mutants_are_caught(mutant: str) -> None:
    assert "BROKEN" in run("--mutant", mutant)


@pytest.mark.long
def test_everything() -> None:
    run("--all")
    run("--mutants")
    run("--limits")
