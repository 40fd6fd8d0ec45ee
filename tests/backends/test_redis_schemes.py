"""Redis and Valkey: each form of an address is a scheme that ``anarchon_backend`` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.own_options import opened
from support.redis_servers import Cluster, cluster, private_server

from celery_anarchon import RedisBackend, ValkeyBackend
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import claim


@pytest.mark.parametrize(
    ("scheme", "rest", "kind", "tls"),
    [
        (scheme + plus, rest, kind, tls)
        for scheme, tls in (("redis", False), ("rediss", True), ("valkey", False), ("valkeys", True))
        for plus, rest, kind in (
            ("", "h1/1", "server"),
            ("+socket", "/run/a.sock", "socket"),
            ("+sentinel", "h1;h2/1?master_name=m", "sentinel"),
            ("+cluster", "h1,h2", "cluster"),
        )
        # A socket has no TLS.
        if not (tls and kind == "socket")
    ]
    + [("sentinel", "h1;h2/1?master_name=m", "sentinel", False)],
)
def test_every_form_of_an_address_is_a_scheme(scheme: str, rest: str, kind: str, tls: bool) -> None:
    backend = backend_from(f"{scheme}://{rest}")
    assert isinstance(backend, ValkeyBackend if scheme.startswith("valkey") else RedisBackend)
    if kind != "cluster":
        assert (backend._source._address.kind, backend._source._address.tls) == (kind, tls)
    assert backend._source.sharded == (kind == "cluster")


def test_a_cluster_of_valkey_by_its_url(tmp_path: Path, prefix: str) -> None:
    with cluster(tmp_path, "valkey8") as nodes:
        url = nodes.url.replace("redis+", "valkey+")
        with opened(backend_from(f"{url}?prefix={prefix}")) as backend:
            slot = backend.now() - 60_000
            assert [claim(backend, f"job {number}", slot, "a") for number in range(9)] == [Answer.WON] * 9
        node = nodes.nodes[0].url.replace("redis:", "valkey:")
        with pytest.raises(ConfigurationError, match=r"write valkey\+cluster://host:port"):
            backend_from(node).open("app")
    with (
        private_server(tmp_path / "alone", "valkey8") as alone,
        pytest.raises(ConfigurationError, match="it is no cluster: write valkey://"),
    ):
        backend_from(f"valkey+cluster://127.0.0.1:{alone.port}").open("app")


def test_a_cluster_of_redis_is_named_by_its_own_scheme(nodes: Cluster) -> None:
    with pytest.raises(ConfigurationError, match=r"write redis\+cluster://host:port"):
        backend_from(nodes.nodes[0].url).open("app")
