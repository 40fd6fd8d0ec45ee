"""Redis and Valkey: each option of theirs, by object and by URL, set to what is no default, and what it does."""

from __future__ import annotations

import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from servers import free_port
from support.certificates import certificate
from support.columns import Servers
from support.own_options import Cases, claim, of_constructor, of_url, opened, query
from support.redis_servers import DURABLE, Private, cluster, private_server, watched
from support.waiting import wait_for

from celery_anarchon import RedisBackend, ValkeyBackend
from celery_anarchon.backends.redis import strategies
from celery_anarchon.backends.redis.keys import Keys
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.errors import AnarchonError, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import raised_by

CASES = Cases()
WON = Answer.WON


class Bench:
    """Servers, and two backends for each option: made as an object, and of a URL."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers = servers
        self.folder = folder

    def server(self, product: str) -> Any:
        return self.servers.valkey if product == "valkey" else self.servers.redis

    def both(self, product: str, server: Private, text: dict[str, Any], **options: Any) -> Iterator[tuple[Any, str]]:
        """Options of the constructor. *text*: what the URL says of them."""
        kind = ValkeyBackend if product == "valkey" else RedisBackend
        url = server.url.replace("redis://", f"{product}://")
        for make in (
            lambda prefix: kind(url, **{"prefix": prefix, **options}),
            lambda prefix: backend_from(f"{url}?{query({'prefix': prefix, **text})}"),
        ):
            prefix = f"t{uuid.uuid4().hex[:10]}:"
            with opened(make(prefix)) as backend:
                yield backend, prefix

    def connected(self, port: int, scheme: str = "redis", host: str = "127.0.0.1", **options: Any) -> Iterator[Any]:
        """Options of the connection: as a mapping, and in the URL's query. Not opened."""
        yield RedisBackend({"host": host, "port": port, "ssl": scheme == "rediss", **options}, prefix="connected:")
        text = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
        yield backend_from(f"{scheme}://{host}:{port}?{query({'prefix': 'connected:', **text})}")

    @cached_property
    def tls(self) -> Tls:
        return Tls(self.servers)


class Tls:
    """A server that speaks TLS, and to clients with its certificate only."""

    def __init__(self, servers: Servers) -> None:
        folder = servers.folder / f"tls{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        self.folder = folder
        (self.mine, self.key), (self.other, _) = certificate(folder, "mine"), certificate(folder, "other")
        self.port = free_port()
        files = ("--tls-cert-file", self.mine, "--tls-key-file", self.key, "--tls-ca-cert-file", self.mine)
        options = (*DURABLE, *map(str, files), "--tls-port", str(self.port), "--tls-auth-clients", "yes")
        servers.keep(private_server(folder / "server", options=options))
        self.client = {"ssl_certfile": self.mine, "ssl_keyfile": self.key, "ssl_check_hostname": False}

    def works(self, bench: Bench, **options: Any) -> None:
        for backend in bench.connected(self.port, "rediss", **{**self.client, **options}):
            with opened(backend):
                assert claim(backend)[0] is WON

    def fails(self, bench: Bench, without: str = "", **options: Any) -> None:
        given = {name: value for name, value in {**self.client, **options}.items() if name != without}
        for backend in bench.connected(self.port, "rediss", **given):
            assert isinstance(raised_by(lambda backend=backend: backend.open("app")), AnarchonError)
            backend.close()


def keys(server: Private, pattern: str) -> set[bytes]:
    with server.client() as client:
        return set(client.scan_iter(pattern))


def seen_by(server: Private) -> dict[str, str]:
    """What the server says of the connection that is ours. One that was closed may be there a little longer."""
    with server.client() as client:

        def ours() -> list[dict[str, str]]:
            return [dict(one) for one in client.client_list() if one["name"].startswith("celery-anarchon:")]

        return wait_for(lambda: len(found := ours()) == 1 and found[0], "one connection of ours")  # type: ignore[no-any-return]


