"""What is Redis's own: names and addresses, clients of the app, servers that die, lose, refuse and move things."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import re
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from servers import free_port, missing
from support.redis_servers import (
    DURABLE,
    RESP2,
    Cluster,
    Private,
    Proxy,
    cluster,
    drop_idle,
    private_server,
    replicated,
    script_proxy,
    sweep,
    through,
    wait_for,
    watched,
)

from celery_anarchon.backends.base import Beat, ClaimRequest, Keep, Outcome, Sighting
from celery_anarchon.backends.redis import RedisBackend, ValkeyBackend, handed, links, past, talk
from celery_anarchon.backends.redis.address import read_address
from celery_anarchon.backends.redis.cluster import hash_slot
from celery_anarchon.backends.redis.store import SHARDS, Keys
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import abandon, ask, claim, claim_all, confirm, raised_by, take

WON, TAKEN, ALREADY_SENT = Answer.WON, Answer.TAKEN, Answer.ALREADY_SENT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """For all tests here that keep to a prefix and stop nothing."""
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@contextmanager
def opened(server: Any, prefix: str, kind: Any = RedisBackend, **options: Any) -> Iterator[RedisBackend]:
    backend = kind(server, prefix=prefix, **options)
    try:
        backend.open("app")
        yield backend
    finally:
        backend.close()


def base(backend: RedisBackend) -> int:
    return backend.now() - 3_600_000


def stats(server: Private, command: str) -> int:
    with server.client() as client:
        return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def valkey_driver() -> Any:
    if importlib.util.find_spec("valkey") is None:
        missing("no driver valkey")
    return importlib.import_module("valkey")


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


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl") or missing("no openssl on PATH")
    key, file = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    return file, key


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


# --- clients of the app -----------------------------------------------------------------------------------------------


CLIENTS: dict[str, Callable[[int], Any]] = {
    "plain": lambda port: redis.Redis(port=port),
    "resp2": lambda port: redis.Redis(port=port, **RESP2),
    "decoding": lambda port: redis.Redis(port=port, decode_responses=True, encoding="latin-1"),
    "blocking pool": lambda port: redis.Redis(
        connection_pool=redis.BlockingConnectionPool(port=port, max_connections=2, timeout=5)
    ),
    "single connection": lambda port: redis.Redis(port=port, single_connection_client=True),
    "from a URL": lambda port: redis.from_url(f"redis://127.0.0.1:{port}/0"),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_of_the_app(server: Private, prefix: str, kind: str) -> None:
    with closing(CLIENTS[kind](server.port)) as client:
        with opened(client, prefix) as backend:
            slot = base(backend)
            assert claim_all(backend, [ask("jöb", slot, "ä"), ask("jöb", slot, "b")]) == [WON, TAKEN]
            assert confirm(backend, "jöb", slot, "ä")
            assert [run.job for run in backend.history("jöb", 5)] == ["jöb"]
            assert backend.now() > slot
            assert "client of the app" in backend.describe()
        backend.close()
        # Never closed, and as it was.
        assert client.ping() and client.set(prefix + "mine", "x") and client.get(prefix + "mine") in (b"x", "x")


def test_a_client_of_valkey_and_of_redis(server: Private, prefix: str) -> None:
    valkey = valkey_driver()
    with closing(valkey.Valkey(port=server.port)) as client, opened(client, prefix) as backend:
        assert claim(backend, "job", base(backend), "a") is WON
    with server.client() as client, opened(client, prefix, ValkeyBackend) as backend:
        assert claim(backend, "job", base(backend), "b") is WON
    with opened(f"valkey://127.0.0.1:{server.port}", prefix, ValkeyBackend) as backend:
        assert backend.last_run("job") is None or backend.name == "valkey:lease"


def test_clients_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="for asyncio"):
        RedisBackend(redis.asyncio.Redis())
    with pytest.raises(ConfigurationError, match="give the client itself"):
        RedisBackend(redis.Redis().pipeline())
    with pytest.raises(ConfigurationError, match="wait_timeout"):
        RedisBackend(redis.Redis(socket_timeout=0.1), wait_replicas=1).open("app")


def test_retries_of_a_client_send_nothing_twice(server: Private, prefix: str) -> None:
    """redis-py sends a command again by itself; here nothing depends on it, and nothing is sent twice."""
    with script_proxy(server.port) as line:
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 5)}
        with closing(redis.Redis(port=line.port, **options)) as client, opened(client, prefix) as backend:
            slot = base(backend)
            assert claim(backend, "job", slot, "a") is WON
            before = stats(server, "evalsha")
            line.losing = True
            for call in (lambda: claim(backend, "job", slot + 1, "a"), lambda: confirm(backend, "job", slot, "a")):
                assert isinstance(raised_by(call), OutcomeUnknown)
            line.losing = False
            assert stats(server, "evalsha") == before + 2
            assert claim_all(backend, [ask("job", slot + 1, "a"), ask("job", slot, "a")]) == [WON, ALREADY_SENT]
            line.cut()
            assert isinstance(raised_by(lambda: claim(backend, "job", slot, "a")), BackendUnavailable)
            line.mend()
            assert claim(backend, "job", slot + 1, "a") is WON


def test_a_full_pool_is_unavailable(server: Private, prefix: str) -> None:
    with closing(redis.Redis(port=server.port, max_connections=1)) as client, opened(client, prefix) as backend:
        with handed._borrowed(client, backend._source._driver, "here"):
            assert isinstance(raised_by(lambda: claim(backend, "job", 1, "a")), BackendUnavailable)
        assert claim(backend, "job", 1, "a") is WON


# --- what a server says -----------------------------------------------------------------------------------------------


class Scripted:
    """Something that speaks as a server does: to each script the same reply, to all else as a healthy one."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                self._lines.append(line)
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with suppress(OSError), line, line.makefile("rb") as stream:
            while header := stream.readline():
                words = []
                for _ in range(int(header[1:])):
                    words.append(stream.read(int(stream.readline()[1:]) + 2)[:-2])
                line.sendall(self.reply if words[0] in (b"EVAL", b"EVALSHA") else b"+OK\r\n")

    def close(self) -> None:
        for line in [self._listener, *self._lines]:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (b"-LOADING Redis is loading the dataset in memory", BackendUnavailable, "reading its data"),
        (b"-MISCONF Redis is configured to save RDB snapshots", BackendUnavailable, "cannot save to disk"),
        (b"-NOREPLICAS Not enough good replicas to write.", BackendUnavailable, "min-replicas"),
        (b"-BUSY Redis is busy running a script.", BackendUnavailable, "keeps it busy"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.", BackendUnavailable, "raise maxmemory"),
        (b"-READONLY You can't write against a read only replica.", BackendUnavailable, "it is a replica"),
        (b"-MASTERDOWN Link with MASTER is down", BackendUnavailable, "without its master"),
        (
            b"-ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write",
            *(BackendUnavailable, "it is a replica"),
        ),
        (b"-CLUSTERDOWN The cluster is down", BackendUnavailable, "does not serve"),
        (b"-NOAUTH Authentication required.", BackendUnavailable, "wants a password"),
        (b"-NOPERM this user has no permissions", BackendUnavailable, "may not do that"),
        (b"-MOVED 5 127.0.0.1:1", BackendUnavailable, "node of a cluster"),
        (b"-CROSSSLOT Keys in request don't hash to the same slot", BackendUnavailable, "redis+cluster://"),
        (b"-ERR unknown command 'EVALSHA'", BackendUnavailable, "lacks what claims need"),
        (b"-ERR something new", OutcomeUnknown, "something new"),
        (b"-WRONGTYPE Operation against a key", OutcomeUnknown, "WRONGTYPE"),
        (b"*2\r\n$5\r\nmaybe\r\n:1", OutcomeUnknown, "maybe"),
        (b"*0", OutcomeUnknown, "claim was answered"),
        (b"+OK", OutcomeUnknown, "claim was answered"),
        (b"$-1", OutcomeUnknown, "claim was answered"),
    ],
)
def test_what_replies_mean(reply: bytes, error: type[Exception], words: str) -> None:
    with closing(Scripted(reply + b"\r\n")) as fake, closing(RedisBackend(f"redis://127.0.0.1:{fake.port}")) as backend:
        request = ClaimRequest(job="job", slot=1, owner="a", beat="b", lease=1)
        found = raised_by(lambda: backend.claim([request]))
        assert isinstance(found, error) and not isinstance(found, ConfigurationError), repr(found)
        assert words in str(found) and "\n" not in str(found)
        if error is BackendUnavailable:
            assert isinstance(raised_by(lambda: backend.history("job", 1)), BackendUnavailable)


def test_memory_used_up(own: Private, prefix: str) -> None:
    with opened(own.url, prefix) as backend, own.client() as client:
        slot = base(backend)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(BackendUnavailable, match="raise maxmemory"):
            claim(backend, "job", slot, "a")
        client.config_set("maxmemory", "0")
        assert client.exists(backend._keys.runs(b"job")) == 0
        assert claim(backend, "job", slot, "a") is WON


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
        assert time.monotonic() - began < 3
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


# --- batches, bounds, costs -------------------------------------------------------------------------------------------


def test_round_trips_do_not_grow_with_a_batch(server: Private, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[int] = []
    exchange = talk.exchange
    monkeypatch.setattr(
        talk, "exchange", lambda link, driver, commands: trips.append(1) or exchange(link, driver, commands)
    )
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
    trips: list[int] = []
    exchange = talk.exchange
    monkeypatch.setattr(
        talk, "exchange", lambda link, driver, commands: trips.append(1) or exchange(link, driver, commands)
    )
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
