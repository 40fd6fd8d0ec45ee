"""The loop: one message per slot, whatever fails half-way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine import MINUTE, SECOND, START, Failing, Moody, World, job

from celery_anarchon import events, wire
from celery_anarchon.backends.base import ClaimRequest, Hold
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.errors import BackendUnavailable, LayoutMismatch
from celery_anarchon.model import Answer, Coalesce, Millis
from celery_anarchon.options import Settings
from celery_anarchon.publishing import BrokerAway, Dispatch, PublishUnclear
from celery_anarchon.timetable import At, Interval

HOUR = 60 * MINUTE


@pytest.fixture
def world() -> World:
    return World()


def minutes(*numbers: int, name: str = "job") -> list[tuple[str, Millis]]:
    return [(name, START + number * MINUTE) for number in numbers]


# --- the plain case ---------------------------------------------------------------------------------------------------


def test_each_slot_is_sent_once_at_its_time(world: World) -> None:
    world.beat("a", job())
    world.run(3 * MINUTE + 1)
    assert world.outbox.slots == minutes(1, 2, 3)
    assert [event.late for event in world.events_of(events.Sent)] == [0, 0, 0]
    assert world.states("job") == {slot: "dispatched" for _, slot in minutes(1, 2, 3)}


def test_the_run_id_is_the_task_id(world: World) -> None:
    world.beat("a", job())
    world.run(MINUTE)
    assert world.outbox.arrived[0][2] == wire.run_id("anarchon_runs", "job", START + MINUTE)


def test_a_fleet_sends_each_slot_once_and_shares_a_burst(world: World) -> None:
    jobs = [job(f"job-{number}") for number in range(40)]
    world.settings = Settings(lease=30 * SECOND, heartbeat=10 * SECOND, batch=5)
    for name in "abc":
        world.beat(name, *jobs)
    world.run(5 * MINUTE)
    assert sorted(world.outbox.slots) == sorted(
        slot for number in range(40) for slot in minutes(1, 2, 3, 4, 5, name=f"job-{number}")
    )


def test_beats_walk_a_burst_in_orders_of_their_own(world: World) -> None:
    jobs = [job(f"job-{number}") for number in range(40)]
    beats = [world.beat(name, *jobs) for name in "ab"]
    for beat in beats:
        beat.tick()
    world.clock.advance(MINUTE)
    for beat in beats:
        beat.tick()
    asked = {name: [event.job for event in world.events_of(events.Claimed, name)] for name in "ab"}
    assert sorted(asked["a"]) == sorted(asked["b"]) == sorted(j.name for j in jobs)
    assert asked["a"] != asked["b"]


def test_the_wait_ends_at_the_next_slot_and_never_before(world: World) -> None:
    beat = world.beat("a", job(every=7 * SECOND))
    wait = beat.tick()
    next_slot = (START // 7_000 + 1) * 7_000
    assert world.clock.wall() + round(wait * 1000) == next_slot
    world.clock.advance(next_slot - world.clock.wall() - 1)
    assert beat.tick() == pytest.approx(0.001)
    assert world.outbox.slots == []
    world.clock.advance(1)
    beat.tick()
    assert world.outbox.slots == [("job", next_slot)]


class Spied(Interval):
    """Counts who is asked."""

    asked = 0

    def next(self, after: Millis) -> Millis:
        self.asked += 1
        return super().next(after)


def test_a_tick_looks_only_at_what_is_due(world: World) -> None:
    idle = [Spied(3_600 * SECOND) for _ in range(50)]
    busy = Spied(MINUTE)
    beat = world.beat("a", job(timetable=busy), *(job(f"idle-{n}", timetable=spy) for n, spy in enumerate(idle)))
    beat.tick()
    for spy in (busy, *idle):
        spy.asked = 0
    world.clock.advance(MINUTE)
    beat.tick()
    assert busy.asked > 0
    assert sum(spy.asked for spy in idle) == 0


# --- first sight, catch-up, edits -------------------------------------------------------------------------------------


def test_a_new_job_never_fires_for_the_past(world: World) -> None:
    world.clock.advance(30 * SECOND)
    world.beat("a", job())
    world.run(20 * SECOND)
    assert world.outbox.slots == []
    world.run(10 * SECOND)
    assert world.outbox.slots == minutes(1)


@pytest.mark.parametrize(
    ("options", "sent", "states"),
    [
        ({}, [4], ["superseded (newer-slot)"] * 2),
        ({"catch_up": 0}, [], ["misfire (catch-up)"] * 3),
        ({"coalesce": Coalesce.ALL}, [2, 3, 4], []),
        ({"catch_up": 100 * SECOND, "coalesce": Coalesce.ALL}, [3, 4], ["misfire (catch-up)"]),
        ({"max_late": 50 * SECOND}, [4], ["misfire (max-late)"] * 2),
    ],
)
def test_missed_slots_after_downtime(world: World, options: Any, sent: list[int], states: list[str]) -> None:
    world.beat("a", job(**options))
    world.run(MINUTE + SECOND)
    world.beats.pop("a").close()
    world.clock.advance(3 * MINUTE + 10 * SECOND)
    for name in "bcd":
        world.beat(name, job(**options))
    world.run(20 * SECOND)
    assert world.outbox.slots == minutes(1, *sent)
    assert [state for state in world.states("job").values() if state != "dispatched"] == states


def test_an_edited_job_begins_anew_and_a_rollback_moves_nothing(world: World) -> None:
    world.beat("a", job(every=10 * MINUTE))
    world.run(MINUTE)
    world.beats.pop("a").close()
    world.clock.advance(30 * MINUTE)
    # While everything was down, the job was edited: nothing of the new meaning is owed for the past.
    world.beat("b", job(every=7 * MINUTE))
    world.run(SECOND)
    assert world.outbox.slots == []
    world.beats.pop("b").close()
    world.beat("c", job(every=10 * MINUTE))
    world.run(SECOND)
    assert world.outbox.slots == minutes(30)


def test_live_changes(world: World) -> None:
    beat = world.beat("a", job("kept"), job("gone"), job("edited"))
    world.run(MINUTE)
    beat.load({"kept": job("kept"), "edited": job("edited", every=2 * MINUTE), "new": job("new", every=30 * SECOND)})
    world.run(MINUTE)
    assert sorted(world.outbox.slots[3:]) == sorted(
        [*minutes(2, name="kept"), *minutes(2, name="edited"), ("new", START + 90 * SECOND), *minutes(2, name="new")]
    )


def test_an_at_is_sent_once_and_one_from_before_the_first_sight_is_a_misfire(world: World) -> None:
    past, future = At(START - SECOND), At(START + 5 * SECOND)
    for name in "ab":
        world.beat(name, job("past", timetable=past), job("future", timetable=future))
    world.run(30 * SECOND)
    assert world.outbox.slots == [("future", START + 5 * SECOND)]
    assert list(world.states("past").values()) == ["misfire (before-first-seen)"]
    world.beat("late", job("past", timetable=past))
    world.run(SECOND, "late")
    assert not world.events_of(events.SlotsGivenUp, "late"), "the warning comes once, not at each restart"


def test_a_slow_moment_is_no_downtime(world: World) -> None:
    beat = world.beat("a", job(every=SECOND))
    beat.tick()
    world.clock.advance(4_000)
    beat.tick()
    assert len(world.outbox.slots) == 4
    assert not world.events_of(events.Stalled)


def test_a_pause_is_downtime(world: World) -> None:
    beat = world.beat("a", job(every=SECOND))
    beat.tick()
    world.clock.advance(20_000)
    beat.tick()
    assert world.outbox.slots == [("job", START + 20_000)]
    assert len(world.events_of(events.Stalled)) == 1


def test_a_pause_in_mid_burst_makes_nothing_a_missed_slot_that_was_due_before(world: World) -> None:
    world.settings = replace(world.settings, batch=1)
    beat = world.beat("a", *(job(f"job-{n}", catch_up=0) for n in range(4)))
    world.run(MINUTE - SECOND)
    world.outbox.after = lambda _: world.clock.advance(6_000)
    world.clock.advance(SECOND)
    beat.tick()
    assert len(world.outbox.slots) == 4 and not world.events_of(events.SlotsGivenUp)
    assert world.events_of(events.Stalled)


def test_a_new_beat_does_not_take_slots_from_a_slow_one(world: World) -> None:
    slow = world.beat("slow", job(every=SECOND))
    world.run(1_000)
    world.clock.advance(3_000)
    world.beat("new", job(every=SECOND)).tick()
    assert world.outbox.slots[1:] == [("job", START + 4_000)]
    slow.tick()
    assert sorted(world.outbox.slots) == [("job", START + n * SECOND) for n in (1, 2, 3, 4)]


# --- failures of the store --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["claim", "confirm", "register", "beat_seen", "record", "lapsed", "tidy"])
def test_a_lost_reply_costs_nothing(world: World, call: str) -> None:
    past = job("past", timetable=At(START - SECOND))
    beat = world.beat("a", job(), job("other", every=MINUTE, catch_up=0), past)
    if call not in ("register", "beat_seen", "record"):
        world.run(30 * SECOND)
    before = len(world.backend().calls)
    world.backend().lose_reply_of = {call}
    world.run(31 * SECOND)
    assert call in world.backend().calls[before:], "no reply was lost"
    world.backend().lose_reply_of = set()
    world.run(START + 3 * MINUTE + SECOND - world.clock.wall())
    assert sorted(world.outbox.slots) == sorted([*minutes(1, 2, 3), *minutes(1, 2, 3, name="other")])
    assert set(world.states("job").values()) == {"dispatched"}
    assert list(world.states("past").values()) == ["misfire (before-first-seen)"]
    beat.close()


def test_nothing_is_sent_while_the_store_is_away_and_it_is_said_once(world: World) -> None:
    world.beat("a", job(every=10 * SECOND))
    world.run(SECOND)
    world.backend().away = True
    world.run(35 * SECOND)
    assert world.outbox.slots == []
    assert [type(event.error) for event in world.events_of(events.StoreChanged)] != []
    assert len(world.events_of(events.StoreChanged)) == 1
    world.backend().away = False
    world.run(6 * SECOND)
    assert len(world.outbox.slots) in (1, 2)
    assert world.outbox.slots[0] == ("job", START + 30 * SECOND)
    assert len(world.events_of(events.StoreChanged)) == 2


@pytest.mark.parametrize("call", ["claim", "confirm"])
def test_a_line_that_loses_answers_again_and_again_costs_no_slot(world: World, call: str) -> None:
    """Each time something is done in between, so each loss is one of its own, and not one long outage."""
    world.beat("a", job(every=SECOND))
    for _ in range(12):
        world.lose_a_reply_of(call)
        sent = len(world.outbox.slots)
        while len(world.outbox.slots) == sent:
            world.run(100)
    world.run(10 * SECOND)
    slots = [slot for _, slot in world.outbox.slots]
    assert slots == list(range(slots[0], slots[0] + len(slots) * SECOND, SECOND))
    assert world.clock.wall() - slots[-1] <= SECOND
    assert world.events_of(events.SlotsGivenUp) == []


WRITES = {"claim", "confirm", "register", "beat_seen", "record", "takeover", "tidy"}


def test_a_store_that_answers_and_takes_no_writes_is_away_all_the_time(world: World) -> None:
    """Such is a Redis without memory, or a replica. Each question whether it is there is answered."""
    world.beat("a", job(every=10 * SECOND))
    world.run(SECOND)
    world.backend().refused = WRITES
    world.run(10 * MINUTE)
    assert [event.error is None for event in world.events_of(events.StoreChanged)] == [False]
    assert world.backend().calls.count("now") < 160, "looked at every four seconds, not all the time"
    world.backend().refused = set()
    world.run(20 * SECOND)
    assert [event.error is None for event in world.events_of(events.StoreChanged)] == [False, True]
    assert len(world.outbox.slots) >= 2


def test_why_a_store_that_came_up_still_cannot_be_used_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = world.beat("a")
    world.backend().away = True
    beat._opened = False
    beat.open()
    world.run(10 * SECOND)

    def refuse(*_: Any) -> None:
        raise LayoutMismatch("namespace 'anarchon_runs' belongs to app other")

    monkeypatch.setattr(Moody, "open", refuse)
    world.backend().away = False
    world.run(MINUTE)
    errors = [type(event.error) for event in world.events_of(events.StoreChanged)]
    assert errors == [BackendUnavailable, LayoutMismatch]


def test_a_store_that_is_away_at_the_start_is_waited_for(world: World) -> None:
    beat = world.beat("a")
    world.backend().away = True
    beat._opened = False
    beat.open()
    beat.load({"job": job()})
    world.run(30 * SECOND)
    world.backend().away = False
    world.run(MINUTE)
    assert world.outbox.slots == minutes(1)


def test_a_published_slot_whose_confirmation_failed_is_not_published_again(world: World) -> None:
    world.beat("a", job(every=10 * SECOND))

    def store_goes(_dispatch: Dispatch) -> None:
        world.backend().away = True

    world.outbox.after = store_goes
    world.run(10 * SECOND)
    world.outbox.after = None
    world.run(3 * SECOND)
    world.backend().away = False
    world.run(5 * SECOND)
    assert world.outbox.slots == [("job", START + 10 * SECOND)]
    assert world.states("job") == {START + 10 * SECOND: "dispatched"}


def test_a_bug_in_a_backend_does_not_end_the_beat(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.beat("a", job())
    world.run(SECOND)
    monkeypatch.setattr(MemoryBackend, "lapsed", lambda *_: 1 / 0)
    world.run(30 * SECOND)
    monkeypatch.undo()
    world.run(30 * SECOND)
    assert world.outbox.slots == minutes(1)


# --- failures of the broker -------------------------------------------------------------------------------------------


def test_a_broker_that_is_away_consumes_no_slot(world: World) -> None:
    for name in "abc":
        world.beat(name, job())
    world.run(50 * SECOND)
    world.outbox.away = True
    world.run(30 * SECOND)
    assert world.states("job") == {}
    world.outbox.away = False
    world.run(10 * SECOND)
    assert world.outbox.slots == minutes(1)
    for name in "abc":
        assert len(world.events_of(events.BrokerChanged, name)) == 2


def test_a_broker_that_answers_and_takes_no_messages_is_away_all_the_time(world: World) -> None:
    world.beat("a", job(every=10 * SECOND))
    world.run(SECOND)
    world.outbox.mood = _raise(BrokerAway("OOM command not allowed"))
    world.run(10 * MINUTE)
    assert [event.error is None for event in world.events_of(events.BrokerChanged)] == [False]
    assert world.backend().calls.count("claim") < 150, "it is tried every four seconds, not all the time"
    world.outbox.mood = None
    world.run(20 * SECOND)
    assert [event.error is None for event in world.events_of(events.BrokerChanged)] == [False, True]
    assert len(world.outbox.slots) >= 2


def test_a_broker_that_is_back_is_said_to_be_where_nothing_is_due(world: World) -> None:
    world.beat("a", job(every=10 * SECOND), job("rare", every=HOUR))
    world.run(SECOND)
    world.outbox.away = True
    world.run(20 * SECOND)
    world.beats["a"].load({"rare": job("rare", every=HOUR)})
    world.outbox.away = False
    world.run(15 * SECOND)
    assert [event.error is None for event in world.events_of(events.BrokerChanged)] == [False, True]


def test_slots_missed_by_the_broker_collapse_once_for_the_fleet(world: World) -> None:
    for name in "abc":
        world.beat(name, job(every=10 * SECOND))
    world.run(5 * SECOND)

    def cut(_dispatch: Dispatch) -> None:
        world.outbox.away = True
        raise BrokerAway("reset")

    world.outbox.mood = cut
    world.run(35 * SECOND)
    world.outbox.mood, world.outbox.away = None, False
    world.run(6 * SECOND)
    sent = [slot - START for _, slot in world.outbox.slots]
    assert sent in ([40 * SECOND], [30 * SECOND, 40 * SECOND]), "one for the outage, and perhaps the one after it"
    world.run(60 * SECOND)
    assert set(world.states("job").values()) <= {"dispatched", "superseded (newer-slot)"}


def test_a_sure_failure_leaves_the_slot_to_another_beat(world: World) -> None:
    dead = World().outbox
    dead.mood = _raise(BrokerAway("connection reset"))
    world.beat("cut-off", job(), publisher=dead)
    world.run(MINUTE, "cut-off")
    dead.away = True
    assert world.states("job") == {START + MINUTE: "claimed"}
    world.beat("healthy", job())
    world.run(11 * SECOND)
    assert world.outbox.slots == minutes(1)
    assert world.states("job") == {START + MINUTE: "dispatched"}


def test_after_a_lost_abandon_nothing_is_published(world: World) -> None:
    """Mutant publish-after-abandon: the broker is back at once, and whoever takes the slot over sends it too."""
    for name in "ab":
        world.beat(name, job())
    world.run(MINUTE - SECOND)
    failed: list[Dispatch] = []

    def cut_once(dispatch: Dispatch) -> None:
        if not failed:
            failed.append(dispatch)
            raise BrokerAway("connection reset")

    world.outbox.mood = cut_once
    for name in "ab":
        world.backend(name).lose_reply_of = {"abandon"}
    world.run(SECOND)
    assert sum(world.backend(name).calls.count("abandon") for name in "ab") == 1
    for name in "ab":
        world.backend(name).lose_reply_of = set()
    world.run(50 * SECOND)
    assert world.outbox.slots == minutes(1)
    assert world.states("job") == {START + MINUTE: "dispatched"}


def _raise(error: Exception) -> Any:
    def mood(_dispatch: Dispatch) -> None:
        raise error

    return mood


def test_an_unclear_publish_is_repeated_with_the_same_id(world: World) -> None:
    world.beat("a", job())
    attempts: list[str] = []

    def unclear_once(dispatch: Dispatch) -> None:
        attempts.append(dispatch.run_id)
        if len(attempts) == 1:
            raise PublishUnclear("timed out")

    world.outbox.mood = unclear_once
    world.run(MINUTE + 5 * SECOND)
    assert len(attempts) == 2
    assert len(set(attempts)) == 1
    assert world.outbox.slots == minutes(1)
    assert world.states("job") == {START + MINUTE: "dispatched"}


def test_an_unclear_publish_is_anyones_after_its_deadline(world: World) -> None:
    deaf = World().outbox
    deaf.mood = _raise(PublishUnclear("timed out"))
    world.beat("deaf", job(every=5 * MINUTE), publisher=deaf)
    world.run(5 * MINUTE, "deaf")
    world.beat("b", job(every=5 * MINUTE))
    world.run(29 * SECOND)
    assert world.outbox.slots == []
    world.run(12 * SECOND)
    assert world.outbox.slots == minutes(5)
    assert len(world.events_of(events.Unclear, "deaf")) == 1, "said once, not at each try"


def test_a_message_that_cannot_be_sent_ends_its_slot_and_the_others_go_on(world: World) -> None:
    def refuse(dispatch: Dispatch) -> None:
        if dispatch.job.name == "bad":
            raise ValueError("cannot encode")

    world.outbox.mood = refuse
    world.beat("a", job("bad"), job("good"))
    world.run(2 * MINUTE)
    assert world.outbox.slots == minutes(1, 2, name="good")
    assert list(world.states("bad").values()) == ["not-sent (publish-error)"] * 2


# --- death, pauses, takeover ------------------------------------------------------------------------------------------


class DiesAfterClaim(Dispatcher):
    """Stops for good between claim and publish."""

    def _publish(self, won: Any) -> None:
        if list(won):
            raise SystemExit("killed")


def test_a_beat_killed_between_claim_and_publish_is_replaced(world: World) -> None:
    world.beat("killed", job(), kind=DiesAfterClaim)
    world.beats["killed"].tick()
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        world.beats["killed"].tick()
    del world.beats["killed"]
    world.beat("heir", job())
    world.run(29 * SECOND)
    assert world.outbox.slots == []
    world.run(11 * SECOND)
    assert world.outbox.slots == minutes(1), "within lease + heartbeat"
    assert world.events_of(events.TookOver)[0].abandoned is False


def test_a_takeover_whose_answer_was_lost_is_made_again(world: World) -> None:
    """Mutant renew-by-owner: a beat that renews all that is its own keeps what it does not know to be its own."""
    world.beat("killed", job(), kind=DiesAfterClaim)
    world.beats["killed"].tick()
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        world.beats["killed"].tick()
    del world.beats["killed"]
    world.beat("heir", job())
    backend = world.backend("heir")
    backend.lose_reply_of = {"takeover"}
    world.run(40 * SECOND)
    assert "takeover" in backend.calls
    assert world.outbox.slots == []
    backend.lose_reply_of = set()
    world.run(41 * SECOND)
    assert sorted(world.outbox.slots) == minutes(1, 2)


class Frozen(Dispatcher):
    """Is paused for longer than its lease at one point, while another beat works."""

    freeze_at = ""
    thaw: Any = None

    def _freeze(self, point: str) -> None:
        if point == self.freeze_at:
            self.freeze_at = ""
            self.thaw()

    def _begin(self, *batch: Any) -> Any:
        self._freeze("before claim")
        return super()._begin(*batch)

    def _won(self, asked: Any) -> Any:
        won = super()._won(asked)
        self._freeze("after claim")
        return won


@pytest.mark.parametrize("point", ["before claim", "after claim"])
def test_a_beat_paused_past_its_lease_sends_nothing_on_its_old_claim(world: World, point: str) -> None:
    frozen = world.beat("frozen", job(), kind=Frozen)
    world.run(SECOND)
    world.beat("awake", job())
    frozen.freeze_at, frozen.thaw = point, lambda: world.run(45 * SECOND, "awake")  # type: ignore[attr-defined]
    world.run(59 * SECOND, "frozen")
    assert not frozen.freeze_at, "it came there"  # type: ignore[attr-defined]
    world.run(5 * SECOND)
    assert world.outbox.slots == minutes(1)


def test_a_lapsed_claim_beyond_max_late_is_a_misfire(world: World) -> None:
    world.beat("killed", job(max_late=20 * SECOND), kind=DiesAfterClaim)
    world.beats["killed"].tick()
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        world.beats["killed"].tick()
    del world.beats["killed"]
    world.beat("heir", job(max_late=20 * SECOND))
    world.run(41 * SECOND)
    assert world.outbox.slots == []
    assert world.states("job") == {START + MINUTE: "misfire (max-late)"}


def test_a_beat_leaves_claims_of_jobs_it_does_not_know(world: World) -> None:
    world.beat("killed", job(), kind=DiesAfterClaim)
    world.beats["killed"].tick()
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        world.beats["killed"].tick()
    del world.beats["killed"]
    world.beat("newer", job("something else"))
    world.run(50 * SECOND)
    assert world.states("job") == {START + MINUTE: "claimed"}


def test_claims_of_unknown_jobs_do_not_hide_one_that_is_known(world: World) -> None:
    world.settings = Settings(lease=30 * SECOND, heartbeat=10 * SECOND, batch=5)
    dead = MemoryBackend(store=world.store)
    for number, name in enumerate([*(f"gone-{n}" for n in range(20)), "job"]):
        claim = ClaimRequest(job=name, slot=START + number, owner="dead", beat="dead", lease=SECOND + number)
        assert dead.claim([claim])[0].answer is Answer.WON
    world.clock.advance(40 * SECOND)
    world.beat("heir", job())
    world.run(SECOND)
    assert world.outbox.slots == [("job", START + 20)]
    assert len(dead.lapsed(100)) == 20


def test_a_takeover_whose_answer_was_lost_is_asked_for_again(world: World) -> None:
    """The claim is this beat's then, and lapsed for nobody: it would lie until that lease is over, too."""
    dead = MemoryBackend(store=world.store)
    dead.claim([ClaimRequest(job="job", slot=START - SECOND, owner="dead", beat="dead", lease=30 * SECOND)])
    world.beat("heir", job(every=HOUR))
    world.lose_a_reply_of("takeover", "heir")
    assert world.outbox.slots == []
    world.run(2 * SECOND)
    assert world.outbox.slots == [("job", START - SECOND)]
    assert len(world.events_of(events.TookOver)) == 1
    world.run(2 * MINUTE)
    assert len(world.outbox.slots) == 1


