"""The small parts of the engine: agenda, ledger, outage, pulse, interrupts, events, log."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from support.engine import SECOND, START, job

from celery_anarchon import events
from celery_anarchon.agenda import Agenda
from celery_anarchon.backends.base import Hold, LapsedClaim, Outcome
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.beatlog import log_event
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, LayoutMismatch, OutcomeUnknown
from celery_anarchon.interrupts import held_back
from celery_anarchon.ledger import RECORDS_A_CALL, Ledger
from celery_anarchon.model import Answer, Coalesce, RunState
from celery_anarchon.outage import LONGEST_WAIT, Outage
from celery_anarchon.publishing import BrokerAway
from celery_anarchon.pulse import Pulse
from celery_anarchon.sweeper import verdict_on
from celery_anarchon.testing.clock import ManualClock


def test_an_agenda_gives_out_what_is_due_and_forgets_what_was_dropped() -> None:
    agenda = Agenda()
    for name, every in (("a", 1), ("b", 2), ("gone", 1), ("moved", 1)):
        agenda.plan_again(agenda.watch(job(name, every * SECOND), START, START))
    agenda.drop("gone")
    moved = agenda.get("moved")
    assert moved is not None
    agenda.look_at(moved, START + 5 * SECOND)
    assert agenda.next_due() == START + SECOND
    assert [watched.job.name for watched in agenda.pop_due(START + SECOND)] == ["a"]
    assert [watched.job.name for watched in agenda.pop_due(START + 4 * SECOND)] == ["b"]
    assert agenda.next_due() == START + 5 * SECOND
    old = agenda.get("a")
    assert old is not None
    agenda.watch(job("a"), START, START)
    agenda.plan_again(old)
    assert [watched.job.name for watched in agenda.pop_due(START + 100 * SECOND)] == ["moved"]
    assert agenda.next_due() is None


def test_an_agenda_gives_out_a_job_once_however_often_it_was_put_somewhere() -> None:
    agenda = Agenda()
    watched = agenda.watch(job("a"), START, START)
    for when in (5, 9, 5, 5, 7, 5):
        agenda.look_at(watched, START + when * SECOND)
    assert agenda.pop_due(START + 4 * SECOND) == []
    assert agenda.pop_due(START + 100 * SECOND) == [watched]
    assert agenda.pop_due(START + 100 * SECOND) == []
    agenda.look_at(watched, START + 5 * SECOND)
    assert agenda.pop_due(START + 5 * SECOND) == [watched], "the same time again counts again"
    agenda.look_at(watched, START + 5 * SECOND)
    agenda.drop("a")
    again = agenda.watch(job("a"), START, START)
    assert agenda.pop_due(START + 4 * SECOND) == []
    agenda.look_at(again, START + 8 * SECOND)
    assert agenda.next_due() == START + 8 * SECOND
    assert agenda.pop_due(START + 100 * SECOND) == [again]
    assert agenda.next_due() is None


def test_an_agenda_waits_where_it_is_told_to() -> None:
    agenda = Agenda()
    watched = agenda.watch(job("a", SECOND), START, START)
    watched.not_before = START + 9 * SECOND
    agenda.plan_again(watched)
    assert agenda.next_due() == START + 9 * SECOND


class Recorder(MemoryBackend):
    """Notes what it is told; can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.away = False

    def abandon(self, holds: Any) -> Any:
        if self.away:
            raise BackendUnavailable("away")
        self.told.append(list(holds))
        return [True for _ in holds]

    def record(self, outcomes: Any) -> None:
        self.told.append(list(outcomes))


def test_a_ledger_keeps_what_was_not_answered() -> None:
    backend = Recorder()
    ledger = Ledger(backend)
    hold = Hold(job="a", slot=1, owner="o", attempt=1)
    ledger.abandon(hold)
    backend.away = True
    with pytest.raises(BackendUnavailable):
        ledger.tell(0)
    backend.away = False
    ledger.tell(0)
    ledger.tell(0)
    assert backend.told == [[hold]]


