"""What is SQLite's own: locks, files, other people's connections. The contract is in ``tests/conformance``."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import re
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.pool import StaticPool

from celery_anarchon.backends import sqlite as module
from celery_anarchon.backends import sqliteconnections
from celery_anarchon.backends.base import Beat, ClaimRequest, Confirmation, GivenUp, Hold, Keep, Sighting, Takeover
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.testing.contenders import in_child, leftovers, quiet_fork
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "anarchon.db"


@pytest.fixture
def opened() -> Iterator[Callable[..., SqliteBackend]]:
    made: list[SqliteBackend] = []

    def make(database: Any, app: str = "app", *, create: bool = True, **options: Any) -> SqliteBackend:
        backend = SqliteBackend(database, **options)
        made.append(backend)
        backend.open(app, create=create)
        return backend

    yield make
    for backend in made:
        backend.close()


@contextmanager
def engine_on(path: Path, **options: Any) -> Iterator[Any]:
    engine = create_engine(f"sqlite:///{path}", **options)
    try:
        yield engine
    finally:
        engine.dispose()


def base(backend: SqliteBackend) -> Millis:
    return backend.now() - 3_600_000


def refusal(backend: SqliteBackend, *, create: bool = True) -> str:
    error = raised_by(lambda: backend.open("app", create=create))
    assert isinstance(error, ConfigurationError), repr(error)
    assert "\n" not in str(error)
    backend.close()
    return str(error)


# --- waiting for other writers ----------------------------------------------------------------------------------------


@contextmanager
def writer(path: Path, seconds: float | None, mode: str = "IMMEDIATE") -> Iterator[None]:
    """Another client that holds the write lock, for so long or until the end of the block."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"BEGIN {mode}")
            held.set()
            over.wait(seconds)
            connection.execute("ROLLBACK")

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_claims_wait_for_a_writer_of_three_seconds(journal: str, path: Path, opened: Any) -> None:
    """FC-24: "database is locked" is not an answer to a claim."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal,)
    with engine_on(path) as engine:
        # Longer than three slow threads of a busy machine need after the writer.
        clients = [opened(engine if journal == "delete" else path, busy_timeout=60) for _ in range(3)]
        slot = base(clients[0])
        answers: dict[int, list[Answer]] = {}

        def contend(number: int) -> None:
            requests = [ask(f"job {job}", slot, f"owner {number}") for job in range(50)]
            answers[number] = claim_all(clients[number], requests)

        threads = [threading.Thread(target=contend, args=(number,)) for number in range(3)]
        began = time.monotonic()
        with writer(path, 3, "EXCLUSIVE"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert time.monotonic() - began > 2.5
        winners = [answer for row in answers.values() for answer in row if answer is Answer.WON]
        assert len(answers) == 3 and len(winners) == 50
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (journal,)


def test_a_lock_held_past_the_timeout_fails_closed(path: Path, opened: Any) -> None:
    backend = opened(path, busy_timeout=0.3)
    slot = base(backend)
    with writer(path, None):
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="busy_timeout"):
                claim(backend, "job", slot, "a")
        assert 0.5 < time.monotonic() - began < 3
        assert backend.history("job", 10) == [], "readers need not wait, and nothing was applied"
    assert claim(backend, "job", slot, "a") is Answer.WON


def test_a_reader_that_keeps_a_commit_waiting(path: Path, opened: Any) -> None:
    """Without a WAL a reader can hold up the COMMIT itself. It is tried again, and undone when the time is over."""
    with engine_on(path, connect_args={"timeout": 0.05}) as engine:
        backend = opened(engine, busy_timeout=0.4)
        slot = base(backend)
        assert claim_all(backend, [ask("job", slot + number, "a") for number in range(3)]) == [Answer.WON] * 3
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            rows = reader.execute("SELECT * FROM anarchon_runs")
            rows.fetchone()
            with pytest.raises(BackendUnavailable, match="locked"):
                claim(backend, "job", slot + 3, "a")
            rows.fetchall()
        assert len(backend.history("job", 10)) == 3
        assert claim(backend, "job", slot + 3, "b") is Answer.WON


def test_a_signal_is_handled_during_the_wait(path: Path, opened: Any) -> None:
    """A beat that waits for the store must still be stopped within a second."""
    backend = opened(path, busy_timeout=20)
    slot = base(backend)

    def stop(*_: Any) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with writer(path, None):
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SystemExit):
                claim(backend, "job", slot, "a")
            assert time.monotonic() - began < 2
    finally:
        signal.signal(signal.SIGALRM, before)
    assert claim(backend, "job", slot, "a") is Answer.WON


def test_close_comes_as_a_signal_again_and_again(path: Path, opened: Any) -> None:
    """X3 with a real signal, at whatever place it strikes."""
    backend = opened(path)
    slot = base(backend)
    strikes: list[int] = []

    def strike(*_: Any) -> None:
        strikes.append(1)
        backend.close()

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for number in range(100):
            assert claim(backend, "job", slot + number, "a") is Answer.WON
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(strikes) > 10
    other = opened(path)
    assert set(claim_all(other, [ask("job", slot + number, "b") for number in range(100)])) == {Answer.TAKEN}


def test_threads_share_a_backend(path: Path, opened: Any) -> None:
    backend = opened(path)
    slot = base(backend)
    won: list[Answer] = []

    def work(number: int) -> None:
        for step in range(30):
            won.append(claim(backend, f"job {number}", slot + step, "a"))
            assert confirm(backend, f"job {number}", slot + step, "a")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [Answer.WON] * 180


# --- processes --------------------------------------------------------------------------------------------------------


def _create(path: Path, barrier: Any, results: Any, number: int) -> None:
    try:
        barrier.wait(30)
        backend = SqliteBackend(path)
        backend.open("app")
        results.put(str(claim(backend, "job", backend.now() // 3_600_000 * 3_600_000 - 3_600_000, f"owner {number}")))
        backend.close()
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.race
def test_eight_processes_make_the_tables_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(6):
        barrier, results = context.Barrier(8), context.SimpleQueue()
        path = tmp_path / f"{attempt}.db"
        crowd = [context.Process(target=_create, args=(path, barrier, results, number)) for number in range(8)]
        with quiet_fork():
            for process in crowd:
                process.start()
        answers = sorted(results.get() for _ in crowd)
        for process in crowd:
            process.join()
            process.close()
        results.close()
        assert answers == ["taken"] * 7 + ["won"]


def _claim_for_ever(path: Path, told: Any) -> None:
    backend = SqliteBackend(path)
    backend.open("app")
    first = base(backend)
    for number in range(1_000_000):
        if claim(backend, "job", first + number, "a") is Answer.WON:
            os.write(told, f"{first + number}\n".encode())


def test_what_was_won_survives_kill_9(path: Path, opened: Any) -> None:
    reader, told = os.pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_claim_for_ever, args=(path, told), daemon=True)
    with quiet_fork():
        process.start()
    os.close(told)
    with os.fdopen(reader) as lines:
        won = [int(lines.readline()) for _ in range(100)]
        process.kill()
        process.join()
        won += [int(line) for line in lines.read().split()]
    process.close()
    backend = opened(path)
    answers = claim_all(backend, [ask("job", slot, "b") for slot in won])
    assert set(answers) == {Answer.TAKEN} and len(won) >= 100
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_fork_gets_connections_of_its_own(path: Path, opened: Any) -> None:
    with engine_on(path) as engine:
        for number, database in enumerate((path, engine)):
            backend = opened(database, table=f"runs{number}")
            slot = base(backend)
            claim(backend, "job", slot, "parent")
            child = [ask("job", slot, "child"), ask("job", slot + 1, "child")]
            assert in_child(lambda: claim_all(backend, child)) == [Answer.TAKEN, Answer.WON]  # noqa: B023
            assert claim(backend, "job", slot + 1, "parent") is Answer.TAKEN


def test_a_connection_does_not_cross_a_fork(path: Path, opened: Any) -> None:
    with closing(sqlite3.connect(path)) as connection:
        backend = opened(connection)
        slot = base(backend)
        error = in_child(lambda: repr(raised_by(lambda: claim(backend, "job", slot, "a"))))
        assert "fork" in error and "hand over a path" in error
        assert claim(backend, "job", slot, "a") is Answer.WON


# --- connections and engines of the app -------------------------------------------------------------------------------


def test_a_connection_keeps_its_settings_and_stays_open(path: Path, opened: Any) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        connection.text_factory = bytes
        connection.create_function("regexp", 2, lambda pattern, value: 42)
        kept = connection.isolation_level, connection.row_factory, connection.text_factory
        backend = opened(connection)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        assert [run.job for run in backend.history("job", 1)] == ["job"]
        backend.close()
        backend.close()
        assert (connection.isolation_level, connection.row_factory, connection.text_factory) == kept
        assert connection.execute("SELECT 'a' REGEXP 'b'").fetchone()[0] == 42, "the app's own function was replaced"
        assert connection.execute("SELECT owner FROM anarchon_runs").fetchone()["owner"] == b"a"
        assert not connection.in_transaction


def test_a_connection_inside_a_transaction_is_refused(path: Path, opened: Any) -> None:
    """A claim inside it would be undone by the app's rollback, and the slot won again by another."""
    with closing(sqlite3.connect(path)) as connection:
        backend = opened(connection)
        slot = base(backend)
        connection.execute("CREATE TABLE theirs (number)")
        connection.execute("INSERT INTO theirs VALUES (1)")
        for call in (lambda: claim(backend, "job", slot, "a"), lambda: backend.history("job", 1)):
            with pytest.raises(BackendUnavailable, match=r"inside a transaction.*commit or roll back"):
                call()
        assert connection.in_transaction
        connection.commit()
        assert connection.execute("SELECT number FROM theirs").fetchall() == [(1,)]
        assert claim(backend, "job", slot, "a") is Answer.WON


