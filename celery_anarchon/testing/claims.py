"""The claim clauses (C) of every backend: who wins (C1 to C6), and for how long that is known (C20). Each docstring
names the incident it prevents.

Belongs here: what :meth:`~celery_anarchon.backends.base.ClaimBackend.claim` promises of the winner. Does not belong
here: what becomes of a claim (:mod:`.endings`), leases (:mod:`.leases`), and how a store is reached (:mod:`.harness`).
"""

from __future__ import annotations

from typing import ClassVar

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Millis
from celery_anarchon.testing.contenders import race
from celery_anarchon.testing.endings import TAKEN, TOO_OLD, WON, EndingSuite
from celery_anarchon.testing.harness import (
    BackendHarness,
    ask,
    claim,
    claim_all,
    confirm,
    needs,
    raised_by,
)

CONFORMANCE_VERSION = 1
"""Grows with the clauses: by it the author of a backend can say which of them it has passed."""

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


class ClaimSuite(EndingSuite):
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

    # --- C20: for how long --------------------------------------------------------------------------------------------

    @needs("horizon")
    def test_C20_a_claim_is_remembered_until_the_horizon(self, harness: BackendHarness) -> None:
        """A memory that is shorter than a slot may be late: a beat that looks back sends it again."""
        client = harness.connect_short()
        horizon = client.traits.horizon
        assert horizon is not None
        slot = self._just_claimed(client)
        harness.pass_time(max(0, slot + horizon - 100 - client.now()))
        answer, asked = claim(client, "job", slot, "b"), client.now()
        assert answer is TAKEN or (answer is TOO_OLD and asked >= slot + horizon), harness.raw_read("job", slot)

    @needs("horizon", "server_time")
    def test_C20_what_may_have_been_forgotten_is_too_old(self, harness: BackendHarness) -> None:
        """A beat whose clock is ten minutes behind asks for slots whose claims are forgotten, and sends them again."""
        client = harness.connect_short()
        horizon = client.traits.horizon
        assert horizon is not None
        slot = self._just_claimed(client)
        seen = set()
        while client.now() <= slot + 2 * horizon:
            seen.add(claim(client, "job", slot, "b"))
            harness.pass_time(horizon // 8)
        assert claim(client, "job", slot, "b") is TOO_OLD
        assert seen <= {TAKEN, TOO_OLD}
        assert claim(client, "job", slot + 1, "b") is TOO_OLD, "an open slot that nobody can vouch for"

    @staticmethod
    def _just_claimed(client: ClaimBackend) -> Millis:
        """A slot of now that was won. A machine that pauses for longer than the horizon does not count."""
        while True:
            slot = client.now()
            answer = claim(client, "job", slot, "a")
            if answer is not TOO_OLD:
                assert answer is WON
                return slot