def test_a_ledger_tells_records_when_they_are_ripe_and_not_too_many_at_once() -> None:
    backend = Recorder()
    ledger = Ledger(backend)
    outcomes = [Outcome(job="a", slot=n, state=RunState.MISFIRE) for n in range(RECORDS_A_CALL + 1)]
    ledger.record(outcomes, when=10)
    assert ledger.next_at() == 10
    ledger.tell(9)
    assert backend.told == []
    ledger.tell(10)
    ledger.tell(10)
    assert [len(told) for told in backend.told] == [RECORDS_A_CALL, 1]
    assert ledger.next_at() is None


def test_an_outage_is_news_once_and_is_looked_at_less_and_less_often() -> None:
    clock = ManualClock()
    outage = Outage(clock)
    waits = []
    away = BackendUnavailable("no route")
    assert outage.failed(away)
    for _ in range(6):
        waits.append(outage.remaining())
        clock.advance(round(outage.remaining() * 1000))
        assert outage.remaining() == 0
        assert not outage.failed(away)
    assert waits == [0.5, 1, 2, 4, 4, 4]
    assert outage.reachable() == pytest.approx(15.5)
    assert outage.answered() and not outage.answered()
    assert not outage.away
    assert outage.remaining() == 0
    clock.advance(round(LONGEST_WAIT * 1000))
    assert outage.failed(away)
    assert outage.remaining() == 0.5


def test_an_outage_goes_on_while_all_that_works_is_the_question_whether_it_is_there() -> None:
    clock = ManualClock()
    outage = Outage(clock)
    full, waits = BackendUnavailable("OOM"), []
    assert outage.failed(full)
    for _ in range(5):
        waits.append(outage.remaining())
        clock.advance(round(outage.remaining() * 1000))
        assert outage.reachable() == pytest.approx(waits[-1])
        assert not outage.away and not outage.lasts
        assert not outage.failed(full)
    assert waits == [0.5, 1, 2, 4, 4]
    clock.advance(4 * SECOND)
    outage.reachable()
    clock.advance(3 * SECOND)
    assert outage.next_at() == pytest.approx(clock.monotonic() + 1) and not outage.lasts
    clock.advance(SECOND)
    assert outage.lasts and outage.answered()
    assert outage.next_at() is None


def test_waits_do_not_grow_while_work_is_done_between_failures() -> None:
    clock = ManualClock()
    outage, lost = Outage(clock), OutcomeUnknown("the reply was lost")
    assert outage.failed(lost)
    for _ in range(5):
        clock.advance(round(outage.remaining() * 1000))
        outage.reachable()
        outage.worked()
        assert not outage.failed(lost), "one outage, told once"
        assert outage.remaining() == 0.5
    clock.advance(500)
    outage.reachable()
    outage.failed(lost)
    assert outage.remaining() == 1


def test_another_reason_is_news_once_and_a_lost_answer_is_none() -> None:
    outage = Outage(ManualClock())
    away, layout = BackendUnavailable("no route"), LayoutMismatch("of another app")
    assert outage.failed(away)
    assert not outage.failed(OutcomeUnknown("the reply was lost"))
    assert outage.failed(layout)
    assert not outage.failed(away) and not outage.failed(layout)


def test_a_pulse_knows_a_pause_from_a_rest() -> None:
    clock, seen = ManualClock(wall=START), []
    pulse = Pulse(clock, events.Fanout(seen.append))
    pulse.resting(60)
    clock.advance(60 * SECOND)
    pulse.look()
    assert seen == []
    assert pulse.working_since == START
    clock.advance(6 * SECOND)
    pulse.look()
    assert seen == [events.Stalled(pause=6 * SECOND)]
    assert pulse.working_since == clock.wall()
    clock.step(-90 * SECOND)
    assert pulse.look() == -90 * SECOND
    assert seen[1:] == [events.ClockStepped(step=-90 * SECOND)]
    assert pulse.working_since == clock.wall()
    clock.advance(6 * SECOND)
    pulse.excuse()
    pulse.look()
    assert len(seen) == 2