def link_of(backend: Any) -> Any:
    """The connection that waits for the next call."""
    return backend._source._links._idle[-1][0]


# --- options of the constructor ---------------------------------------------------------------------------------------


def of_both_products(*options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def note(case: Callable[..., None]) -> Callable[..., None]:
        for product in ("redis", "valkey"):
            names = [product if option == "server" else option for option in options]

            def run(bench: Bench, product: str = product) -> None:
                case(bench, product)

            CASES.add(product, *names)(run)
        return case

    return note


@of_both_products("server", "prefix")
def _(bench: Bench, product: str) -> None:
    """Neither is the default: another port, and a prefix of this test's own."""
    server = bench.server(product)
    for backend, prefix in bench.both(product, server, {}):
        assert claim(backend)[0] is WON
        assert keys(server, f"{prefix}*") and backend.namespace == prefix


@of_both_products("strategy", "window")
def _(bench: Bench, product: str) -> None:
    server = bench.server(product)
    given = {"name": "script", "window": "10m"}
    for backend, prefix in bench.both(product, server, {"strategy": "script", "window": "10m"}, strategy=given):
        answer, slot = claim(backend)
        assert answer is WON
        with server.client() as client:
            # The default is 300 s.
            assert 300_000 < client.pttl(Keys(prefix).marker(b"job", slot)) <= 600_000


@of_both_products("wait_replicas")
def _(bench: Bench, product: str) -> None:
    """There is no replica that could have it."""
    for backend, _prefix in bench.both(product, bench.server(product), {"wait_replicas": 1}, wait_replicas=1):
        assert isinstance(raised_by(lambda backend=backend: claim(backend)), OutcomeUnknown)


@of_both_products("wait_timeout")
def _(bench: Bench, product: str) -> None:
    server = bench.server(product)
    given = {"wait_replicas": 1, "wait_timeout": "30ms"}
    for backend, _prefix in bench.both(product, server, given, **given):
        with server.client() as client, client.monitor() as watching:
            raised_by(lambda backend=backend: claim(backend))
            asked = next(told["command"] for told in watching.listen() if told["command"].startswith("WAIT"))
        assert asked == "WAIT 1 30"


@of_both_products("early_tolerance")
def _(bench: Bench, product: str) -> None:
    """Of the object alone: in a URL's place stands anarchon_early_tolerance."""
    for backend, _prefix in bench.both(product, bench.server(product), {}, early_tolerance=600_000):
        wide = backend.early_tolerance == 600_000
        assert claim(backend, 300_000)[0] is (WON if wide else Answer.TOO_EARLY)


@CASES.add("redis", "duration", "max_size")
def _(bench: Bench) -> None:
    server = bench.servers.redis86
    options = {"duration": "10m", "max_size": 500}
    text = {"strategy": "idmp", **options}
    for backend, prefix in bench.both("redis", server, text, strategy={"name": "idmp", **options}):
        assert claim(backend)[0] is WON
        with server.client() as client:
            told = client.execute_command("XINFO", "STREAM", Keys(prefix).claims(b"job"))
        facts = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
        facts = {name.decode() if isinstance(name, bytes) else name: value for name, value in facts.items()}
        assert (facts["idmp-duration"], facts["idmp-maxsize"]) == (600, 500)


# --- options of the connection ----------------------------------------------------------------------------------------


@CASES.add("redis", "db", "virtual_host")
def _(bench: Bench) -> None:
    server = bench.servers.redis
    for option, number in (("db", 3), ("virtual_host", 4)):
        for backend in bench.connected(server.port, **{option: number}):
            with opened(backend):
                assert seen_by(server)["db"] == str(number)


@CASES.add("redis", "username", "password")
def _(bench: Bench) -> None:
    server = bench.servers.redis
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "beat", "on", ">hush", "~*", "+@all")
    for backend in bench.connected(server.port, username="beat", password="hush"):
        with opened(backend):
            assert seen_by(server)["user"] == "beat"


