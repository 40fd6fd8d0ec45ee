"""The claim clauses of what becomes of a claim (C8 to C19). Each docstring names the incident it prevents.

Belongs here: confirm, abandon, give_up, record and history, what is too early, and what a lost answer is (C12). Does
not belong here: who wins (:mod:`.claims`), and life and death of a client (:mod:`.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from celery_anarchon.backends.base import ClaimBackend, Confirmation, GivenUp, Hold, Keep, Outcome
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.testing.harness import (
    BackendHarness,
    abandon,
    ask,
    claim,
    claim_all,
    confirm,
    give_up,
    needs,
    raised_by,
    record,
)
from celery_anarchon.testing.lifecycle import LifeSuite

WON, TAKEN, ALREADY_SENT = Answer.WON, Answer.TAKEN, Answer.ALREADY_SENT
TOO_OLD, TOO_EARLY = Answer.TOO_OLD, Answer.TOO_EARLY


def wrong(answers: Sequence[object], expected: Sequence[object]) -> list[tuple[int, object, object]]:
    """(place, answer, expected) of the first answers that are wrong. The full diff of a thousand takes minutes."""
    assert len(answers) == len(expected)
    pairs = enumerate(zip(answers, expected, strict=True))
    return [(place, answer, right) for place, (answer, right) in pairs if answer != right][:10]


class EndingSuite(LifeSuite):
    """A part of :class:`~celery_anarchon.testing.claims.ClaimSuite`: inherit that."""

    # --- C8 .. C19: what a claim becomes ------------------------------------------------------------------------------

    @needs("exact_history")
    def test_C8_a_write_of_somebody_else_changes_nothing(self, harness: BackendHarness) -> None:
        """A confirm, abandon or give-up that names only the slot undoes what its holder is doing."""
        client, other = harness.connect(), harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        before = harness.raw_read("job", slot)
        for owner, attempt in (("b", 1), ("a", 2), ("a", 0)):
            assert not confirm(other, "job", slot, owner, attempt)
            assert not abandon(other, "job", slot, owner, attempt)
            assert not give_up(other, "job", slot, owner, attempt)
        assert harness.raw_read("job", slot) == before
        assert not confirm(other, "job", slot + 1, "a")
        assert not give_up(other, "job", slot + 1, "a")
        assert harness.raw_read("job", slot + 1) is None, "a confirm of nothing made a record"
        assert confirm(client, "job", slot, "a"), "the holder is refused as well"

    @needs("exact_history")
    def test_C8_what_has_ended_does_not_change(self, harness: BackendHarness) -> None:
        """An abandon after an unknown publish opens a slot whose message is with the broker: it is sent twice."""
        client = harness.connect()
        base = self.base(client)
        for slot in (base, base + 1):
            assert claim(client, "job", slot, "a") is WON
        assert confirm(client, "job", base, "a")
        assert give_up(client, "job", base + 1, "a")
        before = [harness.raw_read("job", slot) for slot in (base, base + 1)]
        assert not abandon(client, "job", base, "a")
        assert not give_up(client, "job", base, "a")
        assert not abandon(client, "job", base + 1, "a")
        assert not confirm(client, "job", base + 1, "a")
        assert [harness.raw_read("job", slot) for slot in (base, base + 1)] == before

    @needs("durable")
    def test_C10_claims_survive_a_restart_of_the_store(self, harness: BackendHarness) -> None:
        """After a reboot every slot of the last minutes is claimed and sent again."""
        client = harness.connect()
        base = self.base(client)
        assert claim_all(client, [ask("job", base + number, "a") for number in range(3)]) == [WON] * 3
        assert confirm(client, "job", base, "a")
        before = [harness.raw_read("job", base + number) for number in range(3)]
        harness.restart()
        client = harness.connect()
        answers = claim_all(client, [ask("job", base + number, "b") for number in range(3)])
        assert answers == [TAKEN] * 3, f"before {before}"
        assert claim(client, "job", base + 1, "a") is self.to_its_owner(harness)

    @needs("breakable")
    def test_C12_an_unreachable_store_is_unavailable(self, harness: BackendHarness) -> None:
        """A driver's exception that the engine does not know ends the beat, or is taken for "no"."""
        client = harness.connect()
        slot = self.base(client)
        calls = self.calls(harness, client, slot)
        with harness.unreachable(client):
            for name, call in calls.items():
                error = raised_by(call)
                assert isinstance(error, BackendUnavailable), f"{name}: {error!r} instead of BackendUnavailable"
                assert "\n" not in str(error)
            # A store may have nothing to tidy.
            error = raised_by(partial(client.tidy, [Keep(job="job", decided=slot, history_size=0)]))
            assert isinstance(error, BackendUnavailable) or (error is None and not harness.traits.leases), repr(error)
        assert harness.raw_read("job", slot) is None, "it was applied"
        assert claim(client, "job", slot, "a") is WON, "the client does not recover"

    @needs("breakable")
    def test_C12_a_reply_that_does_not_arrive_is_unknown(self, harness: BackendHarness) -> None:
        """A confirm whose reply was lost, taken for a refusal, publishes again; the driver's error ends the beat."""
        client = harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        self.unanswered(harness, client, partial(confirm, client, "job", slot, "a"))
        assert confirm(client, "job", slot, "a")

    @needs("breakable")
    def test_C12_what_is_not_sent_can_be_said_again(self, harness: BackendHarness) -> None:
        """A misfire whose answer was lost counts as refused: nobody knows what became of the slot. Or it is told twice,
        and stands there twice."""
        client, other = harness.connect(), harness.connect()
        base = self.base(client)
        assert claim(client, "job", base, "a") is WON
        self.unanswered(harness, client, partial(give_up, client, "job", base, "a"))
        assert give_up(client, "job", base, "a")
        self.unanswered(harness, client, partial(record, client, "job", base + 1))
        record(client, "job", base + 1)
        assert [run.state for run in other.history("job", 10)] == [RunState.SKIPPED, RunState.MISFIRE]

    def calls(self, harness: BackendHarness, client: ClaimBackend, slot: Millis) -> dict[str, Callable[[], object]]:
        """What can be asked of a store that *client* cannot reach, by name; as far as it is about a slot, this one."""
        hold = Hold(job="job", slot=slot, owner="a", attempt=1)
        calls: dict[str, Callable[[], object]] = {
            "claim": partial(client.claim, [ask("job", slot, "a")]),
            "confirm": partial(client.confirm, [Confirmation(**vars(hold), late=0)]),
            "give_up": partial(client.give_up, [GivenUp(**vars(hold), state=RunState.NOT_SENT)]),
            "record": partial(client.record, [Outcome(job="job", slot=slot, state=RunState.SKIPPED)]),
            "history": partial(client.history, "job", 1),
            "last_run": partial(client.last_run, "job"),
        }
        if harness.traits.server_time:
            calls["now"] = client.now
        return calls

    def unanswered(self, harness: BackendHarness, client: ClaimBackend, call: Callable[[], object]) -> None:
        """*call* is done, its answer is lost, and that is what its caller hears."""
        with harness.reply_lost(client):
            error = raised_by(call)
        assert isinstance(error, OutcomeUnknown), f"{error!r} instead of OutcomeUnknown"

    def test_C13_a_slot_of_the_future_is_too_early(self, harness: BackendHarness) -> None:
        """A beat whose clock is a day ahead claims tomorrow's slots: tomorrow nobody sends them."""
        client = harness.connect()
        slot = client.now() + client.early_tolerance + 60_000
        assert claim(client, "job", slot, "a") is TOO_EARLY
        assert claim(client, "job", slot + 86_400_000, "a") is TOO_EARLY
        assert harness.raw_read("job", slot) is None
        assert client.history("job", 10) == []

    def test_C13_a_slot_within_the_tolerance_is_not(self, harness: BackendHarness) -> None:
        """Clocks of hosts differ by milliseconds: refused to all, a slot would be dispatched late by the slowest."""
        client = harness.connect()
        client.early_tolerance = 60_000
        assert claim(client, "job", client.now() + 30_000, "a") is WON

    def test_C14_a_confirm_asked_again_is_still_true(self, harness: BackendHarness) -> None:
        """The reply to a confirm is lost; told "moved on" the beat thinks that somebody else sent the slot. Written
        twice it counts as two runs."""
        client, other = harness.connect(), harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        assert confirm(client, "job", slot, "a", late=1_234)
        assert confirm(client, "job", slot, "a", late=1_234)
        assert confirm(other, "job", slot, "a", late=1_234)
        assert [(run.state, run.late) for run in other.history("job", 10)] == [(RunState.DISPATCHED, 1.234)]

    @needs("exact_history")
    def test_C14_a_confirm_asked_again_changes_nothing(self, harness: BackendHarness) -> None:
        """Lateness is that of the first publish; the second confirm comes when a lost reply is missed."""
        client, other = harness.connect(), harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        assert confirm(client, "job", slot, "a", late=1_234)
        before = harness.raw_read("job", slot)
        assert confirm(other, "job", slot, "a", late=9_999)
        assert harness.raw_read("job", slot) == before, "the second confirm changed the first"
        run = client.last_run("job")
        assert run is not None
        assert (run.state, run.late, run.attempt, run.beat) == (RunState.DISPATCHED, 1.234, 1, "beat")
        assert run.claimed_at is not None and run.sent_at is not None and run.claimed_at <= run.sent_at

    @needs("exact_history")
    def test_C15_its_own_ended_claim_is_already_sent(self, harness: BackendHarness) -> None:
        """A beat whose confirm was lost claims again: "won" would publish a second message, "taken" hides that it was
        its own."""
        client, other = harness.connect(), harness.connect()
        base = self.base(client)
        for slot in (base, base + 1):
            assert claim(client, "job", slot, "a") is WON
        assert confirm(client, "job", base, "a")
        assert give_up(client, "job", base + 1, "a", state=RunState.NOT_SENT)
        for slot in (base, base + 1):
            assert claim(other, "job", slot, "a") is ALREADY_SENT, harness.raw_read("job", slot)
            assert claim(other, "job", slot, "b") is TAKEN, harness.raw_read("job", slot)

    def test_C16_a_batch_answers_each_request_by_its_own(self, harness: BackendHarness) -> None:
        """One refused row rolls the batch back, or answers come in the order of the store: slots are sent that nobody
        owns."""
        client, other = harness.connect(), harness.connect()
        base = self.base(client)
        future = client.now() + client.early_tolerance + 60_000
        assert claim(other, "taken", base, "b") is WON
        assert claim(client, "mine", base, "a") is WON
        assert claim(client, "sent", base, "a") is WON
        assert confirm(client, "sent", base, "a")
        own = self.to_its_owner(harness)
        requests = [
            (ask("zebra", base, "a"), WON),
            (ask("taken", base, "a"), TAKEN),
            (ask("sent", base, "a"), ALREADY_SENT if harness.traits.exact_history else own),
            (ask("zebra", future, "a"), TOO_EARLY),
            (ask("mine", base, "a"), own),
            (ask("ant", base + 1, "a"), WON),
            (ask("ant", base, "a"), WON),
            (ask("ant", base, "a"), own),
            (ask("ant", base, "c"), TAKEN),
        ]
        assert claim_all(client, [request for request, _ in requests]) == [answer for _, answer in requests]
        assert claim_all(client, []) == []
        held = [("ant", base + 1), ("taken", base), ("zebra", base), ("sent", base), ("ant", base)]
        confirmations = [Confirmation(job=job, slot=slot, owner="a", attempt=1, late=0) for job, slot in held]
        confirmed = client.confirm(confirmations)
        assert confirmed == [True, not harness.traits.exact_history, True, True, True]

    def test_C16_a_batch_of_a_thousand(self, harness: BackendHarness) -> None:
        """A burst at midnight is longer than a store's limit of parameters or rows, and nothing of it is sent."""
        client, other = harness.connect(), harness.connect()
        base = self.base(client)
        everything = [(f"job {number}", base) for number in range(1_000)]
        theirs = claim_all(other, [ask(job, slot, "b") for job, slot in everything[::3]])
        assert not wrong(theirs, [WON] * 334)
        answers = claim_all(client, [ask(job, slot, "a") for job, slot in everything])
        assert not wrong(answers, [TAKEN if number % 3 == 0 else WON for number in range(1_000)])
        confirmations = [Confirmation(job=job, slot=slot, owner="a", attempt=1, late=0) for job, slot in everything]
        right = [number % 3 != 0 or not harness.traits.exact_history for number in range(1_000)]
        assert not wrong(client.confirm(confirmations), right)

    @needs("exact_history")
    def test_C17_a_record_never_replaces_another(self, harness: BackendHarness) -> None:
        """A beat that finds a slot too late writes "misfire" over the run that another has just sent."""
        client = harness.connect()
        base = self.base(client)
        assert claim(client, "job", base, "a") is WON
        assert claim(client, "job", base + 1, "a") is WON
        assert confirm(client, "job", base + 1, "a")
        before = [harness.raw_read("job", base + number) for number in range(2)]
        client.record([Outcome(job="job", slot=base + n, state=RunState.MISFIRE) for n in range(3)])
        assert [harness.raw_read("job", base + number) for number in range(2)] == before
        record(client, "job", base + 2, RunState.PAUSED)
        run = client.history("job", 1)[0]
        assert (run.state, run.claimed_at, run.sent_at) == (RunState.MISFIRE, None, None)
        assert run.ended_at is not None

    @needs("leases")
    def test_C17_a_recorded_slot_cannot_be_claimed(self, harness: BackendHarness) -> None:
        """A slot that one beat has skipped is sent by the next."""
        client = harness.connect()
        base = self.base(client)
        states = (RunState.MISFIRE, RunState.SUPERSEDED, RunState.SKIPPED, RunState.PAUSED)
        for number, state in enumerate(states):
            client.record([Outcome(job="job", slot=base + number, state=state, reason="a-reason", beat="beat")])
            assert claim(harness.connect(), "job", base + number, "a") is TAKEN
        seen = [(run.state, run.reason, run.beat) for run in client.history("job", 10)]
        assert seen == [(state, "a-reason", "beat") for state in reversed(states)]

    @needs("exact_history")
    def test_C18_a_slot_given_up_stays_so(self, harness: BackendHarness) -> None:
        """A misfire that another beat claims again is sent hours late after all."""
        client, other = harness.connect(), harness.connect()
        base = self.base(client)
        for number, state in enumerate((RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED)):
            slot = base + number
            assert claim(client, "job", slot, "a") is WON
            assert give_up(client, "job", slot, "a", state=state, reason="why-not")
            before = harness.raw_read("job", slot)
            assert before is not None, "it is gone"
            assert give_up(other, "job", slot, "a", state=state, reason="why-not"), "asked again it is refused"
            assert claim(other, "job", slot, "b") is TAKEN
            assert harness.raw_read("job", slot) == before
            run = client.history("job", 1)[0]
            assert (run.state, run.reason) == (state, "why-not")
            assert run.ended_at is not None and run.sent_at is None

    def test_C19_the_history_is_the_latest_records_newest_first(self, harness: BackendHarness) -> None:
        """An operator at night reads the history from the wrong end, or of another job."""
        client = harness.connect()
        base = self.base(client)
        for number in (2, 0, 3, 1) if harness.traits.any_order else range(4):
            assert claim(client, "job", base + number, "a") is WON
            if not harness.traits.exact_history:
                assert confirm(client, "job", base + number, "a")
        assert claim(client, "other", base + 9, "a") is WON
        record(client, "job", base + 4)

        def slots(limit: int) -> list[Millis]:
            return [round(run.slot.timestamp() * 1000) - base for run in harness.connect().history("job", limit)]

        assert slots(10) == [4, 3, 2, 1, 0]
        assert slots(2) == [4, 3]
        assert slots(0) == []
        assert client.history("nobody", 10) == []

    @needs("exact_history")
    def test_C19_a_claim_is_in_the_history_before_its_message_is_sent(self, harness: BackendHarness) -> None:
        """A beat dies between claim and publish: nobody can tell that the slot was ever begun, or by whom."""
        client = harness.connect()
        base = self.base(client)
        assert claim(client, "job", base, "a") is WON
        record(client, "job", base + 1)
        newest = client.history("job", 2)[1]
        assert (newest.state, newest.job, newest.attempt, newest.beat) == (RunState.CLAIMED, "job", 1, "beat")
        assert newest.claimed_at is not None and newest.sent_at is None and newest.late is None

    def test_C19_the_last_run_is_one_with_a_message(self, harness: BackendHarness) -> None:
        """ "Last run: skipped" is no answer to the question when the job last ran."""
        client = harness.connect()
        base = self.base(client)
        assert client.last_run("job") is None
        record(client, "job", base)
        assert client.last_run("job") is None
        assert claim(client, "job", base + 1, "a") is WON
        assert confirm(client, "job", base + 1, "a")
        assert claim(client, "job", base + 2, "a") is WON
        assert give_up(client, "job", base + 2, "a")
        record(client, "job", base + 3, RunState.PAUSED)
        last = harness.connect().last_run("job")
        assert last is not None and last.state is RunState.DISPATCHED
        assert round(last.slot.timestamp() * 1000) == base + 1
