"""How the conformance kit reaches NATS."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from support.lines import Line
from support.losing import losing_replies
from support.nats_servers import PUBLISHING, Cluster, NatsServer

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.nats import NatsBackend
from celery_anarchon.backends.nats.store import NAME_LIMIT
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness

HOURS_2: Millis = 7_200_000


def open_nats(url: str, options: Mapping[str, Any], app_name: str) -> ClaimBackend:
    client = NatsBackend(url, **options)
    client.open(app_name)
    return client


class NatsHarness(BackendHarness):
    """On a server that the test class starts."""

    replicas: ClassVar[int] = 1
    traits = replace(NatsBackend.traits, horizon=HOURS_2 * 4 // 5)
    server: ClassVar[NatsServer | Cluster]
    """Set by the test class."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lines: list[Line] = []

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for line in self._lines:
            line.close()
        for name in (self.namespace, f"{self.namespace}_HISTORY"):
            self.server.api(f"STREAM.DELETE.{name}")

    def _options(self) -> dict[str, Any]:
        return {"stream": self.namespace, "prefix": f"{self.namespace}.", "replicas": self.replicas}

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        options = {**self._options(), "duplicate_window": HOURS_2 // 1000}
        return partial(open_nats, self.server.url, options, app_name or self.app_name)

    def connect_short(self) -> ClaimBackend:
        options = {**self._options(), "duplicate_window": 3, "early_tolerance": 500}
        client = open_nats(self.server.url, options, self.app_name)
        self._clients.append(client)
        return client

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        subject = f"{self.namespace}.claim.{wire.store_name(job, NAME_LIMIT)}.{slot}"
        reply = self.server.api(f"STREAM.MSG.GET.{self.namespace}", {"last_by_subj": subject})
        assert reply is not None, "no answer"
        if "error" in reply:
            assert reply["error"]["err_code"] == 10037, reply
            return None
        return dict(json.loads(base64.b64decode(reply["message"]["data"])))

    def raw_forge_layout(self, version: int) -> None:
        config = self.server.api(f"STREAM.INFO.{self.namespace}")["config"]
        old, new = (f'"layout": {number}' for number in (wire.LAYOUT_VERSION, version))
        config["description"] = config["description"].replace(old, new)
        assert "error" not in self.server.api(f"STREAM.UPDATE.{self.namespace}", config)

    def restart(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.server.restart()

    def through_lines(self, client: Any) -> list[Line]:
        """All of *client* goes over lines from now on."""
        if not self._lines:
            nodes = self.server.nodes if isinstance(self.server, Cluster) else [self.server]
            self._lines = [Line(node.port, PUBLISHING) for node in nodes]
        places = [f"nats://127.0.0.1:{line.port}" for line in self._lines]
        if client._connection.servers[0] not in places:
            client._connection.servers = places
            client._connection.close()
            client._connection.reopen()
            client.now()
        return self._lines

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        lines = self.through_lines(client)
        for line in lines:
            line.cut()
        try:
            yield
        finally:
            for line in lines:
                line.mend()

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        return losing_replies(self.through_lines(client))


class ClusterHarness(NatsHarness):
    replicas: ClassVar[int] = 3

    def restart(self) -> None:
        """Servers that are up elect a leader for each stream; until then nobody answers for it."""
        super().restart()
        assert isinstance(self.server, Cluster)
        for stream in (self.namespace, f"{self.namespace}_HISTORY"):
            self.server.leader(stream)