@CASES.add("redis", "master_name", "sentinel_username", "sentinel_password")
def _(bench: Bench) -> None:
    """A sentinel that answers to nobody else, and another name than everybody's `mymaster`."""
    with watched(bench.folder) as group:
        with group.sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "looker", "on", ">hush", "+@all")
            client.execute_command("ACL", "SETUSER", "default", "off")
        login = {"sentinel_username": "looker", "sentinel_password": "hush"}
        place = f"127.0.0.1:{group.sentinel.port}"
        for given in (
            {**login, "master_name": "mine"},
            {**login, "master_name": "yours"},
            {**login, "master_name": "mine", "sentinel_password": "wrong"},
            {"master_name": "mine"},
        ):
            for backend in (
                RedisBackend({"sentinels": [place], **given}),
                backend_from(f"sentinel://{place}/0?{query(given)}"),
            ):
                if given == {**login, "master_name": "mine"}:
                    with opened(backend):
                        assert seen_by(group.master)
                else:
                    assert isinstance(raised_by(lambda backend=backend: backend.open("app")), AnarchonError)
                    backend.close()


@CASES.add("redis", "ssl", "ssl_ca_certs", "ssl_cert_reqs")
def _(bench: Bench) -> None:
    tls = bench.tls
    tls.works(bench, ssl_ca_certs=tls.mine)
    tls.fails(bench, ssl_ca_certs=tls.other)
    tls.works(bench, ssl_ca_certs=tls.other, ssl_cert_reqs="none")
    files = {**tls.client, "ssl_ca_certs": tls.mine, "ssl_check_hostname": "false"}
    with opened(backend_from(f"redis://127.0.0.1:{tls.port}?ssl=true&{query(files)}")) as backend:
        assert link_of(backend)._sock.version().startswith("TLS")


@CASES.add("redis", "ssl_ca_path")
def _(bench: Bench) -> None:
    tls = bench.tls
    folder = tls.folder / "trusted"
    folder.mkdir()
    asked = ["openssl", "x509", "-hash", "-noout", "-in", str(tls.mine)]
    name = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    (folder / f"{name}.0").write_text(tls.mine.read_text())
    tls.works(bench, ssl_ca_path=folder)
    tls.fails(bench, ssl_ca_path=tls.folder / "server")


@CASES.add("redis", "ssl_certfile", "ssl_keyfile", "ssl_password")
def _(bench: Bench) -> None:
    tls = bench.tls
    with pytest.raises(ConfigurationError, match="ssl_keyfile goes with ssl_certfile"):
        tls.fails(bench, without="ssl_certfile", ssl_ca_certs=tls.mine)
    nobody = {"ssl_ca_certs": tls.mine, "ssl_check_hostname": False}
    for backend in bench.connected(tls.port, "rediss", **nobody):
        assert isinstance(raised_by(lambda backend=backend: backend.open("app")), AnarchonError)
        backend.close()
    locked = tls.folder / "locked.key"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:hush", "-in", str(tls.key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    tls.works(bench, ssl_ca_certs=tls.mine, ssl_keyfile=locked, ssl_password="hush")
    tls.fails(bench, ssl_ca_certs=tls.mine, ssl_keyfile=locked, ssl_password="wrong")


@CASES.add("redis", "ssl_check_hostname")
def _(bench: Bench) -> None:
    """The certificate is for 127.0.0.1 and localhost."""
    tls = bench.tls
    tls.works(bench, host="127.1", ssl_ca_certs=tls.mine, ssl_check_hostname=False)
    tls.fails(bench, host="127.1", ssl_ca_certs=tls.mine, ssl_check_hostname=True)
    tls.works(bench, ssl_ca_certs=tls.mine, ssl_check_hostname=True)


