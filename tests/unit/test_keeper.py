"""What a worker process holds, without Celery and without its thread: leases, ends in their order, a store away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_anarchon import MemoryBackend
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.backends.memory import MemoryStore
from celery_anarchon.backends.runs import RunHold, Start, StartResult, Unstarted, Worker
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.events import Event, HoldLost, RunEnded, Settled
from celery_anarchon.held import Held
from celery_anarchon.keeper import Keeper
from celery_anarchon.model import GateAnswer, Run, RunState, Terms
from celery_anarchon.testing.clock import ManualClock

SECOND = 1_000
TERMS = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND, max_attempts=2)
UNCOUNTED = replace(TERMS, max_attempts=None)


class Noted(MemoryBackend):
    """Notes what it is told, and fails on demand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.told: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.along = False

        self.meanwhile: dict[str, Callable[[], Any]] = {}
        """What happens, once, while the answer is under way."""

    def _note(self, name: str) -> None:
        self.told.append(name)
        if name in self.failing:
            raise self.failing[name]

    def start(self, starts: Any) -> Any:
        self._note("start")
        answers = super().start(starts)
        self.meanwhile.pop("start", lambda: None)()
        return answers

    def heartbeat(self, holds: Any) -> Any:
        self._note("heartbeat")
        return super().heartbeat(holds)

    def settle(self, settlements: Any) -> Any:
        self._note("settle")
        return super().settle(settlements)

    def tells_along(self) -> bool:
        return self.along

    def settle_and_start(self, settlements: Any, starts: Any) -> Any:
        self._note("settle and start")
        return super().settle_and_start(settlements, starts)

    def release(self, holds: Any) -> Any:
        self._note("release")
        return super().release(holds)

    def unstarted(self, messages: Any) -> Any:
        self._note("unstarted")
        return super().unstarted(messages)


class Desk:
    def __init__(self) -> None:
        self.clock = ManualClock(wall=1_774_746_000_000)
        store = MemoryStore(self.clock)
        self.backend = Noted(store=store)
        self.reader = MemoryBackend(store=store)
        self.keeper = Keeper(
            self.backend,
            heartbeat=10 * SECOND,
            presence=Worker(owner="w", label="w", version="1"),
            clock=self.clock,
        )
        self.told: list[Event] = []
        self.keeper.fanout.add(self.told.append)
        self.keeper.begin = lambda: None  # type: ignore[method-assign]
        self.slot = self.clock.wall()

    def claim(self, job: str, terms: Terms) -> None:
        """And its message is sent."""
        request = ClaimRequest(job=job, slot=self.slot, owner="b", beat="b", lease=SECOND, terms=terms)
        self.reader.claim([request])
        self.reader.confirm([Confirmation(job=job, slot=self.slot, owner="b", attempt=1, late=0)])

    def ask(self, job: str = "job", attempt: int = 1) -> tuple[StartResult, Held | None]:
        self.claim(job, TERMS)
        return self.keeper.ask(
            Start(job=job, slot=self.slot, attempt=attempt, retries=0, token=job, worker="w", terms=TERMS)
        )

    def start(self, job: str = "job", attempt: int = 1) -> Held:
        result, held = self.ask(job, attempt)
        assert result.answer is GateAnswer.START and held is not None
        # As where a child of the pool begins the body.
        held.begun = None
        self.backend.told.clear()
        return held

    def start_without_answer(self, terms: Terms = TERMS) -> Held:
        """A body that runs though the store could not be asked."""
        self.claim("job", terms)
        start = Start(job="job", slot=self.slot, attempt=1, retries=0, token="job", worker="w", terms=terms)
        hold = RunHold(job="job", slot=self.slot, attempt=1, retries=0, token="job")
        held = Held(hold, terms.lease, math.inf, start=start, answered=False)
        self.keeper.add(held)
        return held

    def elsewhere(self, terms: Terms = TERMS) -> None:
        """Another worker starts a copy of the message."""
        start = Start(job="job", slot=self.slot, attempt=1, retries=0, token="other", worker="other", terms=terms)
        assert self.reader.start([start])[0].answer is GateAnswer.START

    def run(self, job: str = "job") -> Run:
        return self.reader.history(job, 1)[0]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_leases_are_renewed_each_heartbeat_in_one_call(desk: Desk) -> None:
    for job in ("one", "two", "three"):
        desk.start(job)
    for _ in range(10):
        desk.keeper.turn()
        desk.clock.advance(10 * SECOND)
    assert desk.backend.told == ["heartbeat"] * 10
    assert desk.reader.lapsed(10) == []
    assert [worker.label for worker in desk.reader.workers(11 * SECOND)] == ["w"]


