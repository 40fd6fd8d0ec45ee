"""What celery-anarchon asks of every backend: the suite that fits the traits, with the harness."""

from __future__ import annotations

from pathlib import Path

import pytest
from anarchon_folder import DAY, HORIZON, FolderBackend, _name
from folder_harness import FolderHarness, open_folder

from celery_anarchon.backends import backend_from_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Answer
from celery_anarchon.testing import ClaimSuite
from celery_anarchon.testing.harness import claim, confirm, record


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