@CASES.add("redis", "ssl_ciphers")
def _(bench: Bench) -> None:
    tls = bench.tls
    only = "ECDHE-RSA-AES256-GCM-SHA384"
    for backend in bench.connected(tls.port, "rediss", **tls.client, ssl_ca_certs=tls.mine, ssl_ciphers=only):
        with opened(backend):
            offered = {cipher["name"] for cipher in link_of(backend)._sock.context.get_ciphers()}
            assert {name for name in offered if not name.startswith("TLS_")} == {only}


@CASES.add("redis", "socket_timeout", "socket_connect_timeout", "socket_keepalive")
def _(bench: Bench) -> None:
    given = {"socket_timeout": 3.5, "socket_connect_timeout": 2.5, "socket_keepalive": False}
    for backend in bench.connected(bench.servers.redis.port, **given):
        with opened(backend):
            link = link_of(backend)
            assert link._sock.gettimeout() == 3.5
            assert link.socket_connect_timeout == 2.5
            assert not link._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@CASES.add("redis address", "host", "port", "url", "path", "sentinels", "nodes")
def _(bench: Bench) -> None:
    """Where it is, as a mapping and as a URL. Sentinels: above."""
    with cluster(bench.folder / "cluster") as group:
        server = group.nodes[0]
        nodes = [f"127.0.0.1:{node.port}" for node in group.nodes]
        made = (RedisBackend({"nodes": nodes}), backend_from(f"redis+cluster://{','.join(nodes)}"))
        for number, backend in enumerate(made):
            with opened(backend):
                assert claim(backend, job=f"job {number}")[0] is WON
                assert seen_by(server)
    socket_file = bench.folder / "redis.sock"
    options = (*DURABLE, "--unixsocket", str(socket_file))
    with private_server(bench.folder / "server", options=options) as server:
        for backend in (
            RedisBackend({"path": str(socket_file)}),
            backend_from(f"redis+socket://{socket_file}"),
            RedisBackend({"host": "127.0.0.1", "port": server.port}),
            RedisBackend({"url": server.url, "socket_timeout": 3}),
        ):
            with opened(backend):
                assert claim(backend)[0] is WON
                by_socket = "redis+socket://" in backend.describe()
                # The server shows the beginning of a long path.
                assert seen_by(server)["addr"].startswith("/" if by_socket else "127.0.0.1:")


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(servers: Servers) -> dict[str, Any]:
    return {}


@pytest.fixture
def bench(servers: Servers, tmp_path: Path, shared: dict[str, Any]) -> Bench:
    made = Bench(servers, tmp_path)
    if "tls" in shared:
        made.__dict__["tls"] = shared["tls"]
    yield made
    shared.update({name: value for name, value in vars(made).items() if name == "tls"})


@pytest.mark.parametrize("case", CASES.parameters())
def test_option(case: Callable[[Bench], None], bench: Bench) -> None:
    case(bench)


def options_of_strategies() -> set[str]:
    """The keys of the mappings that a type checker knows."""
    kinds = [kind for kind in get_args(strategies.RedisStrategy) if hasattr(kind, "__annotations__")]
    return {name for kind in kinds for name in get_type_hints(kind)} - {"name"}


def test_no_option_is_without_a_case() -> None:
    of_strategies = options_of_strategies()
    assert of_strategies == {"window", "duration", "max_size"}
    constructor = of_constructor(RedisBackend)
    assert constructor == {"redis", "strategy", "prefix", "wait_replicas", "wait_timeout", "early_tolerance"}
    assert CASES.options("redis") == constructor | of_strategies | of_url("redis://cache")
    with pytest.raises(ConfigurationError) as caught:
        RedisBackend({"there_is_no_such_option": 1})
    places = set(str(caught.value).partition("known are ")[2].split(", ")) - of_url("redis://cache")
    assert places == CASES.options("redis address")
    # Those of the connection are read by the same code, and tried above.
    of_connections = of_url("redis://cache") - constructor - of_strategies
    assert of_url("valkey://cache") - of_connections == CASES.options("valkey") - {"valkey", "early_tolerance"} | {
        "duration",
        "max_size",
    }
    assert of_constructor(ValkeyBackend) <= CASES.options("valkey")
