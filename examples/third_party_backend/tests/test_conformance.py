"""What celery-anarchon asks of every backend: one harness, and the suite that fits the traits."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anarchon_folder import DAY, HORIZON, FolderBackend, _name

from celery_anarchon.backends import ClaimBackend, backend_from_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing import BackendHarness, ClaimSuite
from celery_anarchon.testing.harness import claim, confirm, record


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


class TestFolder(ClaimSuite):
    harness_class = FolderHarness


# --- what only this backend has ---------------------------------------------------------------------------------------


def test_a_url_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    backend = backend_from_url(f"folder://{tmp_path}/claims?namespace=billing")
    assert isinstance(backend, FolderBackend)
    assert backend.describe() == f"folder {tmp_path}/claims, namespace billing"
    with pytest.raises(ConfigurationError, match="unknown option 'namespase'"):
        backend_from_url(f"folder://{tmp_path}?namespase=billing")


def test_beyond_the_horizon_slots_are_too_old_and_their_files_go(tmp_path: Path) -> None:
    client = open_folder(tmp_path, "cron", "app")
    old = client.now() - HORIZON - 2 * DAY
    (client.folder / f"{_name('job', old)}.claim").write_text("{}")
    assert claim(client, "job", old, "a") is Answer.TOO_OLD
    assert not list(client.folder.glob("*.claim"))
    record(client, "job", old)
    assert client.history("job", 10) == []
    assert claim(client, "job", client.now(), "a") is Answer.WON


def test_a_claim_that_a_crash_left_empty_is_nobodys_to_send(tmp_path: Path) -> None:
    client = open_folder(tmp_path, "cron", "app")
    slot = client.now()
    (client.folder / f"{_name('job', slot)}.claim").write_text("")
    assert claim(client, "job", slot, "a") is Answer.TAKEN
    assert not confirm(client, "job", slot, "a")