if sys.version_info >= (3, 12):

    def test_a_connection_without_autocommit_is_refused(path: Path) -> None:
        with (
            closing(sqlite3.connect(path, autocommit=False)) as connection,
            pytest.raises(BackendUnavailable, match="autocommit=False"),
        ):
            SqliteBackend(connection).open("app")
        with closing(sqlite3.connect(path, autocommit=True)) as connection:
            backend = SqliteBackend(connection)
            backend.open("app")
            assert claim(backend, "job", base(backend), "a") is Answer.WON


def test_a_connection_of_another_thread_is_refused(path: Path) -> None:
    made: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
    over = threading.Event()

    def own() -> None:
        with closing(sqlite3.connect(path)) as connection:
            made.put(connection)
            over.wait()

    thread = threading.Thread(target=own)
    thread.start()
    try:
        assert "check_same_thread=False" in refusal(SqliteBackend(made.get()))
    finally:
        over.set()
        thread.join()
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        backend = SqliteBackend(connection)
        errors: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: errors.append(raised_by(lambda: backend.open("app"))))
        thread.start()
        thread.join()
        assert errors == [None]


def test_a_closed_connection_is_unavailable(path: Path, opened: Any) -> None:
    connection = sqlite3.connect(path)
    backend = opened(connection)
    connection.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        claim(backend, "job", 1, "a")


