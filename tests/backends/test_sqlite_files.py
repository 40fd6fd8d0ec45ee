"""Files that SQLite can use and cannot, and the tables in them. The contract is in ``tests/conformance``."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from support.opened import opening
from support.sqlite_files import Opened, base, refusal

from celery_anarchon.backends import sqlite as module
from celery_anarchon.backends import sqliteconnections
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer
from celery_anarchon.testing.contenders import in_child, leftovers
from celery_anarchon.testing.harness import ask, claim, claim_all


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anarchon.db"


@pytest.fixture
def opened() -> Iterator[Opened]:
    with opening(SqliteBackend) as make:
        yield make


# --- files ------------------------------------------------------------------------------------------------------------


def test_bad_paths_are_refused_with_the_fix(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"certainly no database" * 100)
    (tmp_path / "a file").touch()
    for path, words in (
        (tmp_path / "nowhere" / "a.db", "there is no directory"),
        (tmp_path, "is a directory; give the path of a file"),
        (garbage, "file is not a database.*choose another path"),
        (tmp_path / "a file" / "a.db", "there is no directory"),
        (Path("/proc/anarchon.db"), "/proc"),
    ):
        text = refusal(SqliteBackend(path))
        assert re.search(words, text) and str(path) in text, text
    assert garbage.read_bytes() == b"certainly no database" * 100


def _as_nobody(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return call()

    return run


def test_a_file_that_this_user_may_not_write() -> None:
    directory = Path(f"/tmp/anarchon-{os.getpid()}")
    directory.mkdir(mode=0o755)
    try:
        path = directory / "a.db"
        backend = SqliteBackend(path)
        backend.open("app")
        slot = base(backend)
        claim(backend, "job", slot, "a")
        backend.close()
        path.chmod(0o444)
        directory.chmod(0o555)
        words = in_child(_as_nobody(lambda: refusal(SqliteBackend(path))))
        assert "may not write" in words or "may not open" in words, words
        words = in_child(_as_nobody(lambda: refusal(SqliteBackend(directory / "b.db"))))
        assert "may not make files" in words and str(directory) in words
        path.chmod(0o000)
        words = in_child(_as_nobody(lambda: refusal(SqliteBackend(path))))
        assert "may not open" in words
        directory.chmod(0o000)
        words = in_child(_as_nobody(lambda: refusal(SqliteBackend(path))))
        assert str(directory) in words
    finally:
        directory.chmod(0o755)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


def test_a_reader_makes_nothing(path: Path, opened: Any) -> None:
    reader = opened(path, create=False)
    assert not path.exists()
    assert reader.history("job", 10) == [] and reader.last_run("job") is None
    assert reader.lapsed(10) == [] and reader.beats(60_000) == []
    assert abs(reader.now() - time.time() * 1000) < 5_000
    with pytest.raises(BackendUnavailable, match="start a beat"):
        claim(reader, "job", 1, "a")
    assert not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (number)")
    for client in (reader, opened(path, create=False)):
        assert client.history("job", 10) == []
        with pytest.raises(BackendUnavailable, match="start a beat"):
            claim(client, "job", 1, "a")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    beat = opened(path)
    slot = base(beat)
    assert claim(beat, "job", slot, "a") is Answer.WON
    assert len(reader.history("job", 10)) == 1, "what begins while it looks is seen"
    with pytest.raises(LayoutMismatch):
        opened(path, app="another app", create=False)


def test_a_full_disk(path: Path, opened: Any) -> None:
    backend = opened(path)
    slot = base(backend)
    (connection,) = backend._source._connections._idle
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    connection.exec_driver_sql(f"PRAGMA max_page_count={pages}").fetchall()
    requests = [ask(f"job {number}", slot, "a") for number in range(2_000)]
    with pytest.raises(BackendUnavailable, match="full; make room"):
        claim_all(backend, requests)
    backend.close()
    assert set(claim_all(opened(path), requests)) == {Answer.WON}, "nothing was applied"


def test_a_disk_that_is_full_at_the_commit(path: Path, opened: Any) -> None:
    """Then nobody says whether it was one: the owner asks again, and is told the fix."""
    backend = opened(path)
    slot = base(backend)
    requests = [ask(f"job {number}", slot, "a") for number in range(20)]

    def no_room(cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT":
            cursor.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")

    engine = backend._source._engine
    event.listen(engine, "do_execute", no_room)
    with pytest.raises(OutcomeUnknown, match="disk is full; make room on the disk"):
        claim_all(backend, requests)
    event.remove(engine, "do_execute", no_room)
    assert set(claim_all(backend, requests)) == {Answer.WON}


def test_a_file_that_goes_away(path: Path, tmp_path: Path, opened: Any) -> None:
    """A beat that goes on writing to a deleted file claims in a store that nobody else sees."""
    backend = opened(path)
    slot = base(backend)
    assert claim(backend, "job", slot, "a") is Answer.WON
    for file in tmp_path.glob("anarchon.db*"):
        file.unlink()
    for call in (lambda: claim(backend, "job", slot + 1, "a"), lambda: backend.lapsed(1), backend.now):
        with pytest.raises(BackendUnavailable, match="no such file"):
            call()
    assert not path.exists(), "an empty store in the place of the claims"
    another = opened(path)
    assert claim(another, "job", slot + 1, "b") is Answer.WON
    assert claim(backend, "job", slot + 1, "a") is Answer.TAKEN, "it goes on with the new file"


def test_nothing_is_left_beside_the_file(path: Path, tmp_path: Path) -> None:
    refusal(SqliteBackend(tmp_path))
    before = leftovers()
    for _ in range(3):
        backend = SqliteBackend(path)
        backend.open("app")
        threads = [threading.Thread(target=backend.history, args=("job", 1)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        backend.close()
    assert leftovers() == before
    assert [file.name for file in tmp_path.iterdir()] == ["anarchon.db"]


def test_a_network_file_system_is_warned_of(
    tmp_path: Path, path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = tmp_path / "mounts"
    shared = tmp_path / "with space"
    shared.mkdir()
    shared_there = str(shared).replace(" ", "\\040")
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nnas:/x {shared_there} nfs4 rw 0 0\nbroken\n")
    find = sqliteconnections.network_file_system
    assert find(shared / "a.db", mounts) == "nfs4"
    assert find(tmp_path / "a.db", mounts) is None
    assert find(tmp_path / "a.db", tmp_path / "none") is None
    monkeypatch.setattr(sqliteconnections, "network_file_system", lambda path: "nfs4")
    with caplog.at_level(logging.WARNING, "celery_anarchon.backend"):
        opened(path)
    (message,) = caplog.messages
    assert "nfs4" in message and str(path) in message


def test_an_old_sqlite_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OLDEST_SQLITE", (99, 0, 0))
    assert re.search(r"SQLite 3\.\d+\.\d+ is too old", refusal(SqliteBackend(path)))


def test_a_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that is detached changes its directory."""
    monkeypatch.chdir(tmp_path)
    backend = SqliteBackend("here.db")
    monkeypatch.chdir("/")
    backend.open("app")
    backend.close()
    assert (tmp_path / "here.db").exists()
    assert str(tmp_path / "here.db") in backend.describe()