def test_a_timetable_that_fails_holds_up_no_takeover_of_another_job(world: World) -> None:
    """The store is not away for it: taken for that, one job would stop all takeovers for ever."""
    dead = MemoryBackend(store=world.store)
    slots = {"a": START - 9 * SECOND, "job": START - 8 * SECOND}
    for name, slot in slots.items():
        dead.claim([ClaimRequest(job=name, slot=slot, owner="dead", beat="dead", lease=SECOND)])
    dead.abandon([Hold(job=name, slot=slot, owner="dead", attempt=1) for name, slot in slots.items()])
    broken = Failing(MINUTE)
    world.beat("heir", job("a", timetable=broken), job("job", coalesce=Coalesce.ALL))
    broken.fails = True
    world.run(50 * SECOND)
    assert world.outbox.slots == [("job", slots["job"])]
    assert world.events_of(events.StoreChanged) == []
    assert {event.job for event in world.events_of(events.JobTrouble)} == {"a"}
    assert len(world.events_of(events.JobTrouble)) == 2, "by the plan and by the sweep, however often it is swept"
    broken.fails = False
    world.run(10 * SECOND)
    assert world.states("a") == {slots["a"]: "superseded (newer-slot)"}


def test_claims_of_failing_timetables_do_not_hide_one_that_works(world: World) -> None:
    world.settings = Settings(lease=30 * SECOND, heartbeat=10 * SECOND, batch=5)
    dead = MemoryBackend(store=world.store)
    broken = Failing(MINUTE)
    names = [*(f"broken-{n}" for n in range(20)), "job"]
    for number, name in enumerate(names):
        dead.claim([ClaimRequest(job=name, slot=START + number, owner="dead", beat="dead", lease=SECOND + number)])
    world.clock.advance(40 * SECOND)
    world.beat("heir", job("job"), *(job(name, timetable=broken, max_late=HOUR, jitter=SECOND) for name in names[:-1]))
    broken.fails = True
    world.run(SECOND)
    assert world.outbox.slots == [("job", START + 20)]


