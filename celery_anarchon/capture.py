"""What kombu's Redis transport would write for a message, taken down instead of written; and whether that is so.

The transport's own code decides which keys and which bytes: only the client that it writes with is another one while a
message is made. Nothing is changed in kombu between two messages.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.transport import redis as transport
from redis import Redis

from celery_anarchon.backends.base import Command
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.publishing import NotOneStep

PRIVATE_MILLIS = 60_000
"""What is written to find something out is gone after that, should it not be deleted."""

_LAST_PRIORITY = 9


class _Recorder:
    """Stands in for the transport's client, and for its pipelines."""

    def __init__(self, prefixed: Any, commands: list[Command]) -> None:
        self._prefixed = prefixed
        self._commands = commands

    def lpush(self, key: str, payload: str) -> None:
        self._note("LPUSH", key, payload)

    def pexpire(self, key: str, millis: int) -> Any:
        self._note("PEXPIRE", key, millis)
        return self

    def publish(self, topic: str, payload: str) -> None:
        self._note("PUBLISH", topic, payload)

    def pipeline(self, *_: Any, **__: Any) -> _Recorder:
        return self

    def execute(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise NotOneStep(f"this kombu writes messages in a way that is not known here ({name})")

    def _note(self, *command: Any) -> None:
        self._commands.append(tuple(self._prefixed(command)))


class Capture:
    """Of one channel.

    :raises NotOneStep: it is not one of the Redis transport.
    """

    def __init__(self, channel: Any) -> None:
        if not isinstance(channel, transport.Channel) or isinstance(channel, transport.SentinelChannel):
            raise NotOneStep(f"messages are written by {type(channel).__module__}, not by kombu's Redis transport")
        self._channel = channel
        # With a key prefix its client changes each command on the way.
        self._prefixed = getattr(channel.client, "_prefix_args", None) or (lambda command: command)

    @contextmanager
    def recording(self) -> Iterator[list[Command]]:
        """Within: what the channel would write for messages is in the list, and not written. What it reads is read."""
        channel: Any = self._channel
        commands: list[Command] = []
        recorder = _Recorder(self._prefixed, commands)

        @contextmanager
        def to_recorder(*_: Any, **__: Any) -> Iterator[_Recorder]:
            yield recorder

        def noting(put: Any) -> Any:
            def noted(*args: Any, **kwargs: Any) -> Any:
                channel.conn_or_acquire = to_recorder
                try:
                    return put(*args, **kwargs)
                finally:
                    del channel.conn_or_acquire

            return noted

        channel._put, channel._put_fanout = noting(channel._put), noting(channel._put_fanout)
        try:
            yield commands
        finally:
            del channel._put, channel._put_fanout

    # --- is it so? ----------------------------------------------------------------------------------------------------

    def check_server(self, store: OneStepBackend) -> None:
        """The store writes a key of its own, and the broker reads it.

        :raises NotOneStep: it does not.
        """
        token = secrets.token_hex(16)
        key = f"{store.namespace}one-step:{token}"
        _write(store, (("SET", key, token, "PX", PRIVATE_MILLIS),))
        broker = self._broker()
        found = broker.get(key)
        broker.delete(key)
        if found not in (token, token.encode()):
            raise NotOneStep("broker and store are not one database of one server")

    def check_layout(self, store: OneStepBackend, producer: Any) -> None:
        """Send to a queue that nobody reads, in both ways, and compare what stands there.

        :raises NotOneStep: it is not the same.
        """
        queue = f"{store.namespace}one-step:{secrets.token_hex(16)}"
        for options in ({}, {"priority": _LAST_PRIORITY}):
            self._check_queue(store, producer, queue, {"routing_key": queue, "exchange": "", **options})

    def _check_queue(self, store: OneStepBackend, producer: Any, queue: str, options: dict[str, Any]) -> None:
        broker = self._broker()
        with self.recording() as commands:
            producer.publish({"is": "a test"}, retry=False, **options)
        keys = [str(command[1]) for command in commands if command[0] == "LPUSH"]
        try:
            # First what expires: so all of it does.
            _write(store, (*commands, *(("PEXPIRE", key, PRIVATE_MILLIS) for key in keys)))
            producer.publish({"is": "a test"}, retry=False, **options)
            found = [broker.lrange(key, 0, -1) for key in keys]
        finally:
            if keys:
                broker.delete(*keys)
        if len(found) != 1 or len(found[0]) != 2 or _without_tag(found[0][0]) != _without_tag(found[0][1]):
            raise NotOneStep(f"this kombu writes messages in a way that is not known here ({queue})")

    def _broker(self) -> Any:
        """Its own client would prefix some commands, and others not."""
        return Redis(connection_pool=self._channel.pool)


def _write(store: OneStepBackend, commands: tuple[Command, ...]) -> None:
    if not store.write(commands):
        raise NotOneStep("the store does not take what the broker's client writes: its user may not write those keys")


def _without_tag(payload: bytes) -> bytes:
    tag = json.loads(payload)["properties"]["delivery_tag"]
    return payload.replace(json.dumps(tag).encode(), b'""')
