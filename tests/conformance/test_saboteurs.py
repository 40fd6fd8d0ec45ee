"""Every clause is broken by a saboteur, kept by the honest backend, and stands in the contract."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conformance.harnesses import ClaimOnlyHarness, MemoryHarness, SqliteHarness
from model.run_protocol import MUTANTS as MODEL_MUTANTS

from celery_anarchon.backends import base, onestep, runs
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.testing import RunSuite, clauses_of
from celery_anarchon.testing.claimonly import ClaimOnlyMemory
from celery_anarchon.testing.runsaboteurs import MUTANTS, NOT_OF_A_STORE
from celery_anarchon.testing.saboteurs import SABOTEURS

CLAUSES = clauses_of(RunSuite)


class QuickSuite(RunSuite):
    """Races small enough to be run for each saboteur; never collected, so it needs no harness."""

    race_threads = 12
    race_slots = 30
    race_processes = (4, 2)
    rounds = 12
    patience = 2


class HonestSuite(QuickSuite):
    """What is not broken may be slow."""

    patience = 30


HARNESSES: dict[type[Any], type[Any]] = {
    MemoryBackend: MemoryHarness,
    SqliteBackend: SqliteHarness,
    ClaimOnlyMemory: ClaimOnlyHarness,
}


def kind_of(backend: type[Any]) -> type[Any]:
    return next(kind for kind in HARNESSES if issubclass(backend, kind))


def broken_by(
    backend: type[Any], clause: str, directory: Path, suite: type[RunSuite] = QuickSuite
) -> dict[str, BaseException]:
    """The tests of *clause* that fail on *backend*, and how."""
    harness_class = type("Harness", (HARNESSES[kind_of(backend)],), {"backend": backend})
    broken: dict[str, BaseException] = {}
    for name in CLAUSES[clause]:
        test = getattr(suite(), name)
        if any(
            not getattr(harness_class.traits if hasattr(harness_class.traits, need) else harness_class, need)
            for need in getattr(test, "conformance_needs", ())
        ):
            continue
        place = directory / name
        place.mkdir()
        with harness_class(place) as harness:
            try:
                test(harness)
            except (AssertionError, pytest.fail.Exception) as error:
                broken[name] = error
    return broken


NO_SABOTEUR = {
    "test_O2_a_reply_that_was_really_lost": "they are in memory, where no reply is lost",
    "test_O7_an_answer_that_was_lost_under_way": "the same",
}
"""Test -> why none of these saboteurs can fail it."""


@pytest.mark.parametrize("clause", sorted(SABOTEURS))
def test_the_clause_catches_its_saboteurs(clause: str, tmp_path: Path) -> None:
    """Each of them, and each test of the clause catches one: a test that nothing fails proves nothing."""
    caught: set[str] = set()
    for saboteur in SABOTEURS[clause]:
        place = tmp_path / saboteur.__name__
        place.mkdir()
        broken = broken_by(saboteur, clause, place)
        assert broken, f"{saboteur.__name__} passes {clause}: sharpen it"
        caught |= set(broken)
    assert caught == set(CLAUSES[clause]) - set(NO_SABOTEUR)


@pytest.mark.parametrize("clause", sorted(SABOTEURS))
def test_the_honest_backend_keeps_the_clause(clause: str, tmp_path: Path) -> None:
    """As it is run above: else a saboteur might fail for another reason."""
    for kind in {kind_of(saboteur) for saboteur in SABOTEURS[clause]}:
        place = tmp_path / kind.name
        place.mkdir()
        assert not broken_by(kind, clause, place, HonestSuite)


def test_every_clause_has_a_saboteur() -> None:
    assert set(SABOTEURS) == set(CLAUSES)


def test_every_clause_of_the_contract_is_tested() -> None:
    text = "".join(Path(part.__file__).read_text() for part in (base, runs, onestep))
    promised = set(re.findall(r"\b[CLXWO]\d+\b", text))
    assert promised == set(CLAUSES)


def test_every_mutant_of_the_model_is_a_saboteur_or_no_matter_of_stores() -> None:
    names = {saboteur.__name__ for some in SABOTEURS.values() for saboteur in some}
    assert set(MUTANTS.values()) <= names
    assert set(MUTANTS) | NOT_OF_A_STORE == set(MODEL_MUTANTS) and not set(MUTANTS) & NOT_OF_A_STORE


def test_a_saboteur_breaks_in_one_way() -> None:
    """Each says which clause it breaks."""
    for clause, some in SABOTEURS.items():
        for saboteur in some:
            assert re.match(rf"{clause}[:,] ", saboteur.__doc__ or ""), saboteur