def test_a_broker_less_beat_takes_nothing_over(world: World) -> None:
    world.beat("killed", job(), kind=DiesAfterClaim)
    world.beats["killed"].tick()
    world.clock.advance(MINUTE)
    with pytest.raises(SystemExit):
        world.beats["killed"].tick()
    del world.beats["killed"]
    world.outbox.away = True
    world.beat("heir", job())
    world.run(50 * SECOND)
    assert "takeover" not in world.backend("heir").calls


# --- stop -------------------------------------------------------------------------------------------------------------


def test_close_leaves_nothing_to_the_lease(world: World) -> None:
    deaf = World().outbox
    deaf.mood = _raise(PublishUnclear("timed out"))
    beat = world.beat("a", job(), publisher=deaf)
    world.run(MINUTE)
    beat.close()
    beat.close()
    world.beat("b", job())
    world.run(SECOND, "b")
    assert world.outbox.slots == minutes(1)


def test_a_stop_in_mid_burst_finishes_what_was_won(world: World) -> None:
    world.settings = Settings(lease=30 * SECOND, heartbeat=10 * SECOND, batch=10)
    beat = world.beat("a", *(job(f"job-{number}") for number in range(50)))
    beat.tick()
    beat.stopping = lambda: len(world.outbox.arrived) > 3
    world.clock.advance(MINUTE)
    beat.tick()
    beat.close()
    assert len(world.outbox.arrived) == 10
    reader = MemoryBackend(store=world.store)
    assert reader.lapsed(100) == []
    world.clock.advance(MINUTE)
    assert reader.lapsed(100) == []


