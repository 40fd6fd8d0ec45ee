"""Children that are forked while the worker's other threads are at work: nothing is half done in them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_for

from celery_anarchon import MemoryBackend
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.backends.runs import RunBackend, Start, Worker
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.forks import PATIENCE, ForkLock
from celery_anarchon.held import Held
from celery_anarchon.keeper import Keeper
from celery_anarchon.model import RunState, Terms
from celery_anarchon.testing.contenders import in_child, quiet_fork

SECOND = 1_000
SLOT = SystemClock().wall() // SECOND * SECOND
TERMS = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND, max_attempts=2)


def fork(check: Callable[[], bool]) -> tuple[float, bool]:
    """How many seconds the fork took, and what *check* returns in the child."""
    began = time.monotonic()
    return in_child(lambda: (time.monotonic() - began, check()), 10)


def end_of(child: int) -> int:
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(child, os.WNOHANG)
        ended.append(status)
        return bool(found)

    wait_for(has_ended, "a child")
    return ended[-1]


def free(lock: ForkLock) -> bool:
    """Whether another thread than this one can have it."""
    had: list[bool] = []

    def take() -> None:
        had.append(lock.acquire(timeout=1))
        if had[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return had == [True]


class Halt:
    """A place in another thread's way, where it can be made to stay."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.left = False
        self._may_go = threading.Event()
        self._may_go.set()

    def close(self) -> None:
        self.reached.clear()
        self.left = False
        self._may_go.clear()

    def open(self) -> None:
        self._may_go.set()

    def open_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.open).start()

    def pass_by(self) -> None:
        self.reached.set()
        assert self._may_go.wait(20)
        self.left = True


@contextmanager
def at_the(halt: Halt, work: Callable[[], object]) -> Iterator[None]:
    """Within: another thread does *work* and stays at *halt*."""
    halt.close()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert halt.reached.wait(10)
        yield
    finally:
        halt.open()
        thread.join(10)
        assert not thread.is_alive()


class StaysBeforeCommit(SqliteBackend):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.halt = Halt()

    def _commit(self, connection: object) -> None:
        self.halt.pass_by()
        super()._commit(connection)  # type: ignore[arg-type]


