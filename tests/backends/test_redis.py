"""Redis servers that die, forget and move things."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from support.redis_clients import base, opened, stats
from support.redis_servers import (
    RESP2,
    Cluster,
    Private,
    cluster,
    drop_idle,
    private_server,
    replicated,
    script_proxy,
    watched,
)
from support.waiting import wait_for

from celery_anarchon.backends.base import Beat, Keep
from celery_anarchon.backends.redis import RedisBackend, links
from celery_anarchon.backends.redis.cluster import hash_slot
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import abandon, ask, claim, claim_all, confirm, raised_by, take

WON, TAKEN = Answer.WON, Answer.TAKEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """For all tests here that keep to a prefix and stop nothing."""
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


# --- servers that die, forget and move --------------------------------------------------------------------------------


def test_killed_and_started_again(own: Private, prefix: str) -> None:
    with opened(own.url, prefix) as backend:
        slot = base(backend)
        assert claim_all(backend, [ask("job", slot + n, "a") for n in range(50)]) == [WON] * 50
        own.process.kill()
        for call in (lambda: claim(backend, "job", slot, "a"), lambda: backend.lapsed(1), backend.now):
            assert isinstance(raised_by(call), BackendUnavailable)
        own.process.start()
        own.wait_until_ready()
        assert claim_all(backend, [ask("job", slot + n, "b") for n in range(51)]) == [TAKEN] * 50 + [WON]
        assert claim(backend, "job", slot, "a") is WON


def test_paused(own: Private, prefix: str) -> None:
    with opened(own.url + "?socket_timeout=0.3", prefix) as backend:
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON
        own.process.pause()
        began = time.monotonic()
        try:
            assert isinstance(raised_by(lambda: confirm(backend, "job", slot, "a")), OutcomeUnknown)
            assert isinstance(raised_by(lambda: backend.history("job", 1)), BackendUnavailable)
        finally:
            own.process.resume()
        assert time.monotonic() - began < links.CALL_TIMEOUT, "the patience of the address counts"
        assert confirm(backend, "job", slot, "a")


def test_an_idle_connection_that_the_server_closed_costs_nothing(own: Private, prefix: str) -> None:
    with opened(own.url, prefix) as backend, own.client() as client:
        slot = base(backend)
        for number in range(3):
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert claim(backend, "job", slot + number, "a") is WON


def test_an_idle_connection_is_tried_after_a_while(
    server: Private, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that died without a word is found out before a claim is trusted to it."""
    with script_proxy(server.port) as line, opened(f"redis://127.0.0.1:{line.port}/0", prefix) as backend:
        before = stats(server, "ping")
        backend.now()
        assert stats(server, "ping") == before
        monkeypatch.setattr(links, "_LOOK_AFTER", 0.0)
        backend.now()
        assert stats(server, "ping") == before + 1