def test_an_engine_is_used_and_never_disposed(path: Path, opened: Any) -> None:
    with engine_on(path) as engine:
        pool = engine.pool
        backend = opened(engine)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        backend.close()
        assert engine.pool is pool
        with engine.connect() as connection:
            assert connection.connection.dbapi_connection.isolation_level == ""
            assert connection.execute(text("SELECT count(*) FROM anarchon_runs")).scalar_one() == 1
        assert claim(opened(path), "job", slot, "b") is Answer.TAKEN


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_an_engine_that_begins_by_itself(begin: str, path: Path, opened: Any) -> None:
    """SQLAlchemy's own recipe for transactions on SQLite."""
    with engine_on(path) as engine:

        @event.listens_for(engine, "connect")
        def on_connect(connection: Any, _: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def on_begin(connection: Any) -> None:
            connection.exec_driver_sql(begin)

        backend = opened(engine)
        slot = base(backend)
        assert claim(backend, "job", slot, "a") is Answer.WON
        assert confirm(backend, "job", slot, "a")
        assert claim(opened(path), "job", slot, "b") is Answer.TAKEN


def test_an_engine_in_memory_serves_one_process(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    with caplog.at_level(logging.WARNING, "celery_anarchon.backend"):
        backend = opened(engine)
    assert "in memory" in caplog.text
    slot = base(backend)
    assert claim(backend, "job", slot, "a") is Answer.WON
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE theirs (number)"))
        connection.execute(text("INSERT INTO theirs VALUES (1)"))
        with pytest.raises(BackendUnavailable, match="inside a transaction"):
            claim(backend, "job", slot, "a")
        connection.commit()
        assert connection.execute(text("SELECT count(*) FROM theirs")).scalar_one() == 1, "it was rolled back"
    assert claim(backend, "job", slot, "a") is Answer.WON
    engine.dispose()


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    for wrong, words in (
        (":memory:", "MemoryBackend"),
        ("", "path"),
        ("file:x.db?mode=memory", "path"),
        ("sqlite:///x.db", "backend_from_url"),
        (b"x.db", "bytes"),
        (None, "NoneType"),
        (7, "int"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            SqliteBackend(wrong)


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
        opened(path, "another app", create=False)


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
    opened(path, "billing")
    words = refusal(SqliteBackend(path))
    assert (
        words == "namespace anarchon_runs: belongs to app billing, and this is app app; set table=... to give this "
        "app its own"
    )
    assert claim(opened(path, table="app_runs"), "job", 1, "a") is Answer.WON


def test_two_tables_are_two_stores(path: Path, opened: Any) -> None:
    one, two = opened(path, table="one"), opened(path, "other app", table="two")
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


# --- what it costs ----------------------------------------------------------------------------------------------------


def statements(backend: SqliteBackend, call: Callable[[], Any]) -> list[str]:
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    engine = backend._source._engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    return seen


def test_the_number_of_statements_does_not_grow_with_the_batch(path: Path, opened: Any) -> None:
    backend = opened(path)
    first = base(backend)

    def requests(count: int, owner: str, offset: int) -> list[ClaimRequest]:
        return [ask(f"job {number}", first + offset, owner) for number in range(count)]

    counts: dict[str, set[int]] = {}
    for offset, count in enumerate((1, 10, 1_000)):
        holds = [
            Hold(job=request.job, slot=request.slot, owner="a", attempt=1) for request in requests(count, "a", offset)
        ]
        half = max(1, count // 2)
        for name, call in (
            ("won", lambda: backend.claim(requests(count, "a", offset))),  # noqa: B023
            ("won again", lambda: backend.claim(requests(count, "a", offset))),  # noqa: B023
            ("taken", lambda: backend.claim(requests(count, "b", offset))),  # noqa: B023
            ("confirm", lambda: backend.confirm([Confirmation(**vars(h), late=1) for h in holds[:half]])),  # noqa: B023
            ("confirm again", lambda: backend.confirm([Confirmation(**vars(h), late=1) for h in holds[:half]])),  # noqa: B023
            ("abandon", lambda: backend.abandon(holds[half:] or holds)),  # noqa: B023
            (
                "takeover",
                lambda: backend.takeover(
                    [
                        Takeover(job=h.job, slot=h.slot, from_attempt=1, owner="c", beat="", lease=1)
                        for h in holds  # noqa: B023
                    ]
                ),
            ),
            ("give up", lambda: backend.give_up([GivenUp(**vars(h), state=RunState.NOT_SENT) for h in holds])),  # noqa: B023
            ("register", lambda: backend.register([Sighting(job=h.job, fingerprint=str(offset)) for h in holds])),  # noqa: B023
            (
                "tidy",
                lambda: backend.tidy([Keep(job=h.job, decided=first + 99, history_size=99) for h in holds]),  # noqa: B023
            ),
        ):
            counts.setdefault(name, set()).add(len(statements(backend, call)))
    assert {name: spread for name, spread in counts.items() if len(spread) > 1} == {}
    assert max(counts["won"]) <= 5 and max(counts["taken"]) <= 7, counts


def test_a_statement_is_rendered_once_for_each_number_of_rows(path: Path, opened: Any) -> None:
    """For a large batch the text of its rows costs as much as the batch."""
    backend = opened(path)
    slot = base(backend)

    def texts(count: int, offset: int) -> list[str]:
        requests = [ask(f"job {number}", slot + offset, "a") for number in range(count)]
        return [text for text in statements(backend, lambda: backend.claim(requests)) if "VALUES" in text]

    first, second, third = texts(40, 0), texts(40, 1), texts(41, 2)
    assert len(first) >= 2
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert not set(first) & set(third)


def test_a_batch_of_ten_thousand(path: Path, opened: Any) -> None:
    """More rows than one statement can have parameters for."""
    backend = opened(path)
    slot = base(backend)
    everything = [ask(f"job {number}", slot, "a") for number in range(10_000)]
    assert set(claim_all(backend, everything)) == {Answer.WON}
    assert set(claim_all(backend, [ask(r.job, r.slot, "b") for r in everything])) == {Answer.TAKEN}
    confirmations = [Confirmation(job=r.job, slot=r.slot, owner="a", attempt=1, late=0) for r in everything]
    assert all(backend.confirm(confirmations))
    registrations = backend.register([Sighting(job=r.job, fingerprint="x") for r in everything])
    assert {registration.last for registration in registrations} == {slot}


def test_every_statement_finds_its_rows_by_an_index(path: Path, opened: Any) -> None:
    """SQLite walks the whole table for (job, slot) IN (VALUES ...), and for a partial index that it cannot prove."""
    backend = opened(path)
    first = base(backend)
    held = [ask("job", first + number, "a") for number in range(3)]
    seen: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, parameters[0] if isinstance(parameters, list) else parameters))

    engine = backend._source._engine
    event.listen(engine, "before_cursor_execute", note)
    backend.claim(held)
    backend.claim(held)
    backend.claim([ask("job", first, "b")])
    confirm(backend, "job", first, "a")
    confirm(backend, "job", first, "b")
    backend.abandon([Hold(job="job", slot=first + 1, owner="a", attempt=1)])
    backend.lapsed(10)
    backend.takeover([Takeover(job="job", slot=first + 1, from_attempt=1, owner="b", beat="", lease=1)])
    backend.give_up([GivenUp(job="job", slot=first + 1, owner="b", attempt=1, state=RunState.MISFIRE)])
    backend.register([Sighting(job="job", fingerprint=str(number)) for number in range(10)])
    backend.history("job", 5)
    backend.last_run("job")
    backend.tidy([Keep(job="job", decided=first, history_size=0, history_ttl=1)])
    event.remove(engine, "before_cursor_execute", note)
    plans: dict[str, list[str]] = {}
    with closing(sqlite3.connect(path)) as connection:
        for statement, parameters in seen:
            if "anarchon_runs" in statement:
                rows = connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
                plans[statement] = [row[3] for row in rows]
    assert len(plans) >= 15
    walks = {
        statement: plan
        for statement, plan in plans.items()
        if any(re.match(r"SCAN (anarchon|inner|outer)", step) for step in plan)
    }
    assert walks == {}
    (lapsed,) = [plan for statement, plan in plans.items() if "patience <= ?" in statement and "LIMIT" in statement]
    assert any("USING INDEX anarchon_runs_lease" in step for step in lapsed), lapsed


def test_the_look_for_lapsed_claims_does_not_grow_with_the_past(path: Path, opened: Any) -> None:
    """Counted in steps of SQLite's machine, not in seconds."""
    backend = opened(path)
    first = base(backend)

    def steps() -> int:
        (connection,) = backend._source._connections._idle
        driver = connection.connection.dbapi_connection
        counted = [0]
        driver.set_progress_handler(lambda: counted.__setitem__(0, counted[0] + 1), 10)
        try:
            assert len(backend.lapsed(10)) == 1
        finally:
            driver.set_progress_handler(None, 0)
        return counted[0]

    claim(backend, "dead", first, "a", lease=0)
    few = steps()
    requests = [ask(f"job {number}", first, "a") for number in range(5_000)]
    claim_all(backend, requests)
    backend.confirm([Confirmation(job=r.job, slot=r.slot, owner="a", attempt=1, late=0) for r in requests[1_000:]])
    assert steps() <= few + 5


def test_beats_that_vanished_are_forgotten_in_time(path: Path, opened: Any) -> None:
    backend = opened(path)
    backend.beat_seen(Beat(owner="gone", label="gone", version="1"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE anarchon_runs_beats SET seen = seen - 90000000")
        connection.commit()
    assert len(backend.beats(within=100_000_000)) == 1
    backend.beat_seen(Beat(owner="here", label="here", version="1"))
    assert [beat.owner for beat in backend.beats(within=100_000_000)] == ["here"]


def test_claims_in_a_file_of_ours_survive_a_power_cut(path: Path, opened: Any) -> None:
    backend = opened(path)
    (connection,) = backend._source._connections._idle
    assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"


def test_the_clock_is_that_of_the_machine(path: Path, opened: Any) -> None:
    backend = opened(path)
    for _ in range(50):
        before = time.time_ns() // 1_000_000
        assert before - 1 <= backend.now() <= time.time_ns() // 1_000_000 + 1