def test_one_failed_heartbeat_is_no_loss(desk: Desk) -> None:
    """Only past the lease nobody knows; and what the store says afterwards holds."""
    held = desk.start()
    desk.keeper.turn()
    desk.backend.failing["heartbeat"] = BackendUnavailable("away")
    for _ in range(2):
        desk.clock.advance(12 * SECOND)
        desk.keeper.turn()
        assert desk.keeper.lost("job") is False
    desk.clock.advance(12 * SECOND)
    desk.keeper.turn()
    assert desk.keeper.lost("job") is True
    desk.backend.failing.clear()
    desk.clock.advance(12 * SECOND)
    desk.keeper.turn()
    assert desk.keeper.lost("job") is False and not held.refused


def test_what_was_taken_over_is_lost_and_left_alone(desk: Desk) -> None:
    held = desk.start()
    record = desk.reader._store.spaces[desk.reader.namespace].find("job", desk.slot)
    assert record is not None
    record.attempt, record.token = 2, "another"
    desk.keeper.turn()
    assert desk.keeper.lost("job") is True
    desk.clock.advance(10 * SECOND)
    desk.keeper.turn()
    desk.keeper.settle(held, RunState.SUCCEEDED)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().attempt, record.token) == (RunState.RUNNING, 2, "another")
    assert desk.told == [HoldLost(job="job", slot=desk.slot, attempt=1)]


def test_an_answer_that_is_older_than_its_lease_is_asked_for_again(desk: Desk) -> None:
    """A worker that was frozen while it waited for a yes: another has started the next attempt since."""

    def frozen() -> None:
        desk.clock.advance(TERMS.lease + 1)
        again = Start(job="job", slot=desk.slot, attempt=1, retries=0, token="other", worker="other", terms=TERMS)
        assert desk.reader.start([again])[0] == StartResult(GateAnswer.START, 2)

    desk.backend.meanwhile["start"] = frozen
    result, held = desk.ask()
    assert (result.answer, held) == (GateAnswer.STALE, None)
    desk.keeper.turn()
    assert "heartbeat" not in desk.backend.told


def test_a_late_answer_to_a_run_that_nobody_took_holds(desk: Desk) -> None:
    desk.backend.meanwhile["start"] = lambda: desk.clock.advance(TERMS.lease + 1)
    result, held = desk.ask()
    assert (result.answer, desk.backend.told) == (GateAnswer.START, ["start", "start"])
    assert held is not None and desk.keeper.lost("job") is False
    assert held.until == desk.clock.monotonic() + TERMS.lease / SECOND
    assert desk.reader.lapsed(10) == []


def test_the_first_end_counts(desk: Desk) -> None:
    held = desk.start()
    desk.keeper.settle(held, RunState.TIMED_OUT, "time-limit")
    desk.keeper.settle(held, RunState.FAILED, "exception")
    desk.keeper.release(held)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().reason) == (RunState.TIMED_OUT, "time-limit")
    assert desk.backend.told.count("settle") == 1 and "release" not in desk.backend.told
    assert desk.told == [Settled(job="job", slot=desk.slot, attempt=1, state=RunState.TIMED_OUT, reason="time-limit")]


def test_no_release_goes_before_an_end_that_was_not_told(desk: Desk) -> None:
    """Mutant handover-overtakes-settle (R4): the finished run would be executed again."""
    ended, cut = desk.start("ended"), desk.start("cut")
    desk.backend.failing["settle"] = OutcomeUnknown("no answer")
    desk.keeper.release(cut)
    desk.keeper.settle(ended, RunState.SUCCEEDED)
    desk.keeper.turn()
    assert "release" not in desk.backend.told
    desk.backend.failing.clear()
    desk.clock.advance(5 * SECOND)
    desk.keeper.turn()
    assert desk.backend.told[-2:] == ["settle", "release"]
    assert desk.run("ended").state is RunState.SUCCEEDED
    assert [claim.job for claim in desk.reader.lapsed(10)] == ["cut"]


