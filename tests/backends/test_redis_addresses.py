"""Redis by names and addresses: what they mean, and what opening a store there finds."""

from __future__ import annotations

import logging
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from servers import free_port
from support.certificates import certificate
from support.redis_clients import base, opened, valkey_driver
from support.redis_servers import (
    DURABLE,
    Private,
    private_server,
)
from support.waiting import wait_for

from celery_anarchon.backends.base import Beat, Keep, Outcome, Sighting
from celery_anarchon.backends.redis import RedisBackend, ValkeyBackend
from celery_anarchon.backends.redis.address import read_address
from celery_anarchon.backends.redis.cluster import hash_slot
from celery_anarchon.backends.redis.keys import SHARDS, Keys
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import abandon, ask, claim, claim_all, confirm, raised_by, take

WON, TAKEN = Answer.WON, Answer.TAKEN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """For all tests here that keep to a prefix and stop nothing."""
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


# --- names and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "more"),
    [
        ("redis://", "server", [("localhost", 6379)], {"db": 0, "tls": False}),
        ("redis://cache", "server", [("cache", 6379)], {}),
        ("redis://cache:7000/3", "server", [("cache", 7000)], {"db": 3}),
        ("redis://cache:7000/?db=4", "server", [("cache", 7000)], {"db": 4}),
        ("redis://:s%40crt@cache/0", "server", [("cache", 6379)], {"login": {"password": "s@crt"}}),
        ("redis://me:pw@cache", "server", [("cache", 6379)], {"login": {"username": "me", "password": "pw"}}),
        ("redis://[::1]:7000/0", "server", [("::1", 7000)], {}),
        ("rediss://cache:7000", "server", [("cache", 7000)], {"tls": True}),
        (
            "rediss://cache?ssl_cert_reqs=CERT_NONE&ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=no",
            *("server", [("cache", 6379)]),
            {"options": {"ssl_cert_reqs": "none", "ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False}},
        ),
        ("redis+socket:///run/redis.sock?virtual_host=2", "socket", [], {"path": "/run/redis.sock", "db": 2}),
        (
            "sentinel://a:1;b:2/5?master_name=mine&sentinel_password=x",
            *("sentinel", [("a", 1), ("b", 2)]),
            {"db": 5, "master_name": "mine", "sentinel_login": {"password": "x"}},
        ),
        (
            "sentinel://:pw@a:1;sentinel://:pw@b?master_name=mine",
            *("sentinel", [("a", 1), ("b", 26379)]),
            {"login": {"password": "pw"}},
        ),
        (
            "sentinel://:pw@a:1;:pw@b:2/3?master_name=mine",
            *("sentinel", [("a", 1), ("b", 2)]),
            {"login": {"password": "pw"}, "db": 3},
        ),
        ("redis://:p/w;@cache/2", "server", [("cache", 6379)], {"login": {"password": "p/w;"}, "db": 2}),
        (
            "redis+cluster://me:pw@a,b:2",
            "cluster",
            [("a", 6379), ("b", 2)],
            {"login": {"username": "me", "password": "pw"}},
        ),
        ("sentinel://a,b?master_name=mine&ssl=true", "sentinel", [("a", 26379), ("b", 26379)], {"tls": True}),
        ("redis+cluster://a:1,b", "cluster", [("a", 1), ("b", 6379)], {}),
        ("valkey://cache", "server", [("cache", 6379)], {}),
        ("valkeys://cache", "server", [("cache", 6379)], {"tls": True}),
        ("redis://cache?socket_timeout=2.5", "server", [("cache", 6379)], {"options": {"socket_timeout": 2.5}}),
    ],
)
def test_addresses(url: str, kind: str, hosts: list[Any], more: dict[str, Any]) -> None:
    address = read_address(url, "redis")
    assert (address.kind, list(address.hosts)) == (kind, hosts)
    assert {name: getattr(address, name) for name in more} == more
    assert "pw" not in repr(address) and "crt" not in repr(address)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cache:6379", "no URL"),
        ("http://cache", "unknown scheme http://"),
        ("redis://a,b", "names several hosts"),
        ("redis://a/one", "number of one database"),
        ("redis://a/1?db=2", "number of one database"),
        ("redis://a?colour=red", "unknown option 'colour'"),
        ("redis://a?ssl_cert_reqs=maybe", "required, optional or none"),
        ("redis://a:b:c/0", "expected host:port"),
        ("redis://:one@a?password=two", "the password is given twice"),
        ("redis://a?master_name=mine", "for sentinel:// only"),
        ("sentinel://a;b", "master_name=mymaster"),
        ("redis+cluster://a/3", "database 0 only"),
        ("redis+socket://redis.sock", "absolute path"),
        ({"host": "a", "sentinels": ["b"]}, "give one of"),
        ({"colour": "red"}, "unknown option 'colour'"),
        ({"url": 5}, "must be a text"),
        (5, "builtins.int"),
        (None, "NoneType"),
    ],
)
def test_addresses_that_mean_nothing(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        RedisBackend(given)
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "kind", "hosts"),
    [
        ({}, "server", [("localhost", 6379)]),
        ({"host": "a", "port": "7", "db": 2, "password": "hush", "ssl": True}, "server", [("a", 7)]),
        ({"url": "redis://a:7/2", "password": "hush"}, "server", [("a", 7)]),
        ({"path": "/run/redis.sock"}, "socket", []),
        ({"sentinels": [("a", 1), "b:2"], "master_name": "m"}, "sentinel", [("a", 1), ("b", 2)]),
        ({"nodes": ["a:1", "b"]}, "cluster", [("a", 1), ("b", 6379)]),
    ],
)
def test_addresses_as_mappings(given: dict[str, Any], kind: str, hosts: list[Any]) -> None:
    address = read_address(given, "redis")
    assert (address.kind, list(address.hosts)) == (kind, hosts)
    assert "hush" not in RedisBackend(given).describe()


