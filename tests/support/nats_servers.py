"""NATS servers of a test's own, with JetStream: one, or a cluster of three."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from servers import Server, free_port, missing, on_path
from support.waiting import wait_for

PUBLISHING = b"HPUB "
"""What every message begins with that the backend wants stored."""


def wanted() -> bool:
    """Whether tests on a server are to be collected: in CI on one Python only, elsewhere where the driver is."""
    return sys.version_info[:2] == (3, 11) or (not os.environ.get("CI") and find_spec("nats") is not None)


def binary() -> str:
    found = on_path("nats-server") or ("/usr/sbin/nats-server" if Path("/usr/sbin/nats-server").exists() else None)
    if found is None:
        missing("no nats-server on this machine")
    return found


class NatsServer:
    """A server. ``process`` acts on it: ``kill()`` (-9), ``stop()``, ``start()``, ``pause()``, ``resume()``."""

    def __init__(self, folder: Path, name: str = "alone", options: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.port = free_port()
        command = [binary(), "-a", "127.0.0.1", "-p", str(self.port), "-n", name, "-js", "-sd", str(folder / "data")]
        self.process = Server([*command, *options], self.port, folder)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process.start()
        self.wait_until_ready()

    def restart(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        elif self.process.running:
            # It ends with 1 on SIGTERM.
            self.process._executor.stop(expected_returncode=1)  # type: ignore[union-attr]
        self.start()

    def end(self) -> None:
        self.process.kill()

    def wait_until_ready(self) -> None:
        wait_for(self._answers, f"NATS on port {self.port}", patience=60)

    def _answers(self) -> bool:
        return "error" not in (self.api("INFO") or {"error": "none"})

    def api(self, subject: str, payload: Any = None) -> Any:
        """What JetStream's API says, past what is tested; None: nothing."""
        data = b"" if payload is None else json.dumps(payload).encode()
        reply = self.ask(f"$JS.API.{subject}", data)
        return None if reply is None else json.loads(reply)

    def ask(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> bytes | None:
        return asyncio.run(_ask(self.url, subject, data, headers))


async def _ask(url: str, subject: str, data: bytes, headers: dict[str, str] | None) -> bytes | None:
    import nats
    from nats.errors import Error

    async def quiet(_: Exception) -> None:
        pass

    try:
        client = await nats.connect(url, allow_reconnect=False, connect_timeout=5, error_cb=quiet)
    except (OSError, Error, asyncio.TimeoutError):
        return None
    try:
        reply: bytes = (await client.request(subject, data, timeout=5, headers=headers)).data
        return reply
    except (Error, asyncio.TimeoutError):
        return None
    finally:
        await client.close()


class Cluster:
    """Three servers."""

    def __init__(self, folder: Path) -> None:
        routes = [free_port() for _ in range(3)]
        self.nodes = [
            NatsServer(
                folder / f"n{number}",
                f"n{number}",
                (
                    *("--cluster_name", "three", "--cluster", f"nats://127.0.0.1:{port}"),
                    *("--routes", ",".join(f"nats://127.0.0.1:{other}" for other in routes if other != port)),
                ),
            )
            for number, port in enumerate(routes)
        ]

    @property
    def url(self) -> str:
        return "nats://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            if not node.process.running:
                node.process.start()
        for node in self.nodes:
            node.wait_until_ready()
        wait_for(self._takes_streams, "a cluster that takes streams", patience=60)

    def _takes_streams(self) -> bool:
        config = {"name": "PROBE", "subjects": ["probe"], "num_replicas": 3, "storage": "memory"}
        made = self.nodes[0].api("STREAM.CREATE.PROBE", config)
        return bool(made) and "error" not in made and "error" not in (self.nodes[0].api("STREAM.DELETE.PROBE") or {})

    def restart(self) -> None:
        self.end()
        self.start()

    def end(self) -> None:
        for node in self.nodes:
            node.end()

    def api(self, subject: str, payload: Any = None) -> Any:
        for node in self.nodes:
            if node.process.running and (reply := node.api(subject, payload)) is not None:
                return reply
        return None

    def leader(self, stream: str) -> NatsServer:
        def found() -> NatsServer | None:
            info = self.api(f"STREAM.INFO.{stream}") or {}
            name = (info.get("cluster") or {}).get("leader")
            return next((node for node in self.nodes if node.name == name and node.process.running), None)

        leader: NatsServer = wait_for(found, f"a leader of {stream}", patience=60)
        return leader


@contextmanager
def nats_server(folder: Path, options: Sequence[str] = ()) -> Iterator[NatsServer]:
    server = NatsServer(folder, options=options)
    with ExitStack() as stack:
        stack.callback(server.end)
        server.start()
        yield server


@contextmanager
def nats_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    with ExitStack() as stack:
        stack.callback(cluster.end)
        cluster.start()
        yield cluster


def with_accounts(folder: Path, port: int) -> Path:
    """The configuration of a server whose users are known by signatures; those of one are in ``beat.creds`` beside it.

    An operator vouches for accounts, and an account for its users: each is a token that the one above has signed.
    """
    import nkeys

    def pair(kind: int) -> Any:
        return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))

    def name(key: Any) -> str:
        return str(key.public_key.decode())

    def token(subject: Any, by: Any, **claims: Any) -> str:
        body = {"jti": os.urandom(8).hex(), "iat": 1, "iss": name(by), "name": "test", "sub": name(subject)}
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {**body, "nats": {"version": 2, **claims}}]
        text = ".".join(_url_text(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_url_text(by.sign(text.encode()))}"

    operator = pair(nkeys.PREFIX_BYTE_OPERATOR)
    account, system = pair(nkeys.PREFIX_BYTE_ACCOUNT), pair(nkeys.PREFIX_BYTE_ACCOUNT)
    user = pair(nkeys.PREFIX_BYTE_USER)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer"), -1)
    storage = {"mem_storage": -1, "disk_storage": -1, "wildcards": True}
    accounts = {
        name(account): token(account, operator, type="account", limits={**limits, **storage}),
        name(system): token(system, operator, type="account", limits={**limits, "wildcards": True}),
    }
    settings = {
        "listen": f"127.0.0.1:{port}",
        "operator": token(operator, operator, type="operator", system_account=name(system)),
        "system_account": name(system),
        "resolver": "MEMORY",
        "resolver_preload": accounts,
        "jetstream": {"store_dir": str(folder / "data")},
    }
    file = folder / "accounts.conf"
    file.write_text(json.dumps(settings))
    (folder / "beat.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{token(user, account, type='user', subs=-1, data=-1, payload=-1)}\n"
        "------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n"
        f"{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return file


def _url_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
