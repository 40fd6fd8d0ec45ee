"""Real servers for tests: private ones on free ports, or those that the environment names.

``ANARCHON_TEST_REDIS_URL`` points tests at a Redis of yours, which they neither flush nor stop. Otherwise the binary on
PATH is started. Where there is neither, the test is skipped, and failed when CI is set.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest
from mirakuru import TCPExecutor

START_TIMEOUT = 120
"""Seconds. An Erlang node takes five of them on an idle machine, and many times that on a busy one."""


def missing(text: str) -> NoReturn:
    """There is no such server here."""
    if os.environ.get("CI"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


_PORTS_EACH = 2_000
_FIRST_PORT = 15_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8 * _PORTS_EACH
"""Each worker of xdist has ports of its own."""
_ports: Iterator[int] = iter(random.sample(range(_FIRST_PORT, _FIRST_PORT + _PORTS_EACH), _PORTS_EACH))


def free_port() -> int:
    """A port that nobody listens on just now, that was not given before, and that is below those that the system gives
    to connections that go out: a server that is away for a while finds it free."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def on_path(name: str) -> str | None:
    """A program of this machine, not of the tests' own environment: wheels put older servers there."""
    own = {str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent)}
    path = os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part not in own)
    return shutil.which(name, path=path)


class Server:
    """A server process of a test."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self.port = port
        self.log = folder / "server.log"
        self._command = command
        self._folder = folder
        self._executor: TCPExecutor | None = None

    def start(self) -> None:
        """Start it, anew if it has ended; returns when it accepts connections."""
        assert not self.running, f"it runs already, as {self.pid}"
        with self.log.open("ab") as log, warnings.catch_warnings():
            # mirakuru forks, which Python 3.12 and later do not like beside threads. The child runs one system call.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded")
            self._executor = TCPExecutor(
                self._command,
                host="127.0.0.1",
                port=self.port,
                timeout=START_TIMEOUT,
                sleep=0.02,
                cwd=str(self._folder),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._executor.start()

    @property
    def running(self) -> bool:
        return self._executor is not None and self._executor.running()

    @property
    def pid(self) -> int:
        assert self._executor is not None and self._executor.process is not None
        return self._executor.process.pid

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: what it had not written is lost."""
        if self._executor is not None:
            self._executor.kill()

    def stop(self) -> None:
        """SIGTERM: it may write what it has."""
        if self._executor is not None and self.running:
            self.resume()
            self._executor.stop(signal.SIGTERM, expected_returncode=0)

    def restart(self) -> None:
        """Stop and start: what the server keeps is there again."""
        self.stop()
        self.start()


class RedisServer:
    """A Redis to talk to. What acts on the process is there for a private one only."""

    def __init__(self, url: str, process: Server | None = None) -> None:
        self.url = url
        self._process = process

    @property
    def process(self) -> Server:
        """``pause()``, ``resume()``, ``kill()``, ``stop()``, ``start()``, ``restart()``, ``pid``, ``log``."""
        assert self._process is not None, "not ours to stop: ask for a private server"
        return self._process


@contextmanager
def redis_server(folder: Path, *, private: bool = False, options: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    """A Redis: that of ANARCHON_TEST_REDIS_URL, unless *private*; else the binary on PATH, with an append-only file in
    *folder* so that a restart keeps what was written.

    :param options: further command-line options of the server.
    """
    url = os.environ.get("ANARCHON_TEST_REDIS_URL")
    if url and not private:
        yield RedisServer(url)
        return
    binary = on_path("redis-server")
    if binary is None:
        missing("no redis-server on PATH" + ("" if private else " and no ANARCHON_TEST_REDIS_URL"))
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    server = Server([*command, "--appendonly", "yes", "--appendfsync", "always", *options], port, folder)
    server.start()
    try:
        yield RedisServer(f"redis://127.0.0.1:{port}/0", server)
    finally:
        server.stop()