class StaysInCall(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self.halt = Halt()

    def worker_seen(self, worker: Worker) -> None:
        self.halt.pass_by()
        super().worker_seen(worker)


def keeper_of(backend: RunBackend, heartbeat: int = 10 * SECOND) -> Keeper:
    keeper = Keeper(backend, heartbeat=heartbeat, presence=Worker(owner="w", label="w", version="1"))
    keeper.begin = lambda: None  # type: ignore[method-assign]
    return keeper


def sent(backend: RunBackend, job: str) -> Start:
    """A run of *job* whose message is there, and the question whether it may start."""
    backend.claim([ClaimRequest(job=job, slot=SLOT, owner="b", beat="b", lease=SECOND, terms=TERMS)])
    backend.confirm([Confirmation(job=job, slot=SLOT, owner="b", attempt=1, late=0)])
    return Start(job=job, slot=SLOT, attempt=1, retries=0, token=job, worker="w", terms=TERMS)


def started(keeper: Keeper, start: Start) -> Held:
    _, held = keeper.ask(start)
    assert held is not None
    return held


@pytest.mark.parametrize("who", ["the keeper", "a question of another thread"])
def test_a_child_is_not_forked_in_the_middle_of_a_transaction(tmp_path: Path, who: str) -> None:
    """SQLite keeps the locks of a process in one table, which a child inherits: a write lock in it would be held there
    for ever, every heartbeat of ``current_run().lost`` fail, and a run that is renewed look lost after its lease."""
    path = tmp_path / "anarchon.db"
    backend = StaysBeforeCommit(path)
    backend.open("app")
    keeper = keeper_of(backend)
    held = started(keeper, sent(backend, "job"))
    other = sent(backend, "other")

    def renewed_here() -> bool:
        own = SqliteBackend(path, busy_timeout=3)
        own.open("app", create=False)
        return own.heartbeat([held.hold]) == [True]

    with at_the(backend.halt, keeper.turn if who == "the keeper" else lambda: keeper.ask(other)):
        backend.halt.open_in(0.3)
        took, renewed = fork(renewed_here)
    assert renewed
    assert took < PATIENCE
    assert free(keeper._io)
    backend.close()


def test_a_child_is_not_forked_in_the_middle_of_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """The lock of the buffer behind sys.stderr is C code's, and nothing renews it in a child: it would hang at its own
    first line. So forks wait for whatever a turn logs, its complaint about the store included."""

    class Away(MemoryBackend):
        def worker_seen(self, worker: Worker) -> None:
            raise BackendUnavailable("away")

    class Stays(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.halt = Halt()

        def emit(self, record: logging.LogRecord) -> None:
            self.halt.pass_by()

    handler = Stays()
    logger = logging.getLogger("celery_anarchon.worker")
    logger.addHandler(handler)
    try:
        with at_the(handler.halt, keeper_of(Away()).turn):
            handler.halt.open_in(0.3)
            _, written = fork(lambda: handler.halt.left)
    finally:
        logger.removeHandler(handler)
    assert written
    assert "the store is away" in caplog.text


def test_a_store_that_hangs_holds_up_forks_for_a_second_and_once() -> None:
    """A worker that replaces its children one by one must not stand still while the store does."""
    backend = StaysInCall()
    keeper = keeper_of(backend, heartbeat=0)
    with at_the(backend.halt, keeper.turn):
        first, free_in_first = fork(lambda: free(keeper._io))
        second, free_in_second = fork(lambda: free(keeper._io))
        assert PATIENCE * 0.9 < first < PATIENCE * 2
        assert second < PATIENCE / 2
        assert free_in_first and free_in_second
    assert free(keeper._io)
    with at_the(backend.halt, keeper.turn):
        backend.halt.open_in(0.3)
        took, waited = fork(lambda: backend.halt.left)
    assert waited and took < PATIENCE


def test_a_fork_leaves_nothing_locked() -> None:
    backend = StaysInCall()
    keeper = keeper_of(backend, heartbeat=0)
    for _ in range(2):
        took, free_in_child = fork(lambda: free(keeper._io))
        assert free_in_child and free(keeper._io)
        assert took < PATIENCE / 2
    keeper.turn()

    def another_fork() -> bool:
        # Of a child that has the parent's keeper in its memory: it waits for nobody.
        took, free_in_grandchild = fork(lambda: free(keeper._io))
        return free_in_grandchild and took < PATIENCE / 2

    with at_the(backend.halt, keeper.turn):
        assert fork(another_fork)[1]


def test_threads_that_fork_at_once_leave_nothing_locked() -> None:
    backend = StaysInCall()
    keeper = keeper_of(backend, heartbeat=0)
    children: list[int] = []

    def fork_here() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if free(keeper._io) else 1)
        children.append(child)

    # Once for all: what is ignored is the process's, not a thread's.
    with quiet_fork(), at_the(backend.halt, keeper.turn):
        backend.halt.open_in(0.3)
        forkers = [threading.Thread(target=fork_here) for _ in range(4)]
        for forker in forkers:
            forker.start()
        for forker in forkers:
            forker.join(10)
    assert [end_of(child) for child in children] == [0] * 4
    assert free(keeper._io)


def test_a_receiver_may_fork() -> None:
    """It runs in the keeper's thread, in the middle of a turn, and must not wait for itself."""
    backend = MemoryBackend()
    keeper = keeper_of(backend)
    forked: list[tuple[float, bool]] = []
    keeper.fanout.add(lambda _: forked.append(fork(lambda: not free(keeper._io))))
    held = started(keeper, sent(backend, "job"))
    keeper.settle(held, RunState.SUCCEEDED)
    keeper.turn()
    [(took, still_in_the_turn)] = forked
    assert took < PATIENCE / 2 and still_in_the_turn
    assert free(keeper._io)


def test_a_lock_that_is_gone_is_not_waited_for() -> None:
    lock = ForkLock()
    lock.acquire()
    del lock
    took, _ = fork(lambda: True)
    assert took < PATIENCE / 2