def test_names_with_everything_in_them(tmp_path: Path, opened: Any) -> None:
    backend = opened(tmp_path / "ü %41 ?#&.db")
    assert claim(backend, "job", base(backend), "a") is Answer.WON
    assert (tmp_path / "ü %41 ?#&.db").stat().st_size


# --- namespaces -------------------------------------------------------------------------------------------------------


def test_another_app_is_refused_with_both_names_and_the_fix(path: Path, opened: Any) -> None:
    opened(path, app="billing")
    words = refusal(SqliteBackend(path))
    assert (
        words == "namespace 'anarchon_runs' belongs to app billing, and this is app app; set table=... to give this "
        "app its own"
    )
    assert claim(opened(path, table="app_runs"), "job", 1, "a") is Answer.WON


def test_two_tables_are_two_stores(path: Path, opened: Any) -> None:
    one, two = opened(path, table="one"), opened(path, app="other app", table="two")
    slot = base(one)
    assert claim(one, "job", slot, "a") is Answer.WON
    assert claim(two, "job", slot, "b") is Answer.WON
    assert [run.run_id for run in one.history("job", 1)] != [run.run_id for run in two.history("job", 1)]


def test_a_table_of_somebody_else_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE anarchon_runs_jobs (number)")
    assert "anarchon_runs_jobs" in refusal(SqliteBackend(path))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("anarchon_runs_jobs",)]


@pytest.mark.parametrize("table", ["", "a.b", "a b", "1a", "a-b", 'a"b', "é", "sqlite_x", "x_meta", "n" * 64, None, 7])
def test_a_table_needs_a_plain_name(table: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="table="):
        SqliteBackend(tmp_path / "a.db", table=table)


def test_a_keyword_is_a_name(path: Path, opened: Any) -> None:
    assert claim(opened(path, table="order"), "job", 1, "a") is Answer.WON


def test_busy_timeout_is_a_duration(tmp_path: Path) -> None:
    assert SqliteBackend(tmp_path / "a.db").busy_timeout == 5
    assert SqliteBackend(tmp_path / "a.db", busy_timeout="1m").busy_timeout == 60
    with pytest.raises(ConfigurationError, match="busy_timeout"):
        SqliteBackend(tmp_path / "a.db", busy_timeout="soon")
