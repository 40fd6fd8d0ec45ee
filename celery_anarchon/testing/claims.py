"""The claim clauses (C) of every backend. Each docstring names the incident it prevents.

Belongs here: what :class:`~celery_anarchon.backends.base.ClaimBackend` promises. Does not belong here: leases
(:mod:`.leases`), life and death of a client (:mod:`.lifecycle`), and how a store is reached (:mod:`.harness`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from celery_anarchon.backends.base import Confirmation, GivenUp, Hold, Outcome
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.testing.contenders import race
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

CONFORMANCE_VERSION = 1
"""Grows with the clauses. A new one warns for one minor release before it fails."""

WON, TAKEN, ALREADY_SENT = Answer.WON, Answer.TAKEN, Answer.ALREADY_SENT
TOO_OLD, TOO_EARLY = Answer.TOO_OLD, Answer.TOO_EARLY

PLAIN_NAMES = ("export", "export_", "Export", "export-2", "2", "a" * 100)
ANY_NAMES = (
    *PLAIN_NAMES,
    " export",
    "export ",
    "exp ort",
    "exp:ort",
    "exp.ort",
    "exp/ort",
    "exp%3Aort",
    "exp%25",
    "exp{ort}",
    "}x{",
    "exp*",
    "exp>",
    "exp_rt",
    "exp?rt",
    "exp[o]rt",
    "exp\\ort",
    "exp\nort",
    "exp\tort",
    "exp\0ort",
    "exp\0",
    "'; drop table runs; --",
    '"export"',
    "экспорт",
    "e\u0301xport",
    "\u00e9xport",
    "\U0001f4e6",
    "null",
    *("a.b", "a_b", "a b", "a:b*", "{x}", "a>", "é" * 300),
    "n" * 255,
    "n" * 254 + "m",
    "n" * 1000,
    "n" * 999 + "m",
)
"""No two may meet, whatever a store uses to separate, quote, fold, cut or match."""


def wrong(answers: Sequence[object], expected: Sequence[object]) -> list[tuple[int, object, object]]:
    """(place, answer, expected) of the first answers that are wrong. The full diff of a thousand takes minutes."""
    assert len(answers) == len(expected)
    pairs = enumerate(zip(answers, expected, strict=True))
    return [(place, answer, right) for place, (answer, right) in pairs if answer != right][:10]


class ClaimSuite(LifeSuite):
    """Inherit it, or :class:`~celery_anarchon.testing.leases.LeaseSuite`, and name the ``harness_class``."""

    race_threads: ClassVar[int] = 50
    race_slots: ClassVar[int] = 60
    race_processes: ClassVar[tuple[int, int]] = (10, 5)
    """Processes, and threads in each."""

    # --- C1 .. C6: who wins -------------------------------------------------------------------------------------------

    def test_C1_one_winner_among_threads(self, harness: BackendHarness) -> None:
        """Read-then-write, and upserts that both succeed: two beats send one slot (steady-queue#54, django-q#231)."""
        base = self.base(harness.connect())
        slots = [base + 100 * number for number in range(self.race_slots)]
        self.assert_exact(harness, "race", race(harness, "race", slots, processes=1, threads=self.race_threads))

    @needs("processes")
    def test_C1_one_winner_among_processes(self, harness: BackendHarness) -> None:
        """A lock of one process, or the host's name as owner, holds among threads and not among beats."""
        base = self.base(harness.connect())
        slots = [base + 100 * number for number in range(self.race_slots)]
        processes, threads = self.race_processes
        self.assert_exact(harness, "race", race(harness, "race", slots, processes=processes, threads=threads))

    def test_C1_one_winner_among_batches(self, harness: BackendHarness) -> None:
        """Batches of two beats that meet in different orders: deadlocks, or a batch told won as a whole."""
        base = self.base(harness.connect())
        slots = [base + number for number in range(self.race_slots)]
        won = race(harness, "race", slots, processes=1, threads=8, batched=True)
        self.assert_exact(harness, "race", won)

    def assert_exact(self, harness: BackendHarness, job: str, winners: dict[Millis, list[str]]) -> None:
        wrong = {slot: owners for slot, owners in winners.items() if len(owners) != 1}
        some = next(iter(wrong), None)
        assert not wrong, (
            f"{len(wrong)} of {len(winners)} slots do not have exactly one winner; slot {some}: winners "
            f"{wrong.get(some or 0)}, record {harness.raw_read(job, some or 0)}"
        )

    @needs("knows_owner")
    def test_C2_asking_again_is_won_again(self, harness: BackendHarness) -> None:
        """A tick that failed between claim and publish asks again; told "taken" it would never send its own slot."""
        client, other = harness.connect(), harness.connect()
        slot = self.base(client)
        first = client.claim([ask("job", slot, "a")])[0]
        again = client.claim([ask("job", slot, "a")])[0]
        assert (first.answer, again.answer) == (WON, WON), harness.raw_read("job", slot)
        assert first.attempt == again.attempt == 1
        assert claim(other, "job", slot, "b") is TAKEN

    @needs("knows_owner")
    def test_C3_the_owner_learns_over_another_connection_that_it_won(self, harness: BackendHarness) -> None:
        """The reply is lost, the client reconnects and asks again: its own claim looks like somebody else's, and nobody
        sends the slot (redis-py's silent resend)."""
        first = harness.connect()
        slot = self.base(first)
        first.claim([ask("job", slot, "a")])
        first.close()
        assert claim(harness.connect(), "job", slot, "a") is WON, harness.raw_read("job", slot)

    @needs("breakable")
    def test_C3_a_lost_reply_is_unknown_and_can_be_asked_again(self, harness: BackendHarness) -> None:
        """A lost reply read as "no" loses the slot; read as "yes" it may send it twice."""
        client = harness.connect()
        slot = self.base(client)
        with harness.reply_lost(client):
            error = raised_by(lambda: claim(client, "job", slot, "a"))
        assert isinstance(error, OutcomeUnknown), f"{error!r}, record {harness.raw_read('job', slot)}"
        assert claim(client, "job", slot, "a") is self.to_its_owner(harness), harness.raw_read("job", slot)
        assert claim(harness.connect(), "job", slot, "b") is TAKEN

    def test_C4_jobs_are_independent_whatever_their_names(self, harness: BackendHarness) -> None:
        """Keys that are joined, cut, folded or used as patterns make two jobs one: one of them never runs."""
        client, other = harness.connect(), harness.connect()
        slot = self.base(client)
        names = ANY_NAMES if harness.traits.any_job_name else PLAIN_NAMES
        answers = {name: claim(client, name, slot, f"owner of {name!r}") for name in names}
        assert {name for name, answer in answers.items() if answer is not WON} == set()
        answers = {name: claim(other, name, slot, f"owner of {name!r}") for name in names}
        own = self.to_its_owner(harness)
        assert {name for name, answer in answers.items() if answer is not own} == set(), "another job's claim was read"
        assert all(answer is TAKEN for answer in claim_all(other, [ask(name, slot, "b") for name in names]))
        for name in names:
            assert confirm(client, name, slot, f"owner of {name!r}")
            assert [run.job for run in other.history(name, 10)] == [name]

    def test_C4_slots_a_millisecond_apart_are_independent(self, harness: BackendHarness) -> None:
        """A time cut to seconds claims the next slot together with this one."""
        client = harness.connect()
        base = self.base(client)
        for number in range(3):
            assert claim(client, "job", base + number, f"owner {number}") is WON
        again = [claim(client, "job", base + number, f"owner {number}") for number in range(3)]
        assert again == [self.to_its_owner(harness)] * 3

    def test_C5_a_claim_is_seen_by_clients_that_were_there_before(self, harness: BackendHarness) -> None:
        """A client that reads from a snapshot or a cache of its own claims what others have claimed since."""
        early, client = harness.connect(), harness.connect()
        slot = self.base(client)
        assert claim(early, "job", slot - 1, "a") is WON
        assert confirm(early, "job", slot - 1, "a")
        assert len(early.history("job", 10)) == 1
        assert claim(client, "job", slot, "b") is WON
        assert confirm(client, "job", slot, "b")
        assert claim(early, "job", slot, "a") is TAKEN, harness.raw_read("job", slot)
        assert len(early.history("job", 10)) == 2

    def test_C6_a_newer_claim_changes_nothing_for_older_slots(self, harness: BackendHarness) -> None:
        """The memory of older claims goes with a newer one: a late beat sends the old slot again (procrastinate's
        periodic deferrer); or an older open slot is refused for ever."""
        client, late = harness.connect(), harness.connect()
        base = self.base(client)
        assert claim(client, "job", base, "a") is WON
        assert confirm(client, "job", base, "a")
        assert claim(client, "job", base + 120_000, "a") is WON
        assert confirm(client, "job", base + 120_000, "a")
        assert claim(late, "job", base, "b") is TAKEN, harness.raw_read("job", base)
        open_slot = WON if harness.traits.any_order else TOO_OLD
        assert claim(late, "job", base + 60_000, "b") is open_slot, "an older open slot was closed by a newer claim"

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
        hold = Hold(job="job", slot=slot, owner="a", attempt=1)
        calls: list[Callable[[], object]] = [
            lambda: client.claim([ask("job", slot, "a")]),
            lambda: client.confirm([Confirmation(**vars(hold), late=0)]),
            lambda: client.give_up([GivenUp(**vars(hold), state=RunState.NOT_SENT)]),
            lambda: client.record([Outcome(job="job", slot=slot, state=RunState.SKIPPED)]),
            lambda: client.history("job", 1),
            lambda: client.last_run("job"),
        ]
        if harness.traits.leases:
            calls.append(lambda: client.abandon([hold]))
        if harness.traits.server_time:
            calls.append(client.now)
        with harness.unreachable(client):
            for call in calls:
                error = raised_by(call)
                assert isinstance(error, BackendUnavailable), f"{error!r} instead of BackendUnavailable"
                assert "\n" not in str(error)
        assert harness.raw_read("job", slot) is None, "it was applied"
        assert claim(client, "job", slot, "a") is WON, "the client does not recover"

    @needs("breakable")
    def test_C12_a_reply_that_does_not_arrive_is_unknown(self, harness: BackendHarness) -> None:
        """A confirm whose reply was lost, taken for a refusal, publishes again; the driver's error ends the beat."""
        client = harness.connect()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        with harness.reply_lost(client):
            error = raised_by(lambda: confirm(client, "job", slot, "a"))
        assert isinstance(error, OutcomeUnknown), f"{error!r} instead of OutcomeUnknown"
        assert confirm(client, "job", slot, "a")

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

    # --- C20: for how long --------------------------------------------------------------------------------------------

    @needs("horizon")
    def test_C20_a_claim_is_remembered_until_the_horizon(self, harness: BackendHarness) -> None:
        """A memory that is shorter than a slot may be late: a beat that looks back sends it again."""
        client = harness.connect_short()
        horizon = client.traits.horizon
        assert horizon is not None
        slot = client.now()
        assert claim(client, "job", slot, "a") is WON
        harness.pass_time(max(0, slot + horizon - 100 - client.now()))
        answer, asked = claim(client, "job", slot, "b"), client.now()
        assert answer is TAKEN or (answer is TOO_OLD and asked >= slot + horizon), harness.raw_read("job", slot)

    @needs("horizon", "server_time")
    def test_C20_what_may_have_been_forgotten_is_too_old(self, harness: BackendHarness) -> None:
        """A beat whose clock is ten minutes behind asks for slots whose claims are forgotten, and sends them again."""
        client = harness.connect_short()
        horizon = client.traits.horizon
        assert horizon is not None
        slot = client.now()
        assert claim(client, "job", slot, "a") is WON
        seen = set()
        while client.now() <= slot + 2 * horizon:
            seen.add(claim(client, "job", slot, "b"))
            harness.pass_time(horizon // 8)
        assert claim(client, "job", slot, "b") is TOO_OLD
        assert seen <= {TAKEN, TOO_OLD}
        assert claim(client, "job", slot + 1, "b") is TOO_OLD, "an open slot that nobody can vouch for"