def test_an_end_goes_along_with_the_next_question(desk: Desk) -> None:
    """On a store where that is one round trip; and not past what has to be told before it."""
    first = desk.start("first")
    desk.keeper.settle(first, RunState.SUCCEEDED)
    desk.start("alone")
    assert desk.run("first").state is RunState.RUNNING
    desk.backend.along = True
    second = desk.start("second")
    assert desk.run("first").state is RunState.SUCCEEDED
    assert [event.job for event in desk.told if isinstance(event, Settled)] == ["first"]
    desk.keeper.turn()
    assert "settle" not in desk.backend.told, "it was told, and is forgotten"
    desk.keeper.settle(second, RunState.FAILED, "exception")
    desk.backend.failing["settle and start"] = OutcomeUnknown("the reply was lost")
    with pytest.raises(OutcomeUnknown):
        desk.start("third")
    desk.backend.failing.clear()
    desk.keeper.doubt(Start(job="third", slot=desk.slot, attempt=1, retries=0, token="third", worker="w", terms=TERMS))
    desk.backend.told.clear()
    desk.start("fourth")
    assert desk.run("second").state is RunState.RUNNING, "what is given back goes first"
    desk.keeper.turn()
    assert desk.run("second").state is RunState.FAILED


def test_an_end_that_cannot_be_told_keeps_no_question_from_its_answer(desk: Desk) -> None:
    desk.backend.along = True
    bad = desk.start("bad")
    desk.keeper.settle(bad, RunState.SUCCEEDED)
    desk.backend.failing = {name: OutcomeUnknown("a broken record") for name in ("settle", "settle and start")}
    desk.keeper.turn()
    desk.start("other")
    desk.backend.failing = {}
    desk.clock.advance(5 * SECOND)
    desk.keeper.turn()
    assert desk.run("bad").state is RunState.SUCCEEDED


def test_an_end_that_cannot_be_told_costs_no_lease(desk: Desk) -> None:
    bad, _ = desk.start("bad"), desk.start("other")
    desk.keeper.settle(bad, RunState.SUCCEEDED)
    desk.backend.failing["settle"] = OutcomeUnknown("a broken record")
    for _ in range(20):
        desk.clock.advance(5 * SECOND)
        desk.keeper.turn()
    assert [claim.job for claim in desk.reader.lapsed(10)] == ["bad"]
    assert desk.keeper.lost("other") is False


class Patience:
    """Instead of the keeper's own waiting: at each wait something happens, or nothing."""

    def __init__(self, *happens: Callable[[], Any]) -> None:
        self._happens = list(happens)
        self.waits = 0

    def wait(self, _: float) -> None:
        self.waits += 1
        if self._happens:
            self._happens.pop(0)()


def test_ends_wait_for_questions_while_these_come(desk: Desk) -> None:
    desk.backend.along = True

    def next_run(name: str, before: Held) -> Held:
        desk.keeper.settle(before, RunState.SUCCEEDED)
        return desk.start(name)

    runs = [desk.start("run-0")]
    steps = [lambda n=n: runs.append(next_run(f"run-{n}", runs[-1])) for n in range(1, 4)]
    patience = desk.keeper._gathered = Patience(*steps)  # type: ignore[assignment]
    desk.keeper._beat_at = math.inf
    desk.keeper._gather()
    assert patience.waits == 4, "as long as they come, and once for the last"
    assert [desk.run(f"run-{n}").state for n in range(4)] == [RunState.SUCCEEDED] * 3 + [RunState.RUNNING]


def test_what_goes_along_with_no_question_waits_for_none(desk: Desk) -> None:
    desk.backend.along = True
    ended, cut = desk.start("ended"), desk.start("cut")
    desk.keeper.settle(ended, RunState.SUCCEEDED)

    def ask_and_release() -> None:
        desk.start("other")
        desk.keeper.release(cut)

    patience = desk.keeper._gathered = Patience(ask_and_release, lambda: desk.start("more"))  # type: ignore[assignment]
    desk.keeper._beat_at = math.inf
    desk.keeper._gather()
    assert patience.waits == 1


