"""The line of the test kit: each fault is what it says, towards a server that only echoes."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_anarchon.testing.faults import Proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1024):
            server = self.server
            assert isinstance(server, Server)
            server.heard.append(data)
            self.request.sendall(data)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.heard: list[bytes] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def line(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port, may_lose=lambda asked, reply: asked.startswith(b"write")) as line:
        yield line


def connect(line: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", line.port), timeout=20)


def talk(link: socket.socket, words: bytes) -> bytes:
    link.sendall(words)
    return link.recv(1024)


def test_what_is_said_arrives(line: Proxy) -> None:
    with closing(connect(line)) as link:
        assert talk(link, b"hello") == b"hello"
        assert talk(link, b"again") == b"again"


def test_a_lost_reply_was_done(line: Proxy, server: Server) -> None:
    with closing(connect(line)) as link:
        line.losing = True
        assert talk(link, b"read") == b"read"
        assert talk(link, b"write") == b""
        assert server.heard == [b"read", b"write"]
        assert line.lost == 1
        line.losing = False
    with closing(connect(line)) as link:
        assert talk(link, b"write") == b"write"


def test_a_cut_line_refuses_until_it_is_mended(line: Proxy) -> None:
    with closing(connect(line)) as link:
        assert talk(link, b"hello") == b"hello"
        line.cut()
        assert link.recv(1024) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(line)
    line.mend()
    line.mend()
    with closing(connect(line)) as link:
        assert talk(link, b"hello") == b"hello"


def test_a_reset_is_no_goodbye(line: Proxy) -> None:
    with closing(connect(line)) as link:
        assert talk(link, b"hello") == b"hello"
        line.reset()
        with pytest.raises(ConnectionResetError):
            link.recv(1024)
    with closing(connect(line)) as link:
        assert talk(link, b"hello") == b"hello"


def test_a_frozen_line_takes_connections_and_nothing_flows(line: Proxy, server: Server) -> None:
    with closing(connect(line)) as old:
        assert talk(old, b"hello") == b"hello"
        line.freeze()
        with closing(connect(line)) as new:
            for link in (old, new):
                link.sendall(b"later")
                link.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    link.recv(1024)
            assert server.heard == [b"hello"]
            line.thaw()
            for link in (old, new):
                link.settimeout(20)
                assert link.recv(1024) == b"later"


def test_a_slow_line_only_delays(line: Proxy) -> None:
    line.delay = 0.3
    with closing(connect(line)) as link:
        link.settimeout(0.2)
        link.sendall(b"hello")
        with pytest.raises(TimeoutError):
            link.recv(1024)
        link.settimeout(20)
        assert link.recv(1024) == b"hello"


def test_a_server_that_is_away_ends_the_connection(line: Proxy, server: Server) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = probe.getsockname()[1]
    with Proxy(nobody) as other, closing(connect(other)) as link:
        assert link.recv(1024) == b""