def test_close_is_quick_when_the_store_is_away(world: World) -> None:
    beat = world.beat("a", job())
    world.run(SECOND)
    world.backend().away = True
    world.run(15 * SECOND)
    before = len(world.backend().calls)
    beat.close()
    assert len(world.backend().calls) == before


# --- clocks -----------------------------------------------------------------------------------------------------------


def test_a_clock_set_back_repeats_nothing(world: World) -> None:
    world.beat("a", job())
    world.run(5 * MINUTE)
    world.clock.step(-3 * MINUTE)
    world.run(3 * MINUTE)
    assert world.outbox.slots == minutes(1, 2, 3, 4, 5)
    world.run(MINUTE)
    assert world.outbox.slots == minutes(1, 2, 3, 4, 5, 6)
    assert len(world.events_of(events.ClockStepped)) == 1


def test_a_clock_set_ahead_catches_up_under_the_rules(world: World) -> None:
    world.beat("a", job())
    world.run(MINUTE)
    world.clock.step(10 * MINUTE)
    world.run(SECOND)
    assert world.outbox.slots == minutes(1, 11)


def test_one_bad_timetable_does_not_hold_up_the_others(world: World) -> None:
    class Broken:
        key = "broken"

        def next(self, after: Millis) -> Millis | None:
            if after > START:
                raise RuntimeError("no idea")
            return START + SECOND

        def last(self, until: Millis) -> Millis | None:
            raise RuntimeError("no idea")

        def count(self, after: Millis, until: Millis) -> int:
            return 0

    world.beat("a", job("broken", timetable=Broken()), job(every=SECOND))
    world.run(10 * SECOND)
    assert world.outbox.slots == [("job", START + n * SECOND) for n in range(1, 11)]
    assert len(world.events_of(events.JobTrouble)) <= 2