def test_questions_do_not_hold_up_the_heartbeat(desk: Desk) -> None:
    desk.backend.along = True
    ended = desk.start("ended")
    desk.keeper.settle(ended, RunState.SUCCEEDED)
    patience = desk.keeper._gathered = Patience(lambda: desk.start("a"), lambda: desk.start("b"))  # type: ignore[assignment]
    desk.keeper._beat_at = desk.clock.monotonic()
    desk.keeper._gather()
    assert patience.waits == 1


def test_an_end_that_the_store_did_not_hear_is_told_again(desk: Desk) -> None:
    held = desk.start()
    desk.backend.failing["settle"] = BackendUnavailable("away")
    desk.keeper.settle(held, RunState.FAILED, "exception")
    desk.keeper.turn()
    assert desk.run().state is RunState.RUNNING
    desk.backend.failing.clear()
    desk.clock.advance(SECOND)
    desk.keeper.turn()
    assert desk.run().state is RunState.FAILED


def test_a_copy_that_expired_does_not_end_the_run(desk: Desk) -> None:
    """Mutant expiry-unfenced (H5), as the worker says it."""
    desk.start()
    desk.keeper.unstarted(Unstarted(job="job", slot=desk.slot, attempt=1, retries=0, reason="expired"))
    desk.keeper.turn()
    assert desk.run().state is RunState.RUNNING


def test_a_message_that_is_gone_is_told_of(desk: Desk) -> None:
    desk.claim("job", TERMS)
    desk.keeper.unstarted(Unstarted(job="job", slot=desk.slot, attempt=1, retries=0, reason="expired"))
    desk.keeper.turn()
    assert desk.run().state is RunState.LOST_IN_QUEUE
    assert desk.told == [RunEnded(job="job", slot=desk.slot, state=RunState.LOST_IN_QUEUE, reason="expired")]


def test_a_stop_releases_what_has_not_ended_and_leaves(desk: Desk) -> None:
    ended, _ = desk.start("ended"), desk.start("cut")
    desk.keeper.turn()
    desk.keeper.settle(ended, RunState.SUCCEEDED)
    desk.keeper.stop()
    assert desk.run("ended").state is RunState.SUCCEEDED
    assert [(claim.job, claim.reason) for claim in desk.reader.lapsed(10)] == [("cut", "worker-stopped")]
    assert desk.reader.workers(60 * SECOND) == [] and desk.reader.ever_had_workers()


def test_a_run_past_its_time_is_ended_where_the_pool_cannot(desk: Desk) -> None:
    held = desk.start()
    held.deadline = desk.clock.monotonic() + 5
    desk.keeper.turn()
    assert desk.run().state is RunState.RUNNING
    desk.clock.advance(5 * SECOND)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().reason) == (RunState.TIMED_OUT, "time-limit")
    assert desk.keeper.lost("job") is None


def test_losses_with_work_between_them_do_not_add_up(desk: Desk) -> None:
    for number in range(6):
        held = desk.start(f"job-{number}")
        desk.backend.failing["settle"] = OutcomeUnknown("the reply was lost")
        desk.keeper.settle(held, RunState.SUCCEEDED)
        desk.keeper.turn()
        desk.backend.failing.clear()
        desk.clock.advance(SECOND // 2)
        desk.keeper.turn()
        assert desk.run(f"job-{number}").state is RunState.SUCCEEDED


# --- bodies that run without the store's answer -----------------------------------------------------------------------


@pytest.mark.parametrize("failure", [BackendUnavailable("away"), OutcomeUnknown("no answer")])
def test_a_body_without_an_answer_is_followed_once_there_is_one(desk: Desk, failure: Exception) -> None:
    desk.backend.failing["start"] = failure
    held = desk.start_without_answer()
    for _ in range(100):
        desk.keeper.turn()
        desk.clock.advance(SECOND)
    # Asked with the outage's patience, not at each turn; and nothing is lost before the store says so.
    assert 2 <= desk.backend.told.count("start") <= 30
    assert "heartbeat" not in desk.backend.told and desk.keeper.lost("job") is False
    desk.backend.failing.clear()
    for _ in range(10):
        desk.clock.advance(10 * SECOND)
        desk.keeper.turn()
    assert desk.run().state is RunState.RUNNING and desk.reader.lapsed(10) == []
    desk.keeper.settle(held, RunState.SUCCEEDED)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().attempt, desk.run().refused) == (RunState.SUCCEEDED, 1, 0)


