"""The clauses of what may not overlap (W1-W3). Each docstring names the incident it prevents.

Belongs here: what becomes of a slot while other runs of its job live. Does not belong here: lapsed runs, and ends
(:mod:`.runs`).
"""

from __future__ import annotations

from functools import partial

from celery_anarchon.backends.base import Keep
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.gates import (
    CLAIMED,
    DISPATCHED,
    DUPLICATE,
    LOST,
    QUEUED,
    RETRYING,
    RUNNING,
    START,
    SUCCEEDED,
)
from celery_anarchon.testing.harness import LONG, BackendHarness, abandon, give_up, take
from celery_anarchon.testing.holders import HolderSuite
from celery_anarchon.testing.runforms import (
    PLAIN,
    QUEUE_ONE,
    SKIP,
    ask_run,
    bring,
    claim_run,
    confirm_run,
    end_lapsed,
    look,
    send,
    settle,
    slot_of,
    start,
    state_of,
    terms,
    unstarted,
)

WON, TAKEN, WAIT, SKIPPED, WAITING = Answer.WON, Answer.TAKEN, Answer.WAIT, Answer.SKIPPED, Answer.WAITING
LOST_IN_QUEUE, SUPERSEDED = RunState.LOST_IN_QUEUE, RunState.SUPERSEDED


