"""Redis with ``wait_replicas``, where the server that is asked is not the master any more."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from support.own_options import opened
from support.redis_servers import RESP2, Cluster, cluster, fail_over, replica_in_cluster, replicated

from celery_anarchon import RedisBackend
from celery_anarchon.backends.redis.cluster import hash_slot
from celery_anarchon.errors import BackendUnavailable, ConfigurationError
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import ask, claim, claim_all

WON, TAKEN = Answer.WON, Answer.TAKEN


@pytest.mark.parametrize("client", ["own", "handed"])
def test_a_master_that_became_a_replica_has_refused(tmp_path: Path, prefix: str, client: str) -> None:
    """It cannot WAIT either, and that must not hide that surely nothing was written."""
    with replicated(tmp_path) as (master, replica), closing(redis.Redis(port=master.port, **RESP2)) as app:
        where: Any = master.url if client == "own" else app
        with opened(RedisBackend(where, prefix=prefix, wait_replicas=1, wait_timeout=4)) as backend:
            slot = backend.now() - 60_000
            assert claim(backend, "job", slot, "a") is WON
            with replica.client() as new, master.client() as old:
                new.replicaof("NO", "ONE")
                old.replicaof("127.0.0.1", replica.port)
            with pytest.raises(BackendUnavailable, match="it is a replica"):
                claim_all(backend, [ask("job", slot + number, "a") for number in range(3)])
            if client == "own":
                assert not backend._source._links._idle, "the way to the master is asked for anew"


@pytest.mark.parametrize("client", ["own", "handed"])
def test_a_call_follows_the_keys_of_a_cluster_to_the_new_master(tmp_path: Path, prefix: str, client: str) -> None:
    with cluster(tmp_path) as nodes:
        old = nodes.nodes[0]
        with (
            replica_in_cluster(tmp_path / "replica", nodes, old) as new,
            closing(redis.RedisCluster(host="127.0.0.1", port=old.port, **RESP2)) as app,
        ):
            where: Any = nodes.url if client == "own" else app
            with opened(RedisBackend(where, prefix=prefix, wait_replicas=1, wait_timeout=4)) as backend:
                slot = backend.now() - 60_000
                names = [f"job {number}" for number in range(200)]
                jobs = [name for name in names if nodes.node_of(hash_slot(backend._keys.runs(name.encode()))) is old]
                assert claim_all(backend, [ask(job, slot, "a") for job in jobs]) == [WON] * len(jobs)
                fail_over(new, old)
                assert claim_all(backend, [ask(job, slot, "b") for job in jobs]) == [TAKEN] * len(jobs)
                assert claim_all(backend, [ask(job, slot + 1, "b") for job in jobs]) == [WON] * len(jobs)


def test_a_cluster_client_with_less_patience_than_wait_timeout_is_refused(nodes: Cluster, prefix: str) -> None:
    """Every claim would be one of unknown outcome."""
    with closing(redis.RedisCluster(host="127.0.0.1", port=nodes.nodes[0].port, socket_timeout=0.1)) as app:
        RedisBackend(app, prefix=prefix).open("app")
        with pytest.raises(ConfigurationError, match=r"its socket_timeout \(0.1 s\) is not longer than wait_timeout"):
            RedisBackend(app, prefix=prefix, wait_replicas=1).open("app")
