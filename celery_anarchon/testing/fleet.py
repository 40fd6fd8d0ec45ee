"""Real beats and real workers for tests: started, frozen, killed, stopped, restarted; and their messages, read past the
product.

    settings = filesystem_broker(workdir / "broker")           # what the app "myapp" is to set, among others
    with Fleet("myapp", workdir, {"MY_VARIABLE": "1"}) as fleet:
        one, two = fleet.beat("one"), fleet.beat("two")
        one.wait_for_log("beat: Waking up")                    # it has ticked; beats run with -l DEBUG
        one.freeze(); one.thaw(); one.kill(); one.restart(); two.stop()
    events = events_of(filesystem_messages(workdir / "broker"))
    verdict = judge([("job", slot) for slot in expected_interval(...)], events)

Belongs here: tooling for processes and messages. Does not belong here: what a test wants to see, and any knowledge of
the store.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from celery_anarchon.cli.processes import (
    ManagedProcess,
    NotInTime,
    ProcessGroup,
    celery_command,
    clean_environment,
    wait_until,
)
from celery_anarchon.verdict import Event, event_of

__all__ = [
    "Fleet",
    "ManagedProcess",
    "Message",
    "NotInTime",
    "amqp_messages",
    "decode_message",
    "events_of",
    "filesystem_broker",
    "filesystem_messages",
    "redis_messages",
    "sqlite_messages",
    "wait_until",
]

_HALF_WRITTEN = 5.0
"""Seconds after which a message file that is no JSON counts as broken, not as being written just now."""


class Fleet(ProcessGroup):
    """Processes of one Celery app. A context manager: none of them outlives it.

    :param app_module: what ``celery -A`` takes. It must be importable from *workdir* or PYTHONPATH.
    :param workdir: where they run and log (``<name>.log``).
    :param env: environment variables for all of them, beside this process's own without its ``CELERY_*``.
    """

    def __init__(self, app_module: str, workdir: Path, env: Mapping[str, str] | None = None) -> None:
        super().__init__(workdir, clean_environment(**(env or {})))
        self.app_module = app_module

    def __enter__(self) -> Fleet:
        return self

    def beat(
        self,
        name: str,
        *args: str,
        scheduler: str | None = "celery_anarchon.Scheduler",
        loglevel: str = "DEBUG",
        **env: str,
    ) -> ManagedProcess:
        """Start ``celery beat``. *scheduler* None: what the app says."""
        chosen = () if scheduler is None else ("-S", scheduler)
        return self.celery(name, "beat", *chosen, "-l", loglevel, *args, **env)

    def worker(self, name: str, *args: str, pool: str = "solo", loglevel: str = "INFO", **env: str) -> ManagedProcess:
        """Start ``celery worker``, without the chatter between workers, which a file-system broker is too slow for."""
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        return self.celery(name, "worker", "-n", f"{name}@%h", "-P", pool, "-l", loglevel, *quiet, *args, **env)

    def celery(self, name: str, *arguments: str, **env: str) -> ManagedProcess:
        """Start any ``celery`` command of the app."""
        return self.start(name, celery_command(self.app_module, *arguments), **env)


# --- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Message:
    """A task message as it lay in the broker."""

    task_id: str
    task: str
    headers: Mapping[str, Any]
    body: Any
    """Celery's [args, kwargs, embed]."""
    properties: Mapping[str, Any]
    envelope: Mapping[str, Any]
    """All of it, as kombu wrote it."""

    @property
    def run(self) -> Mapping[str, Any] | None:
        """The ``anarchon`` header."""
        found = self.headers.get("anarchon")
        return found if isinstance(found, Mapping) else None


def decode_message(payload: str | bytes) -> Message:
    """A message out of the JSON envelope of kombu's virtual transports (Redis, file system, SQLAlchemy, memory).

    :raises ValueError: no such envelope.
    """
    return _message(json.loads(payload))


