"""The clauses of the gate (W6-W13). Each docstring names the incident it prevents.

Belongs here: what the store says to a delivery that asks to start. Does not belong here: what one that was started says
afterwards (:mod:`.holders`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from celery_anarchon.backends.base import Keep
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import SETTLED, Answer, GateAnswer, Millis, Overlap, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import BackendHarness, abandon, give_up, take
from celery_anarchon.testing.leases import LeaseSuite
from celery_anarchon.testing.runforms import (
    ONCE,
    PLAIN,
    QUEUE_ONE,
    SKIP,
    TWICE,
    bring,
    claim_run,
    confirm_run,
    end_lapsed,
    give_back,
    heartbeat,
    look,
    release,
    retrying,
    send,
    settle,
    start,
    state_of,
    terms,
)

START, UNKNOWN, DUPLICATE = GateAnswer.START, GateAnswer.UNKNOWN, GateAnswer.DUPLICATE
CLAIMED, QUEUED, RUNNING, RETRYING = RunState.CLAIMED, RunState.QUEUED, RunState.RUNNING, RunState.RETRYING
LOST, SUCCEEDED, DISPATCHED = RunState.LOST, RunState.SUCCEEDED, RunState.DISPATCHED


class GateSuite(LeaseSuite):
    """A part of :class:`~celery_anarchon.testing.runs.RunSuite`: inherit that."""

    rounds: ClassVar[int] = 15
    """How often a race of workers is run."""

    def refuses(self, harness: BackendHarness, slot: Millis, *calls: Callable[[], bool]) -> None:
        """Each of *calls* is refused, and the record of this slot stays as it is, to the last field."""
        before = harness.raw_read("job", slot)
        for number, call in enumerate(calls):
            assert call() is False, f"call {number}, record {before}"
            assert harness.raw_read("job", slot) == before, f"call {number} was refused, and changed it"

    def not_the_holder(
        self, client: RunBackend, slot: Millis, token: str, attempt: int = 1, retries: int = 0
    ) -> list[Callable[[], bool]]:
        """All that somebody who does not hold the run might say of it."""
        steps = (heartbeat, settle, partial(settle, state=RunState.FAILED), retrying, release, give_back)
        return [partial(step, client, "job", slot, token, attempt, retries) for step in steps]

    # --- W6 .. W13: may it start? -------------------------------------------------------------------------------------

    def test_W6_the_same_delivery_asks_again_and_is_told_the_same(self, harness: BackendHarness) -> None:
        """The reply is lost; told "duplicate" the worker drops the message, and nobody runs what it was granted."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        send(client, "job", slot, TWICE)
        for _ in range(3):
            result = start(other, "job", slot, "d", of=TWICE)
            assert (result.answer, result.attempt) == (START, 1), harness.raw_read("job", slot)
        harness.lapse("job", slot)
        assert start(client, "job", slot, "d", of=TWICE).attempt == 1, "its own lease, and nobody took it"
        assert self.lapsed(other) == [], "asking again renews the lease"
        harness.lapse("job", slot)
        assert start(client, "job", slot, "e", of=TWICE).attempt == 2
        result = start(other, "job", slot, "e", of=TWICE)
        assert (result.answer, result.attempt) == (START, 2), "its message says 1, it was granted 2"
        assert state_of(client, "job", slot) is RUNNING

    def test_W7_what_has_ended_does_not_start(self, harness: BackendHarness) -> None:
        """The broker delivers a message again after its run: a payment is made twice. Or a run given up as lost in its
        queue starts beside the one that came after it."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        ends = [SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, LOST, RunState.LOST_IN_QUEUE]
        for number, state in enumerate(ends):
            bring(client, "job", base + number, state)
        for number, state in enumerate((RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED), len(ends)):
            bring(client, "job", base + number, CLAIMED)
            assert give_up(client, "job", base + number, "beat", state=state)
            ends.append(state)
        assert set(ends) < SETTLED
        for number, state in enumerate(ends):
            for attempt, retries, token in ((1, 0, "d"), (1, 0, "e"), (2, 0, "f"), (1, 1, "g")):
                answer = start(other, "job", base + number, token, attempt, retries).answer
                assert answer is GateAnswer.SETTLED, f"{state}, delivery {token}"
            run = look(client, "job", base + number)
            assert run is not None and (run.state, run.refused) == (state, 4)

    def test_W7_below_the_floor_it_has_ended(self, harness: BackendHarness) -> None:
        """The record was dropped with the history; its late copy counts as unknown, and is executed again."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base + 5, SUCCEEDED)
        assert client.tidy([Keep(job="job", decided=base + 5, history_size=0)]) == 1
        for slot in (base + 5, base):
            assert start(other, "job", slot, "e").answer is GateAnswer.TRIMMED
            assert harness.raw_read("job", slot) is None
        assert start(other, "another job", base, "e").answer is UNKNOWN, "a floor is one job's"

    def test_W8_without_a_record_it_runs_as_its_message_says(self, harness: BackendHarness) -> None:
        """The store was wiped: every message that waits in the broker is dropped, or can never end."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        result = start(client, "job", slot, "d", attempt=2, retries=1, of=TWICE)
        assert (result.answer, result.attempt) == (UNKNOWN, 2)
        run = look(other, "job", slot)
        assert run is not None
        assert (run.state, run.attempt, run.worker, run.beat) == (RUNNING, 2, "worker of d", "beat")
        assert run.started_at is not None and run.late == 0.003
        assert claim_run(other, "job", slot, "x", TWICE) is Answer.TAKEN
        assert start(other, "job", slot, "e", 2, 1, TWICE).answer is DUPLICATE
        assert heartbeat(other, "job", slot, "d", 2, 1)
        harness.lapse("job", slot)
        found = other.lapsed(10)
        assert [(one.state, one.attempt, one.max_attempts) for one in found] == [(RUNNING, 2, 2)], "its own terms"
        assert settle(other, "job", slot, "d", 2, 1)

    def test_W8_without_a_record_it_must_not_overlap(self, harness: BackendHarness) -> None:
        """The store forgets a run, the next slot is sent; the message of the first comes: two at once."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, of in enumerate((SKIP, QUEUE_ONE)):
            job = f"job {number}"
            for state in (CLAIMED, QUEUED, RUNNING, RETRYING):
                slot = base + 10 * list(RunState).index(state)
                bring(client, job, slot, state, of)
                for lapse in (False, True):
                    if lapse:
                        harness.lapse(job, slot)
                    assert start(other, job, slot + 1, "e", of=of).answer is GateAnswer.OVERLAPS, (state, lapse)
                    assert look(client, job, slot + 1) is None
                assert start(other, job, slot + 1, "f", of=PLAIN).answer is UNKNOWN, "this one may overlap"
                assert [run.state for run in client.release_job(job)] == [LOST, LOST]
            assert start(other, job, base + 999, "e", of=of).answer is UNKNOWN
        bring(client, "waits", base, RUNNING, QUEUE_ONE)
        assert claim_run(client, "waits", base + 1, "x", QUEUE_ONE) is Answer.WAITING
        assert settle(client, "waits", base, "d")
        assert start(client, "waits", base + 2, "e", of=QUEUE_ONE).answer is UNKNOWN, "what waits has no message"

    def test_W9_a_message_of_an_earlier_attempt_is_stale(self, harness: BackendHarness) -> None:
        """Attempt 2 is on its way, and the first message comes back: both are executed."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, terms(3))
        harness.lapse("job", slot)
        assert take(other, "job", slot, "x") == 2
        for confirmed in (False, True):
            if confirmed:
                assert confirm_run(other, "job", slot, "x", 2)
            for retries in (0, 1):
                result = start(client, "job", slot, "e", 1, retries, terms(3))
                assert (result.answer, result.attempt) == (GateAnswer.STALE, 2), harness.raw_read("job", slot)
        assert start(client, "job", slot, "f", 2, 0, terms(3)).answer is START
        for lapse in (False, True):
            if lapse:
                harness.lapse("job", slot)
            assert start(other, "job", slot, "g", 1, 1, terms(3)).answer is GateAnswer.STALE
        run = look(client, "job", slot)
        assert run is not None and (run.state, run.attempt, run.refused) == (RUNNING, 2, 6)

    def test_W9_also_of_what_guards_nothing_any_more(self, harness: BackendHarness) -> None:
        """An old message of a run that was given up is reported as an overlap: the person looks for the wrong thing."""
        client, other = harness.connect_run(), harness.connect_run()
        slot, of = self.base(client), terms(3, Overlap.SKIP)
        bring(client, "job", slot, RUNNING, of)
        harness.lapse("job", slot)
        assert take(other, "job", slot, "x") == 2
        assert confirm_run(other, "job", slot, "x", 2)
        harness.lapse("job", slot)
        assert end_lapsed(client, "job", slot, QUEUED, 2, DISPATCHED, "no-gate-seen")
        bring(client, "job", slot + 1, RUNNING, of)
        assert start(other, "job", slot, "e", 1, 0, of).answer is GateAnswer.STALE
        assert start(other, "job", slot, "f", 2, 0, of).answer is GateAnswer.OVERLAPS

    def test_W9_uncounted_attempts_are_redeliveries_of_one_message(self, harness: BackendHarness) -> None:
        """Two workers die over a task that acknowledges late: the second redelivery is dropped, and the run is lost."""
        client, other = harness.connect_run(), harness.connect_run()
        slot, of = self.base(client), terms(None)
        bring(client, "job", slot, RUNNING, of)
        for attempt in (2, 3, 4):
            assert start(other, "job", slot, f"early {attempt}", 1, 0, of).answer is DUPLICATE
            harness.lapse("job", slot)
            # A retry that an earlier attempt has sent is of that attempt.
            if attempt > 2:
                assert start(other, "job", slot, f"retry {attempt}", attempt - 2, 1, of).answer is GateAnswer.STALE
            result = start(other, "job", slot, f"again {attempt}", 1, 0, of)
            assert (result.answer, result.attempt) == (START, attempt), harness.raw_read("job", slot)

    def test_W10_what_was_sent_starts_confirmed_or_not(self, harness: BackendHarness) -> None:
        """The worker is faster than the confirm: refused, its message is gone. Or a beat that follows no runs meets
        workers that do: no task of the fleet ever runs."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for slot in (base, base + 1, base + 2):
            bring(client, "job", slot, CLAIMED)
        harness.lapse("job", base + 1)
        assert abandon(client, "job", base + 2, "beat")
        send(client, "job", base + 3)
        send(client, "job", base + 4)
        harness.lapse("job", base + 4)
        send(client, "job", base + 5, None)
        for number in range(6):
            result = start(other, "job", base + number, "e", of=ONCE)
            assert (result.answer, result.attempt) == (START, 1), (number, harness.raw_read("job", base + number))
            run = look(client, "job", base + number)
            assert run is not None and (run.state, run.worker, run.refused) == (RUNNING, "worker of e", 0)
            assert run.started_at is not None and run.ended_at is None
            assert heartbeat(client, "job", base + number, "e")
        harness.lapse("job", base + 5)
        assert [found.max_attempts for found in client.lapsed(10)] == [1], "followed as its message says"

    def test_W10_after_its_queue_limit_it_must_not_overlap(self, harness: BackendHarness) -> None:
        """No worker had the gate, so its guard was freed and the next slot sent; now one comes and starts both."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for slot in (base, base + 1):
            send(client, "job", slot, SKIP)
            harness.lapse("job", slot)
            assert end_lapsed(client, "job", slot, QUEUED, state=DISPATCHED, reason="no-gate-seen")
            assert state_of(client, "job", slot) is DISPATCHED
        send(client, "job", base + 2, SKIP)
        assert start(other, "job", base, "e", of=SKIP).answer is GateAnswer.OVERLAPS
        assert state_of(client, "job", base) is DISPATCHED
        assert start(other, "job", base + 2, "f", of=SKIP).answer is START
        assert start(other, "job", base + 1, "e", of=SKIP).answer is GateAnswer.OVERLAPS
        assert settle(other, "job", base + 2, "f")
        assert start(other, "job", base, "e", of=SKIP).answer is START, "alone"
        run = look(client, "job", base)
        assert run is not None and (run.state, run.reason, run.refused) == (RUNNING, None, 1)

    def test_W11_the_next_try_starts_before_the_last_has_said_so(self, harness: BackendHarness) -> None:
        """Celery publishes the retry first: refused as a copy of what runs, nothing else ever comes."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for slot, state in ((base, RUNNING), (base + 1, RETRYING), (base + 2, RUNNING)):
            bring(client, "job", slot, state, TWICE)
        harness.lapse("job", base + 2)
        for slot in (base, base + 1, base + 2):
            result = start(other, "job", slot, "e", 1, 1, TWICE)
            assert (result.answer, result.attempt) == (START, 1), harness.raw_read("job", slot)
            self.refuses(harness, slot, *self.not_the_holder(client, slot, "d"))
            assert start(client, "job", slot, "f", 1, 0, TWICE).answer is DUPLICATE, "a copy of the first try"
            assert heartbeat(other, "job", slot, "e", 1, 1)
            assert settle(other, "job", slot, "e", 1, 1)

    def test_W12_a_copy_of_what_runs_is_a_duplicate(self, harness: BackendHarness) -> None:
        """A visibility timeout shorter than the task, a copied message: its body runs twice at once."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING)
        bring(client, "job", base + 1, RETRYING)
        assert start(client, "job", base + 1, "d", 1, 1).answer is START
        assert retrying(client, "job", base + 1, "d", 1, 1)
        harness.lapse("job", base + 1)
        for slot, tries in ((base, (0,)), (base + 1, (0, 1))):
            before = look(client, "job", slot)
            for retries in tries:
                result = start(other, "job", slot, "e", 1, retries)
                assert (result.answer, result.holder) == (DUPLICATE, "worker of d"), harness.raw_read("job", slot)
            after = look(client, "job", slot)
            assert before is not None and after is not None
            assert after.refused == before.refused + len(tries)
            assert (after.state, after.worker, after.started_at) == (before.state, before.worker, before.started_at)
        assert heartbeat(client, "job", base, "d"), "the copy took its lease"
        assert start(client, "job", base + 1, "f", 1, 2).answer is START

    def test_W12_of_workers_that_ask_at_once_one_starts(self, harness: BackendHarness) -> None:
        """Two deliveries reach two workers in the same millisecond; both read "queued", and both start."""
        clients = [harness.connect_run() for _ in range(4)]
        base = self.base(clients[0])
        for slot in range(base, base + self.rounds):
            send(clients[0], "job", slot, TWICE)
            for attempt in (1, 2):
                asked = [partial(start, clients[n], "job", slot, f"{attempt} {n}", of=TWICE) for n in range(4)]
                results = at_once(asked)
                licensed = [result.attempt for result in results if result.answer is START]
                assert licensed == [attempt], (results, harness.raw_read("job", slot))
                others = {result.answer for result in results} - {START}
                assert others <= {DUPLICATE, GateAnswer.STALE}, results
                harness.lapse("job", slot)

    def test_W13_a_delivery_goes_on_with_what_a_dead_worker_left(self, harness: BackendHarness) -> None:
        """A redelivery after a crash is the first attempt again: a task that kills its worker does so for ever."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, terms(3))
        for attempt, token in ((2, "e"), (3, "f")):
            harness.lapse("job", slot)
            result = start(other, "job", slot, token, 1 if attempt == 2 else 2, 0, terms(3))
            assert (result.answer, result.attempt) == (START, attempt), harness.raw_read("job", slot)
            assert self.lapsed(client) == []
        self.refuses(harness, slot, *self.not_the_holder(client, slot, "d"))
        self.refuses(harness, slot, *self.not_the_holder(client, slot, "e", 2))
        harness.lapse("job", slot)
        assert start(other, "job", slot, "g", 2, 0, terms(3)).answer is GateAnswer.STALE
        result = start(other, "job", slot, "g", 3, 0, terms(3))
        assert result.answer is GateAnswer.USED_UP
        run = look(client, "job", slot)
        assert run is not None and (run.state, run.reason, run.attempt) == (LOST, "attempts-used-up", 3)
        assert run.ended_at is not None and run.refused == 2
        assert self.lapsed(client) == []
        assert start(other, "job", slot, "g", 3, 0, terms(3)).answer is GateAnswer.SETTLED

    def test_W13_once_means_once(self, harness: BackendHarness) -> None:
        """Payments, max_attempts=1: the worker dies in the body, the message comes again, and it is paid twice."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, ONCE)
        harness.lapse("job", slot)
        assert start(other, "job", slot, "e", of=ONCE).answer is GateAnswer.USED_UP
        assert not settle(client, "job", slot, "d"), "its record is an end"
        assert state_of(other, "job", slot) is LOST

    def test_W13_unset_means_as_often_as_the_broker_delivers(self, harness: BackendHarness) -> None:
        """Without max_attempts a task that acknowledges late is given up after one crash: stock would go on."""
        client = harness.connect_run()
        slot = self.base(client)
        send(client, "job", slot)
        for attempt in range(1, 6):
            result = start(client, "job", slot, f"{attempt}", acks_late=True)
            assert (result.answer, result.attempt) == (START, attempt)
            assert heartbeat(client, "job", slot, f"{attempt}", attempt)
            harness.lapse("job", slot)
