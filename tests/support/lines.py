"""Lines to a server that can be cut, that lose replies, and that hold them back."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from servers import free_port


class Line:
    """Connections to a local port go through here.

    :param mark: bytes that are in every write. After one, :attr:`losing` takes away the reply, and the connection.
    """

    def __init__(self, target: int, mark: bytes) -> None:
        self._target = target
        self._mark = mark
        self._listener: socket.socket | None = None
        self._ends: list[socket.socket] = []
        self._free = threading.Event()
        self._free.set()
        self.losing = False
        self.lost = 0
        self.port = free_port()
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Nobody listens any more, and what was connected is closed."""
        if self._listener is not None:
            # A close alone does not wake the thread that accepts.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for end in self._ends:
            _end(end)
        self._ends.clear()

    def close(self) -> None:
        self.release()
        self.cut()

    def hold(self) -> None:
        """What the server says from now on waits here; the connections stay."""
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                _end(client)
                continue
            self._ends += [client, server]
            asked = bytearray()
            threading.Thread(target=self._up, args=(client, server, asked), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client, asked), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                asked += data
                server.sendall(data)
        _end(client)
        _end(server)

    def _down(self, server: socket.socket, client: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                self._free.wait()
                if self.losing and self._mark in asked:
                    self.lost += 1
                    break
                asked.clear()
                client.sendall(data)
        _end(server)
        _end(client)


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
