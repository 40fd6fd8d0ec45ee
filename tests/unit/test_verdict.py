"""The judge is judged: each way to be wrong must be seen, and nothing may be called valid that is not known to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_anarchon.verdict import Event, Kind, event_line, event_of, judge, named, read_events

A, B, C = 1_774_746_000_000, 1_774_746_001_000, 1_774_746_002_000


def event(slot: int, job: str = "a", task_id: str | None = None, **more: Any) -> Event:
    return Event(job=job, slot=slot, task_id=task_id or f"{job}-{slot}", **more)


def test_all_sent_once_is_valid() -> None:
    verdict = judge([("a", A), ("a", B)], [event(B), event(A)])
    assert (verdict.kind, verdict.reason) == (Kind.VALID, None)
    assert (verdict.expected, verdict.sent_once) == (2, 2)


def test_a_missing_slot() -> None:
    verdict = judge([("a", A), ("a", B), ("b", A)], [event(A)])
    assert (verdict.kind, verdict.reason) == (Kind.INVALID, "2 missing")
    assert verdict.missing == (("b", A), ("a", B))
    assert (verdict.expected, verdict.sent_once) == (3, 1)


def test_a_readable_log_without_events_is_no_excuse() -> None:
    assert judge([("a", A)], []).kind is Kind.INVALID


def test_a_slot_sent_under_two_ids() -> None:
    events = [event(A, task_id="1"), event(A, task_id="2")]
    for allowed in (True, False):
        verdict = judge([("a", A)], events, allow_same_id=allowed)
        assert (verdict.kind, verdict.duplicate, verdict.same_id_twice) == (Kind.INVALID, (("a", A),), ())
        assert verdict.sent_once == 0


def test_a_slot_sent_twice_under_one_id() -> None:
    events = [event(A), event(A), event(B)]
    strict = judge([("a", A), ("a", B)], events)
    assert (strict.kind, strict.reason) == (Kind.INVALID, "1 sent twice")
    lenient = judge([("a", A), ("a", B)], events, allow_same_id=True)
    assert (lenient.kind, lenient.sent_once) == (Kind.VALID, 1)
    for verdict in (strict, lenient):
        assert (verdict.duplicate, verdict.same_id_twice) == ((), (("a", A),))


def test_a_slot_that_no_timetable_names() -> None:
    verdict = judge([("a", A)], [event(A), event(A + 1)])
    assert (verdict.kind, verdict.reason, verdict.unexpected) == (Kind.INVALID, "1 unexpected", (("a", A + 1),))


def test_before_and_after_the_window_only_duplicates_count() -> None:
    verdict = judge([("a", B)], [event(A), event(B), event(C)], window=(A, B))
    assert (verdict.kind, verdict.outside, verdict.unexpected) == (Kind.VALID, 2, ())
    verdict = judge([("a", B)], [event(B), event(C, task_id="1"), event(C, task_id="2")], window=(A, B))
    assert (verdict.kind, verdict.duplicate) == (Kind.INVALID, (("a", C),))


def test_a_job_that_nobody_expects_is_wrong_outside_the_window_too() -> None:
    verdict = judge([("a", B)], [event(B), event(C, job="ghost")], window=(A, B))
    assert (verdict.kind, verdict.unexpected) == (Kind.INVALID, (("ghost", C),))


def test_excluded_slots_are_counted_and_may_be_there_or_not_but_not_twice() -> None:
    expected = [("a", A), ("a", B)]
    for seen in ([], [event(A)]):
        verdict = judge(expected, [*seen, event(B)], excluded=[("a", A)])
        assert (verdict.kind, verdict.expected, verdict.excluded) == (Kind.VALID, 1, 1)
    assert judge(expected, [event(A), event(A), event(B)], excluded=[("a", A)]).kind is Kind.INVALID


def test_what_does_not_decide_is_unknown() -> None:
    verdict = judge([("a", A)], None)
    assert (verdict.kind, verdict.reason) == (Kind.UNKNOWN, "the event log could not be read")
    assert judge([], []).kind is Kind.UNKNOWN
    assert judge([("a", A)], [], excluded=[("a", A)]).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        pytest.param([event(A)], Kind.UNKNOWN, id="it may be a second one"),
        pytest.param([], Kind.UNKNOWN, id="it may be the missing one"),
        pytest.param([event(A), event(A)], Kind.INVALID, id="wrong whatever it is"),
    ],
)
def test_an_unreadable_entry(events: list[Event], kind: Kind) -> None:
    assert judge([("a", A)], events, unreadable=1).kind is kind


def test_json() -> None:
    verdict = judge([("a", A), ("a", B)], [event(A), event(A), event(C)])
    assert json.loads(json.dumps(verdict.as_json())) == {
        "verdict": "invalid",
        "reason": "1 missing, 1 sent twice, 1 unexpected",
        "expected": 2,
        "sent_once": 0,
        "missing": [{"job": "a", "slot": "2026-03-29T01:00:01.000Z"}],
        "duplicate": [],
        "same_id_twice": [{"job": "a", "slot": "2026-03-29T01:00:00.000Z"}],
        "unexpected": [{"job": "a", "slot": "2026-03-29T01:00:02.000Z"}],
        "outside": 0,
        "excluded": 0,
        "unreadable": 0,
    }


def test_lists_are_ordered_by_slot_then_job() -> None:
    assert named(judge([("b", B), ("a", B), ("b", A)], []).missing) == [
        {"job": "b", "slot": "2026-03-29T01:00:00.000Z"},
        {"job": "a", "slot": "2026-03-29T01:00:01.000Z"},
        {"job": "b", "slot": "2026-03-29T01:00:01.000Z"},
    ]


# --- what witnesses write ---------------------------------------------------------------------------------------------


def test_an_event_of_a_message() -> None:
    run = {"v": 1, "ns": "n", "job": "a", "slot": "2026-03-29T01:00:00.000Z", "attempt": 2, "beat": "host:1", "new": 1}
    assert event_of({"id": "x", "anarchon": run}) == Event(job="a", slot=A, task_id="x", beat="host:1", attempt=2)


@pytest.mark.parametrize(
    "headers",
    [
        {"id": "x"},
        {"id": "x", "anarchon": None},
        {"id": "x", "anarchon": {"job": "a"}},
        {"id": "x", "anarchon": {"job": "a", "slot": "yesterday"}},
        {"id": "x", "anarchon": {"job": "a", "slot": 7}},
        {"anarchon": {"job": "a", "slot": "2026-03-29T01:00:00.000Z"}},
    ],
)
def test_other_messages_are_no_events(headers: dict[str, Any]) -> None:
    assert event_of(headers) is None


def test_event_lines_read_back() -> None:
    written = [event(A, beat="host:1"), event(B, job='odd "name"\n', attempt=3)]
    lines = "".join(event_line(each) for each in written)
    assert lines.count("\n") == 2
    assert read_events(lines.splitlines()) == (written, 0)


def test_torn_and_foreign_lines_are_counted() -> None:
    good = event_line(event(A))
    events, unreadable = read_events([good, "", good[:20], "[]", '{"job": "a"}', "\n"])
    assert (len(events), unreadable) == (1, 3)
