"""The suite of a store that follows runs, and its clauses W4, W5, W16, W20-W27. Each docstring names the incident it
prevents.

Belongs here: what beats, sweepers and people do with runs. Does not belong here: the gate (:mod:`.gates`), who holds a
run (:mod:`.holders`), overlap (:mod:`.overlaps`).
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from celery_anarchon.backends.base import Confirmation, Terms
from celery_anarchon.backends.runs import RunBackend, Worker
from celery_anarchon.model import UNSETTLED, Answer, GateAnswer, Millis, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.gates import (
    CLAIMED,
    DISPATCHED,
    LOST,
    QUEUED,
    RETRYING,
    RUNNING,
    START,
    SUCCEEDED,
)
from celery_anarchon.testing.harness import LONG, BackendHarness, abandon, give_up, raised_by, take
from celery_anarchon.testing.runforms import (
    ONCE,
    PLAIN,
    QUEUE_ONE,
    SKIP,
    TWICE,
    bring,
    claim_run,
    confirm_run,
    delivery,
    end_lapsed,
    ending,
    heartbeat,
    look,
    retrying,
    send,
    settle,
    slot_of,
    start,
    state_of,
    terms,
    unstarted,
)
from celery_anarchon.testing.unanswered import UnansweredSuite

WON, TAKEN, WAIT, SKIPPED, WAITING = Answer.WON, Answer.TAKEN, Answer.WAIT, Answer.SKIPPED, Answer.WAITING
LOST_IN_QUEUE, SUPERSEDED = RunState.LOST_IN_QUEUE, RunState.SUPERSEDED


class RunSuite(UnansweredSuite):
    """Everything of :class:`~celery_anarchon.testing.leases.LeaseSuite`, and runs on their workers."""

    wants_runs: ClassVar[bool] = True

    # --- W4, W5: sweepers ---------------------------------------------------------------------------------------------

    def test_W4_the_list_also_has_runs(self, harness: BackendHarness) -> None:
        """A worker dies, or a queue is purged, and no sweeper ever hears of it."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        states = (RUNNING, CLAIMED, RETRYING, QUEUED)
        for number, state in enumerate(states):
            bring(client, f"job {state}", base, state, terms(number or None))
        bring(client, "ended", base, RUNNING)
        harness.lapse("ended", base, 9_000)
        assert settle(client, "ended", base, "d")
        assert other.lapsed(10) == []
        for number, state in enumerate(states):
            harness.lapse(f"job {state}", base, 5_000 - 1_000 * number)
        found = [(one.job, one.state, one.attempt, one.max_attempts) for one in other.lapsed(10)]
        assert found == [(f"job {state}", state, 1, number or None) for number, state in enumerate(states)]
        assert [one.state for one in other.lapsed(2)] == [RUNNING, CLAIMED]
        assert heartbeat(client, "job running", base, "d")
        assert start(client, "job queued", base, "e").answer is START
        assert [one.state for one in other.lapsed(10)] == [CLAIMED, RETRYING]

    def test_W4_redelivery_comes_first(self, harness: BackendHarness) -> None:
        """A late-acknowledging task of a worker that died is given up before the broker brings its message again."""
        client = harness.connect_run()
        base = self.base(client)
        cases = ((PLAIN, True), (PLAIN, False), (TWICE, True))
        for number, (of, acks_late) in enumerate(cases):
            send(client, "job", base + number, of)
            assert start(client, "job", base + number, "d", of=of, acks_late=acks_late).answer is START
            assert heartbeat(client, "job", base + number, "d")
            harness.lapse("job", base + number, 10_000)
        assert sorted(self.lapsed(client)) == [("job", base + 1), ("job", base + 2)]
        assert not end_lapsed(client, "job", base, RUNNING), "not over its limit"
        assert heartbeat(client, "job", base, "d")
        harness.lapse("job", base, LONG + 10_000)
        assert len(self.lapsed(client)) == 3
        assert end_lapsed(client, "job", base, RUNNING)

    def test_W5_a_takeover_of_a_run_is_its_next_attempt(self, harness: BackendHarness) -> None:
        """The same attempt again: what the dead worker may still write is taken for the new one's."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RETRYING, terms(3))
        assert start(client, "job", slot, "e", 1, 1, terms(3)).answer is START
        assert take(other, "job", slot, "x") is None, "its lease is not over"
        harness.lapse("job", slot)
        assert take(other, "job", slot, "x", from_attempt=2) is None, "another attempt"
        assert take(other, "job", slot, "x") == 2
        assert take(harness.connect_run(), "job", slot, "x") == 2, "asked again"
        assert take(client, "job", slot, "y") is None
        run = look(client, "job", slot)
        assert run is not None and (run.state, run.attempt, run.beat) == (CLAIMED, 2, "sweeper")
        assert self.lapsed(other) == []
        self.refuses(harness, slot, *self.not_the_holder(client, slot, "e", 1, 1))
        assert not give_up(other, "job", slot, "x", 2, RunState.MISFIRE), "a body of it has started"
        assert abandon(other, "job", slot, "x", 2)
        assert [(one.attempt, one.state) for one in client.lapsed(10)] == [(2, CLAIMED)], "abandon keeps the attempt"
        assert take(other, "job", slot, "y", 2) == 2
        assert not confirm_run(other, "job", slot, "y", 1)
        assert confirm_run(other, "job", slot, "y", 2)
        assert state_of(client, "job", slot) is QUEUED
        result = start(client, "job", slot, "f", 2, 0, terms(3))
        assert (result.answer, result.attempt) == (START, 2), "of its new attempt no try has been"
        assert settle(client, "job", slot, "f", 2)

    def test_W5_never_more_attempts_than_asked_for(self, harness: BackendHarness) -> None:
        """A task that kills its worker is sent again for ever; or one that acknowledges early twice, where stock would
        not."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, of in enumerate((ONCE, PLAIN)):
            slot = base + number
            bring(client, "job", slot, RUNNING, of)
            harness.lapse("job", slot)
            before = harness.raw_read("job", slot)
            assert take(other, "job", slot, "x") is None
            assert harness.raw_read("job", slot) == before
        bring(client, "job", base + 2, RUNNING, TWICE)
        harness.lapse("job", base + 2)
        assert take(other, "job", base + 2, "x") == 2
        assert start(client, "job", base + 2, "e", 2, of=TWICE).answer is START
        harness.lapse("job", base + 2)
        assert take(other, "job", base + 2, "x", 2) is None
        for state in (QUEUED, RETRYING):
            bring(client, f"job {state}", base, state, TWICE)
            harness.lapse(f"job {state}", base)
            assert take(other, f"job {state}", base, "x") is None, "what waits is not sent again"
        bring(client, "ended", base, RUNNING, TWICE)
        harness.lapse("ended", base)
        assert "ended" in [one.job for one in other.lapsed(10)]
        assert settle(client, "ended", base, "d")
        assert take(other, "ended", base, "x") is None, "it ended after the list was read"

    def test_W5_one_of_sweepers_and_workers_goes_on(self, harness: BackendHarness) -> None:
        """Sweepers and the broker's redelivery find the same dead run: it is sent and started as two attempts."""
        clients = [harness.connect_run() for _ in range(4)]
        base = self.base(clients[0])
        for slot in range(base, base + self.rounds):
            bring(clients[0], "job", slot, RUNNING, TWICE)
            harness.lapse("job", slot)
            sweeps = [partial(take, clients[n], "job", slot, f"sweeper {n}") for n in (0, 1)]
            gates = [partial(self.started, clients[n], slot, f"gate {n}") for n in (2, 3)]
            # Who comes last to the start goes first: each of them in its turn.
            last = (slot - base) % 4
            calls = [*sweeps, *gates]
            attempts = [attempt for attempt in at_once([*calls[last:], *calls[:last]]) if attempt is not None]
            assert attempts == [2], (attempts, harness.raw_read("job", slot))
            run = look(clients[0], "job", slot)
            assert run is not None and run.attempt == 2

    def started(self, client: RunBackend, slot: Millis, token: str) -> int | None:
        result = start(client, "job", slot, token, of=TWICE)
        return result.attempt if result.answer is START else None

    # --- W16, W20, W21: ends and late answers -------------------------------------------------------------------------

    def test_W16_a_late_confirm_changes_nothing(self, harness: BackendHarness) -> None:
        """The worker is faster than the beat's confirm: what runs is "queued" again, and a copy of it starts."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, lapse in enumerate((False, True)):
            slot = base + number
            assert claim_run(client, "job", slot, "beat", TWICE) is WON
            if lapse:
                harness.lapse("job", slot)
            assert start(other, "job", slot, "d", of=TWICE).answer is START
            self.refuses(harness, slot, partial(confirm_run, client, "job", slot, "beat"))
            assert retrying(other, "job", slot, "d")
            self.refuses(harness, slot, partial(confirm_run, client, "job", slot, "beat"))
            assert start(other, "job", slot, "e", 1, 1, TWICE).answer is START
            self.refuses(
                harness,
                slot,
                partial(confirm_run, client, "job", slot, "beat"),
                partial(abandon, client, "job", slot, "beat"),
                partial(give_up, client, "job", slot, "beat"),
            )
            assert claim_run(client, "job", slot, "beat", TWICE) is Answer.ALREADY_SENT
            assert settle(other, "job", slot, "e", 1, 1)
            self.refuses(harness, slot, partial(confirm_run, client, "job", slot, "beat"))

    def test_W20_a_message_that_is_gone_ends_its_run(self, harness: BackendHarness) -> None:
        """A message expires or is revoked, and the job waits an hour for the run that will not come."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, CLAIMED)
        send(client, "job", base + 1)
        send(client, "job", base + 2, None)
        bring(client, "job", base + 3, RETRYING)
        for number, retries in enumerate((0, 0, 0, 1)):
            slot = base + number
            self.refuses(harness, slot, partial(unstarted, other, "job", slot, 2, retries))
            for _ in range(2):
                assert unstarted(other, "job", slot, 1, retries, "revoked"), "asked again"
            run = look(client, "job", slot)
            assert run is not None and (run.state, run.reason) == (LOST_IN_QUEUE, "revoked")
            assert run.ended_at is not None
            assert start(client, "job", slot, "e", 1, retries).answer is GateAnswer.SETTLED
        assert self.lapsed(client) == []

    def test_W20_a_copy_does_not_end_what_lives(self, harness: BackendHarness) -> None:
        """A copy of the message expires while its run is executed: "lost", and the next slot starts beside it."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING, TWICE)
        bring(client, "job", base + 1, RETRYING, TWICE)
        bring(client, "job", base + 2, SUCCEEDED, TWICE)
        for slot in (base, base + 1, base + 2, base + 3):
            self.refuses(harness, slot, partial(unstarted, other, "job", slot))
        self.refuses(harness, base, partial(unstarted, other, "job", base, 1, 1))
        harness.lapse("job", base)
        self.refuses(harness, base, partial(unstarted, other, "job", base))
        assert take(other, "job", base, "x") == 2
        self.refuses(harness, base, partial(unstarted, other, "job", base))
        assert unstarted(other, "job", base, 2)

    def test_W21_a_sweeper_ends_what_nobody_goes_on_with(self, harness: BackendHarness) -> None:
        """A purged queue, a worker that died in its last attempt: the job is skipped for ever."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        cases = (
            (RUNNING, ONCE, LOST, "attempts-used-up"),
            (RUNNING, PLAIN, LOST, "worker-lost"),
            (QUEUED, SKIP, LOST_IN_QUEUE, "queue-timeout"),
            (RETRYING, SKIP, LOST_IN_QUEUE, "queue-timeout"),
            (QUEUED, SKIP, DISPATCHED, "no-gate-seen"),
        )
        for number, (was, of, state, reason) in enumerate(cases):
            slot, job = base + number, f"job {number}"
            bring(client, job, slot, was, of)
            ask = partial(end_lapsed, other, job, slot, was, state=state, reason=reason)
            assert not ask(), "not over its limit"
            harness.lapse(job, slot)
            assert not ask(attempt=2)
            assert not end_lapsed(other, job, slot, QUEUED if was is RUNNING else RUNNING, state=state, reason=reason)
            assert state_of(client, job, slot) is was
            assert ask() and ask(), "asked again"
            run = look(client, job, slot)
            assert run is not None and (run.state, run.reason, run.attempt) == (state, reason, 1)
            assert run.ended_at is not None
            assert claim_run(client, job, slot + 1, "x", SKIP) is WON, "the guard is free"
        assert self.lapsed(client) == []
        error = raised_by(partial(end_lapsed, client, "job", base, RUNNING, state=SUCCEEDED))
        assert isinstance(error, ValueError)

    def test_W21_only_what_is_still_as_the_list_said(self, harness: BackendHarness) -> None:
        """Between the list and the end its worker comes back, or another goes on: a living run is ended."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING, ONCE)
        harness.lapse("job", base)
        assert heartbeat(client, "job", base, "d")
        self.refuses(harness, base, partial(end_lapsed, other, "job", base, RUNNING))
        send(client, "job", base + 1)
        harness.lapse("job", base + 1)
        assert start(client, "job", base + 1, "e").answer is START
        self.refuses(
            harness,
            base + 1,
            partial(end_lapsed, other, "job", base + 1, QUEUED, state=LOST_IN_QUEUE, reason="queue-timeout"),
            partial(end_lapsed, other, "job", base + 1, RUNNING),
            partial(end_lapsed, other, "job", base + 9, QUEUED),
        )
        bring(client, "job", base + 2, RUNNING, PLAIN)
        harness.lapse("job", base + 2)
        assert settle(client, "job", base + 2, "d", state=LOST, reason="why")
        self.refuses(harness, base + 2, partial(end_lapsed, other, "job", base + 2, RUNNING))

    def test_W21_what_can_go_on_is_not_ended(self, harness: BackendHarness) -> None:
        """A rolling deploy: the new beat does not have the job yet, sweeps first, and ends what the old one would have
        sent. Or a run that had a body counts as dispatched, and a copy of its message is its body again."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, state in enumerate((RUNNING, CLAIMED)):
            slot = base + number
            bring(client, "job", slot, state, TWICE)
            harness.lapse("job", slot, LONG - 5_000)
            asked = partial(end_lapsed, other, "job", slot, state)
            removed = partial(asked, reason="job-removed")
            self.refuses(harness, slot, asked, removed, partial(removed, state=LOST_IN_QUEUE))
            harness.lapse("job", slot, LONG + 5_000)
            self.refuses(harness, slot, asked)
            for end in (LOST_IN_QUEUE, DISPATCHED):
                self.refuses(harness, slot, partial(removed, state=end))
            assert removed() and removed(), "asked again"
            assert state_of(client, "job", slot) is LOST
        for number, state in enumerate((RUNNING, RETRYING), 5):
            bring(client, "job", base + number, state, ONCE)
            harness.lapse("job", base + number)
            no_gate = partial(end_lapsed, other, "job", base + number, state, state=DISPATCHED, reason="no-gate-seen")
            self.refuses(harness, base + number, no_gate)

    def test_W26_what_waits_for_a_removed_job_ends(self, harness: BackendHarness) -> None:
        """The job is taken out of the schedule while one of its slots waits: it waits for ever, and is looked at for
        ever. Or a beat that does not have the job yet ends what the others would have sent."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        soon = Terms(lease=LONG, queue_timeout=1, overlap=QUEUE_ONE.overlap)
        for job, of in (("job", soon), ("patient", QUEUE_ONE)):
            bring(client, job, base, RUNNING, QUEUE_ONE)
            assert claim_run(client, job, base + 1, "x", of) is WAITING
        harness.pass_time(5)

        def ask(job: str, state: RunState = SUPERSEDED, reason: str = "job-removed") -> bool:
            return end_lapsed(other, job, base + 1, RunState.WAITING, state=state, reason=reason)

        self.refuses(harness, base + 1, partial(ask, "job"))
        for job in ("job", "patient"):
            assert settle(client, job, base, "d")
        assert not ask("patient"), "before its time"
        self.refuses(harness, base + 1, *(partial(ask, "job", state) for state in (LOST, LOST_IN_QUEUE, DISPATCHED)))
        self.refuses(harness, base + 1, partial(ask, "job", reason="newer-slot"))
        assert ask("job") and ask("job"), "asked again"
        run = look(client, "job", base + 1)
        assert run is not None and (run.state, run.reason) == (SUPERSEDED, "job-removed")
        assert run.ended_at is not None
        assert [one.job for one in other.waiting(10)] == ["patient"] and client.living("job") == []
        bring(client, "job", base + 2, QUEUED, soon)
        harness.lapse("job", base + 2, LONG)
        asked = partial(end_lapsed, other, "job", base + 2, state=SUPERSEDED, reason="job-removed")
        self.refuses(harness, base + 2, partial(asked, QUEUED), partial(asked, RunState.WAITING))
        assert claim_run(client, "job", base + 3, "x", QUEUE_ONE) is WAITING, "it waits as ever"

    def test_W27_an_end_is_told_along_with_a_question(self, harness: BackendHarness) -> None:
        """The question is asked and the end forgotten; or the next run of the job finds alive what has ended."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number in range(2):
            bring(client, "job", base + number, RUNNING)
        send(client, "another job", base)
        question = delivery("another job", base, "e")
        mine, foreign = (ending("job", base + number, token) for number, token in enumerate(("d", "not mine")))
        told, (result,) = client.settle_and_start([mine, foreign], [question])
        assert told == [True, False] and result.answer is GateAnswer.START
        assert [state_of(other, "job", base + number) for number in (0, 1)] == [SUCCEEDED, RUNNING]
        assert state_of(other, "another job", base) is RUNNING
        assert client.settle_and_start([mine], [question]) == ([True], [result]), "asked again"
        # Made from its message, it may not overlap: the end comes first.
        unheard_of = delivery("job", base + 5, "f", of=SKIP)
        ends = [ending("job", base + 1, "d")]
        assert client.settle_and_start(ends, [unheard_of])[1][0].answer is GateAnswer.UNKNOWN

    def test_W25_a_run_is_as_late_as_its_first_publish(self, harness: BackendHarness) -> None:
        """A worker dies, the next attempt is published half a minute later, and "why was it late?" is asked of a beat
        that was on time."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, confirmed in enumerate((True, False)):
            slot = base + number
            assert claim_run(client, "job", slot, "beat", TWICE) is WON
            if confirmed:
                assert confirm_run(client, "job", slot)
            assert start(client, "job", slot, "d", of=TWICE).answer is START
            first = look(other, "job", slot)
            assert first is not None and first.late == (0.007 if confirmed else 0.003)
            harness.pass_time(5)
            harness.lapse("job", slot)
            assert take(other, "job", slot, "another") == 2
            late = Confirmation(job="job", slot=slot, owner="another", attempt=2, late=31_000)
            assert other.confirm([late]) == [True]
            run = look(client, "job", slot)
            assert run is not None and (run.state, run.attempt) == (QUEUED, 2)
            assert (run.sent_at, run.late) == (first.sent_at, first.late)

    # --- W22 .. W24 ---------------------------------------------------------------------------------------------------

    def test_W22_what_may_go_on_is_listed(self, harness: BackendHarness) -> None:
        """The run before it has ended, and the slot that waited for it is never sent."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number in (2, 0, 1, 3):
            job = f"job {number}"
            bring(client, job, base, RUNNING, QUEUE_ONE)
            assert claim_run(client, job, base + 10 - number, "x", QUEUE_ONE) is WAITING
        assert other.waiting(10) == []
        for number in (0, 1, 2):
            assert settle(client, f"job {number}", base, "d")
        listed = [(one.job, one.slot - base) for one in other.waiting(10)]
        assert listed == [("job 2", 8), ("job 1", 9), ("job 0", 10)], "oldest first"
        assert len(other.waiting(2)) == 2 and other.waiting(2) == other.waiting(10)[:2]
        assert claim_run(other, "job 2", base + 8, "y", QUEUE_ONE) is WON
        assert [one.job for one in client.waiting(10)] == ["job 1", "job 0"]
        assert give_up(other, "job 2", base + 8, "y", state=RunState.NOT_SENT)
        assert [one.job for one in client.waiting(10)] == ["job 1", "job 0"]

    def test_W23_a_person_frees_the_job(self, harness: BackendHarness) -> None:
        """The guard of a job is held by what nobody can find, and the only way out is the store's own console."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for number, state in enumerate((CLAIMED, QUEUED, RUNNING, RETRYING, SUCCEEDED)):
            bring(client, "job", base + number, state)
        send(client, "another job", base)
        assert claim_run(client, "job", base + 9, "x", QUEUE_ONE) is WAITING
        assert [slot_of(run) - base for run in other.living("job")] == [0, 1, 2, 3, 9], "oldest slot first"
        assert all(run.state in UNSETTLED for run in other.living("job"))
        released = other.release_job("job")
        assert sorted(slot_of(run) - base for run in released) == [0, 1, 2, 3]
        assert {(run.state, run.reason, run.ended_at is not None) for run in released} == {(LOST, "released", True)}
        assert sorted(released, key=slot_of) == [look(client, "job", base + number) for number in range(4)]
        assert [run.state for run in client.living("job")] == [RunState.WAITING]
        assert [one.slot for one in client.waiting(10)] == [base + 9], "it is its turn"
        assert state_of(client, "job", base + 4) is SUCCEEDED and state_of(client, "another job", base) is QUEUED
        assert not settle(client, "job", base + 2, "d")
        assert start(client, "job", base + 1, "e").answer is GateAnswer.SETTLED
        assert not confirm_run(client, "job", base, "beat")
        assert self.lapsed(client) == []
        assert other.release_job("job") == [] and other.release_job("nobody") == []

    def test_W24_a_worker_is_shown_until_it_leaves(self, harness: BackendHarness) -> None:
        """Workers of one host count as one, or are shown after they stopped; and whether any worker ever had the gate
        is forgotten when the last one leaves for the night."""
        client, other = harness.connect_run(), harness.connect_run()
        assert not client.ever_had_workers() and client.workers(60_000) == []
        before = client.now()
        shown = [
            Worker(owner="2", label="host", version="1", queues=("b", "a, c")),
            Worker(owner="1", label="host", version="1"),
            Worker(owner="3", label="a host", version="2"),
        ]
        seen = {worker.owner: client.worker_seen(worker) for worker in shown}
        assert all(before <= at <= client.now() for at in seen.values())
        workers = other.workers(within=60_000)
        assert [worker.label for worker in workers] == ["a host", "host", "host"]
        assert sorted(worker.owner for worker in workers) == ["1", "2", "3"]
        found = next(worker for worker in workers if worker.owner == "2")
        assert (found.version, found.queues) == ("1", ("b", "a, c"))
        assert {worker.owner: worker.seen for worker in workers} == seen
        harness.pass_time(600)
        again = client.worker_seen(Worker(owner="1", label="host", version="1"))
        assert again >= seen["1"] + 600
        begun = other.now()
        found_now = [worker.owner for worker in other.workers(within=begun - again + 500)]
        assert found_now == ["1"] or (found_now == [] and other.now() > begun + 500)
        for owner in ("2", "nobody", "1", "3"):
            other.worker_left(owner)
        assert client.workers(within=60_000) == [] and client.beats(within=60_000) == []
        assert other.ever_had_workers() and client.ever_had_workers()
