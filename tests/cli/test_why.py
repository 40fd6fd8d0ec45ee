"""``anarchon explain``: one line that a person understands for whatever became of a slot. ``anarchon release``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_anarchon import Anarchon
from celery_anarchon.backends.base import ClaimRequest, Confirmation, GivenUp, Keep, Outcome
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.backends.runs import RunBackend, RunHold, Settlement, Start, Unstarted
from celery_anarchon.cli.why import REASONS
from celery_anarchon.model import Answer, Millis, Overlap, Run, RunState, Terms
from celery_anarchon.testing.claimonly import ClaimOnlyMemory, ClaimOnlyStore
from celery_anarchon.wire import moment, run_id, time_text

MINUTE = 60_000
TERMS = Terms(lease=30_000, queue_timeout=3_600_000)
SKIP = Terms(lease=30_000, queue_timeout=3_600_000, overlap=Overlap.SKIP)


@pytest.fixture
def now() -> Millis:
    return time.time_ns() // 1_000_000 // MINUTE * MINUTE


class Desk:
    """A store with one job, ``report``, each minute."""

    def __init__(self, app: Celery, url: str) -> None:
        app.conf.anarchon_backend = url
        Anarchon(app)
        app.conf.beat_schedule = {"report": {"task": "t", "schedule": 60, "options": {"anarchon": {"overlap": "skip"}}}}
        backend = backend_from(url)
        assert isinstance(backend, RunBackend)
        self.backend = backend
        self.backend.open("proj")

    def claim(self, slot: Millis, terms: Terms | None = TERMS) -> Answer:
        request = ClaimRequest(job="report", slot=slot, owner="me", beat="host:1", lease=30_000, terms=terms)
        return self.backend.claim([request])[0].answer

    def send(self, slot: Millis, late: Millis = 12, terms: Terms | None = TERMS) -> None:
        assert self.claim(slot, terms) is Answer.WON
        assert self.backend.confirm([Confirmation(job="report", slot=slot, owner="me", attempt=1, late=late)]) == [True]

    def start(self, slot: Millis, terms: Terms = TERMS) -> RunHold:
        start = Start(job="report", slot=slot, attempt=1, retries=0, token="t", worker="w@host", terms=terms)
        self.backend.start([start])
        return RunHold(job="report", slot=slot, attempt=1, retries=0, token="t")

    def settle(self, hold: RunHold, state: RunState, reason: str | None = None) -> None:
        assert self.backend.settle([Settlement(**vars(hold), state=state, reason=reason)]) == [True]


URLS: dict[str, Callable[[Any, str], str]] = {
    "sqlite": lambda on, name: f"sqlite:///{on.folder}/store.db?table={name}",
    "redis": lambda on, name: f"{on.redis.url}?prefix={name}:",
    "postgres": lambda on, name: f"{on.postgres.url}?table={name}",
}


@pytest.fixture(params=sorted(URLS))
def desk(request: pytest.FixtureRequest, app: Celery, servers: Any, namespace: str) -> Iterator[Desk]:
    desk = Desk(app, URLS[request.param](servers, namespace))
    yield desk
    desk.backend.close()


def sent(desk: Desk, slot: Millis) -> None:
    desk.send(slot, terms=None)


def late(desk: Desk, slot: Millis) -> None:
    desk.send(slot, late=65_000)
    desk.settle(desk.start(slot), RunState.SUCCEEDED)


def failed(desk: Desk, slot: Millis) -> None:
    desk.send(slot)
    desk.settle(desk.start(slot), RunState.FAILED, "exception")


def skipped(desk: Desk, slot: Millis) -> None:
    desk.send(slot - MINUTE, terms=SKIP)
    assert desk.claim(slot, SKIP) is Answer.SKIPPED


def outcome(state: RunState, reason: str) -> Callable[[Desk, Millis], None]:
    def act(desk: Desk, slot: Millis) -> None:
        desk.backend.record([Outcome(job="report", slot=slot, state=state, reason=reason, beat="host:1")])

    return act


def not_sent(desk: Desk, slot: Millis) -> None:
    desk.claim(slot)
    ending = GivenUp(job="report", slot=slot, owner="me", attempt=1, state=RunState.NOT_SENT, reason="publish-error")
    assert desk.backend.give_up([ending]) == [True]


def lost(desk: Desk, slot: Millis) -> None:
    desk.send(slot)
    desk.settle(desk.start(slot), RunState.LOST, "worker-lost")


def lost_in_queue(desk: Desk, slot: Millis) -> None:
    desk.send(slot)
    message = Unstarted(job="report", slot=slot, attempt=1, retries=0, reason="expired")
    assert desk.backend.unstarted([message]) == [True]


def trimmed(desk: Desk, slot: Millis) -> None:
    for each in (slot, slot + MINUTE):
        desk.send(each, terms=None)
    assert desk.backend.tidy([Keep(job="report", decided=slot + MINUTE, history_size=1)]) == 1


def nothing(desk: Desk, slot: Millis) -> None:
    pass


def claimed(desk: Desk, slot: Millis) -> None:
    desk.claim(slot)


CASES: list[tuple[Callable[[Desk, Millis], None], str, str | None, str]] = [
    (sent, "sent", None, "sent by beat host:1 0.012 s after its time"),
    (late, "late", None, "65.000 s after its time; succeeded on worker w@host"),
    (failed, "sent", "exception", "failed on worker w@host: its body raised"),
    (skipped, "skipped", "overlap", "still going on"),
    (outcome(RunState.MISFIRE, "max-late"), "misfire", "max-late", "later than max_late allows"),
    (outcome(RunState.SUPERSEDED, "newer-slot"), "superseded", "newer-slot", "a newer slot"),
    (not_sent, "not-sent", "publish-error", "the broker refused it"),
    (lost, "lost", "worker-lost", "died; attempt 1 was on worker w@host"),
    (lost_in_queue, "lost", "expired", "expired before a worker took it"),
    (trimmed, "unknown", "too-old", "older than all that is kept"),
    (nothing, "unknown", "no-record", "nothing of this job is recorded"),
    (claimed, "unknown", None, "claimed by beat host:1, not sent yet"),
]


@pytest.mark.parametrize(("act", "verdict", "reason", "words"), CASES)
def test_explain(
    desk: Desk,
    call: Callable[..., Any],
    now: Millis,
    act: Callable[[Desk, Millis], None],
    verdict: str,
    reason: str | None,
    words: str,
) -> None:
    slot = now - 3 * MINUTE
    act(desk, slot)
    answer = call("explain", "report", time_text(slot))
    assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1), answer
    assert answer.out.startswith(f"report {time_text(slot)} {verdict}: ") and words in answer.out
    data = call("explain", "report", time_text(slot), "--json").json
    assert list(data) == ["job", "slot", "verdict", "reason", "run", "tries"]
    assert (data["verdict"], data["reason"]) == (verdict, reason)
    if act is skipped:
        assert run_id(desk.backend.namespace, "report", slot - MINUTE) in answer.out


class Claimed(ClaimOnlyMemory):
    """A store without leases, with one claim whose message is not sent yet."""

    def history(self, job: str, limit: int) -> list[Run]:
        slot = self.now() // MINUTE * MINUTE - MINUTE
        identity = run_id(self.namespace, job, slot)
        return [Run(run_id=identity, job=job, slot=moment(slot), state=RunState.CLAIMED, beat="host:1")]


def test_explain_a_claim_that_nobody_can_take_over(app: Celery, call: Callable[..., Any]) -> None:
    app.conf.anarchon_backend = store = Claimed(store=ClaimOnlyStore())
    app.conf.beat_schedule = {"report": {"task": "t", "schedule": 60}}
    slot = store.history("report", 1)[0].slot
    answer = call("explain", "report", slot.isoformat())
    assert "claimed by beat host:1, not sent yet; if that beat is dead the slot is lost" in answer.out, answer


def test_explain_what_is_no_slot(desk: Desk, call: Callable[..., Any], now: Millis) -> None:
    answer = call("explain", "report", time_text(now + 1))
    assert answer.out.startswith(f"report {time_text(now + 1)} never-due: ")
    assert time_text(now) in answer.out and time_text(now + MINUTE) in answer.out
    answer = call("explain", "report", time_text(now + 10 * MINUTE))
    assert "its time has not come" in answer.out
    answer = call("explain", "repotr", time_text(now))
    assert (answer.code, answer.err) == (2, "Error: no job 'repotr' (did you mean 'report'?)\n")
    answer = call("explain", "report", "yesterday")
    assert answer.code == 2 and "2026-03-29T01:00:00.000Z" in answer.err


def test_release(desk: Desk, call: Callable[..., Any], now: Millis) -> None:
    slot = now - 3 * MINUTE
    desk.send(slot, terms=SKIP)
    desk.start(slot, SKIP)
    assert desk.claim(slot + MINUTE, SKIP) is Answer.SKIPPED
    answer = call("release", "report")
    assert (answer.code, answer.out) == (
        0,
        f"report {time_text(slot)} released: attempt 1 on worker w@host, now lost\n",
    )
    assert desk.claim(slot + 2 * MINUTE, SKIP) is Answer.WON
    assert call("release", "report", "--json").json[0]["state"] == "lost"
    assert call("release", "report").out == "report: nothing holds it\n"
    assert call("release", "repotr").code == 2


def test_every_reason_has_words() -> None:
    """Whatever the code writes as a reason, a person can be told what it means."""
    import celery_anarchon

    root = Path(celery_anarchon.__file__).parent
    pattern = re.compile(r'(?:reason=|RunState\.[A-Z_]+, )"([a-z-]+)"')
    written = {
        found
        for file in root.rglob("*.py")
        # Signals have reasons of their own, which no record has.
        if "testing" not in file.parts and file.name != "signals.py"
        for found in pattern.findall(file.read_text())
    }
    assert written and written <= set(REASONS), written - set(REASONS)


def test_the_page_has_every_state_and_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    states = dict(re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| ([^|]*)\|$", page, re.MULTILINE))
    assert set(states) == {str(state) for state in RunState}
    assert {reason for cell in states.values() for reason in re.findall(r"`([a-z-]+)`", cell)} == set(REASONS)
    assert dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|$", page, re.MULTILINE)) == REASONS
