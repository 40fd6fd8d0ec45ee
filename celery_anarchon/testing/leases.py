"""The lease clauses (L), and the claim clauses that only a lease store can be asked.

Belongs here: what :class:`~celery_anarchon.backends.base.LeaseBackend` promises. Each docstring names the incident it
prevents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar
from unittest import mock

from celery_anarchon.backends.base import Beat, ClaimBackend, Keep, LeaseBackend, Registration, Sighting, Takeover
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Millis, RunState
from celery_anarchon.testing.claims import ClaimSuite
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.endings import TAKEN, TOO_EARLY, TOO_OLD, WON
from celery_anarchon.testing.harness import (
    BackendHarness,
    abandon,
    ask,
    claim,
    claim_all,
    confirm,
    give_up,
    needs,
    record,
    take,
)


class LeaseSuite(ClaimSuite):
    """Everything of :class:`ClaimSuite`, and leases."""

    wants_leases: ClassVar[bool] = True

    def lapsed(self, client: LeaseBackend, limit: int = 100) -> list[tuple[str, Millis]]:
        return [(found.job, found.slot) for found in client.lapsed(limit)]

    # --- claims that have a lease -------------------------------------------------------------------------------------

    def test_C2_asking_again_renews_the_lease(self, harness: BackendHarness) -> None:
        """A publish that needs longer than its lease asks again, is told "won", and the slot is taken over."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        harness.lapse("job", slot)
        assert claim(client, "job", slot, "a") is WON, "lapsed, but nobody else has it"
        assert self.lapsed(other) == []
        assert take(other, "job", slot, "b") is None, harness.raw_read("job", slot)

    def test_C7_at_or_below_the_floor_is_too_old(self, harness: BackendHarness) -> None:
        """The record of a sent slot is dropped with the history: a beat that was asleep claims and sends it again."""
        client, other = harness.connect_lease(), harness.connect_lease()
        base = self.base(client)
        for number in (0, 10, 20):
            assert claim(client, "job", base + number, "a") is WON
            assert confirm(client, "job", base + number, "a")
        assert client.tidy([Keep(job="job", decided=base + 10, history_size=0)]) == 2
        assert harness.raw_read("job", base + 10) is None
        requests = [ask("job", base + number, "b") for number in (-5, 0, 5, 10, 11, 20)]
        assert claim_all(other, requests) == [TOO_OLD, TOO_OLD, TOO_OLD, TOO_OLD, WON, TAKEN]
        assert claim(other, "other", base, "b") is WON, "a floor is one job's"
        record(client, "job", base + 5)
        assert harness.raw_read("job", base + 5) is None, "a record at or below the floor"

    def test_C9_tidy_keeps_what_is_unsettled_or_undecided(self, harness: BackendHarness) -> None:
        """Housekeeping drops the claim that a beat is about to publish, or closes a slot that nobody has decided."""
        client = harness.connect_lease()
        base = self.base(client)

        def settle(job: str, *numbers: int) -> None:
            for number in numbers:
                assert claim(client, job, base + number, "a") is WON
                assert confirm(client, job, base + number, "a")

        def left(job: str) -> list[int]:
            return [round(run.slot.timestamp() * 1000) - base for run in client.history(job, 100)][::-1]

        settle("held", 0, 1, 3, 4)
        assert claim(client, "held", base + 2, "a") is WON
        settle("undecided", 0, 1, 2, 3)
        settle("short", 0, 1)
        keeps = [
            Keep(job="held", decided=base + 100, history_size=1),
            Keep(job="undecided", decided=base + 1, history_size=1),
            Keep(job="short", decided=base + 100, history_size=2),
            Keep(job="nobody", decided=base + 100, history_size=1),
        ]
        assert client.tidy(keeps) == 4
        assert (left("held"), left("undecided"), left("short")) == ([2, 3, 4], [2, 3], [0, 1])
        assert client.tidy(keeps) == 0
        assert confirm(client, "held", base + 2, "a"), "what was held cannot be confirmed any more"
        assert client.tidy(keeps) == 2
        assert left("held") == [4]
        assert claim_all(client, [ask("undecided", base + number, "b") for number in (1, 2)]) == [TOO_OLD, TAKEN]

    @needs("history_by_age")
    def test_C9_tidy_by_age_keeps_what_is_younger(self, harness: BackendHarness) -> None:
        """A slot of long ago that was sent a minute ago vanishes from the history before anybody has seen it."""
        client = harness.connect_lease()
        base = self.base(client)
        assert claim(client, "job", base, "a") is WON
        assert confirm(client, "job", base, "a")
        hour = Keep(job="job", decided=base + 100, history_size=100, history_ttl=3_000_000)
        assert client.tidy([hour]) == 0
        harness.pass_time(50)
        brief = Keep(job="job", decided=base + 100, history_size=100, history_ttl=20)
        assert client.tidy([brief]) == 1
        assert claim(client, "job", base, "b") is TOO_OLD

    def test_C11_a_claim_can_be_taken_over_after_its_lease_and_never_before(self, harness: BackendHarness) -> None:
        """A beat dies between claim and publish: nobody ever sends the slot; or it lives, and two do."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        begun = client.now()
        claim_all(client, [ask("job", slot, "a", harness.short), ask("job", slot + 1, "a")])
        if take(other, "job", slot, "b") is None:
            assert claim(other, "job", slot, "b") is TAKEN
        else:
            assert client.now() >= begun + harness.short, harness.raw_read("job", slot)
        harness.pass_time(harness.short + 20)
        assert take(other, "job", slot, "b") == 1, harness.raw_read("job", slot)
        assert take(other, "job", slot + 1, "b") is None, "a lease of ten minutes ended early"

    @needs("server_time")
    def test_C11_the_callers_clock_decides_nothing(self, harness: BackendHarness) -> None:
        """A beat whose clock is an hour ahead sees every lease as over, and sends what others are sending."""
        client = harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        ahead = max(SystemClock().wall(), client.now()) + 3_600_000
        seconds, nanoseconds = ahead / 1000, ahead * 1_000_000
        with mock.patch("time.time", return_value=seconds), mock.patch("time.time_ns", return_value=nanoseconds):
            other = harness.connect_lease()
            assert self.lapsed(other) == []
            assert take(other, "job", slot, "b") is None, harness.raw_read("job", slot)
            assert claim(other, "job", slot + 1, "b", lease=1) is WON
            assert claim(other, "job", ahead, "b") is TOO_EARLY
        harness.pass_time(20)
        assert take(client, "job", slot + 1, "a") == 1, "its lease was counted from the caller's clock"

    def test_C14_a_confirm_after_the_lease_is_true(self, harness: BackendHarness) -> None:
        """The broker was slow; the message is sent, the confirm refused, and the slot sent again by a takeover."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        harness.lapse("job", slot)
        assert confirm(client, "job", slot, "a"), harness.raw_read("job", slot)
        assert self.lapsed(other) == []
        assert take(other, "job", slot, "b") is None, harness.raw_read("job", slot)

    @needs("breakable")
    def test_C12_of_a_claim_no_lost_answer_is_a_refusal(self, harness: BackendHarness) -> None:
        """The answer to a takeover is lost: taken for "no", the slot has a holder that does not know of it."""
        client, other = harness.connect_lease(), harness.connect_lease()
        base = self.base(client)
        for number in range(3):
            assert claim(client, "job", base + number, "a") is WON
        self.unanswered(harness, client, partial(abandon, client, "job", base + 1, "a"))
        assert [(found.slot, found.abandoned) for found in other.lapsed(10)] == [(base + 1, True)]
        harness.lapse("job", base + 2)
        for slot in (base + 1, base + 2):
            self.unanswered(harness, client, partial(take, client, "job", slot, "b"))
            assert ("job", slot) not in self.lapsed(other), harness.raw_read("job", slot)
            assert take(client, "job", slot, "b") == 1
            assert confirm(client, "job", slot, "b")
        assert confirm(client, "job", base, "a")
        self.unanswered(harness, client, partial(client.tidy, [Keep(job="job", decided=base, history_size=0)]))
        assert client.tidy([Keep(job="job", decided=base, history_size=0)]) == 0
        assert claim(client, "job", base, "a") is TOO_OLD

    @needs("breakable")
    def test_C12_of_a_fleet_no_lost_answer_is_a_refusal(self, harness: BackendHarness) -> None:
        """The answer to a first sight is lost: asked again it would be a later one, and what fell due meanwhile is
        never sent."""
        client, other = harness.connect_lease(), harness.connect_lease()
        self.unanswered(harness, client, partial(self.register, client, "job", "one"))
        seen_by = other.now()
        harness.pass_time(20)
        assert self.register(client, "job", "one").since <= seen_by
        self.unanswered(harness, client, partial(client.beat_seen, Beat(owner="1", label="host", version="1")))
        assert [beat.owner for beat in other.beats(within=60_000)] == ["1"]
        self.unanswered(harness, client, partial(client.beat_left, "1"))
        assert other.beats(within=60_000) == []

    def calls(self, harness: BackendHarness, client: ClaimBackend, slot: Millis) -> dict[str, Callable[[], object]]:
        assert isinstance(client, LeaseBackend)
        return {
            **super().calls(harness, client, slot),
            "abandon": partial(abandon, client, "job", slot, "a"),
            "register": partial(self.register, client, "job", "one"),
            "lapsed": partial(client.lapsed, 1),
            "takeover": partial(take, client, "job", slot, "a"),
            "beat_seen": partial(client.beat_seen, Beat(owner="1", label="host", version="1")),
            "beat_left": partial(client.beat_left, "1"),
            "beats": partial(client.beats, 60_000),
        }

    # --- L: registration, takeover, presence --------------------------------------------------------------------------

    def test_L1_since_is_the_first_sighting_by_anyone(self, harness: BackendHarness) -> None:
        """Each restart of a beat counts as a new schedule: what was missed while it was down is never sent."""
        client, other = harness.connect_lease(), harness.connect_lease()
        before = client.now()
        first = self.register(client, "job", "one")
        assert before <= first.since <= client.now() and first.last is None
        harness.pass_time(20)
        assert self.register(other, "job", "one") == first
        edited = self.register(other, "job", "two")
        assert edited.since >= first.since + 20, "an edited schedule fires for the past"
        assert self.register(client, "job", "one") == first, "a rollback moved it"
        assert self.register(client, "other", "one").since >= edited.since

    def test_L1_eight_fingerprints_are_kept(self, harness: BackendHarness) -> None:
        """A deploy that goes round the fleet while schedules change forgets what half of the beats still use."""
        client = harness.connect_lease()
        first = self.register(client, "job", "1")
        harness.pass_time(20)
        for name in "2345678":
            self.register(client, "job", name)
            assert self.register(client, "job", "1") == first, "in use all the time, and forgotten"
        sightings = [Sighting(job="job", fingerprint=name) for name in "12345678"]
        since = [registration.since for registration in client.register(sightings)]
        harness.pass_time(20)
        assert [registration.since for registration in client.register(sightings)] == since
        self.register(client, "job", "9")
        assert self.register(client, "job", "1").since > first.since, "more than eight are kept"

    def test_L1_last_is_the_highest_slot_known(self, harness: BackendHarness) -> None:
        """A beat that starts after the history was dropped begins at the beginning, and catches up a year."""
        client = harness.connect_lease()
        base = self.base(client)
        assert self.register(client, "job", "one").last is None
        for number in (3, 1):
            assert claim(client, "job", base + number, "a") is WON
            assert confirm(client, "job", base + number, "a")
            assert self.register(client, "job", "one").last == base + 3
        record(client, "job", base + 5)
        batch = [Sighting(job=job, fingerprint="one") for job in ("new", "job", "new")]
        assert [registration.last for registration in client.register(batch)] == [None, base + 5, None]
        assert client.tidy([Keep(job="job", decided=base + 5, history_size=0)]) == 3
        assert self.register(client, "job", "one").last == base + 5

    def register(self, client: LeaseBackend, job: str, fingerprint: str) -> Registration:
        return client.register([Sighting(job=job, fingerprint=fingerprint)])[0]

    def test_L2_the_lapsed_ones_longest_first(self, harness: BackendHarness) -> None:
        """With a hundred dead claims and a look for ten, the oldest is never reached; or a live one is among them."""
        client = harness.connect_lease()
        base = self.base(client)
        assert client.lapsed(10) == []
        for number in range(5):
            assert claim(client, f"job {number}", base, "a") is WON
        assert claim(client, "sent", base, "a") is WON
        harness.lapse("sent", base)
        assert confirm(client, "sent", base, "a")
        for number, ago in ((3, 20_000), (0, 180_000), (4, 90_000)):
            harness.lapse(f"job {number}", base, ago)
        assert self.lapsed(client) == [("job 0", base), ("job 4", base), ("job 3", base)]
        assert self.lapsed(client, 2) == [("job 0", base), ("job 4", base)]
        assert self.lapsed(client, 0) == []
        found = client.lapsed(1)[0]
        assert (found.attempt, found.abandoned) == (1, False)
        assert take(client, "job 0", base, "b") == 1
        assert self.lapsed(client) == [("job 4", base), ("job 3", base)]

    def test_L3_of_two_sweepers_one_gets_it(self, harness: BackendHarness) -> None:
        """Both read the list of lapsed claims, both take the first: two messages."""
        client = harness.connect_lease()
        base = self.base(client)
        slots = [base + number for number in range(20)]
        claim_all(client, [ask("job", slot, "a") for slot in slots])
        for slot in slots:
            harness.lapse("job", slot)
        sweepers = [harness.connect_lease() for _ in range(4)]

        def sweep(number: int) -> list[int | None]:
            return [take(sweepers[number], "job", slot, f"sweeper {number}") for slot in slots]

        taken = at_once([partial(sweep, number) for number in range(len(sweepers))])
        for position, slot in enumerate(slots):
            winners = [number for number, attempts in enumerate(taken) if attempts[position] is not None]
            assert len(winners) == 1, f"winners {winners}, record {harness.raw_read('job', slot)}"

    def test_L3_only_what_is_still_as_the_list_said(self, harness: BackendHarness) -> None:
        """Between list and takeover its holder settles it, or renews it: a settled run starts again."""
        client, other = harness.connect_lease(), harness.connect_lease()
        base = self.base(client)
        for number in range(4):
            assert claim(client, "job", base + number, "a") is WON
        assert confirm(client, "job", base, "a")
        assert give_up(client, "job", base + 1, "a")
        harness.lapse("job", base + 3)
        before = [harness.raw_read("job", base + number) for number in range(5)]
        assert take(other, "job", base, "b") is None, "it was confirmed"
        assert take(other, "job", base + 1, "b") is None, "it was given up"
        assert take(other, "job", base + 2, "b") is None, "its lease is not over"
        assert take(other, "job", base + 3, "b", from_attempt=2) is None, "another attempt"
        assert take(other, "job", base + 4, "b") is None, "there is no such claim"
        assert [harness.raw_read("job", base + number) for number in range(5)] == before

    def test_L4_a_takeover_of_a_claim_keeps_the_attempt(self, harness: BackendHarness) -> None:
        """Counted as an attempt, a beat's death uses up the one execution of a payment that never began."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        (run,) = client.history("job", 1)
        for owner in ("b", "c"):
            harness.lapse("job", slot)
            harness.pass_time(20)
            assert [found.attempt for found in other.lapsed(10)] == [1]
            assert take(other, "job", slot, owner) == 1, harness.raw_read("job", slot)
        result = other.claim([ask("job", slot, "c")])[0]
        assert (result.answer, result.attempt) == (WON, 1)
        assert confirm(other, "job", slot, "c")
        # The successor of a chained job is worked out from it: one that moved would make two of one.
        assert [known.claimed_at for known in client.history("job", 1)] == [run.claimed_at] != [None]

    def test_L5_an_abandoned_claim_can_be_taken_at_once(self, harness: BackendHarness) -> None:
        """The broker is back in a second, and the slot waits for the lease of a beat that has given it back."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        assert abandon(client, "job", slot, "a")
        assert [(found.slot, found.attempt, found.abandoned) for found in other.lapsed(10)] == [(slot, 1, True)]
        assert claim_all(other, [ask("job", slot, "a"), ask("job", slot, "b")]) == [TAKEN, TAKEN]
        assert not confirm(client, "job", slot, "a"), "it was given back"
        assert take(other, "job", slot, "b") == 1, harness.raw_read("job", slot)
        assert confirm(other, "job", slot, "b")

    def test_L5_also_by_the_one_that_abandoned_it(self, harness: BackendHarness) -> None:
        """With one beat alone an abandoned slot would be open to nobody."""
        client = harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        assert abandon(client, "job", slot, "a")
        assert take(client, "job", slot, "a") == 1, harness.raw_read("job", slot)
        assert confirm(client, "job", slot, "a")

    def test_L6_the_old_holder_is_refused_and_changes_nothing(self, harness: BackendHarness) -> None:
        """A frozen beat wakes up, abandons or ends what another is sending."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        harness.lapse("job", slot)
        assert take(other, "job", slot, "b") == 1
        before = harness.raw_read("job", slot)
        for _ in range(2):
            assert not confirm(client, "job", slot, "a")
            assert not abandon(client, "job", slot, "a")
            assert not give_up(client, "job", slot, "a")
            assert claim(client, "job", slot, "a") is TAKEN
        assert harness.raw_read("job", slot) == before
        assert confirm(other, "job", slot, "b")
        before = harness.raw_read("job", slot)
        assert not confirm(client, "job", slot, "a")
        assert claim(client, "job", slot, "a") is TAKEN
        assert harness.raw_read("job", slot) == before

    def test_L7_the_new_holder_can_do_everything(self, harness: BackendHarness) -> None:
        """A fence that refuses everybody is safe, and the slot is never sent."""
        client, other = harness.connect_lease(), harness.connect_lease()
        base = self.base(client)
        slots = [base + number for number in range(4)]
        claim_all(client, [ask("job", slot, "a") for slot in slots])
        for slot in slots:
            harness.lapse("job", slot)
        wishes = [
            Takeover(job="job", slot=slot, from_attempt=1, owner="b", beat="new beat", lease=600_000) for slot in slots
        ]
        assert other.takeover(wishes) == [1] * 4
        assert claim(other, "job", base, "b") is WON, "asking again"
        assert confirm(other, "job", base, "b")
        assert abandon(other, "job", base + 1, "b")
        assert give_up(other, "job", base + 2, "b", state=RunState.NOT_SENT)
        assert self.lapsed(client) == [("job", base + 1)]
        last = client.history("job", 4)
        assert [(run.state, run.beat) for run in last[1:]] == [
            (RunState.NOT_SENT, "new beat"),
            (RunState.CLAIMED, "new beat"),
            (RunState.DISPATCHED, "new beat"),
        ]

    def test_L8_a_takeover_asked_again_is_answered_the_same(self, harness: BackendHarness) -> None:
        """Its reply was lost; told "no" the beat does not publish, and renews the lease of what nobody sends."""
        client, other = harness.connect_lease(), harness.connect_lease()
        slot = self.base(client)
        assert claim(client, "job", slot, "a") is WON
        harness.lapse("job", slot)
        assert take(other, "job", slot, "b") == 1
        assert take(harness.connect_lease(), "job", slot, "b") == 1, harness.raw_read("job", slot)
        assert take(client, "job", slot, "c") is None, "anybody may ask again"
        assert confirm(other, "job", slot, "b")
        assert take(other, "job", slot, "b") is None, "it was sent meanwhile"

    def test_L9_a_beat_is_shown_until_it_leaves(self, harness: BackendHarness) -> None:
        """Two beats of one host count as one; or `status` shows beats that stopped last week."""
        client, other = harness.connect_lease(), harness.connect_lease()
        before = client.now()
        shown = [
            Beat(owner="2", label="host", version="1", skew=-3, schedule="s", zones="z"),
            Beat(owner="1", label="host", version="1"),
            Beat(owner="3", label="a host", version="2"),
        ]
        seen = {beat.owner: client.beat_seen(beat) for beat in shown}
        assert all(before <= at <= client.now() for at in seen.values())
        beats = other.beats(within=60_000)
        assert [beat.label for beat in beats] == ["a host", "host", "host"]
        assert sorted(beat.owner for beat in beats) == ["1", "2", "3"]
        found = next(beat for beat in beats if beat.owner == "2")
        assert (found.version, found.skew, found.schedule, found.zones) == ("1", -3, "s", "z")
        assert {beat.owner: beat.seen for beat in beats} == seen
        harness.pass_time(600)
        again = client.beat_seen(Beat(owner="1", label="host", version="1"))
        assert again >= seen["1"] + 600
        begun = other.now()
        found_now = [beat.owner for beat in other.beats(within=begun - again + 500)]
        assert found_now == ["1"] or (found_now == [] and other.now() > begun + 500)
        other.beat_left("2")
        other.beat_left("nobody")
        assert sorted(beat.owner for beat in client.beats(within=60_000)) == ["1", "3"]
