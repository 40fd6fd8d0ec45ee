"""Real beats on a PostgreSQL that is empty, terminates their connections, restarts, hangs; and one beat is killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, SLACK, Beats, until
from support.postgres_servers import Postgres, private_postgres
from support.stage import wall

from celery_anarchon.backends import backend_from_url
from celery_anarchon.model import Millis
from celery_anarchon.oracle import expected_interval
from celery_anarchon.verdict import Kind, Verdict, judge

pytestmark = pytest.mark.fleet

QUICK = {"anarchon_lease": 2, "anarchon_heartbeat": 0.5}
JOBS = {f"job-{n}": 1 + n % 2 for n in range(6)}
BAD = ("WARNING", "ERROR", "CRITICAL", "Traceback")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with private_postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


@pytest.fixture
def fleet(server: Postgres, namespace: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Beats]:
    """A fleet in a schema of its own, which is not there yet. Its parameter: other settings than ``QUICK``."""
    settings = getattr(request, "param", QUICK)
    fleet = Beats(tmp_path, JOBS, {**settings, "anarchon_backend": f"{server.url}?table={namespace}.runs"})
    yield fleet
    fleet.fleet.close()


def go_on(fleet: Beats, seconds: float = 3) -> Millis:
    """Wait until every job was sent so long after now, whatever is late; and until when all is decided."""
    goal = wall() + round(seconds * 1000)
    until(
        lambda: {job for job, slot in fleet.count() if slot > goal} == set(fleet.jobs), "slots of every job", ENOUGH * 2
    )
    return goal


def once(fleet: Beats, start: Millis, end: Millis, *, missing: bool = False) -> Verdict:
    """Each slot of (start, end] has one message, none has two anywhere. *missing*: what was missed may be left out, and
    then its record says that a newer one was sent."""
    owed = [
        (job, slot)
        for job, every in fleet.jobs.items()
        for slot in expected_interval(round(every * 1000), 0, start, end)
    ]

    def judged() -> Verdict:
        return judge(owed, fleet.events(), window=(start, end))

    if not missing:
        # A newer slot was sent already; this one may be somebody's who has stalled, and is taken over.
        until(lambda: not judged().missing, "each slot's message")
    verdict = judged()
    assert not verdict.duplicate and not verdict.same_id_twice, verdict
    if missing:
        with closing(fleet.store()) as store:
            for job in fleet.jobs:
                states = {round(run.slot.timestamp() * 1000): str(run.state) for run in store.history(job, 1_000)}
                # Of those between two looks that are far apart there is no record each.
                assert {states.get(slot) for name, slot in verdict.missing if name == job} <= {"superseded", None}
    else:
        assert verdict.kind is Kind.VALID, verdict
    return verdict


def bad_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if any(word in line for word in BAD)]


def eight_at_once(fleet: Beats) -> None:
    """Eight beats begin with nothing there; each slot is sent once, and no log has a line that somebody would see.

    To be called with a lease that outlasts a slow machine: else a takeover is such a line.
    """
    beats = fleet.beats(*"abcdefgh")
    start = wall()
    once(fleet, start, go_on(fleet, 2))
    # Seven of eight have lost each claim, too.
    assert [line for beat in beats for line in bad_lines(beat.output)] == []


@pytest.mark.parametrize("fleet", [{}], ids=["of the default lease"], indirect=True)
def test_eight_beats_on_an_empty_database(server: Postgres, fleet: Beats) -> None:
    before = len(server.log())
    eight_at_once(fleet)
    assert [line for line in server.log()[before:].splitlines() if "ERROR" in line or "FATAL" in line] == []


def killed_over_a_claim(
    fleet: Beats, trigger: Path, claims: Callable[[str], list[tuple[str, Millis]]]
) -> tuple[float, float]:
    """Of three beats one is killed between its claim and its publish. How long its slots then waited for their
    message, in seconds: the shortest and the longest.

    :param claims: the (job, slot) that a beat whose label ends so holds as claimed, read past the backend.
    """
    killed = fleet.beat("killed", hook=f"after-claim:die:{trigger}")
    start = wall()
    fleet.beats("a", "b")
    go_on(fleet, 1)
    trigger.touch()
    until(lambda: not killed.running, "the beat to die")
    orphans = claims(f":{killed.pid}")
    end = go_on(fleet, 4)
    until(lambda: not [slot for _, slot in claims("") if slot <= end], "no claim left")
    once(fleet, start, end)
    waited = []
    with closing(backend_from_url(fleet.settings["anarchon_backend"])) as store:
        store.open("fleet", create=False)
        for job, slot in orphans:
            run = next(run for run in store.history(job, 50) if round(run.slot.timestamp() * 1000) == slot)
            assert run.claimed_at is not None and run.sent_at is not None
            assert not (run.beat or "").endswith(f":{killed.pid}")
            waited.append((run.sent_at - run.claimed_at).total_seconds())
    assert waited, "it died before its claims were made"
    # Never while it may still live; then a heartbeat later at most, and what the machine adds.
    assert min(waited) >= QUICK["anarchon_lease"]
    assert max(waited) <= QUICK["anarchon_lease"] + QUICK["anarchon_heartbeat"] + SLACK / 1000
    return min(waited), max(waited)


def test_three_beats_and_one_is_killed_over_a_claim(server: Postgres, fleet: Beats, tmp_path: Path) -> None:
    table = fleet.settings["anarchon_backend"].rpartition("=")[2]
    query = f"select job, slot from {table} where state = 'claimed' and beat like %s"
    with server.client() as client:
        waited = killed_over_a_claim(
            fleet, tmp_path / "die", lambda label: client.execute(query, (f"%{label}",)).fetchall()
        )
    print(f"\nslots of the dead beat waited {waited[0]:.2f} to {waited[1]:.2f} s, with a lease of 2 s")


def trouble(fleet: Beats, deed: Callable[[], Any]) -> Verdict:
    """Three beats, *deed* while they run; all stay up, no slot has two messages, and none is left out but for a newer
    one."""
    beats = fleet.beats("a", "b", "c")
    start = wall()
    go_on(fleet, 1)
    deed()
    end = go_on(fleet, 3)
    assert all(beat.running for beat in beats)
    verdict = once(fleet, start, end, missing=True)
    for beat in beats:
        assert "Traceback" not in beat.output
        assert beat.stop() == 0
    print(f"\nof {verdict.expected} slots {verdict.sent_once} were sent once")
    return verdict


def terminate(server: Postgres, fleet: Beats, seconds: int) -> None:
    query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'celery-anarchon%'"
    with server.client() as client:
        for _ in range(seconds):
            client.execute(query)
            time.sleep(1)  # the very thing
    go_on(fleet, 0)


def freeze(server: Postgres, seconds: float) -> None:
    frozen = server.freeze()
    try:
        time.sleep(seconds)  # the very thing
    finally:
        server.thaw(frozen)


def test_a_server_that_terminates_restarts_and_hangs(server: Postgres, fleet: Beats) -> None:
    def deed() -> None:
        terminate(server, fleet, 2)
        server.restart()
        go_on(fleet, 0)
        # For less than the lease: what has just been published is yet to be confirmed.
        freeze(server, 1)

    # Of slots that are missed while the store is away the latest is sent.
    trouble(fleet, deed)


@pytest.mark.long
def test_a_server_that_hangs_for_a_minute(server: Postgres, fleet: Beats) -> None:
    trouble(fleet, lambda: freeze(server, 60))


@pytest.mark.long
def test_connections_that_are_terminated_each_second_for_a_minute(server: Postgres, fleet: Beats) -> None:
    verdict = trouble(fleet, lambda: terminate(server, fleet, 60))
    # A connection that breaks is no outage: it is made again, and asked again.
    assert verdict.sent_once >= verdict.expected / 2
