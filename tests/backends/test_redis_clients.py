"""Redis through clients of the app, and what its replies mean."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.redis_clients import base, opened, stats, valkey_driver
from support.redis_servers import (
    RESP2,
    Private,
    private_server,
    script_proxy,
)

from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.redis import RedisBackend, ValkeyBackend, handed
from celery_anarchon.backends.redis.links import Links
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by

WON, TAKEN, ALREADY_SENT = Answer.WON, Answer.TAKEN, Answer.ALREADY_SENT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """For all tests here that keep to a prefix and stop nothing."""
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


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
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is WON
    with server.client() as client, opened(client, prefix, ValkeyBackend) as backend:
        assert claim_all(backend, [ask("job", slot, "b"), ask("job", slot + 1, "b")]) == [TAKEN, WON]
    with opened(f"valkey://127.0.0.1:{server.port}", prefix, ValkeyBackend) as backend:
        assert backend.name == "valkey:lease"
        assert len(backend.history("job", 5)) == 2


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


def test_a_pool_of_one_connection_carries_a_burst(server: Private, prefix: str) -> None:
    """In one step the next batch is asked for while the last one is under way, where there are connections for both."""
    with closing(redis.Redis(port=server.port, max_connections=1)) as client, opened(client, prefix) as backend:
        slot = base(backend)
        assert isinstance(backend, OneStepBackend)
        under_way = [backend.begin_claims([ask(f"job-{n}", slot, "a")]) for n in range(3)]
        assert [result.answer for results in under_way for result in results()] == [WON] * 3


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


def test_a_connection_that_the_driver_has_closed_is_not_used_again() -> None:
    """It does so after some errors (a node that reads its data), and opens another by itself. The look at what the
    server says unasked is of the old one, whose number any other socket may have by then."""

    class Link:
        def __init__(self) -> None:
            self._sock: Any = object()

        def can_read(self, timeout: float) -> bool:
            return False

        def disconnect(self) -> None: ...

    made: list[Link] = []

    def connect() -> Link:
        made.append(Link())
        return made[-1]

    links = Links(connect, lambda link: True)
    with links.use() as first:
        pass
    with links.use() as again:
        assert again is first
        again._sock = None
    with links.use() as other:
        assert other is not first
    assert len(made) == 2
