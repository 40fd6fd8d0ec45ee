"""RabbitMQ servers of a test's own: a node in a folder, on ports of its own, with an epmd and a cookie of its own.

The binaries are those of this machine. Debian's wrappers switch to the user of the service, so what they lead to is
started itself. Everything ends with the test, and nothing of the machine's own service is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import amqp
from servers import Server, free_port, missing, on_path
from support.waiting import wait_for

PUBLISHING = b"\x00\x3c\x00\x28"
"""What is in the frame of every message that a client publishes."""


def lead_through(client: Any, port: int) -> None:
    """Whatever *client* connects to from now on, it does through this local port."""
    for template in client._source.address._templates:
        template.hostname, template.port = "127.0.0.1", port


def wanted() -> bool:
    """Whether tests on a server are to be collected: in CI on one Python only."""
    return sys.version_info[:2] == (3, 11) or not os.environ.get("CI")


def find_scripts() -> Path | None:
    """The folder of ``rabbitmq-server`` and ``rabbitmqctl``, behind whatever wrappers there are."""
    found = on_path("rabbitmq-server") or "/usr/sbin/rabbitmq-server"
    folder = Path(found).resolve().parent
    return folder if (folder / "rabbitmq-server").exists() else None


class RabbitServer:
    """A node. ``process`` acts on it: ``kill()`` (-9), ``stop()``, ``start()``, ``pause()``, ``resume()``, ``pid``,
    ``log``; after a ``start()`` wait until it is ready, or use :meth:`restart`."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        scripts = find_scripts()
        if scripts is None:
            missing("no rabbitmq-server on this machine")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, distribution, names = free_port(), free_port(), free_port()
        home = folder / "home"
        home.mkdir(exist_ok=True)
        settings = folder / "rabbitmq.conf"
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            # Of the machine's memory only the test's own alarms are to be seen.
            "vm_memory_high_watermark.absolute = 2GB",
            "disk_free_limit.absolute = 1MB",
            *options,
        ]
        settings.write_text("\n".join(lines) + "\n")
        environment = {
            "HOME": str(home),
            "RABBITMQ_NODENAME": f"t{uuid.uuid4().hex[:8]}@localhost",
            "RABBITMQ_CONFIG_FILE": str(settings.with_suffix("")),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # The script becomes the node itself, instead of a shell beside it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        self._environment = {**os.environ, **environment}
        self._control = str(scripts / "rabbitmqctl")
        pairs = [f"{name}={value}" for name, value in environment.items()]
        # Erlang's name server: it would be started by the node, and outlive it.
        self._names = Server(["epmd", "-port", str(names), "-address", "127.0.0.1"], names, folder)
        self.process = Server(["env", *pairs, str(scripts / "rabbitmq-server"), "-noinput"], self.port, folder)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        if not self._names.running:
            self._names.start()
        self.process.start()
        self.wait_until_ready()

    def restart(self, *, kill: bool = False) -> None:
        """*kill*: -9, so what it had not written is lost."""
        if kill:
            self.process.kill()
        else:
            self.process.stop()
        self.start()

    def write_down_streams(self) -> None:
        """Before a kill: RabbitMQ 3.10 writes down half a second later that it has made a stream, and says nothing of
        it. Killed before that, none of them comes back."""
        for _ in range(4):
            time.sleep(0.5)
            with self.client():
                # It was not asleep itself.
                pass

    def end(self) -> None:
        self.process.kill()
        self._names.kill()

    def wait_until_ready(self) -> None:
        wait_for(self._answers, f"RabbitMQ on port {self.port}", patience=120)

    def _answers(self) -> bool:
        with suppress(OSError, amqp.AMQPError), self.client():
            return True
        return False

    @contextmanager
    def client(self, vhost: str = "/", port: int | None = None) -> Iterator[Any]:
        """A connection of py-amqp, to look past what is tested."""
        link = amqp.Connection(
            f"127.0.0.1:{port or self.port}", virtual_host=vhost, connect_timeout=10, read_timeout=30, write_timeout=30
        )
        try:
            link.connect()
        except BaseException:
            # py-amqp leaves the socket open.
            link.collect()
            raise
        with closing(link):
            yield link

    def messages(self, queue: str) -> int | None:
        """How many messages lie in a queue; None: there is no such queue."""
        with self.client() as link, closing(link.channel()) as channel:
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except amqp.NotFound:
                return None

    def stream(self, name: str) -> list[bytes]:
        """All that is in a stream. The server answers in order: a question with nothing before its answer found the
        end."""
        arrived: list[Any] = []
        with self.client() as link, closing(link.channel()) as channel:
            channel.basic_qos(0, 60_000, False)
            try:
                channel.basic_consume(name, callback=arrived.append, arguments={"x-stream-offset": "first"})
                before = -1
                while len(arrived) > before:
                    before = len(arrived)
                    channel.queue_declare(name, passive=True)
            except amqp.NotFound:
                # The channel is gone with it.
                pass
        bodies = [message.body for message in arrived]
        return [body if isinstance(body, bytes) else body.encode() for body in bodies]

    def put(self, queue: str, body: str) -> None:
        with self.client() as link, closing(link.channel()) as channel:
            channel.confirm_select()
            channel.basic_publish_confirm(amqp.Message(body, delivery_mode=2), routing_key=queue, mandatory=True)

    def delete(self, queue: str) -> None:
        with self.client() as link, closing(link.channel()) as channel:
            channel.queue_delete(queue)

    def control(self, *words: str) -> str:
        """``rabbitmqctl`` with these words; what it said. Takes a second or two."""
        command = [self._control, *words]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def memory_alarm(self) -> Iterator[None]:
        """Meanwhile the node is "out of memory": it reads nothing more from connections that publish."""
        self.control("set_vm_memory_high_watermark", "absolute", "1MB")
        try:
            yield
        finally:
            self.control("set_vm_memory_high_watermark", "absolute", "2GB")


@contextmanager
def rabbitmq_server(folder: Path, options: Sequence[str] = ()) -> Iterator[RabbitServer]:
    """A private node. *options*: further lines of ``rabbitmq.conf``."""
    server = RabbitServer(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.end()
