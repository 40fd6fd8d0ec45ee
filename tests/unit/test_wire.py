"""Forms that other versions and other processes read: what these tests fix may not change."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_anarchon import wire
from celery_anarchon.model import Run, RunState

SPRING = datetime(2026, 3, 29, 1, 0, tzinfo=timezone.utc)
INSTANTS = st.integers(min_value=wire.instant(datetime(1900, 1, 1, tzinfo=timezone.utc)), max_value=4_102_444_800_000)


def test_a_time_is_an_instant_of_whole_milliseconds() -> None:
    at = wire.instant(SPRING)
    assert at == 1_774_746_000_000
    assert wire.moment(at) == SPRING and wire.moment(at).tzinfo is timezone.utc
    assert wire.instant(SPRING.astimezone(timezone(timedelta(hours=5, minutes=45)))) == at
    assert wire.instant(SPRING + timedelta(microseconds=1_999)) == at + 1
    assert wire.instant(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)) == -1, "floored, not cut"


def test_a_naive_time_is_none() -> None:
    with pytest.raises(ValueError, match="no time zone"):
        wire.instant(datetime(2026, 3, 29))


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (1_774_746_000_000, "2026-03-29T01:00:00.000Z"),
        (1_774_746_000_007, "2026-03-29T01:00:00.007Z"),
        (0, "1970-01-01T00:00:00.000Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
    ],
)
def test_the_text_of_a_time(at: int, text: str) -> None:
    assert wire.time_text(at) == text
    assert wire.parse_time(text) == at


@pytest.mark.parametrize(
    "text", ["2026-03-29T01:00:00Z", "2026-03-29T01:00:00z", "2026-03-29T03:00:00+02:00", "2026-03-29T01:00+00:00"]
)
def test_other_texts_of_a_time_are_read(text: str) -> None:
    assert wire.parse_time(text) == 1_774_746_000_000


@pytest.mark.parametrize("text", ["", "yesterday", "2026-03-29", "2026-03-29T01:00:00", "Z", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        wire.parse_time(text)


@given(at=INSTANTS)
def test_texts_and_moments_lose_nothing(at: int) -> None:
    assert wire.parse_time(wire.time_text(at)) == at == wire.instant(wire.moment(at))


@given(one=INSTANTS, two=INSTANTS)
def test_texts_are_in_the_order_of_their_times(one: int, two: int) -> None:
    assert (wire.time_text(one) < wire.time_text(two)) == (one < two)


def test_the_run_id_is_the_documented_formula() -> None:
    name = json.dumps(
        ["anarchon_runs", "export", "2026-03-29T01:00:00.000Z"], ensure_ascii=False, separators=(",", ":")
    )
    expected = str(uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, "celery-anarchon"), name))
    assert wire.run_id("anarchon_runs", "export", 1_774_746_000_000) == expected
    # Written down once: another Python, another host, another release give the same.
    assert expected == "7706955b-8d42-5e98-bfdd-1bbfc0716ead"


@given(st.lists(st.tuples(st.text(), st.text(), INSTANTS), min_size=2, max_size=2, unique=True))
def test_two_runs_never_share_an_id(runs: list[tuple[str, str, int]]) -> None:
    one, two = (wire.run_id(namespace, job, slot) for namespace, job, slot in runs)
    assert one != two


def test_a_fingerprint_is_the_same_everywhere() -> None:
    assert wire.fingerprint("every 30s") == "a029982c8f36256a"
    assert wire.fingerprint("every 30s") != wire.fingerprint("every 31s")


def test_the_header() -> None:
    header = wire.header(namespace="cron:", job="é", slot=1_774_746_000_000, attempt=1, late=12, beat="host:1")
    assert header == {
        "v": 1,
        "ns": "cron:",
        "job": "é",
        "slot": "2026-03-29T01:00:00.000Z",
        "attempt": 1,
        "late": 0.012,
        "beat": "host:1",
    }
    assert json.loads(json.dumps(header)) == header
    assert (wire.HEADER, wire.UNTRACKED_HEADER) == ("anarchon", "anarchon_slot")


def test_a_run_as_json() -> None:
    run = Run(job="export", slot=SPRING, run_id="id", state=RunState.DISPATCHED, sent_at=SPRING, late=0.5, beat="b")
    shown = wire.run_json(run)
    assert list(shown) == [
        *("job", "slot", "run_id", "state", "reason", "attempt", "manual", "claimed_at", "sent_at", "started_at"),
        *("ended_at", "late", "beat", "worker", "blocked_by"),
    ]
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["slot"], shown["state"], shown["late"]) == ("2026-03-29T01:00:00.000Z", "dispatched", 0.5)
    assert (shown["sent_at"], shown["ended_at"], shown["manual"]) == ("2026-03-29T01:00:00.000Z", None, False)