def test_a_url_may_carry_the_options_of_the_constructor() -> None:
    url = "redis://me:hush@cache:7000/1?prefix=billing:&wait_replicas=2&wait_timeout=100ms&socket_timeout=1"
    backend = RedisBackend.from_url(url)
    assert (backend.name, backend.namespace) == ("redis:lease", "billing:")
    assert backend._wait is not None and (backend._wait.replicas, backend._wait.millis) == (2, 100)
    assert backend.describe() == "redis redis://me:***@cache:7000/1, prefix billing:"
    assert RedisBackend.from_url("redis://cache", prefix="x:").namespace == "x:"
    with pytest.raises(ConfigurationError, match="unknown option 'prefx'; did you mean 'prefix'"):
        RedisBackend.from_url("redis://cache?prefx=x")


def test_a_url_of_valkey() -> None:
    valkey_driver()
    backend = ValkeyBackend.from_url("valkey://cache:7000/1?prefix=x:")
    assert (backend.name, backend.describe()) == ("valkey:lease", "valkey valkey://cache:7000/1, prefix x:")


def test_wrong_strategies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no such strategy for redis"):
        RedisBackend(strategy="leese")
    with pytest.raises(ConfigurationError, match="takes no options, and was given window"):
        RedisBackend(strategy={"name": "lease", "window": 3})
    assert RedisBackend(strategy={"name": "lease"}).name == "redis:lease"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix": ""}, "prefix=''"),
        ({"wait_replicas": -1}, "wait_replicas=-1"),
        ({"wait_replicas": True}, "wait_replicas=True"),
        ({"wait_replicas": 1, "wait_timeout": 0}, "wait_timeout=0"),
        ({"wait_replicas": 1, "wait_timeout": 5}, "wait_timeout=5"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        RedisBackend(**options)


def test_no_two_prefixes_meet(server: Private, prefix: str) -> None:
    names = [prefix + end for end in ("", "x", "{", "}", "{}", "{x}", "{5}:runs:job", "%7B", "%257B", " ", "*", "\0")]
    for name in names:
        with opened(server.url, name) as backend:
            assert claim(backend, "job", 1_000_000, f"owner of {name}") is WON
    for name in names:
        with opened(server.url, name) as backend:
            assert claim(backend, "job", 1_000_000, "b") is TAKEN
            assert len(backend.history("job", 10)) == 1


def test_keys_are_spread_over_the_shards_and_a_cluster_agrees() -> None:
    keys = Keys("a{b}c:")
    assert keys.leases(7) == b"a%7Bb%7Dc:{7}leases"
    shards = {keys.shard(b"job %d" % number) for number in range(2_000)}
    assert shards == set(range(SHARDS))
    for key in (b"x{7}leases", b"x{7}runs:{8}", b"plain", b"x{}y", b"{a", b"}a{b}"):
        assert hash_slot(key) == redis.crc.key_slot(key)


def test_every_script_says_what_it_takes() -> None:
    folder = resources.files("celery_anarchon.backends.redis") / "lua"
    files = [file for place in (folder, folder / "claims") for file in place.iterdir() if file.is_file()]
    assert len(files) >= 28 + 9
    for file in files:
        text = file.read_text()
        assert text.startswith("-- ")
        if file.name not in ("common.lua", "sending.lua"):
            for word in ("-- KEYS", "-- ARGV", "-- Reply"):
                assert word in text, file.name


# --- opening ----------------------------------------------------------------------------------------------------------


def test_reading_makes_nothing(own: Private, prefix: str) -> None:
    backend = RedisBackend(own.url, prefix=prefix)
    backend.open("app", create=False)
    assert backend.history("job", 10) == [] and backend.last_run("job") is None
    assert backend.beats(60_000) == [] and backend.lapsed(10) == []
    with own.client() as client:
        assert client.dbsize() == 0
    backend.open("app")
    with pytest.raises(LayoutMismatch, match="belongs to app app, and this is app other"):
        RedisBackend(own.url, prefix=prefix).open("other", create=False)
    backend.close()


def test_warnings_at_start(own: Private, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "celery_anarchon.backend")

    def said(**settings: str) -> list[tuple[str, str]]:
        with own.client() as client:
            for name, value in settings.items():
                client.config_set(name.replace("_", "-"), value)
        caplog.clear()
        with opened(own.url, prefix):
            return [(record.levelname, record.getMessage()) for record in caplog.records]

    assert said() == []
    assert said(maxmemory_policy="volatile-lru") == []
    ((level, words),) = said(maxmemory_policy="allkeys-lru")
    assert level == "WARNING" and "maxmemory-policy is allkeys-lru" in words and "noeviction" in words
    ((level, words),) = said(maxmemory_policy="noeviction", appendonly="no")
    assert level == "WARNING" and "nothing is persisted" in words and "appendonly yes" in words
    ((level, words),) = said(save="3600 1")
    assert level == "INFO" and "only snapshots" in words and "3600 1" in words
    caplog.clear()
    RedisBackend(own.url, prefix=prefix).open("app", create=False)
    assert caplog.records == []


def test_a_server_that_is_too_old(server: Private, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fine in (("4.0.14", False), ("5.0.0", True), ("255.255.255", True), ("", True)):
        monkeypatch.setattr(RedisBackend, "_facts", lambda self, version=version: {"redis_version": version})
        error = raised_by(lambda: RedisBackend(server.url, prefix=prefix).open("app", create=False))
        assert (error is None) == fine, error
        assert fine or (isinstance(error, ConfigurationError) and "Redis 4.0.14 is too old: 5.0" in str(error))


def test_passwords_and_rights(own: Private, prefix: str) -> None:
    with own.client() as client:
        client.config_set("requirepass", "hush")
    place = f"127.0.0.1:{own.port}/0"
    for url, words in (
        (f"redis://{place}", "it wants a password"),
        (f"redis://:wrong@{place}", "wrong user or password"),
        (f"redis://nobody:wrong@{place}", "wrong user or password"),
        (f"redis://:hush@127.0.0.1:{own.port}/999", "no database of this number"),
    ):
        with pytest.raises(ConfigurationError, match=words) as caught:
            RedisBackend(url, prefix=prefix).open("app")
        assert "hush" not in str(caught.value) and "wrong@" not in str(caught.value)
    rights = (
        "+eval +evalsha +time +hget +hmget +hset +hdel +exists +zadd +zrem +zscore +zcard +zrange +zrevrange "
        "+zrangebyscore"
    )
    with own.client(password="hush") as client:
        client.execute_command("ACL", "SETUSER", "beat", "on", ">pw", f"~{prefix}*", *rights.split())
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", f"~{prefix}*", "+info")
    # Without the right to ask it about itself, and to name a connection.
    with opened(f"redis://beat:pw@{place}", prefix) as backend:
        slot = base(backend)
        assert claim_all(backend, [ask("job", slot, "a"), ask("job", slot, "b")]) == [WON, TAKEN]
        assert abandon(backend, "job", slot, "a") and take(backend, "job", slot, "b") == 1
        assert [found.slot for found in backend.lapsed(5)] == [] and confirm(backend, "job", slot, "b")
        backend.record([Outcome(job="job", slot=slot + 1, state=RunState.SKIPPED)])
        backend.register([Sighting(job="job", fingerprint="x")])
        assert len(backend.history("job", 5)) == 2 and backend.last_run("job") is not None
        assert backend.tidy([Keep(job="job", decided=slot + 9, history_size=0)]) == 2
        backend.beat_seen(Beat(owner="a", label="a", version="1"))
        assert len(backend.beats(9_999)) == 1
        backend.beat_left("a")
    with pytest.raises(ConfigurationError, match="may not do that"):
        RedisBackend(f"redis://reader:pw@{place}", prefix=prefix).open("app")
    with opened(f"redis://:hush@{place}", prefix) as backend:
        with own.client(password="hush") as client:
            client.config_set("requirepass", "changed")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        # A running beat sends nothing, and does not end.
        with pytest.raises(BackendUnavailable, match="wrong user or password"):
            claim(backend, "job", base_of_now(), "a")


def base_of_now() -> int:
    return int(time.time() * 1000) - 1_000


# redis-py 4 forgets to close a Unix socket that it could not connect.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_there(prefix: str) -> None:
    with pytest.raises(BackendUnavailable, match="refused"):
        RedisBackend("redis://127.0.0.1:1/0", prefix=prefix).open("app")
    with pytest.raises(BackendUnavailable):
        RedisBackend("redis+socket:///nowhere/redis.sock", prefix=prefix).open("app")
    with pytest.raises(BackendUnavailable):
        RedisBackend("redis+cluster://127.0.0.1:1", prefix=prefix).open("app")
    with pytest.raises(BackendUnavailable):
        RedisBackend("sentinel://127.0.0.1:1?master_name=mine", prefix=prefix).open("app")


def test_a_socket(tmp_path: Path, prefix: str) -> None:
    folder = Path("/tmp") / f"anarchon-{uuid.uuid4().hex[:8]}"
    options = (*DURABLE, "--unixsocket", str(folder / "redis.sock"))
    try:
        with private_server(folder, options=options), opened(f"redis+socket://{folder}/redis.sock", prefix) as backend:
            assert claim(backend, "job", base(backend), "a") is WON
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_tls(tmp_path: Path, prefix: str) -> None:
    (mine, key), (other, _) = certificate(tmp_path, "mine"), certificate(tmp_path, "other")
    port = free_port()
    files = ("--tls-cert-file", str(mine), "--tls-key-file", str(key), "--tls-ca-cert-file", str(mine))
    options = (*DURABLE, *files, "--tls-port", str(port), "--tls-auth-clients", "no")
    with private_server(tmp_path / "server", options=options) as server:
        url = f"rediss://127.0.0.1:{port}/0"
        with opened(f"{url}?ssl_ca_certs={mine}", prefix) as backend:
            slot = base(backend)
            assert claim(backend, "job", slot, "a") is WON
        with opened(f"{url}?ssl_cert_reqs=none&ssl_check_hostname=false", prefix) as backend:
            assert claim(backend, "job", slot, "b") is TAKEN
        with pytest.raises(ConfigurationError, match="see ssl_ca_certs"):
            RedisBackend(f"{url}?ssl_ca_certs={other}", prefix=prefix).open("app")
        with pytest.raises(BackendUnavailable):
            RedisBackend(f"rediss://127.0.0.1:{server.port}/0?socket_timeout=0.5", prefix=prefix).open("app")


def test_connections_are_ours_by_name_and_end_with_close(own: Private, prefix: str) -> None:
    with own.client() as client:
        with opened(own.url, prefix) as backend:
            names = [one["name"] for one in client.client_list() if one["name"]]
            assert len(names) == 1 and names[0].startswith("celery-anarchon:")
            assert backend._source._opener._options.get("protocol", 2) == 2  # type: ignore[attr-defined]
        wait_for(lambda: len(client.client_list()) == 1, "closed connections")
