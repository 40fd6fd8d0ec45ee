"""Which slots a job owes: current, missed, too late, superseded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_anarchon.model import Coalesce
from celery_anarchon.options import JobOptions
from celery_anarchon.slots import Plan, delay_of, due_at, last_due, plan
from celery_anarchon.timetable import Interval

SECOND = 1_000
MINUTE = 60 * SECOND
EVERY_MINUTE = Interval(MINUTE)


def owed(*, cursor: int, now: int, working_since: int = 0, limit: int = 100, **options: object) -> Plan:
    return plan(
        "job",
        EVERY_MINUTE,
        JobOptions(**options),  # type: ignore[arg-type]
        cursor=cursor,
        now=now,
        working_since=working_since,
        limit=limit,
    )


def test_nothing_before_its_time() -> None:
    result = owed(cursor=0, now=MINUTE - 1)
    assert result.send == ()
    assert result.cursor == 0


def test_a_timetable_that_does_not_go_on_is_refused() -> None:
    """What it names after a slot is that slot: one would be listed for many."""

    class Standing(Interval):
        def next(self, after: int) -> int:
            return super().next(after - 1)

    with pytest.raises(ValueError, match=r"next\(1970-01-01T00:01:00.000Z\) names 1970-01-01T00:01:00.000Z"):
        plan("job", Standing(MINUTE), JobOptions(), cursor=MINUTE, now=3 * MINUTE, working_since=0, limit=100)


def test_a_slot_is_owed_at_its_very_millisecond() -> None:
    assert owed(cursor=0, now=MINUTE).send == (MINUTE,)


def test_current_slots_are_all_sent_oldest_first() -> None:
    result = owed(cursor=0, now=3 * MINUTE)
    assert result.send == (MINUTE, 2 * MINUTE, 3 * MINUTE)
    assert result.superseded.total == 0
    assert result.cursor == 3 * MINUTE


@pytest.mark.parametrize(
    ("options", "sent", "superseded", "not_caught_up"),
    [
        ({}, (3,), 2, 0),
        ({"coalesce": Coalesce.ALL}, (1, 2, 3), 0, 0),
        ({"catch_up": 0}, (), 0, 3),
        ({"catch_up": 2 * MINUTE, "coalesce": Coalesce.ALL}, (2, 3), 0, 1),
        ({"catch_up": 2 * MINUTE}, (3,), 1, 1),
    ],
)
def test_missed_slots(options: dict[str, object], sent: tuple[int, ...], superseded: int, not_caught_up: int) -> None:
    now = 3 * MINUTE + 30 * SECOND
    result = owed(cursor=0, now=now, working_since=now, **options)
    assert result.send == tuple(minute * MINUTE for minute in sent)
    assert result.superseded.total == superseded
    assert result.not_caught_up.total == not_caught_up
    assert result.too_late.total == 0
    assert result.cursor == 3 * MINUTE


def test_missed_and_current_slots_do_not_mix() -> None:
    result = owed(cursor=0, now=5 * MINUTE, working_since=3 * MINUTE + 1)
    assert result.send == (3 * MINUTE, 4 * MINUTE, 5 * MINUTE)
    assert result.superseded.latest == (2 * MINUTE, MINUTE)


def test_catch_up_zero_spares_current_slots() -> None:
    result = owed(cursor=0, now=5 * MINUTE, working_since=3 * MINUTE + 1, catch_up=0)
    assert result.send == (4 * MINUTE, 5 * MINUTE)
    assert result.not_caught_up.total == 3


def test_max_late_cuts_current_slots_too_and_keeps_its_edge() -> None:
    result = owed(cursor=0, now=3 * MINUTE, max_late=MINUTE)
    assert result.send == (2 * MINUTE, 3 * MINUTE)
    assert result.too_late.latest == (MINUTE,)


def test_everything_too_late_moves_the_cursor_all_the_same() -> None:
    result = owed(cursor=0, now=3 * MINUTE + 2 * SECOND, max_late=SECOND)
    assert result.send == ()
    assert result.too_late.total == 3
    assert result.cursor == 3 * MINUTE


def test_a_year_of_missed_minutes_is_counted_not_listed() -> None:
    year = 525_600
    result = owed(cursor=0, now=year * MINUTE, working_since=year * MINUTE, history_size=50)
    assert result.send == (year * MINUTE,)
    assert result.superseded.total == year - 1
    assert len(result.superseded.latest) == 50
    assert result.superseded.latest[0] == (year - 1) * MINUTE


def test_the_limit_cuts_and_the_cursor_stands_at_the_cut() -> None:
    result = owed(cursor=0, now=10 * MINUTE, limit=4)
    assert result.send == (MINUTE, 2 * MINUTE, 3 * MINUTE, 4 * MINUTE)
    assert result.cursor == 4 * MINUTE


@given(
    cursor=st.integers(0, 30),
    elapsed=st.integers(0, 30),
    worked=st.integers(0, 60),
    catch_up=st.none() | st.integers(0, 30),
    max_late=st.none() | st.integers(1, 30),
    coalesce=st.sampled_from(Coalesce),
    phase=st.integers(0, MINUTE - 1),
)
def test_every_slot_is_accounted_for_exactly_once(
    cursor: int,
    elapsed: int,
    worked: int,
    catch_up: int | None,
    max_late: int | None,
    coalesce: Coalesce,
    phase: int,
) -> None:
    start, now = cursor * MINUTE, (cursor + elapsed) * MINUTE + phase
    result = owed(
        cursor=start,
        now=now,
        working_since=worked * MINUTE,
        catch_up=None if catch_up is None else catch_up * MINUTE,
        max_late=None if max_late is None else max_late * MINUTE,
        coalesce=coalesce,
    )
    given_up = [*result.too_late.latest, *result.not_caught_up.latest, *result.superseded.latest]
    named = sorted([*result.send, *given_up])
    assert named == [(cursor + n) * MINUTE for n in range(1, elapsed + 1)]
    assert list(result.send) == sorted(result.send)
    assert all(slot < min(result.send, default=now + 1) for slot in given_up)
    assert result.cursor == (cursor + elapsed) * MINUTE


@given(job=st.text(), slot=st.integers(0, 2**42), jitter=st.integers(1, 10 * MINUTE), gap=st.integers(1, 2 * MINUTE))
def test_jitter_stays_within_its_bounds(job: str, slot: int, jitter: int, gap: int) -> None:
    delay = delay_of(job, slot, jitter, slot + gap)
    assert 0 <= delay < min(jitter, gap)
    assert delay == delay_of(job, slot, jitter, slot + gap)


def test_jitter_is_the_same_on_every_host() -> None:
    # Golden values: another hash would let two releases in one fleet disagree.
    assert [delay_of("export", n * MINUTE, 30 * SECOND, None) for n in range(4)] == [23202, 11606, 25816, 9025]


def test_jitter_spreads() -> None:
    delays = [delay_of("job", n * MINUTE, MINUTE, None) for n in range(600)]
    assert sum(1 for delay in delays if delay < 30 * SECOND) in range(250, 351)
    assert len(set(delays)) > 590


def test_a_jittered_slot_is_due_with_its_delay() -> None:
    options = JobOptions(jitter=30 * SECOND)
    due = due_at("job", EVERY_MINUTE, options, 0)
    assert due is not None
    assert MINUTE <= due < MINUTE + 30 * SECOND
    assert last_due("job", EVERY_MINUTE, options, due - 1) == 0
    assert last_due("job", EVERY_MINUTE, options, due) == MINUTE
    early = plan("job", EVERY_MINUTE, options, cursor=0, now=due - 1, working_since=0, limit=9)
    assert early.send == ()
    on_time = plan("job", EVERY_MINUTE, options, cursor=0, now=due, working_since=0, limit=9)
    assert on_time.send == (MINUTE,)


def test_lateness_is_counted_from_the_moment_a_slot_falls_due() -> None:
    options = JobOptions(jitter=30 * SECOND, max_late=SECOND)
    due = due_at("job", EVERY_MINUTE, options, 0)
    assert due is not None and due > MINUTE + SECOND, "else this test shows nothing"
    in_time = plan("job", EVERY_MINUTE, options, cursor=0, now=due + SECOND, working_since=0, limit=9)
    assert in_time.send == (MINUTE,)
    late = plan("job", EVERY_MINUTE, options, cursor=0, now=due + SECOND + 1, working_since=0, limit=9)
    assert late.send == ()
    assert late.too_late.latest == (MINUTE,)


def test_a_slot_whose_jitter_ends_after_the_start_is_not_missed() -> None:
    options = JobOptions(jitter=30 * SECOND, catch_up=0)
    due = due_at("job", EVERY_MINUTE, options, 0)
    assert due is not None
    assert due > MINUTE
    result = plan("job", EVERY_MINUTE, options, cursor=0, now=due, working_since=due - 1, limit=9)
    assert result.send == (MINUTE,)
