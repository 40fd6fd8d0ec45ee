"""What Redis is asked for a batch, a look and a history, and what it keeps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.redis_clients import base, opened, stats
from support.redis_servers import (
    Cluster,
    Private,
    Proxy,
    private_server,
    sweep,
    through,
)

from celery_anarchon.backends.base import Beat, Keep, Outcome, Sighting
from celery_anarchon.backends.redis import past, source
from celery_anarchon.backends.redis.keys import SHARDS
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by

WON = Answer.WON


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """For all tests here that keep to a prefix and stop nothing."""
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


# --- batches, bounds, costs -------------------------------------------------------------------------------------------


def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each from now on, while the server knows the scripts."""
    trips: list[int] = []
    send = source.send
    monkeypatch.setattr(source, "send", lambda link, calls, wait: trips.append(1) or send(link, calls, wait))
    return trips


def test_round_trips_do_not_grow_with_a_batch(server: Private, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = round_trips(monkeypatch)
    with opened(server.url, prefix) as backend:
        slot = base(backend)
        claim(backend, "warm", slot, "a")
        confirm(backend, "warm", slot, "a")
        for size, calls in ((1, 1), (100, 1), (1_000, 1), (2_500, 3)):
            trips.clear()
            before = stats(server, "evalsha")
            assert set(claim_all(backend, [ask(f"job {n}", slot + size, "a") for n in range(size)])) == {WON}
            assert (len(trips), stats(server, "evalsha") - before) == (1, calls)


def test_round_trips_to_a_cluster_are_one_for_each_node(
    nodes: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = round_trips(monkeypatch)
    with opened(nodes.url, prefix) as backend:
        slot = base(backend)
        everybody = [ask(f"job {n}", slot, "a") for n in range(500)]
        assert set(claim_all(backend, everybody)) == {WON}
        trips.clear()
        assert set(claim_all(backend, everybody)) == {WON}
        assert len(trips) == 3
        trips.clear()
        assert backend.lapsed(10) == []
        assert len(trips) <= 6


def test_a_look_for_lapsed_claims_costs_the_same_after_thousands_of_runs(server: Private, prefix: str) -> None:
    with opened(server.url, prefix) as backend:
        slot = base(backend)

        def cost() -> int:
            before = [stats(server, name) for name in ("zrangebyscore", "hget", "hmget")]
            backend.lapsed(10)
            return sum(stats(server, name) for name in ("zrangebyscore", "hget", "hmget")) - sum(before)

        alone = cost()
        requests = [ask(f"job {n}", slot, "a") for n in range(2_000)]
        assert set(claim_all(backend, requests)) == {WON}
        for request in requests[:50]:
            assert confirm(backend, request.job, request.slot, "a")
        assert alone == cost() == SHARDS


def test_a_long_history(server: Private, prefix: str) -> None:
    """Longer than what Lua passes at once."""
    with opened(server.url, prefix) as backend:
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON and confirm(backend, "job", slot, "a")
        backend.record([Outcome(job="job", slot=slot + n, state=RunState.SKIPPED) for n in range(1, 9_001)])
        assert [len(backend.history("job", limit)) for limit in (0, 1, 501, 20_000)] == [0, 1, 501, 9_001]
        last = backend.last_run("job")
        assert last is not None and last.state is RunState.DISPATCHED
        assert backend.register([Sighting(job="job", fingerprint="x")])[0].last == slot + 9_000
        assert backend.tidy([Keep(job="job", decided=slot + 9_000, history_size=10)]) == 8_991
        assert len(backend.history("job", 100)) == 10


def test_much_to_drop_is_dropped_in_steps(server: Private, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "_DROPPED_AT_ONCE", 3)
    with opened(server.url, prefix) as backend:
        slot = base(backend)
        for job in ("a", "b", "c"):
            backend.record([Outcome(job=job, slot=slot + n, state=RunState.SKIPPED) for n in range(7)])
        keeps = [Keep(job=job, decided=slot + 99, history_size=2) for job in ("a", "b", "c")]
        assert backend.tidy(keeps) == 15
        assert [len(backend.history(job, 99)) for job in ("a", "b", "c")] == [2, 2, 2]


def test_what_is_stored_is_bounded(server: Private, prefix: str) -> None:
    """A job that runs for a year leaves two keys of bounded size, and nothing in the index."""
    with opened(server.url, prefix) as backend, server.client() as client:
        slot = base(backend)
        for turn in range(20):
            rows = [slot + 50 * turn + n for n in range(50)]
            assert set(claim_all(backend, [ask("job", row, "a") for row in rows])) == {WON}
            for row in rows:
                assert confirm(backend, "job", row, "a")
            backend.tidy([Keep(job="job", decided=rows[-1], history_size=100)])
        keys = sorted(client.scan_iter(f"{prefix}*"))
        assert keys == sorted([backend._keys.meta, backend._keys.runs(b"job"), backend._keys.slots(b"job")])
        assert client.hlen(backend._keys.runs(b"job")) == 101 and client.zcard(backend._keys.slots(b"job")) == 100


def test_many_owners_in_many_processes_on_a_cluster(nodes: Cluster, prefix: str) -> None:
    """Takeovers too: each of many lapsed claims is one sweeper's."""
    with opened(nodes.url, prefix) as backend:
        slot = base(backend)
        names = [f"job {n}" for n in range(120)]
        assert set(claim_all(backend, [ask(name, slot, "dead", lease=0) for name in names])) == {WON}
        context = multiprocessing.get_context("spawn")
        with context.Pool(3) as pool:
            taken = pool.starmap(sweep, [(nodes.url, prefix, names, slot, f"owner {n}") for n in range(3)])
        assert sorted(name for some in taken for name in some) == sorted(names)
        assert backend.lapsed(10) == []


def test_lost_replies_of_every_write(server: Private, prefix: str) -> None:
    with opened(server.url, prefix) as backend:
        proxies: dict[int, Proxy] = {}
        slot = base(backend)
        beat = Beat(owner="a", label="a", version="1")
        calls: list[Callable[[], Any]] = [
            lambda: claim(backend, "job", slot, "a"),
            lambda: backend.register([Sighting(job="job", fingerprint="x")]),
            lambda: backend.record([Outcome(job="job", slot=slot + 1, state=RunState.SKIPPED)]),
            lambda: backend.beat_seen(beat),
            lambda: confirm(backend, "job", slot, "a"),
            lambda: backend.tidy([Keep(job="job", decided=slot + 1, history_size=0)]),
            lambda: backend.beat_left("a"),
        ]
        for call in calls:
            call()
        (line,) = through(backend, proxies)
        try:
            slot += 10
            line.losing = True
            for call in calls:
                assert isinstance(raised_by(call), OutcomeUnknown)
            for read in (lambda: backend.history("job", 1), lambda: backend.lapsed(1), lambda: backend.beats(1)):
                assert isinstance(raised_by(read), BackendUnavailable)
            line.losing = False
            assert claim(backend, "job", slot, "a") is Answer.TOO_OLD, "every one of them was applied"
        finally:
            line.close()
