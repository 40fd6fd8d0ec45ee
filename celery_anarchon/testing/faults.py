"""A line between a client and a server that a test can cut, reset, freeze and slow down, and that can lose replies.

    with Proxy(6379) as line:                        # clients connect to 127.0.0.1, line.port
        line.losing = True                           # what was asked is done, and the reply does not come
        ...
        line.losing = False

A backend's harness uses it for ``unreachable`` (:meth:`Proxy.cut`) and ``reply_lost`` (:attr:`Proxy.losing`), and tests
with real beats use all of it. TCP only, and of the protocol it knows nothing: what counts as a reply that may be lost
is the caller's to say.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Proxy"]

_PIECE = 1 << 16


def _any_reply(asked: bytes, reply: bytes) -> bool:
    return True


class Proxy:
    """A line to a server. A context manager.

    :param target: the server's port on this host, or (host, port).
    :param may_lose: given what a client has sent since the last reply and the first piece of the reply, whether that is
        one to lose while :attr:`losing` is set. Default: any. For a claim to be lost *after* it was applied, name the
        calls that write.
    """

    def __init__(self, target: int | tuple[str, int], *, may_lose: Callable[[bytes, bytes], bool] = _any_reply) -> None:
        self._target = ("127.0.0.1", target) if isinstance(target, int) else target
        self._may_lose = may_lose
        self._listener: socket.socket | None = None
        self._lines: list[socket.socket] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self.losing = False
        """While set, a connection whose reply counts is closed instead of given the reply."""
        self.lost = 0
        """How many replies were lost so far."""
        self.delay = 0.0
        """Seconds that each piece waits, in each direction."""
        self.port = 0
        self.mend()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- faults -------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Nobody listens any more, and what was connected is closed."""
        if self._listener is not None:
            # A close alone does not wake the thread that accepts.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self._end_all()

    def mend(self) -> None:
        """Listen again, on the same port."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
            self.port = self._listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def reset(self) -> None:
        """Break what is connected with a reset, as a firewall does; new connections are taken."""
        for line in self._lines:
            # Lingering for no time: the close is a reset, and what was under way is thrown away.
            with suppress(OSError):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._end_all()

    def freeze(self) -> None:
        """Connections stay, and are taken; nothing flows, in either direction."""
        self._flowing.clear()

    def thaw(self) -> None:
        """What has been waiting since :meth:`freeze` flows on."""
        self._flowing.set()

    def close(self) -> None:
        """For good. Repeatable."""
        self.cut()
        self.thaw()

    # --- the line -----------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        for line in self._lines:
            _end(line)
        self._lines.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self._lines += [client, server]
            asked = bytearray()
            threading.Thread(target=self._up, args=(client, server, asked), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client, asked), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := client.recv(_PIECE):
                self._hold_up()
                asked += data
                server.sendall(data)
        _end(client)
        _end(server)

    def _down(self, server: socket.socket, client: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := server.recv(_PIECE):
                self._hold_up()
                if self.losing and self._may_lose(bytes(asked), data):
                    self.lost += 1
                    break
                asked.clear()
                client.sendall(data)
        _end(server)
        _end(client)

    def _hold_up(self) -> None:
        self._flowing.wait()
        if self.delay:
            threading.Event().wait(self.delay)


_AT_ONCE = struct.pack("ii", 1, 0)


def _end(line: socket.socket) -> None:
    with suppress(OSError):
        resets = line.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_AT_ONCE)) == _AT_ONCE
        # Wakes who waits for it. The other half would say goodbye, and then the close would be no reset.
        line.shutdown(socket.SHUT_RD if resets else socket.SHUT_RDWR)
    line.close()