class OverlapSuite(HolderSuite):
    """A part of :class:`~celery_anarchon.testing.runs.RunSuite`: inherit that."""

    def test_W1_a_followed_run_waits_in_its_queue(self, harness: BackendHarness) -> None:
        """The queue is purged: the run is "dispatched", nobody misses it. Or it waits for ever, and the job with it."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        brief = terms(queue_timeout=harness.short)
        for number, (of, delay) in enumerate(((brief, 0), (brief, LONG), (PLAIN, 0), (None, 0))):
            slot = base + number
            assert claim_run(client, "job", slot, "beat", of) is WON
            for _ in range(2):
                assert confirm_run(client, "job", slot, "beat", delay=delay), "asked again"
            assert state_of(other, "job", slot) is (QUEUED if of else DISPATCHED)
            assert take(other, "job", slot, "x") is None
            assert claim_run(client, "job", slot, "beat", of) is Answer.ALREADY_SENT
        assert [slot_of(run) for run in other.living("job")] == [base, base + 1, base + 2]
        assert client.tidy([Keep(job="job", decided=base + 9, history_size=0)]) == 0, "it is not settled"
        harness.pass_time(harness.short + 20)
        found = [(one.slot, one.state) for one in other.lapsed(10)]
        assert found == [(base, QUEUED)], "the limit counts from the message's ETA, each run by its own terms"
        assert take(other, "job", base, "x") is None, "nobody sends it again"
        assert end_lapsed(other, "job", base, QUEUED, state=LOST_IN_QUEUE, reason="queue-timeout")

    def test_W2_skip_while_another_run_lives(self, harness: BackendHarness) -> None:
        """The report of nine o'clock runs until ten, and the next begins beside it. A run whose worker seems dead
        counts, too: it may live."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for state in (QUEUED, RUNNING, RETRYING):
            job = f"job {state}"
            bring(client, job, base, state, SKIP)
            assert claim_run(other, job, base + 1, "x", SKIP) is SKIPPED
            harness.lapse(job, base)
            for slot in (base + 2, base - 1):
                assert claim_run(other, job, slot, "x", SKIP) is SKIPPED, (state, harness.raw_read(job, base))
                run = look(client, job, slot)
                assert run is not None
                living = look(client, job, base)
                assert living is not None and run.blocked_by == living.run_id
                assert (run.state, run.reason, run.beat) == (RunState.SKIPPED, "overlap", "beat")
                assert claim_run(client, job, slot, "y", SKIP) is TAKEN
            assert claim_run(other, job, base + 3, "x", PLAIN) is WON, "this one may overlap"
        assert claim_run(other, "another job", base, "x", SKIP) is WON

    def test_W2_what_waits_also_lives(self, harness: BackendHarness) -> None:
        """The job's overlap was changed by a deploy: the slot that waits is sent later, beside the one claimed now."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING, QUEUE_ONE)
        assert claim_run(client, "job", base + 1, "x", QUEUE_ONE) is WAITING
        assert settle(client, "job", base, "d")
        assert claim_run(other, "job", base + 2, "y", SKIP) is SKIPPED

    def test_W2_what_has_ended_does_not_count(self, harness: BackendHarness) -> None:
        """A guard that is not freed: after one failure the job never runs again."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        for state in (SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, LOST, LOST_IN_QUEUE):
            slot += 10
            bring(client, "job", slot, state, SKIP)
        send(client, "job", slot + 1, None)
        assert claim_run(client, "job", slot + 2, "x", SKIP) is WON
        assert give_up(client, "job", slot + 2, "x")
        assert claim_run(other, "job", slot + 3, "y", SKIP) is WON

    def test_W2_what_is_only_claimed_is_waited_for(self, harness: BackendHarness) -> None:
        """A beat dies between claim and publish, and the next slot is skipped for a run that was never sent."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        results = client.claim([ask_run("job", base + number, "x", SKIP) for number in range(3)])
        assert [result.answer for result in results] == [WON, WAIT, WAIT], "one batch"
        for lapse in (False, True):
            if lapse:
                harness.lapse("job", base)
            assert claim_run(other, "job", base + 1, "y", SKIP) is WAIT
            assert claim_run(other, "job", base - 1, "y", SKIP) is WAIT
        assert abandon(client, "job", base, "x")
        assert claim_run(other, "job", base + 1, "y", SKIP) is WAIT
        assert [slot_of(run) for run in other.history("job", 9)] == [base], "something was recorded"
        assert take(other, "job", base, "y") == 1
        assert claim_run(other, "job", base, "y", SKIP) is WON, "its own"
        assert confirm_run(other, "job", base, "y")
        assert claim_run(client, "job", base + 1, "x", SKIP) is SKIPPED

    def test_W2_of_many_slots_at_once_one_lives(self, harness: BackendHarness) -> None:
        """Beats that are late by a slot claim both; each sees that nothing runs, and both are sent."""
        clients = [harness.connect_run() for _ in range(8)]
        base = self.base(clients[0])
        for number in range(self.rounds):
            job, overlap = f"job {number}", (SKIP, QUEUE_ONE)[number % 2]
            asked = [partial(claim_run, clients[n], job, base + n, f"owner {n}", overlap) for n in range(8)]
            answers = at_once(asked)
            assert answers.count(WON) == 1 and answers.count(WAIT) == 7, answers
            assert [run.state for run in clients[0].living(job)] == [CLAIMED]
            winner = answers.index(WON)
            assert confirm_run(clients[winner], job, base + winner, f"owner {winner}")
            again = at_once([asked[n] for n in range(8) if n != winner])
            living = clients[0].living(job)
            assert WON not in again and len(living) == (1 if overlap is SKIP else 2), (again, living)
            assert {run.state for run in living} == ({QUEUED} if overlap is SKIP else {QUEUED, RunState.WAITING})

    def test_W3_the_newest_slot_waits(self, harness: BackendHarness) -> None:
        """A slow job with a short interval: every slot of the night waits, and all run in the morning."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        assert claim_run(client, "job", base, "x", QUEUE_ONE) is WON
        assert claim_run(other, "job", base + 1, "y", QUEUE_ONE) is WAIT, "not sent yet"
        assert look(client, "job", base + 1) is None
        assert confirm_run(client, "job", base, "x")
        assert claim_run(client, "job", base + 2, "x", QUEUE_ONE) is WAITING
        assert claim_run(other, "job", base + 2, "y", QUEUE_ONE) is WAITING, "of nobody"
        assert claim_run(other, "job", base + 1, "y", QUEUE_ONE) is SKIPPED, "older than the one that waits"
        assert claim_run(client, "job", base + 3, "x", QUEUE_ONE) is WAITING
        runs = client.history("job", 9)[::-1]
        assert [(slot_of(run) - base, run.state, run.reason) for run in runs] == [
            (0, QUEUED, None),
            (1, SUPERSEDED, "newer-slot"),
            (2, SUPERSEDED, "newer-slot"),
            (3, RunState.WAITING, None),
        ]
        assert runs[3].blocked_by == runs[0].run_id
        last = other.last_run("job")
        assert last is not None and slot_of(last) == base, "of what waits no message was sent"
        assert start(client, "job", base, "d", of=QUEUE_ONE).answer is START
        harness.lapse("job", base)
        assert claim_run(other, "job", base + 3, "y", QUEUE_ONE) is WAITING, "lapsed, but it may live"
        assert settle(client, "job", base, "d")
        both = ((client, "x"), (other, "y"))
        answers = at_once([partial(claim_run, one, "job", base + 3, owner, QUEUE_ONE) for one, owner in both])
        assert sorted(answers) == [TAKEN, WON], "who asks first"
        winner = ("x", "y")[answers.index(WON)]
        assert claim_run(other, "job", base + 3, winner, QUEUE_ONE) is WON
        assert confirm_run(other, "job", base + 3, winner)
        assert state_of(client, "job", base + 3) is QUEUED

    def test_W3_what_is_sent_supersedes_what_waits(self, harness: BackendHarness) -> None:
        """Eleven o'clock runs while ten o'clock waits, and ten o'clock runs after it."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING, QUEUE_ONE)
        assert claim_run(client, "job", base + 1, "x", QUEUE_ONE) is WAITING
        assert settle(client, "job", base, "d")
        assert claim_run(other, "job", base + 2, "y", QUEUE_ONE) is WON
        run = look(client, "job", base + 1)
        assert run is not None and (run.state, run.reason) == (SUPERSEDED, "newer-slot")
        assert claim_run(client, "job", base + 1, "x", QUEUE_ONE) is TAKEN
        assert client.waiting(10) == []

    def test_W3_what_waits_is_nobodys(self, harness: BackendHarness) -> None:
        """A slot that waits is swept as lapsed, trimmed with the history, or started by a stray message."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        bring(client, "job", base, RUNNING, QUEUE_ONE)
        assert claim_run(client, "job", base + 1, "x", QUEUE_ONE) is WAITING
        self.refuses(
            harness,
            base + 1,
            partial(confirm_run, client, "job", base + 1, "x"),
            partial(abandon, client, "job", base + 1, "x"),
            partial(give_up, client, "job", base + 1, "x"),
            partial(settle, client, "job", base + 1, "d"),
            partial(unstarted, client, "job", base + 1),
            partial(end_lapsed, client, "job", base + 1, RunState.WAITING),
        )
        assert take(other, "job", base + 1, "y") is None
        assert self.lapsed(other) == []
        assert start(other, "job", base + 1, "e", of=QUEUE_ONE).answer is DUPLICATE
        assert state_of(other, "job", base + 1) is RunState.WAITING
        assert settle(client, "job", base, "d")
        assert client.tidy([Keep(job="job", decided=base + 9, history_size=0)]) == 1
        assert claim_run(other, "job", base + 1, "y", QUEUE_ONE) is WON
