"""The clauses of claims that take their messages along (O1-O7), asked where ``traits.one_step``. Each docstring names
the incident it prevents.

Belongs here: :class:`~celery_anarchon.backends.onestep.OneStepBackend`. Does not belong here: what a message is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Command, Enqueue, Keep, Takeover, Terms
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing.gates import CLAIMED, DISPATCHED, QUEUED, RUNNING, START
from celery_anarchon.testing.harness import LONG, BackendHarness, abandon, claim, confirm, needs, raised_by
from celery_anarchon.testing.overlaps import OverlapSuite
from celery_anarchon.testing.runforms import (
    PLAIN,
    QUEUE_ONE,
    SKIP,
    ask_run,
    at_once,
    bring,
    claim_run,
    confirm_run,
    look,
    settle,
    start,
    state_of,
    terms,
)

QUEUE = "queue"
SENT = ClaimResult(Answer.WON, 1, sent=True)
ONLY_WON = ClaimResult(Answer.WON, 1)


class OneStepSuite(OverlapSuite):
    """A part of :class:`~celery_anarchon.testing.runs.RunSuite`: inherit that."""

    def message(self, harness: BackendHarness, payload: str, attempt: int = 1, *more: Command) -> Enqueue:
        return Enqueue(commands=(*harness.message_writes(QUEUE, payload), *more), attempt=attempt, late=7)

    def asked(
        self, harness: BackendHarness, slot: Millis, owner: str, of: Terms | None = PLAIN, job: str = "job"
    ) -> ClaimRequest:
        return replace(ask_run(job, slot, owner, of), enqueue=self.message(harness, f"{job} {slot} of {owner}"))

    def wish(self, harness: BackendHarness, slot: Millis, owner: str, attempt: int, of_message: int) -> Takeover:
        message = self.message(harness, f"attempt {of_message} of {owner}", of_message)
        return Takeover(
            job="job", slot=slot, from_attempt=attempt, owner=owner, beat="sweeper", lease=LONG, enqueue=message
        )

    # --- O1, O2: claims -----------------------------------------------------------------------------------------------

    @needs("one_step")
    def test_O1_a_claim_is_sent_with_its_message(self, harness: BackendHarness) -> None:
        """The beat dies between claim and publish: nobody has the message, and the slot waits for a sweeper."""
        client, other = harness.connect_one_step(), harness.connect_run()
        base = self.base(client)
        first, second = self.asked(harness, base, "x"), self.asked(harness, base + 1, "x", None)
        assert client.claim_and_send([first, second, ask_run("job", base + 2, "x")]) == [SENT, SENT, ONLY_WON]
        assert harness.raw_queue(QUEUE) == [f"job {base} of x", f"job {base + 1} of x"]
        assert [state_of(other, "job", base + n) for n in (0, 1, 2)] == [QUEUED, DISPATCHED, CLAIMED]
        assert start(other, "job", base, "d").answer is START

    @needs("one_step")
    def test_O1_no_other_answer_sends(self, harness: BackendHarness) -> None:
        """A beat that was second, or a slot that may not be sent, has its message in the queue all the same."""
        client, other = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        _drop_record(other, "old", base)
        assert claim(other, "held", base, "y") is Answer.WON
        assert claim_run(other, "claimed", base, "y", SKIP) is Answer.WON
        bring(other, "skips", base, RUNNING, SKIP)
        bring(other, "waits", base, RUNNING, QUEUE_ONE)
        ask = partial(self.asked, harness)
        requests = [
            ask(base, "x", job="old"),
            ask(base + 10, "x", job="old"),
            ask(base, "x", job="held"),
            ask(client.now() + 3_600_000, "x", job="early"),
            ask(base + 1, "x", SKIP, job="claimed"),
            ask(base + 1, "x", SKIP, job="skips"),
            ask(base + 1, "x", QUEUE_ONE, job="waits"),
        ]
        found = [result.answer for result in client.claim_and_send(requests)]
        wanted = (Answer.TOO_OLD, Answer.TAKEN, Answer.TAKEN, Answer.TOO_EARLY)
        assert found == [*wanted, Answer.WAIT, Answer.SKIPPED, Answer.WAITING]
        assert harness.raw_queue(QUEUE) == []

    @needs("one_step")
    def test_O1_one_of_many_sends(self, harness: BackendHarness) -> None:
        """Two beats look at once, and both write the message."""
        clients = [harness.connect_one_step() for _ in range(8)]
        base = self.base(clients[0])
        for slot in range(base, base + 10):
            requests = [self.asked(harness, slot, str(number)) for number in range(8)]
            calls = [partial(one.claim_and_send, [request]) for one, request in zip(clients, requests, strict=True)]
            results = [answers[0] for answers in at_once(calls)]
            assert results.count(SENT) == 1, results
            sent = harness.raw_queue(QUEUE)
            assert len(sent) == slot - base + 1, sent
            assert sent[-1] == f"job {slot} of {results.index(SENT)}"

    @needs("one_step")
    def test_O1_what_waited_is_sent_when_it_may_go_on(self, harness: BackendHarness) -> None:
        """The run ended, and the beat that let the next one go died before its message was out."""
        client, other = harness.connect_one_step(), harness.connect_run()
        base = self.base(client)
        bring(other, "job", base, RUNNING, QUEUE_ONE)
        request = self.asked(harness, base + 1, "x", QUEUE_ONE)
        assert client.claim_and_send([request])[0].answer is Answer.WAITING
        assert settle(other, "job", base, "d")
        assert client.claim_and_send([request]) == [SENT]
        assert harness.raw_queue(QUEUE) == [f"job {base + 1} of x"]
        assert state_of(other, "job", base + 1) is QUEUED
        assert other.waiting(10) == []

    @needs("one_step")
    def test_O2_a_lost_answer_sends_once(self, harness: BackendHarness) -> None:
        """The reply is lost, the beat asks again, as it must: the message is in the queue twice."""
        client, again = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        request = self.asked(harness, base, "x")
        assert client.claim_and_send([request]) == [SENT]
        assert again.claim_and_send([request]) == [ClaimResult(Answer.ALREADY_SENT)]
        assert start(again, "job", base, "d").answer is START
        assert again.claim_and_send([request]) == [ClaimResult(Answer.ALREADY_SENT)]
        assert again.claim_and_send([self.asked(harness, base, "y")]) == [ClaimResult(Answer.TAKEN)]
        assert claim_run(client, "job", base + 1, "x") is Answer.WON
        assert client.claim_and_send([self.asked(harness, base + 1, "x")]) == [ONLY_WON], "it may be out"
        assert harness.raw_queue(QUEUE) == [f"job {base} of x"]

    @needs("one_step", "breakable")
    def test_O2_a_reply_that_was_really_lost(self, harness: BackendHarness) -> None:
        """The same, over a line that breaks after the store has done its part."""
        client, again = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        requests = [self.asked(harness, base + number, "x") for number in range(3)]
        with harness.reply_lost(client):
            assert isinstance(raised_by(lambda: client.claim_and_send(requests)), OutcomeUnknown)
        assert again.claim_and_send(requests) == [ClaimResult(Answer.ALREADY_SENT)] * 3
        assert len(harness.raw_queue(QUEUE)) == 3

    # --- O3: takeovers ------------------------------------------------------------------------------------------------

    @needs("one_step")
    def test_O3_a_takeover_is_sent_with_its_message(self, harness: BackendHarness) -> None:
        """Taken over in one step, sent in another: a second sweeper, or a lost answer, sends the attempt twice."""
        client, other = harness.connect_one_step(), harness.connect_one_step()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, terms(3))
        assert other.takeover_and_send([self.wish(harness, slot, "x", 1, 2)]) == [None], "its lease is not over"
        harness.lapse("job", slot)
        wishes = [self.wish(harness, slot, owner, 1, 2) for owner in ("x", "y")]
        results = at_once(
            [partial(one.takeover_and_send, [wish]) for one, wish in zip((client, other), wishes, strict=True)]
        )
        winner = [found[0] for found in results].index(ClaimResult(Answer.WON, 2, sent=True))
        assert results[1 - winner] == [None]
        assert harness.raw_queue(QUEUE) == [f"attempt 2 of {'xy'[winner]}"]
        run = look(client, "job", slot)
        assert run is not None and (run.state, run.attempt, run.beat) == (QUEUED, 2, "sweeper")
        assert other.lapsed(10) == []
        assert client.takeover_and_send([wishes[winner]]) == [ClaimResult(Answer.WON, 2, sent=True)], "asked again"
        assert len(harness.raw_queue(QUEUE)) == 1
        assert start(client, "job", slot, "e", 2, of=terms(3)).answer is START

    @needs("one_step")
    def test_O3_a_claim_keeps_its_attempt(self, harness: BackendHarness) -> None:
        """A beat without a broker gave it up, and the attempt of a body that never was is counted."""
        client = harness.connect_one_step()
        base = self.base(client)
        for slot, of, state in ((base, PLAIN, QUEUED), (base + 1, None, DISPATCHED)):
            assert claim_run(client, "job", slot, "x", of) is Answer.WON
            assert abandon(client, "job", slot, "x")
            assert client.takeover_and_send([self.wish(harness, slot, "y", 1, 1)]) == [SENT]
            assert state_of(client, "job", slot) is state
            assert not confirm_run(client, "job", slot, "x"), "the old holder"
            assert client.takeover_and_send([self.wish(harness, slot, "y", 1, 1)]) == [SENT], "asked again"
        assert len(harness.raw_queue(QUEUE)) == 2

    @needs("one_step")
    def test_O3_a_message_of_another_attempt_is_not_sent(self, harness: BackendHarness) -> None:
        """Its header lies: the gate drops it as stale, and the run is lost in its queue."""
        client = harness.connect_one_step()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, terms(3))
        harness.lapse("job", slot)
        assert client.takeover_and_send([self.wish(harness, slot, "x", 1, 1)]) == [ClaimResult(Answer.WON, 2)]
        assert state_of(client, "job", slot) is CLAIMED
        assert harness.raw_queue(QUEUE) == []
        assert confirm_run(client, "job", slot, "x", 2), "it is published as ever"

    # --- O4 .. O7 -----------------------------------------------------------------------------------------------------

    @needs("one_step")
    def test_O4_what_cannot_be_written_leaves_nothing(self, harness: BackendHarness) -> None:
        """One queue of two has the message, the claim says it is sent; or one bad job stops all others."""
        client = harness.connect_one_step()
        base = self.base(client)
        good = self.asked(harness, base, "x")
        bad = replace(good, slot=base + 1, enqueue=self.message(harness, "bad", 1, harness.refused_write()))
        assert client.claim_and_send([bad, good]) == [ONLY_WON, SENT]
        assert harness.raw_queue(QUEUE) == [f"job {base} of x"]
        run = look(client, "job", base + 1)
        assert run is not None and (run.state, run.sent_at, run.late) == (CLAIMED, None, None)
        assert confirm_run(client, "job", base + 1, "x"), "it is published as ever"
        assert not client.write((*harness.message_writes(QUEUE, "none"), harness.refused_write()))
        assert client.write(harness.message_writes(QUEUE, "alone"))
        assert harness.raw_queue(QUEUE)[1:] == ["alone"]

    @needs("one_step")
    def test_O5_it_is_as_if_confirmed(self, harness: BackendHarness) -> None:
        """A message for tomorrow is given up today, because its queue limit counts from the claim."""
        client, other = harness.connect_one_step(), harness.connect_run()
        base = self.base(client)
        brief = terms(queue_timeout=harness.short)
        soon, later = self.asked(harness, base, "x", brief), self.asked(harness, base + 1, "x", brief)
        assert later.enqueue is not None
        later = replace(later, enqueue=replace(later.enqueue, delay=LONG))
        before = client.now()
        assert client.claim_and_send([soon, later]) == [SENT, SENT]
        for slot in (base, base + 1):
            run = look(other, "job", slot)
            assert run is not None and run.sent_at is not None and run.late == 0.007
            assert before <= round(run.sent_at.timestamp() * 1000) <= client.now()
        harness.pass_time(harness.short + 100)
        assert [(one.slot, one.state) for one in other.lapsed(10)] == [(base, QUEUED)]

    @needs("one_step")
    def test_O6_what_is_decided(self, harness: BackendHarness) -> None:
        """A beat makes messages for slots that others have sent; or never asks for one that it could send."""
        client, other = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        _drop_record(other, "old", base)
        assert claim(other, "held", base, "y") is Answer.WON
        bring(other, "waits", base, RUNNING, QUEUE_ONE)
        assert claim_run(other, "waits", base + 1, "y", QUEUE_ONE) is Answer.WAITING
        places: Sequence[tuple[str, Millis]] = [
            *(("old", base), ("old", base + 10), ("old", base + 20)),
            *(("held", base), ("held", base + 1), ("waits", base), ("waits", base + 1)),
        ]
        taken, old = ClaimResult(Answer.TAKEN), ClaimResult(Answer.TOO_OLD)
        found = [old, taken, None, taken, None, taken, None]
        assert client.decided(places, "x") == found
        sent = ClaimResult(Answer.ALREADY_SENT)
        assert client.decided(places, "y") == [old, sent, None, None, None, taken, None]
        assert client.decided([], "x") == []

    @needs("one_step")
    def test_O7_batches_under_way(self, harness: BackendHarness) -> None:
        """A beat goes on with its next batch: the answers of one are taken for those of the other, or what is between
        them for an answer."""
        client, other = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        assert claim(other, "job", base + 1, "y") is Answer.WON
        ask = partial(self.asked, harness)
        first = client.begin_claims([ask(base, "x"), ask(base + 1, "x")])
        second = client.begin_claims([ask(base + 2, "x"), ask(base + 3, "x"), ask(base + 4, "x")])
        assert client.decided([("job", base + 1)], "x") == [ClaimResult(Answer.TAKEN)]
        assert first() == [SENT, ClaimResult(Answer.TAKEN)]
        assert second() == [SENT] * 3
        assert sorted(harness.raw_queue(QUEUE)) == [f"job {base + number} of x" for number in (0, 2, 3, 4)]
        assert client.begin_claims([ask(base, "x")])() == [ClaimResult(Answer.ALREADY_SENT)]

    @needs("one_step", "breakable")
    def test_O7_an_answer_that_was_lost_under_way(self, harness: BackendHarness) -> None:
        """Read as no, or as the answer to something else."""
        client, again = harness.connect_one_step(), harness.connect_one_step()
        base = self.base(client)
        requests = [self.asked(harness, base + number, "x") for number in range(3)]
        with harness.reply_lost(client):
            assert isinstance(raised_by(lambda: client.begin_claims(requests)()), OutcomeUnknown)
        assert again.begin_claims(requests)() == [ClaimResult(Answer.ALREADY_SENT)] * 3
        assert len(harness.raw_queue(QUEUE)) == 3


def _drop_record(client: OneStepBackend, job: str, slot: Millis) -> None:
    """Leave *slot* sent and without its record, at the floor."""
    for one in (slot, slot + 10):
        assert claim(client, job, one, "y") is Answer.WON
        assert confirm(client, job, one, "y")
    assert client.tidy([Keep(job=job, decided=slot, history_size=0)]) == 1
