"""Real beats: killed, frozen, stopped and restarted; the judge is what lies in the broker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, SCHEDULER, SLACK, Beats, until
from support.stage import (
    Stage,
    all_sent_once,
    claims_left_by,
    count_window,
    on,
    quiet,
    sent_last,
    settle,
    taken_over_in_time,
    wall,
)

from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import ManagedProcess
from celery_anarchon.verdict import Kind, Verdict

pytestmark = pytest.mark.fleet

QUICK = {"anarchon_lease": 2, "anarchon_heartbeat": 0.5}
LEASE, HEARTBEAT = 2_000, 500


def survive(fleet: Beats, seconds: float) -> tuple[int, int]:
    """Three beats, one killed, all restarted one by one; slots and beats that sent."""
    beats = fleet.beats("a", "b", "c")
    start = wall()

    def pass_time(share: float) -> None:
        goal = start + round(seconds * share * 1000)
        until(lambda: wall() > goal, "time", seconds + 60)

    pass_time(0.3)
    quiet(fleet)
    killed = sent_last(fleet, beats)
    killed.kill()
    beats.remove(killed)
    pass_time(0.5)
    for number, old in enumerate(list(beats)):
        beats.append(fleet.beat(f"new-{number}"))
        assert old.stop() == 0
        beats.remove(old)
    beats.append(fleet.beat("new-2"))
    pass_time(1)
    end = wall()
    settle(fleet, end)
    slots = all_sent_once(fleet, start, end)
    return slots, len({event.beat for event in fleet.events()})


TWENTY = {f"job-{n}": 1 + n % 5 for n in range(20)}


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
def test_a_kill_and_a_rolling_restart_lose_and_double_nothing(stage: Stage) -> None:
    slots, beats = survive(stage.fleet(TWENTY, **QUICK), 10)
    assert slots > 60
    assert beats >= 3


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
@pytest.mark.long
def test_a_kill_and_a_rolling_restart_in_two_minutes(stage: Stage, record_property: Any) -> None:
    slots, beats = survive(stage.fleet(TWENTY, anarchon_lease=6), 120)
    record_property("slots", slots)
    print(f"\n{slots} slots, sent by {beats} beats")
    assert slots > 900


def kill_the_last_sender(fleet: Beats, rounds: int) -> float:
    """Kill whoever has just sent, again and again; how late the latest message was, in seconds."""
    beats = fleet.beats("a", "b", "c")
    start = wall()
    for number in range(rounds):
        since = wall()
        until(lambda since=since: any(slot > since for _, slot in fleet.count()), "a message")
        quiet(fleet)
        killed = sent_last(fleet, beats)
        killed.kill()
        beats.remove(killed)
        beats.append(fleet.beat(f"next-{number}"))
    end = wall()
    settle(fleet, end)
    all_sent_once(fleet, start, end)
    late: list[float] = [message.run["late"] for message in fleet.broker.messages() if message.run]
    return max(late)


@on("redis, redis")
def test_a_killed_sender_leaves_no_gap(stage: Stage) -> None:
    # With a lease of 30 s: nobody has waited for one.
    assert kill_the_last_sender(stage.fleet({"a": 2}), 3) < SLACK / 1000


@pytest.mark.long
@on("sqlite, files", "redis, redis", "redis, rabbitmq")
def test_twenty_killed_senders_leave_no_gap(stage: Stage) -> None:
    every = 2
    gap = kill_the_last_sender(stage.fleet({"a": every}), 20) / every
    print(f"\n20 kills of the last sender; the latest message came {gap:.3f} slots late")
    assert gap < 1


def pause_rounds(fleet: Beats, rounds: int, point: str, tmp_path: Path) -> Verdict:
    """Pause a beat past its lease at *point*, again and again; the count, nothing missing."""
    trigger = tmp_path / "pause"
    frozen = fleet.beat("frozen", hook=f"{point}:pause:{trigger}")
    fleet.beat("awake")
    start = wall()
    for _ in range(rounds):
        trigger.touch()
        hit = until(lambda: Path(f"{trigger}.hit").exists() and wall(), "the pause")
        # Past the lease, and past the look that finds it lapsed: then the other one has had every chance.
        until(
            lambda since=hit: any(slot > since + LEASE + 2 * HEARTBEAT for _, slot in fleet.count()),
            "the other beat to go on",
        )
        lines = frozen.output.count("claim of")
        frozen.thaw()
        until(lambda seen=lines: frozen.output.count("claim of") > seen, "the paused beat to go on")
        Path(f"{trigger}.hit").unlink()
    end = wall()
    settle(fleet, end)
    verdict = count_window(fleet, start, end)
    assert not verdict.missing, verdict
    return verdict


POINTS = ["before-claim", "after-claim", "after-confirm"]


@on("sqlite, files")
@pytest.mark.parametrize("point", POINTS)
def test_a_paused_beat_sends_nothing_twice(stage: Stage, tmp_path: Path, point: str) -> None:
    verdict = pause_rounds(stage.fleet({"a": 1, "b": 1}, **QUICK), 2, point, tmp_path)
    assert verdict.kind is Kind.VALID, verdict
    assert verdict.expected > 6


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_paused_beat_twenty_times(stage: Stage, tmp_path: Path, point: str) -> None:
    verdict = pause_rounds(stage.fleet({"a": 1, "b": 1}, **QUICK), 20, point, tmp_path)
    print(f"\n{point}: {verdict.expected} slots in 20 rounds, {verdict.sent_once} sent once")
    assert verdict.kind is Kind.VALID, verdict


@on("sqlite, files")
def test_a_pause_between_publish_and_confirm_may_double_but_never_under_another_id(
    stage: Stage, tmp_path: Path
) -> None:
    # The stated limit of a fleet whose workers do not ask the store: nobody can know that the message is out. In one
    # step there is no such moment.
    fleet = stage.fleet({"a": 1, "b": 1}, **QUICK, anarchon_one_step=False)
    verdict = pause_rounds(fleet, 2, "after-publish", tmp_path)
    assert not verdict.duplicate, verdict
    # Of each round one batch at most: what it has published is confirmed together.
    assert len(verdict.same_id_twice) <= 2 * len(fleet.jobs)


@on("sqlite, files", "redis, redis")
def test_a_beat_killed_between_claim_and_publish_is_replaced(stage: Stage, tmp_path: Path) -> None:
    """By another that lives: within lease + heartbeat of the claim. Where both are one step nothing is in between."""
    lease = 6
    settings = {**QUICK, "anarchon_lease": lease, "anarchon_one_step": False}
    fleet = stage.fleet({"a": 2, "b": 2, "c": 2}, **settings)
    trigger = tmp_path / "die"
    killed = fleet.beat("killed", hook=f"after-claim:die:{trigger}")
    fleet.beat("heir")
    trigger.touch()
    until(lambda: not killed.running, "the beat to die")
    orphans = claims_left_by(fleet, killed)
    assert orphans, "it died before its claims were made"
    start, end = min(slot for _, slot in orphans) - 1, wall()
    settle(fleet, end)
    all_sent_once(fleet, start, end)
    taken_over_in_time(fleet, orphans, lease * 1000, HEARTBEAT)


def stop_in_mid_burst(fleet: Beats, rounds: int, tmp_path: Path) -> int:
    trigger = tmp_path / "claimed"
    stopped = 0
    for number in range(rounds):
        beat = fleet.beat(f"beat-{number}", hook=f"after-claim:go on:{trigger}")
        trigger.touch()
        until(lambda: Path(f"{trigger}.hit").exists(), "a claim")
        time.sleep(0.01)  # the very thing: a signal 10 ms after a claim
        assert beat.stop() == 0
        assert fleet.home.open_claims() == [], beat.output[-3000:]
        Path(f"{trigger}.hit").unlink()
        stopped += 1
    assert all(len(ids) == 1 for ids in fleet.count().values())
    return stopped


FIFTY = {f"job-{n}": 1 for n in range(50)}


@on("sqlite, files")
def test_a_stop_after_a_claim_leaves_nothing_to_the_lease(stage: Stage, tmp_path: Path) -> None:
    stop_in_mid_burst(stage.fleet(FIFTY), 3, tmp_path)


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
@pytest.mark.long
def test_fifty_stops_after_a_claim(stage: Stage, tmp_path: Path) -> None:
    stopped = stop_in_mid_burst(stage.fleet(FIFTY), 50, tmp_path)
    print(f"\n{stopped} stops, no claim left behind")


def restart_all(fleet: Beats, every: float, rounds: int) -> int:
    """All beats stopped and started again, so that no process lives for an interval."""
    start = 0
    for number in range(rounds):
        begun = wall()
        beats = fleet.beats(*(f"{name}-{number}" for name in "ab"))
        # Nothing is owed from before the store first saw the job.
        start = start or wall()
        until(lambda since=begun: wall() > since + every * 1000, "time", every + 60)
        for beat in beats:
            assert beat.stop() == 0
    last = fleet.beat("last")
    end = wall()
    settle(fleet, end)
    last.stop()
    return all_sent_once(fleet, start, end)


@on("sqlite, files")
def test_an_interval_longer_than_any_process_lives(stage: Stage) -> None:
    # Seven rounds of 2 s after the first beats are up hold two slots of 6 s, however quickly they start.
    assert restart_all(stage.fleet({"a": 6}), 2, 8) >= 2


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
@pytest.mark.long
def test_restarts_every_20_s_for_5_minutes(stage: Stage) -> None:
    slots = restart_all(stage.fleet({"a": 60}), 18.5, 15)
    print(f"\n{slots} slots of 60 s under restarts, each sent once")
    assert slots >= 4


@on("sqlite, files")
@pytest.mark.parametrize(("rule", "options"), [("none", {"catch_up": 0}), ("latest", {}), ("all", {"coalesce": "all"})])
def test_three_missed_slots_after_downtime(stage: Stage, rule: str, options: dict[str, Any]) -> None:
    every = 2
    definition = {"schedule": every, "options": {"anarchon": options}}
    fleet = stage.fleet({"a": definition})
    beats = fleet.beats("a", "b")
    until(fleet.count, "a first message")
    for beat in beats:
        beat.stop()
    (last,) = sorted(slot for _, slot in fleet.count())[-1:]
    until(lambda: wall() > last + 3 * every * 1000 + 200, "three missed slots")
    started = wall()
    fleet.beats("c", "d", "e")
    awake = wall()
    until(lambda: any(slot > awake for _, slot in fleet.count()), "the next slot")
    due = expected_interval(every * 1000, 0, last, awake)
    sent = sorted(slot for _, slot in fleet.count() if last < slot <= awake)
    # What fell due while they started may have been missed by all of them, or current to the first.
    meanwhile = len([slot for slot in due if slot > started])
    least, most = {"none": (0, meanwhile), "latest": (1, 1 + meanwhile), "all": (len(due), len(due))}[rule]
    assert least <= len(sent) <= most
    assert sent == due[len(due) - len(sent) :], "the latest ones, without a gap"
    assert all(len(ids) == 1 for ids in fleet.count().values())


@on("sqlite, files")
def test_beats_embedded_in_workers(stage: Stage) -> None:
    """FC-02: -B in every replica; scaling up and down, gently and not."""
    fleet = stage.fleet({"a": 1, "b": 2}, **QUICK)

    def worker(name: str) -> ManagedProcess:
        # Of another queue: what the embedded beats send stays where it can be counted.
        started = fleet.fleet.worker(name, "-B", "--scheduler", SCHEDULER, "-Q", "elsewhere")
        started.wait_for_log(r"ready\.", ENOUGH)
        return started

    def go_on(seconds: int) -> None:
        since = wall()
        until(lambda: any(slot > since + seconds * 1000 for _, slot in fleet.count()), f"{seconds} s of slots")

    first, second = worker("one"), worker("two")
    until(fleet.count, "a first message")
    start = wall()
    go_on(3)
    assert first.stop() == 0
    worker("three")
    quiet(fleet)
    second.kill(group=True)
    go_on(2)
    end = wall()
    settle(fleet, end)
    all_sent_once(fleet, start, end)


@pytest.mark.parametrize(
    ("settings", "jobs", "words"),
    [
        ({}, {"bad": 0}, ["'bad'", "too short"]),
        ({"anarchon_backend": "sqlite:////proc/nowhere/anarchon.db"}, {"a": 1}, ["/proc/nowhere"]),
        ({"anarchon_lease": 2, "anarchon_heartbeat": 1}, {"a": 1}, ["anarchon_heartbeat", "third"]),
        (
            {},
            {"a": {"schedule": 1, "options": {"anarchon": {"jiter": 1}}}},
            ["'a'", "'jiter'", "did you mean 'jitter'?"],
        ),
    ],
)
def test_a_beat_that_cannot_work_says_why_in_one_line(
    stage: Stage, settings: dict[str, Any], jobs: dict[str, Any], words: list[str]
) -> None:
    fleet = stage.fleet(jobs, **settings)
    beat = fleet.fleet.beat("bad", scheduler="anarchon", loglevel="WARNING")
    assert beat.wait(60) == 2
    assert "Traceback" not in beat.output
    (line,) = [line for line in beat.output.splitlines() if "CRITICAL" in line]
    for word in words:
        assert word in line


@on("sqlite, files", "redis, redis", "redis, rabbitmq")
def test_messages_carry_what_they_should(stage: Stage) -> None:
    fleet = stage.fleet({"a": {"schedule": 1, "options": {"priority": 5, "anarchon": {"timeout": "90s"}}}})
    fleet.beats("a")
    until(fleet.count, "a message")
    message = fleet.broker.messages()[0]
    assert message.properties["priority"] == 5
    assert message.headers["timelimit"] == [90, None]
    run = message.run
    assert run is not None and run["ns"] == fleet.home.namespace
    assert set(run) == {"v", "ns", "job", "slot", "attempt", "late", "beat"}
