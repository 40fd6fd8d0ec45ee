"""How the kit reaches the store, breaks it, and looks past the backend. Processes of its races import this module."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from anarchon_folder import FolderBackend, _name

from celery_anarchon.backends import ClaimBackend
from celery_anarchon.model import Millis
from celery_anarchon.testing import BackendHarness


def open_folder(folder: Path, namespace: str, app_name: str) -> FolderBackend:
    client = FolderBackend(folder, namespace)
    client.open(app_name)
    return client


class FolderHarness(BackendHarness):
    traits = FolderBackend.traits

    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        return partial(open_folder, self.directory, self.namespace, app_name or self.app_name)

    @property
    def files(self) -> Path:
        return self.directory / self.namespace

    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        found: dict[str, Any] = {}
        for part in ("claim", "end"):
            file = self.files / f"{_name(job, slot)}.{part}"
            if file.exists():
                found[part] = json.loads(file.read_text())
        return found or None

    def connect_short(self) -> ClaimBackend:
        client = FolderBackend(self.directory, f"{self.namespace}-short", horizon=0.4)
        client.open(self.app_name)
        self._clients.append(client)
        return client

    def raw_forge_layout(self, version: int) -> None:
        meta = self.files / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "layout": version}))

    def restart(self) -> None:
        """There is no server; what ends is every client."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    @contextmanager
    def unreachable(self, client: ClaimBackend) -> Iterator[None]:
        away = self.directory / "away"
        self.files.rename(away)
        try:
            yield
        finally:
            away.rename(self.files)

    @contextmanager
    def reply_lost(self, client: ClaimBackend) -> Iterator[None]:
        """The disk fails after the name was made."""

        def fail() -> None:
            raise OSError(errno.EIO, "Input/output error")

        client._sync = fail  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del client._sync  # type: ignore[attr-defined]
