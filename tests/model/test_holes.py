"""Each hole that the protocol closes has tests, and each mutant of the model one that it fails.

The mutants that a store can make are saboteurs, which the suite of every lease store catches
(``tests/conformance/test_saboteurs.py``). Those that beats and workers make are named in the tests below.
"""

from __future__ import annotations

import re
from pathlib import Path

import celery_anarchon
from celery_anarchon.testing.runsaboteurs import MUTANTS, NOT_OF_A_STORE

TESTS = Path(__file__).parents[1]

ELSEWHERE = {
    "gate-token-per-worker": "worker/test_gate.py::test_a_copy_never_runs",
    "requeue-after-unknown": "worker/test_gate.py::test_an_answer_that_was_lost_is_asked_for_again",
    "retry-keeps-old-header": "worker/test_gate.py::test_a_retry_carries_the_attempt_that_was_granted",
    "ask-then-expire": "worker/test_gate.py::test_a_message_that_expires_while_its_answer_is_out",
    "gate-store-down-repeat": "worker/test_gate.py::test_repeat_beside_another_that_has_the_run",
    "repeat-never-asks": "unit/test_keeper.py::test_a_body_without_an_answer_is_followed_once_there_is_one",
    "gateless-worker": "unit/test_followed_runs.py::test_a_run_that_nobody_starts",
    "gateless-worker-overlap": "unit/test_followed_runs.py::test_no_worker_that_asks_is_said_once",
    # No call of the contract renews by owner. What that did to a lost answer of a takeover can be asked all the same.
    "renew-by-owner": "unit/test_dispatcher.py::test_a_takeover_whose_answer_was_lost_is_made_again",
    "publish-after-abandon": "unit/test_dispatcher.py::test_after_a_lost_abandon_nothing_is_published",
    "handover-before-stop": "unit/test_outcomes.py::test_a_body_that_is_cut_is_released_once_it_has_stopped",
    "handover-overtakes-settle": "unit/test_keeper.py::test_no_release_goes_before_an_end_that_was_not_told",
    "unknown-is-won": "unit/test_claim_only.py::test_a_lost_answer_is_asked_again_as_the_same_owner",
    "unknown-is-taken": "unit/test_claim_only.py::test_a_lost_answer_is_asked_again_as_the_same_owner",
}
"""Mutant -> the test that it fails."""


def test_every_mutant_has_a_test() -> None:
    assert set(ELSEWHERE) == NOT_OF_A_STORE
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert name and f"\ndef {name}(" in (TESTS / file).read_text(), place


PROTOCOL = Path(__file__).with_name("protocol.md").read_text()
ID = re.compile(r"\b[RH]\d{1,2}\b")


def test_every_id_that_comments_name_is_explained() -> None:
    defined = set(re.findall(r"^\| ([RH]\d+) \|", PROTOCOL, re.MULTILINE))
    package = Path(celery_anarchon.__file__).parent
    found = {
        name for folder in (package, TESTS) for file in folder.rglob("*.py") for name in ID.findall(file.read_text())
    }
    assert found and found <= defined
    # What the reference shows is for people who have no repository.
    assert not ID.findall((package / "model.py").read_text())


def test_every_mutant_is_of_a_hole() -> None:
    cells = re.findall(r"^\| H\d+ \| .* \| ([^|]*)\|$", PROTOCOL, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([a-z0-9-]+)`", cell)} == set(MUTANTS) | NOT_OF_A_STORE
