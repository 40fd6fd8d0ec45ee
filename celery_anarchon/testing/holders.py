"""The clauses of who holds a run on a worker (W14, W15, W17-W19). Each docstring names the incident it prevents.

Belongs here: what a delivery says of the run that it was granted, and who may not say it. Does not belong here: whether
it may start (:mod:`.gates`), and what beats do (:mod:`.runs`).
"""

from __future__ import annotations

from functools import partial

from celery_anarchon.backends.runs import RELEASED
from celery_anarchon.model import Answer, GateAnswer, RunState
from celery_anarchon.testing.gates import (
    CLAIMED,
    DUPLICATE,
    LOST,
    QUEUED,
    RETRYING,
    RUNNING,
    START,
    SUCCEEDED,
    GateSuite,
)
from celery_anarchon.testing.harness import LONG, BackendHarness, raised_by, take
from celery_anarchon.testing.runforms import (
    ONCE,
    SKIP,
    TWICE,
    bring,
    claim_run,
    confirm_run,
    end_lapsed,
    give_back,
    heartbeat,
    held,
    look,
    release,
    retrying,
    settle,
    start,
    state_of,
    terms,
)


class HolderSuite(GateSuite):
    """A part of :class:`~celery_anarchon.testing.runs.RunSuite`: inherit that."""

    def test_W14_a_heartbeat_renews_each_by_its_own_terms(self, harness: BackendHarness) -> None:
        """A worker with a long and a short task renews both for the same time: one is taken from it while it lives."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        brief = terms(2, lease=harness.short)
        bring(client, "job", base, RUNNING, brief)
        bring(client, "job", base + 1, RUNNING, TWICE, token="e")
        for slot in (base, base + 1):
            harness.lapse("job", slot)
        assert self.lapsed(other) == [("job", base), ("job", base + 1)]
        holds = [held("job", base, "d"), held("job", base + 1, "d"), held("job", base + 1, "e"), held("job", 7, "d")]
        assert client.heartbeat(holds) == [True, False, True, False], "lapsed, and nobody took it"
        harness.pass_time(harness.short + 20)
        assert self.lapsed(other) == [("job", base)], "a lease of ten minutes ended early, or one of 250 ms did not"

    def test_W14_nobody_else_renews(self, harness: BackendHarness) -> None:
        """A frozen worker wakes up and takes the lease back from the one that goes on with its run."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        for at, state in enumerate((CLAIMED, QUEUED, RETRYING, SUCCEEDED), slot + 1):
            bring(client, "job", at, state, TWICE)
            self.refuses(harness, at, partial(heartbeat, client, "job", at, "d"))
        self.refuses(harness, slot, partial(heartbeat, client, "job", slot, "d"))
        bring(client, "job", slot, RUNNING, TWICE)
        self.refuses(
            harness,
            slot,
            partial(heartbeat, client, "job", slot, "e"),
            partial(heartbeat, client, "job", slot, "d", 2),
            partial(heartbeat, client, "job", slot, "d", 1, 1),
        )
        harness.lapse("job", slot)
        assert take(other, "job", slot, "x") == 2
        self.refuses(harness, slot, partial(heartbeat, client, "job", slot, "d"))
        assert start(other, "job", slot, "e", 2, of=TWICE).answer is START
        harness.lapse("job", slot)
        self.refuses(harness, slot, partial(heartbeat, client, "job", slot, "d"))
        assert self.lapsed(client) == [("job", slot)]
        assert heartbeat(other, "job", slot, "e", 2)

    def test_W15_the_end_of_a_run(self, harness: BackendHarness) -> None:
        """The reply to a settle is lost; told "refused" the worker reports its run as taken over. Or the second asking
        writes another end."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        ends = (SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, LOST)
        for number, state in enumerate(ends):
            slot = base + number
            bring(client, "job", slot, RUNNING, TWICE)
            if number % 2:
                harness.lapse("job", slot)
            assert settle(client, "job", slot, "d", state=state, reason=f"why {number}"), "lapsed, not taken over"
            run = look(other, "job", slot)
            assert run is not None and (run.state, run.reason) == (state, f"why {number}")
            assert run.ended_at is not None
            before = harness.raw_read("job", slot)
            assert settle(other, "job", slot, "d", state=state, reason=f"why {number}"), "asked again"
            assert harness.raw_read("job", slot) == before
            another = ends[number - 1]
            self.refuses(harness, slot, partial(settle, other, "job", slot, "d", state=another))
            self.refuses(
                harness, slot, *self.not_the_holder(other, slot, "d")[3:], partial(heartbeat, other, "job", slot, "d")
            )
            assert take(other, "job", slot, "x") is None
        assert self.lapsed(client) == []
        assert isinstance(raised_by(partial(settle, client, "job", base, "d", state=QUEUED)), ValueError)
        bring(client, "next", base, SUCCEEDED, SKIP)
        assert claim_run(other, "next", base + 1, "x", SKIP) is Answer.WON, "the guard is free"

    def test_W15_nobody_else_ends_it(self, harness: BackendHarness) -> None:
        """A worker that was frozen past its lease ends the run that another one is executing."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, CLAIMED, TWICE)
        self.refuses(harness, slot, partial(settle, client, "job", slot, "d"))
        assert confirm_run(client, "job", slot)
        self.refuses(harness, slot, partial(settle, client, "job", slot, "d"))
        assert start(client, "job", slot, "d", of=TWICE).answer is START
        self.refuses(
            harness,
            slot,
            partial(settle, client, "job", slot, "e"),
            partial(settle, client, "job", slot, "d", 2),
            partial(settle, client, "job", slot, "d", 1, 1),
            partial(settle, client, "job", slot + 1, "d"),
        )
        harness.lapse("job", slot)
        assert start(other, "job", slot, "e", of=TWICE).attempt == 2
        self.refuses(harness, slot, *self.not_the_holder(client, slot, "d"))
        assert settle(other, "job", slot, "e", 2)

    def test_W17_a_retry_waits_without_a_lease(self, harness: BackendHarness) -> None:
        """A retry in an hour loses its lease meanwhile, and is run twice; or its message is purged, and the job never
        runs again."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        brief = terms(2, lease=harness.short, queue_timeout=harness.short)
        for number, delay in enumerate((0, LONG)):
            bring(client, "job", base + number, RUNNING, brief)
            for _ in range(2):
                assert retrying(client, "job", base + number, "d", delay=delay), "asked again"
            assert state_of(other, "job", base + number) is RETRYING
            run = look(other, "job", base + number)
            assert run is not None and run.ended_at is None
        assert take(other, "job", base, "x") is None
        harness.pass_time(harness.short + 20)
        found = other.lapsed(10)
        assert [(one.slot, one.state) for one in found] == [(base, RETRYING)], "counted from the next try's ETA"
        assert end_lapsed(other, "job", base, RETRYING, state=RunState.LOST_IN_QUEUE, reason="queue-timeout")
        assert start(other, "job", base + 1, "e", 1, 1, brief).answer is START
        self.refuses(harness, base + 1, partial(retrying, client, "job", base + 1, "d"))

    def test_W17_of_its_holder_only(self, harness: BackendHarness) -> None:
        """The first try's late "retrying" arrives while the second runs: its lease is gone, the run ends as lost."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, TWICE)
        self.refuses(
            harness,
            slot,
            partial(retrying, client, "job", slot, "e"),
            partial(retrying, client, "job", slot, "d", 2),
            partial(retrying, client, "job", slot, "d", 1, 1),
        )
        assert start(other, "job", slot, "e", 1, 1, TWICE).answer is START
        self.refuses(harness, slot, partial(retrying, client, "job", slot, "d"))
        harness.lapse("job", slot)
        assert retrying(other, "job", slot, "e", 1, 1), "lapsed, not taken over"
        assert state_of(client, "job", slot) is RETRYING and self.lapsed(client) == []

    def test_W18_a_first_start_is_given_back_to_its_queue(self, harness: BackendHarness) -> None:
        """A worker stops before the body begins: counted as an attempt, a payment is lost without a body."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, ONCE)
        for _ in range(2):
            assert give_back(client, "job", slot, "d"), "asked again"
        assert state_of(other, "job", slot) is QUEUED and self.lapsed(other) == []
        self.refuses(harness, slot, *self.not_the_holder(client, slot, "d")[:5])
        result = start(other, "job", slot, "e", of=ONCE)
        assert (result.answer, result.attempt) == (START, 1)
        self.refuses(harness, slot, partial(give_back, client, "job", slot, "d"))
        assert settle(other, "job", slot, "e")

    def test_W18_a_retry_is_given_back_as_a_retry(self, harness: BackendHarness) -> None:
        """Given back as queued, an old copy of the first try's message starts it again."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RETRYING, TWICE)
        assert start(client, "job", slot, "e", 1, 1, TWICE).answer is START
        for _ in range(2):
            assert give_back(client, "job", slot, "e", 1, 1)
        assert state_of(other, "job", slot) is RETRYING and self.lapsed(other) == []
        assert start(other, "job", slot, "copy", 1, 0, TWICE).answer is DUPLICATE, harness.raw_read("job", slot)
        result = start(other, "job", slot, "f", 1, 1, TWICE)
        assert (result.answer, result.attempt) == (START, 1), harness.raw_read("job", slot)

    def test_W18_a_higher_attempt_is_given_back_to_the_beats(self, harness: BackendHarness) -> None:
        """Its message says 1, it was granted 2: put back into the queue it is stale, and nothing else comes."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for slot, retries in ((base, 0), (base + 1, 1)):
            bring(client, "job", slot, RETRYING if retries else RUNNING, TWICE)
            if retries:
                assert start(client, "job", slot, "d", 1, 1, TWICE).answer is START
            harness.lapse("job", slot)
            assert start(client, "job", slot, "e", 1, retries, TWICE).attempt == 2
            for _ in range(2):
                assert give_back(client, "job", slot, "e", 2, retries, message_attempt=1)
            found = [one for one in other.lapsed(10) if one.slot == slot]
            assert [(one.state, one.attempt, one.abandoned) for one in found] == [(CLAIMED, 2, True)]
            assert not confirm_run(client, "job", slot, "beat", 2), "it is nobody's"
            assert take(other, "job", slot, "x", from_attempt=2) == 2, "not counted"
            self.refuses(harness, slot, partial(give_back, client, "job", slot, "e", 2))
            assert confirm_run(other, "job", slot, "x", 2)
            result = start(client, "job", slot, "f", 2, 0, TWICE)
            assert (result.answer, result.attempt) == (START, 2)

    def test_W18_only_by_its_holder_and_only_what_has_not_begun(self, harness: BackendHarness) -> None:
        """A worker gives back what another runs meanwhile; or what it has just reported as retrying."""
        client, other = harness.connect_run(), harness.connect_run()
        slot = self.base(client)
        bring(client, "job", slot, RUNNING, TWICE)
        self.refuses(
            harness,
            slot,
            partial(give_back, other, "job", slot, "e"),
            partial(give_back, other, "job", slot, "d", 1, 1),
            partial(give_back, other, "job", slot, "d", 2, message_attempt=2),
        )
        assert retrying(client, "job", slot, "d")
        self.refuses(harness, slot, partial(give_back, client, "job", slot, "d"))
        assert start(other, "job", slot, "e", 1, 1, TWICE).answer is START
        assert settle(other, "job", slot, "e", 1, 1)
        self.refuses(harness, slot, partial(give_back, other, "job", slot, "e", 1, 1))

    def test_W19_a_worker_that_stops_hands_over_at_once(self, harness: BackendHarness) -> None:
        """A deploy stops a worker, and its runs wait for leases that nobody renews."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        for slot in (base, base + 1, base + 2):
            bring(client, "job", slot, RUNNING, ONCE if slot == base + 2 else TWICE)
            self.refuses(
                harness,
                slot,
                partial(release, other, "job", slot, "e"),
                partial(release, other, "job", slot, "d", 2),
                partial(release, other, "job", slot, "d", 1, 1),
            )
            assert release(client, "job", slot, "d")
            run = look(other, "job", slot)
            assert run is not None and (run.state, run.reason, run.attempt) == (RUNNING, RELEASED, 1)
        assert [(one.state, one.attempt, one.reason) for one in other.lapsed(10)] == [(RUNNING, 1, RELEASED)] * 3
        self.refuses(harness, base, *self.not_the_holder(client, base, "d"))
        assert take(other, "job", base, "x") == 2
        result = start(other, "job", base + 1, "d", of=TWICE)
        assert (result.answer, result.attempt) == (START, 2), "also the delivery that had it"
        for slot in (base, base + 1):
            run = look(other, "job", slot)
            assert run is not None and run.reason is None, "why an earlier attempt stopped"
        assert start(other, "job", base + 2, "e", of=ONCE).answer is GateAnswer.USED_UP
