"""How the conformance kit reaches RabbitMQ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from support.lines import Line
from support.losing import losing_replies
from support.rabbitmq_servers import PUBLISHING, RabbitServer, lead_through
from support.waiting import wait_for

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.rabbitmq import RabbitMQBackend
from celery_anarchon.backends.rabbitmq.claims import Names
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness

HOURS_2: Millis = 7_200_000


def open_rabbitmq(url: str, options: Mapping[str, Any], app_name: str) -> ClaimBackend:
    client = RabbitMQBackend(url, **options)
    client.open(app_name)
    return client


class QueueHarness(BackendHarness):
    """On a server that the test class starts."""

    strategy: ClassVar[str] = "queue"
    traits = replace(RabbitMQBackend.traits, horizon=HOURS_2 * 4 // 5)
    server: ClassVar[RabbitServer]
    """Set by the test class."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.names = Names(self.namespace)
        self._line: Line | None = None
        self._led: list[Any] = []
        """Clients that go over it."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._line is not None:
            self._line.close()

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        options = {"prefix": self.namespace, "strategy": self.strategy, "slot_ttl": HOURS_2 // 1000}
        return partial(open_rabbitmq, self.server.url, options, app_name or self.app_name)

    def connect_short(self) -> ClaimBackend:
        options = {"prefix": self.namespace, "strategy": self.strategy, "slot_ttl": 3, "early_tolerance": 500}
        client = open_rabbitmq(self.server.url, options, self.app_name)
        self._clients.append(client)
        return client

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        messages = self.server.messages(self.names.slot(job, slot))
        return None if messages is None else {"messages": messages}

    def raw_forge_layout(self, version: int) -> None:
        entry = json.loads(self.server.stream(self.names.meta)[0])
        self.server.delete(self.names.meta)
        with self.server.client() as link:
            link.channel().queue_declare(
                self.names.meta, durable=True, auto_delete=False, arguments={"x-queue-type": "stream"}
            )
        self.server.put(self.names.meta, json.dumps({**entry, "layout": version}))

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.server.write_down_streams()
        self.server.restart(kill=True)
        # Streams come up after the listeners.
        wait_for(self._opens, "a namespace that is back", patience=120)

    def _opens(self) -> bool:
        with suppress(BackendUnavailable, OutcomeUnknown):
            self.connect_spec()().close()
            return True
        return False

    def through_line(self, client: Any) -> Line:
        """All of *client* goes over a line from now on."""
        if self._line is None:
            self._line = Line(self.server.port, PUBLISHING)
        if client not in self._led:
            self._led.append(client)
            lead_through(client, self._line.port)
            client._source.close()
            client._source.closed = False
            client.now()
        return self._line

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        line = self.through_line(client)
        line.cut()
        try:
            yield
        finally:
            line.mend()

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        return losing_replies([self.through_line(client)])


class StreamHarness(QueueHarness):
    strategy: ClassVar[str] = "stream"
    traits = replace(QueueHarness.traits, knows_owner=True)

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        entries: list[dict[str, Any]] = [json.loads(data) for data in self.server.stream(self.names.claims)]
        return next((entry for entry in entries if (entry["job"], entry["slot"]) == (job, slot)), None)