class Forgetful(Interval):
    """Knows what comes, and never what came."""

    def last(self, until: Millis) -> Millis | None:  # type: ignore[override]
        return None


class Standing(Interval):
    """What comes after a slot is that slot."""

    def next(self, after: Millis) -> Millis:
        return super().next(after - 1)


@pytest.mark.parametrize("kind", [Forgetful, Standing])
@pytest.mark.parametrize("options", [{}, {"max_late": HOUR}, {"jitter": 100}], ids=str)
def test_a_timetable_that_contradicts_itself_is_that_jobs_trouble(
    world: World, kind: type[Interval], options: dict[str, Any]
) -> None:
    """What it names next is past for ever, so the beat would not rest: Celery does not sleep for a wait of 0."""
    beat = world.beat("a", job("bad", timetable=kind(SECOND), **options), job(every=SECOND))
    beat.tick()
    ticks = 0
    while world.clock.wall() < START + 10 * SECOND:
        world.clock.advance(max(1, round(beat.tick() * 1000)))
        ticks += 1
    assert ticks < 40
    assert world.outbox.slots.count(("job", START + 9 * SECOND)) == 1
    assert len([slot for name, slot in world.outbox.slots if name == "job"]) >= 9
    (trouble,) = world.events_of(events.JobTrouble)
    assert trouble.job == "bad" and "2026-03-29T01:00:0" in str(trouble.error)


def test_a_timetable_that_fails_is_told_once_a_look(world: World) -> None:
    broken = Failing(SECOND)
    world.beat("a", job(timetable=broken))
    world.run(10 * SECOND)
    assert len(world.outbox.slots) == 10
    broken.fails = True
    world.run(SECOND)
    assert len(world.events_of(events.JobTrouble)) == 1
    world.run(300 * SECOND)
    assert len(world.events_of(events.JobTrouble)) == 2
    broken.fails = False
    world.run(300 * SECOND)
    assert len(world.outbox.slots) > 10


def test_the_history_is_bounded(world: World) -> None:
    world.beat("a", job(every=SECOND, history_size=20))
    world.run(120 * SECOND)
    assert len(world.outbox.slots) == 120
    assert 20 <= len(world.states("job")) <= 20 + 11