def test_the_hosts_sleep_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases go on meanwhile. Linux has a clock for it, which is the monotonic one but for that."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= SystemClock().monotonic() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert SystemClock().monotonic() >= before > 0


def leave_while_held_back() -> None:
    with held_back():
        signal.raise_signal(signal.SIGTERM)
        sys.exit()


def test_signals_are_held_back_and_then_heard() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with held_back() as came:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == []
            assert came == [signal.SIGTERM, signal.SIGTERM]
        assert heard == [signal.SIGTERM]
        with pytest.raises(SystemExit):
            leave_while_held_back()
        assert heard == [signal.SIGTERM, signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_hold_nothing_back() -> None:
    done: list[list[int]] = []

    def work() -> None:
        with held_back() as came:
            done.append(came)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [[]]


def test_a_listener_cannot_break_what_it_hears(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[events.Event] = []
    fanout = events.Fanout(lambda _: 1 / 0, seen.append)  # type: ignore[arg-type, return-value]
    fanout.add(seen.append)
    fanout.emit(events.StoreChanged(error=None))
    assert len(seen) == 2
    assert "ZeroDivisionError" in caplog.text


EVERY_EVENT = [
    events.Claimed(job="a", slot=START, answer=Answer.TAKEN),
    events.Sending(job="a", slot=START, attempt=1, late=12, run_id="id", task="proj.t"),
    events.Sent(job="a", slot=START, attempt=1, late=12, run_id="id"),
    events.NotSent(job="a", slot=START, run_id="id", error=ValueError("no")),
    events.Unclear(job="a", slot=START, run_id="id", error=OSError("cut")),
    events.TookOver(job="a", slot=START, attempt=1, abandoned=True),
    events.LeaseOver(job="a", slot=START),
    events.SlotsGivenUp(job="a", state=RunState.MISFIRE, reason="max-late", total=3, newest=START),
    events.StoreChanged(error=BackendUnavailable("no route\nto it")),
    events.StoreChanged(error=None),
    events.BrokerChanged(error=BrokerAway("refused")),
    events.BrokerChanged(error=None),
    events.Stalled(pause=6_000),
    events.ClockStepped(step=-6_000),
    events.SkewSeen(skew=2_000),
    events.ZonesDiffer(label="web2:1", zones=("America/Vancouver",)),
    events.JobTrouble(job="a", error=RuntimeError("x")),
]


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: type(event).__name__)
def test_every_event_is_one_line(event: events.Event, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "celery_anarchon.beat"):
        log_event(event)
    (record,) = caplog.records
    text = record.getMessage()
    assert text
    assert "\n" not in text
    assert record.__dict__["action"] == type(event).__name__
    if hasattr(event, "slot") and not isinstance(event, events.SlotsGivenUp):
        assert "2026-03-29T01:00:00.000Z" in text


def test_stocks_line_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "celery_anarchon.beat"):
        log_event(EVERY_EVENT[1])
    assert caplog.records[0].getMessage() == (
        "Scheduler: Sending due task a (proj.t) slot=2026-03-29T01:00:00.000Z late=0.012s"
    )


@pytest.mark.parametrize(
    ("options", "abandoned", "age", "end"),
    [
        ({}, False, 30, None),
        ({}, True, 30, None),
        ({}, True, 70, RunState.SUPERSEDED),
        ({}, False, 70, None),
        ({"coalesce": Coalesce.ALL}, True, 70, None),
        ({"max_late": 20 * SECOND}, False, 30, RunState.MISFIRE),
        ({"max_late": 20 * SECOND}, True, 30, RunState.MISFIRE),
    ],
)
def test_what_becomes_of_a_lapsed_claim(
    options: dict[str, Any], abandoned: bool, age: int, end: RunState | None
) -> None:
    claim = LapsedClaim(job="job", slot=START, attempt=1, abandoned=abandoned)
    assert verdict_on(claim, job(**options), START + age * SECOND)[0] is end
    later = replace(claim, attempt=2)
    assert verdict_on(later, job(**options), START + age * SECOND) == (None, ""), "it was promised by its first start"