def test_all_is_forgotten_while_beats_run(own: Private, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    beat = Beat(owner="a", label="a", version="1")
    with opened(own.url, prefix) as backend, own.client() as client:
        slot = base(backend)
        backend.beat_seen(beat)
        assert claim_all(backend, [ask("job", slot + n, "a") for n in range(3)]) == [WON] * 3
        client.flushall()
        client.script_flush()
        caplog.clear()
        assert not confirm(backend, "job", slot, "a"), "there is nothing to confirm"
        assert not abandon(backend, "job", slot, "a") and take(backend, "job", slot, "a") is None
        assert backend.history("job", 5) == [] and backend.lapsed(5) == []
        assert claim(backend, "job", slot + 9, "a") is WON and confirm(backend, "job", slot + 9, "a")
        backend.beat_seen(beat)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "lost keys while beats were running" in caplog.text
        backend.beat_seen(beat)
        assert len(caplog.records) == 1
        with pytest.raises(LayoutMismatch):
            RedisBackend(own.url, prefix=prefix).open("other")


def test_a_lease_without_its_record_goes(server: Private, prefix: str) -> None:
    """Evicted or deleted by hand; at the head of the list it would hide all others for ever."""
    with opened(server.url, prefix) as backend, server.client() as client:
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON and abandon(backend, "job", slot, "a")
        client.delete(backend._keys.runs(b"job"))
        assert [found.slot for found in backend.lapsed(5)] == [slot]
        assert take(backend, "job", slot, "b") is None
        assert backend.lapsed(5) == [] and backend.history("job", 5) == []
        assert backend.tidy([Keep(job="job", decided=slot, history_size=0)]) == 1


def test_replicas_that_lag(tmp_path: Path, prefix: str) -> None:
    with replicated(tmp_path) as (master, replica):
        with opened(master.url, prefix, wait_replicas=1, wait_timeout="150ms") as backend:
            slot = base(backend)
            in_step(lambda: claim(backend, "job", slot, "a"))
            replica.process.pause()
            with pytest.raises(OutcomeUnknown, match="0 of 1 replicas have it after 150 ms"):
                claim(backend, "job", slot + 1, "a")
            # Nothing more is written, over another connection: it is not in the replica all the same.
            with pytest.raises(OutcomeUnknown):
                confirm(backend, "job", slot, "a")
            drop_idle(backend)
            with pytest.raises(OutcomeUnknown):
                confirm(backend, "job", slot, "a")
            assert len(backend.history("job", 5)) == 2, "reading waits for nobody"
            replica.process.resume()
            in_step(lambda: claim(backend, "job", slot + 1, "a"))
            in_step(lambda: confirm(backend, "job", slot, "a"))
            assert [run.state for run in backend.history("job", 5)] == [RunState.CLAIMED, RunState.DISPATCHED]
        with closing(RedisBackend(replica.url, prefix=prefix)) as backend:
            with pytest.raises(BackendUnavailable, match="it is a replica"):
                claim(backend, "job", slot + 2, "a")
            backend.open("app", create=False)
            assert len(backend.history("job", 5)) == 2


def in_step(call: Callable[[], Any]) -> None:
    """A loaded machine is slower than the wait."""
    wait_for(lambda: raised_by(call) is None, "a replica in step")


def test_a_failover_by_sentinel(tmp_path: Path, prefix: str) -> None:
    with watched(tmp_path) as group:
        with pytest.raises(ConfigurationError, match="this is a sentinel"):
            RedisBackend(group.sentinel.url, prefix=prefix).open("app")
        with pytest.raises(BackendUnavailable, match="no master of that name"):
            RedisBackend(group.url.replace("=mine", "=other"), prefix=prefix).open("app")
        handed = redis.sentinel.Sentinel([("127.0.0.1", group.sentinel.port)]).master_for("mine", **RESP2)
        with (
            opened(group.url.replace("//", "//127.0.0.1:1;"), prefix, wait_replicas=1, wait_timeout=2) as backend,
            closing(handed),
            opened(handed, prefix) as other,
        ):
            assert ", master mine" in backend.describe()
            slot = base(backend)
            assert claim_all(backend, [ask("job", slot + n, "a") for n in range(3)]) == [WON] * 3
            assert claim(other, "job", slot, "b") is TAKEN
            group.master.process.kill()
            assert isinstance(raised_by(lambda: claim(backend, "job", slot, "a")), BackendUnavailable)
            wait_for(lambda: group.known_master() == group.replica.port, "a new master")
            backend._wait = None  # there is no replica left
            for client in (backend, other):
                wait_for(lambda client=client: raised_by(lambda: client.beat_left("nobody")) is None, "a way to it")
                assert claim_all(client, [ask("job", slot + n, "b") for n in range(3)]) == [TAKEN] * 3
            assert claim(backend, "job", slot, "a") is WON


def test_a_node_of_a_cluster_and_a_plain_server_are_told_apart(nodes: Cluster, server: Private, prefix: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("write redis+cluster://")):
        RedisBackend(nodes.nodes[0].url, prefix=prefix).open("app")
    with pytest.raises(ConfigurationError, match="it is no cluster: write redis://"):
        RedisBackend(f"redis+cluster://127.0.0.1:{server.port}", prefix=prefix).open("app")


def test_braces_in_a_prefix_do_not_split_a_shard(nodes: Cluster, prefix: str) -> None:
    for braces in ("{}", "{", "}", "{x}", "a{b"):
        with opened(nodes.url, prefix + braces) as backend:
            slot = base(backend)
            names = ["", "}", "{}", "x}y", "{a}"]
            assert claim_all(backend, [ask(name, slot, "a") for name in names]) == [WON] * 5
            assert backend.lapsed(5) == []


def test_a_cluster_client_of_the_app(nodes: Cluster, prefix: str) -> None:
    with closing(redis.RedisCluster(host="127.0.0.1", port=nodes.nodes[0].port)) as client:
        with opened(client, prefix) as backend:
            check_that_keys_may_move(nodes, backend)
        assert client.set(prefix, "mine")


def test_keys_of_a_cluster_move(nodes: Cluster, prefix: str) -> None:
    with opened(nodes.url, prefix) as backend:
        check_that_keys_may_move(nodes, backend)


def check_that_keys_may_move(nodes: Cluster, backend: RedisBackend) -> None:
    slot = base(backend)
    names = [f"job {n}" for n in range(300)]
    assert claim_all(backend, [ask(name, slot, "a") for name in names]) == [WON] * 300
    moved = hash_slot(backend._keys.runs(b"job 7"))
    new = next(name for name in (f"new {n}" for n in range(9_999)) if hash_slot_of(backend, name) == moved)
    with nodes.moving(moved):
        # What is not on the old node yet, or not any more, has to wait until the move is over.
        error = raised_by(lambda: claim(backend, new, slot, "a"))
        assert isinstance(error, BackendUnavailable) and "is moving these keys" in str(error)
    assert claim_all(backend, [ask(name, slot, "a") for name in [*names, new]]) == [WON] * 301
    assert claim_all(backend, [ask(name, slot, "b") for name in [*names, new]]) == [TAKEN] * 301


def hash_slot_of(backend: RedisBackend, job: str) -> int:
    return hash_slot(backend._keys.runs(job.encode()))


def test_a_node_of_a_cluster_dies(tmp_path: Path, prefix: str) -> None:
    with cluster(tmp_path) as nodes, opened(nodes.url, prefix) as backend:
        slot = base(backend)
        names = [f"job {n}" for n in range(50)]
        last = nodes.nodes[-1]
        last.process.kill()
        error = raised_by(lambda: claim_all(backend, [ask(name, slot, "a") for name in names]))
        # Nodes that live have applied their part.
        assert isinstance(error, OutcomeUnknown), repr(error)
        mine = [name for name in names if nodes.node_of(hash_slot_of(backend, name)) is last]
        error = raised_by(lambda: claim_all(backend, [ask(name, slot, "a") for name in mine]))
        assert isinstance(error, BackendUnavailable), repr(error)
        last.process.start()
        nodes.wait_until_ok()
        assert claim_all(backend, [ask(name, slot, "a") for name in names]) == [WON] * 50
        assert claim_all(backend, [ask(name, slot, "b") for name in names]) == [TAKEN] * 50