def test_a_body_that_ended_before_the_answer_came(desk: Desk) -> None:
    """Its end waits for it: the store would refuse the end of a run that it knows nothing of."""
    desk.backend.failing["start"] = BackendUnavailable("away")
    held = desk.start_without_answer()
    desk.keeper.turn()
    desk.keeper.settle(held, RunState.FAILED, "exception")
    desk.clock.advance(SECOND)
    desk.keeper.turn()
    assert "settle" not in desk.backend.told
    desk.backend.failing.clear()
    desk.clock.advance(5 * SECOND)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().reason) == (RunState.FAILED, "exception")


@pytest.mark.parametrize("ended", [False, True])
def test_a_body_without_an_answer_whose_run_another_has(desk: Desk, ended: bool) -> None:
    """Told, and nothing of it is written: the history keeps the truth."""
    desk.backend.failing["start"] = BackendUnavailable("away")
    held = desk.start_without_answer()
    desk.keeper.turn()
    desk.elsewhere()
    if ended:
        desk.keeper.settle(held, RunState.FAILED, "exception")
    desk.backend.failing.clear()
    desk.clock.advance(SECOND)
    desk.keeper.turn()
    if not ended:
        assert desk.keeper.lost("job") is True
        desk.keeper.settle(held, RunState.FAILED, "exception")
    desk.keeper.turn()
    assert "settle" not in desk.backend.told
    assert (desk.run().state, desk.run().worker) == (RunState.RUNNING, "other")


def test_a_retry_of_a_body_that_was_granted_another_attempt_later(desk: Desk) -> None:
    """Its message names the attempt that the body was told of and will be stale: the run is free at once, and does not
    wait for it."""
    terms = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND, max_attempts=3)
    desk.backend.failing["start"] = BackendUnavailable("away")
    held = desk.start_without_answer(terms)
    desk.elsewhere(terms)
    desk.clock.advance(31 * SECOND)
    desk.backend.failing.clear()
    desk.keeper.turn()
    assert (desk.run().attempt, desk.run().worker) == (2, "w")
    desk.keeper.retry(held, SECOND)
    desk.keeper.turn()
    assert [(claim.attempt, claim.reason) for claim in desk.reader.lapsed(10)] == [(2, "worker-stopped")]