def _message(envelope: Any) -> Message:
    try:
        headers, properties = envelope["headers"], envelope["properties"]
        raw = envelope["body"]
        if properties.get("body_encoding") == "base64":
            raw = base64.b64decode(raw)
        return Message(
            task_id=headers["id"],
            task=headers["task"],
            headers=headers,
            body=json.loads(raw) if envelope["content-type"] == "application/json" else raw,
            properties=properties,
            envelope=envelope,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no task message: {error!r} in {envelope!r}") from error


def events_of(messages: Iterable[Message]) -> list[Event]:
    """What messages say to :func:`celery_anarchon.verdict.judge`; messages of nobody's slot say nothing."""
    return [event for message in messages if (event := event_of(message.headers)) is not None]


def filesystem_broker(folder: Path, queue: str = "celery") -> dict[str, Any]:
    """Make a file-system broker in *folder*; the Celery settings that use it.

    For beats alone. A worker on it may take a message that is only half written, and dies of that: where workers run,
    take ``sqla+sqlite:///``, and :func:`sqlite_messages`. The queue is bound beforehand, because kombu's own first
    declaration writes a file that another process may read half-done, too. Messages lie in ``<folder>/queue``, those
    that a worker took in ``<folder>/processed``.
    """
    for name in ("queue", "processed", "control"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "control" / f"{queue}.exchange").write_text(json.dumps([[queue, "", queue]]))
    return {
        "broker_url": "filesystem://",
        "broker_transport_options": {
            "data_folder_in": str(folder / "queue"),
            "data_folder_out": str(folder / "queue"),
            "processed_folder": str(folder / "processed"),
            "store_processed": True,
            "control_folder": str(folder / "control"),
            "polling_interval": 0.1,
        },
        "task_default_queue": queue,
    }


def filesystem_messages(folder: Path, queue: str = "celery", *, processed: bool = True) -> list[Message]:
    """All messages of a broker made by :func:`filesystem_broker`, oldest first as far as milliseconds tell.

    *processed*: with those that a worker took. A worker that stops puts what it has taken and not run back, as a new
    file: look before that.

    :raises ValueError: a file that is no message, and not just being written.
    """
    found: dict[str, Message] = {}
    places = ["queue", "processed"] if processed else ["queue"]
    for place in places:
        for path in (folder / place).glob(f"*.{queue}.msg"):
            message = _read_settled(path)
            if message is not None:
                # A file that moves while we look is seen in both places, under one name.
                found[path.name] = message
    return [found[name] for name in sorted(found, key=lambda name: int(name.partition("_")[0]))]


def _read_settled(path: Path) -> Message | None:
    deadline = time.monotonic() + _HALF_WRITTEN
    while True:
        try:
            return decode_message(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise ValueError(f"{path}: {error}") from error
        time.sleep(0.01)


def sqlite_messages(path: Path) -> list[Message]:
    """All messages of the broker ``sqla+sqlite:///path``, oldest first, those included that a worker has taken: kombu
    only marks them."""
    with closing(sqlite3.connect(path, timeout=30)) as broker:
        rows = broker.execute("SELECT payload FROM kombu_message ORDER BY id").fetchall()
    return [decode_message(payload) for (payload,) in rows]


class RedisClient(Protocol):
    """The two calls that :func:`redis_messages` makes."""

    def keys(self, pattern: str) -> Any: ...

    def lrange(self, name: Any, start: int, end: int) -> Any: ...


def redis_messages(client: RedisClient, queue: str = "celery") -> list[Message]:
    """The messages that wait in a Redis broker's list and in its lists for other priorities, oldest first in each."""
    keys = [queue, *sorted(client.keys(f"{queue}\x06\x16[0-9]*"))]
    return [decode_message(payload) for key in keys for payload in reversed(client.lrange(key, 0, -1))]


class AmqpChannel(Protocol):
    """The one call that :func:`amqp_messages` makes."""

    def basic_get(self, queue: str) -> Any: ...


def amqp_messages(channel: AmqpChannel, queue: str = "celery") -> list[Message]:
    """The messages that wait in an AMQP broker's queue, oldest first. They are taken and not acknowledged: close the
    channel afterwards, and they are back; until then nobody else sees them.

    :param channel: one of py-amqp's, for this look alone.

    :raises ValueError: one that is no task message.
    """
    found = []
    while (message := channel.basic_get(queue)) is not None:
        properties = dict(message.properties)
        headers = properties.pop("application_headers", {})
        envelope = {
            "body": message.body if isinstance(message.body, str) else bytes(message.body).decode("utf-8", "replace"),
            "headers": headers,
            "properties": properties,
            "content-type": properties.get("content_type"),
        }
        found.append(_message(envelope))
    return found
