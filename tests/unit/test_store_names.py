"""Job names where a store's names cannot be any text: one-to-one, short enough, and readable."""

from __future__ import annotations

import re

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_anarchon import Anarchon
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.entries import JobFactory
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.wire import store_name

NAMES = [
    *("a.b", "a_b", "a b", "a:b*", "{x}", "a>", "a%2Eb", "a~b", "A.B", "ä", "a\u0308", "\udc80", "\0", "%", "~"),
    *("n" * 300, "n" * 299 + "m", "n" * 299, "." * 300),
]


def test_no_two_names_meet() -> None:
    for limit in (60, 200):
        shown = {name: store_name(name, limit) for name in NAMES}
        assert len(set(shown.values())) == len(NAMES)
        assert all(re.fullmatch(r"[A-Za-z0-9_%~-]+", one) and len(one) <= limit for one in shown.values())


def test_names_stay_readable() -> None:
    assert store_name("nightly-export_2", 200) == "nightly-export_2"
    assert store_name("a.b c", 200) == "a%2Eb%20c"
    assert store_name("n" * 300, 60).startswith("nnnnnnnn")
    # What another release has written must be found.
    assert store_name("n" * 300, 60) == "n" * 27 + "~230b077491957fb486227d8d66cc84eb"


@given(st.lists(st.text(max_size=80), min_size=2, max_size=4, unique=True), st.integers(40, 90))
def test_names_are_one_to_one(names: list[str], limit: int) -> None:
    shown = [store_name(name, limit) for name in names]
    assert len(set(shown)) == len(names)
    assert all(len(one) <= limit for one in shown)


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "at least one character"), ("export \ud83d", r"job 'export \\ud83d': half of a surrogate pair")],
)
def test_names_that_no_job_can_have_are_refused(name: str, words: str) -> None:
    """Half a surrogate pair is a text to Python, and an error where the first run's id is made of it."""
    app = Celery("names", set_as_current=False)
    factory = JobFactory(app, MemoryBackend.traits)
    entry = factory.entry(name, {"task": "t", "schedule": 5})
    with pytest.raises(ConfigurationError, match=words):
        factory.job(entry)
    with pytest.raises(ConfigurationError, match=words):
        Anarchon(app, backend=MemoryBackend()).every(name, 5, "t")