def test_a_next_try_that_began_first_is_no_alarm(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """With ``retry(countdown=0)`` its message overtakes what is told of the try before."""
    caplog.set_level("INFO", logger="celery_anarchon.worker")
    held = desk.start()
    desk.keeper.retry(held, 0)
    again = Start(job="job", slot=desk.slot, attempt=1, retries=1, token="next", worker="w", terms=TERMS)
    assert desk.reader.start([again])[0].answer is GateAnswer.START
    desk.keeper.turn()
    said = [record for record in caplog.records if "moved on" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert desk.run().state is RunState.RUNNING


def test_a_stop_asks_for_the_answer_that_is_missing(desk: Desk) -> None:
    desk.backend.failing["start"] = OutcomeUnknown("no answer")
    desk.start_without_answer()
    desk.keeper.turn()
    desk.backend.failing.clear()
    desk.keeper.stop()
    assert [(claim.job, claim.reason) for claim in desk.reader.lapsed(10)] == [("job", "worker-stopped")]


def test_a_run_that_nobody_follows_and_whose_record_was_dropped(desk: Desk) -> None:
    """At the gate it would run; so it is not told to be lost."""
    desk.backend.failing["start"] = BackendUnavailable("away")
    held = desk.start_without_answer()
    held.followed = False
    desk.backend.failing.clear()
    desk.backend.start = lambda starts: [StartResult(GateAnswer.TRIMMED) for _ in starts]  # type: ignore[method-assign]
    desk.keeper.turn()
    assert desk.keeper.lost("job") is False and "heartbeat" not in desk.backend.told
    desk.keeper.settle(held, RunState.SUCCEEDED)
    desk.keeper.turn()
    assert desk.keeper.lost("job") is None and "settle" not in desk.backend.told


# --- bodies of pools that call them in the worker's own process -------------------------------------------------------


def test_a_stop_gives_back_what_has_not_begun(desk: Desk) -> None:
    """Released, it would have cost an attempt without a body: with max_attempts=1 the run."""
    held = desk.start()
    held.begun = False
    desk.keeper.stop()
    assert "release" not in desk.backend.told
    assert desk.run().state is RunState.QUEUED and desk.reader.lapsed(10) == []
    assert desk.keeper.begins(held) is False, "its message runs elsewhere"


@pytest.mark.parametrize("granted", [1, 2])
def test_a_stop_gives_back_what_has_not_begun_and_was_not_answered(desk: Desk, granted: int) -> None:
    """The question may have been answered yes without our hearing it, with the message's attempt or the next one."""
    desk.backend.failing["start"] = OutcomeUnknown("no answer")
    held = desk.start_without_answer(TERMS)
    held.begun = False
    if granted == 2:
        desk.elsewhere(TERMS)
        desk.clock.advance(31 * SECOND)
    desk.keeper.turn()
    assert held.start is not None and desk.reader.start([held.start])[0].attempt == granted
    desk.keeper.stop()
    assert desk.run().state is (RunState.QUEUED if granted == 1 else RunState.CLAIMED)
    assert desk.run().attempt == granted


def redelivered(desk: Desk, times: int) -> Start:
    """The last question of a message that was delivered so often, each time to a worker that died. It was granted."""
    desk.claim("job", UNCOUNTED)
    first = Start(job="job", slot=desk.slot, attempt=1, retries=0, token="0", worker="w", terms=UNCOUNTED)
    for number in range(1, times + 1):
        question = replace(first, token=str(number), acks_late=True)
        assert desk.reader.start([question])[0] == StartResult(GateAnswer.START, number)
        if number < times:
            desk.clock.advance(UNCOUNTED.lease + 1)
    return question


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_what_may_have_been_granted_is_undone_whichever_attempt_it_was(desk: Desk, times: int) -> None:
    """Redeliveries of what acknowledges late say attempt 1 for ever."""
    desk.keeper.doubt(redelivered(desk, times))
    desk.keeper.turn()
    # The message, or a beat, goes on at once.
    assert desk.run().state is (RunState.QUEUED if times == 1 else RunState.CLAIMED)
    assert [claim.attempt for claim in desk.reader.lapsed(10)] == ([] if times == 1 else [times])


def test_what_goes_back_goes_before_the_next_delivery_asks(desk: Desk) -> None:
    """A worker that loses its broker gives back what has not begun, and has it again at once."""
    held, other = desk.start("job"), desk.start("other")
    held.begun = other.begun = False
    assert desk.keeper.give_back_unbegun(held) and desk.keeper.give_back_unbegun(other)
    start = Start(job="job", slot=desk.slot, attempt=1, retries=0, token="again", worker="w", terms=TERMS)
    assert desk.keeper.ask(start)[0] == StartResult(GateAnswer.START, 1)
    assert desk.run("other").state is RunState.RUNNING, "one run's question waits for nothing of another's"
    desk.keeper.turn()
    assert (desk.run("other").state, desk.run("job").state) == (RunState.QUEUED, RunState.RUNNING)


def unbegun(desk: Desk, job: str = "job") -> Held:
    """On threads and greenlets it may wait for one for as long as the bodies before it take."""
    held = desk.start(job)
    held.begun = False
    return held


def test_what_another_has_meanwhile_does_not_begin(desk: Desk) -> None:
    held = unbegun(desk)
    desk.clock.advance(TERMS.lease + 1)
    again = Start(job="job", slot=desk.slot, attempt=1, retries=0, token="other", worker="other", terms=TERMS)
    assert desk.reader.start([again])[0] == StartResult(GateAnswer.START, 2)
    assert desk.keeper.begins(held) is False and held.answer is GateAnswer.STALE
    desk.keeper.stop()
    assert (desk.run().state, desk.run().attempt) == (RunState.RUNNING, 2)


@pytest.mark.parametrize("wiped", [True, False])
def test_what_the_store_forgot_may_begin(desk: Desk, wiped: bool) -> None:
    """A failover lost its start, or all of it: a heartbeat's no says nothing of another."""
    held = unbegun(desk)
    space = desk.reader._store.spaces[desk.reader.namespace]
    record = space.find("job", desk.slot)
    assert record is not None
    if wiped:
        desk.reader._store.spaces.clear()
        desk.reader.open("app")
        desk.backend.open("app")
    else:
        record.state, record.token = RunState.QUEUED, ""
    desk.keeper.turn()
    assert held.refused
    assert desk.keeper.begins(held) is True
    assert desk.keeper.lost("job") is False and desk.run().state is RunState.RUNNING


def test_a_lease_that_nobody_took_lets_the_body_begin(desk: Desk) -> None:
    held = unbegun(desk)
    desk.clock.advance(TERMS.lease + 1)
    assert desk.keeper.begins(held) is True
    assert desk.keeper.lost("job") is False and desk.reader.lapsed(10) == []


def test_bodies_do_not_wait_for_a_store_that_is_known_to_be_away(desk: Desk) -> None:
    """One call tells, for all that wait: each would cost its timeout, one after the other."""
    waiting = [unbegun(desk, job) for job in ("one", "two", "three")]
    desk.clock.advance(TERMS.lease + 1)
    desk.backend.failing["start"] = BackendUnavailable("away")
    assert [desk.keeper.begins(held) for held in waiting] == [True] * 3
    assert desk.backend.told.count("start") == 1
    assert desk.keeper.lost("one") is True


def test_what_was_given_back_is_not_asked_for_again(desk: Desk) -> None:
    held = unbegun(desk)
    assert desk.keeper.give_back_unbegun(held)
    desk.clock.advance(TERMS.lease + 1)
    desk.keeper.turn()
    assert desk.keeper.begins(held) is False and held.answer is None
    assert desk.run().state is RunState.QUEUED and "start" not in desk.backend.told


def test_a_stop_does_not_release_a_body_that_still_runs(desk: Desk) -> None:
    """A cold stop that leaves threads alone (mutant handover-before-stop, R4). One that was cut off is free."""
    runs, cut = desk.start("runs"), desk.start("cut")
    for held in (runs, cut):
        held.begun = False
        assert desk.keeper.begins(held) is True
    cut.stopped = True
    desk.keeper.stop()
    assert [(claim.job, claim.reason) for claim in desk.reader.lapsed(10)] == [("cut", "worker-stopped")]
    assert desk.run("runs").state is RunState.RUNNING


def test_a_timeout_counts_from_the_beginning_of_the_body(desk: Desk) -> None:
    """In the queue of a busy pool it had been over before the body began."""
    held = desk.start()
    held.begun, held.timeout = False, 5
    desk.keeper.turn()
    desk.clock.advance(9 * SECOND)
    desk.keeper.turn()
    assert desk.run().state is RunState.RUNNING
    desk.keeper._wake.clear()
    assert desk.keeper.begins(held) is True
    assert desk.keeper._rest() == pytest.approx(1) and not desk.keeper._wake.is_set(), "the heartbeat is sooner"
    desk.clock.advance(SECOND)
    desk.keeper.turn()
    assert desk.keeper._rest() == pytest.approx(4)
    desk.clock.advance(4 * SECOND)
    desk.keeper.turn()
    assert (desk.run().state, desk.run().reason) == (RunState.TIMED_OUT, "time-limit")


def test_a_timeout_before_the_next_heartbeat_is_not_slept_through(desk: Desk) -> None:
    held = desk.start()
    held.begun, held.timeout = False, 5
    desk.keeper.turn()
    desk.keeper._wake.clear()
    assert desk.keeper.begins(held) is True
    assert desk.keeper._wake.is_set() and desk.keeper._rest() == pytest.approx(5)
