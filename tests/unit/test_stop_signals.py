"""Signals that stop a worker and find its main thread at the gate: heard where nothing of the keeper's is held."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import wait_for

from celery_anarchon import MemoryBackend, interrupts
from celery_anarchon.backends.base import ClaimRequest, Confirmation
from celery_anarchon.backends.runs import Start, Unstarted, Worker
from celery_anarchon.clock import SystemClock
from celery_anarchon.held import Held
from celery_anarchon.interrupts import STOPS_WORKER, Bell, Undisturbed, held_back
from celery_anarchon.keeper import Keeper
from celery_anarchon.model import GateAnswer, RunState, Terms
from celery_anarchon.testing.contenders import interrupted

SECOND = 1_000
SLOT = SystemClock().wall() // SECOND * SECOND
TERMS = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND)


class Slow(MemoryBackend):
    """Takes its time for answers to questions, and lists whose leases are renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = 0.0
        self.renewed: list[str] = []

    def start(self, starts: Any) -> Any:
        time.sleep(self.takes)
        return super().start(starts)

    def heartbeat(self, holds: Any) -> Any:
        self.renewed += [hold.job for hold in holds]
        return super().heartbeat(holds)


@pytest.fixture
def backend() -> Slow:
    return Slow()


def keeper_of(backend: Slow) -> Keeper:
    return Keeper(backend, heartbeat=50, presence=Worker(owner="w", label="w", version="1"))


@pytest.fixture
def keeper(backend: Slow) -> Iterator[Keeper]:
    keeper = keeper_of(backend)
    yield keeper
    keeper.stop()


def sent(backend: Slow, job: str) -> Start:
    backend.claim([ClaimRequest(job=job, slot=SLOT, owner="b", beat="b", lease=SECOND, terms=TERMS)])
    backend.confirm([Confirmation(job=job, slot=SLOT, owner="b", attempt=1, late=0)])
    return Start(job=job, slot=SLOT, attempt=1, retries=0, token=job, worker="w", terms=TERMS)


def started(keeper: Keeper, backend: Slow, job: str) -> Held:
    _, held = keeper.ask(sent(backend, job))
    assert held is not None
    return held


@contextmanager
def handled(*numbers: int, by: Callable[[int], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda came, _frame: by(came)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send(*numbers: int, after: float) -> None:
    """To the main thread, from another one."""

    def now() -> None:
        for number in numbers:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    threading.Timer(after, now).start()


@pytest.mark.parametrize("number", STOPS_WORKER)
def test_leases_are_renewed_while_a_handler_sleeps(keeper: Keeper, backend: Slow, number: signal.Signals) -> None:
    """Celery waits inside its handler, for worker_soft_shutdown_timeout and then for the pool. When that began in the
    middle of a question, the keeper waited too: all leases lapsed, and others went on with runs whose bodies lived."""
    started(keeper, backend, "job")
    renewed: list[list[str]] = []

    def sleep(_: int) -> None:
        backend.renewed.clear()
        time.sleep(1)
        renewed.append(list(backend.renewed))

    backend.takes = 0.3
    with handled(number, by=sleep):
        send(number, after=0.1)
        started(keeper, backend, "other")
        assert len(renewed) == 1
    # The one that was granted just now is among them.
    assert renewed[0].count("job") >= 5 and renewed[0].count("other") >= 5


def test_a_question_that_has_to_wait_keeps_no_signal_waiting(keeper: Keeper, backend: Slow) -> None:
    """A receiver that never returns keeps the gate shut; the worker can still be told to stop."""
    shut, leave = threading.Event(), threading.Event()

    def turn_without_end() -> None:
        with keeper._io:
            shut.set()
            leave.wait(10)

    thread = threading.Thread(target=turn_without_end)
    thread.start()
    assert shut.wait(5)
    with handled(signal.SIGQUIT, by=lambda _: leave.set()):
        send(signal.SIGQUIT, after=0.1)
        began = time.monotonic()
        started(keeper, backend, "job")
        assert time.monotonic() - began < 5
    thread.join()


def test_a_handler_may_tell_the_keeper_of_other_runs(backend: Slow) -> None:
    """Celery stops its pool inside its handler, and the pool tells of the ends of bodies there: in the middle of
    whatever the main thread was telling."""
    # Not the fixture's: where this fails, its stop would wait for ever as well.
    keeper = keeper_of(backend)
    keeper.begin = lambda: None  # type: ignore[method-assign]
    question = sent(backend, "job")

    def work() -> None:
        _, held = keeper.ask(question)
        assert held is not None
        keeper.settle(held, RunState.SUCCEEDED)

    gone = Unstarted(job="gone", slot=SLOT, attempt=1, retries=0, reason="revoked")
    interrupted(work, lambda: keeper.unstarted(gone), 5)
    keeper.turn()
    assert backend.history("job", 1)[0].state is RunState.SUCCEEDED


def test_a_bell_rings_until_it_was_heard() -> None:
    bell = Bell()
    assert not bell.wait(0)
    bell.set()
    bell.set()
    assert bell.is_set() and bell.wait(0)
    assert not bell.is_set() and not bell.wait(0)
    bell.set()
    bell.clear()
    bell.clear()
    assert not bell.wait(0.01)
    threading.Timer(0.05, bell.set).start()
    assert bell.wait(5)


def test_what_a_handler_raises_comes_through(keeper: Keeper, backend: Slow) -> None:
    """So does Celery's hard shutdown, and the gate is not shut behind it."""

    def leave(_: int) -> None:
        raise SystemExit

    question = sent(backend, "job")
    backend.takes = 0.3
    with handled(signal.SIGQUIT, by=leave):
        send(signal.SIGQUIT, after=0.1)
        with pytest.raises(SystemExit):
            keeper.ask(question)
    # Its body surely has not begun: nobody has to wait for the end of its lease.
    wait_for(lambda: backend.history("job", 1)[0].state is RunState.QUEUED, "the run is given back")
    assert keeper.ask(question)[0].answer is GateAnswer.START


def test_each_kind_of_signal_is_heard() -> None:
    """A warm stop and then a cold one, both while one answer is awaited."""
    heard: list[int] = []
    with handled(*STOPS_WORKER, by=heard.append):
        with held_back(STOPS_WORKER):
            for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGTERM):
                signal.raise_signal(number)
            assert heard == []
        assert heard == [signal.SIGTERM, signal.SIGQUIT]


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    """Celery's handlers put the next step of a shutdown in their own place."""
    heard: list[str] = []
    with handled(*STOPS_WORKER, by=lambda _: heard.append("old")):
        with held_back(STOPS_WORKER):
            signal.signal(signal.SIGQUIT, lambda *_: heard.append("new"))
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGQUIT)
    assert heard == ["old", "new"]


@pytest.mark.parametrize("guard", [lambda: held_back(STOPS_WORKER), lambda: Undisturbed(threading.Lock())])
def test_what_one_handler_raises_leaves_the_others_in_their_places(
    guard: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives while handlers are being exchanged."""

    raised: list[int] = []

    def exchange(number: signal.Signals, handler: Any) -> Any:
        if number == STOPS_WORKER[-1] and not raised:
            raised.append(number)
            raise SystemExit
        return signal.signal(number, handler)

    heard: list[int] = []
    with handled(*STOPS_WORKER, by=heard.append):
        monkeypatch.setattr(interrupts, "_calls", SimpleNamespace(getsignal=signal.getsignal, signal=exchange))
        with pytest.raises(SystemExit), guard():
            pass
        signal.raise_signal(STOPS_WORKER[0])
        assert heard == [STOPS_WORKER[0]]


def test_the_ear_is_put_up_once_and_hears_whoever_comes_behind_it() -> None:
    """Celery's handlers put the next step of a shutdown in their own place, and others put back what they have found:
    neither may make a longer and longer chain, nor be forgotten."""
    guard = Undisturbed(threading.Lock())
    heard: list[str] = []
    with handled(*STOPS_WORKER, by=lambda _: heard.append("old")):
        with guard:
            signal.raise_signal(signal.SIGQUIT)
            assert heard == []
        ear = signal.getsignal(signal.SIGQUIT)
        with guard:
            assert signal.getsignal(signal.SIGQUIT) is ear
        signal.signal(signal.SIGQUIT, lambda *_: heard.append("new"))
        with guard:
            signal.raise_signal(signal.SIGQUIT)
            assert heard == ["old"]
        assert heard == ["old", "new"]
        signal.signal(signal.SIGQUIT, ear)
        with guard:
            assert signal.getsignal(signal.SIGQUIT) is ear
            signal.raise_signal(signal.SIGQUIT)
        signal.raise_signal(signal.SIGQUIT)
    assert heard == ["old", "new", "old", "old"]


def test_a_handler_that_was_set_while_the_ear_was_put_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    late: list[Any] = [lambda *_: heard.append("next step")]

    def exchange(number: signal.Signals, handler: Any) -> Any:
        if number == signal.SIGQUIT and late:
            # As if the signal had come right here: Celery's handler has run, and has set the next.
            signal.signal(number, late.pop())
        return signal.signal(number, handler)

    with handled(*STOPS_WORKER, by=lambda _: heard.append("first step")):
        monkeypatch.setattr(interrupts, "_calls", SimpleNamespace(getsignal=signal.getsignal, signal=exchange))
        for _ in range(2):
            with Undisturbed(threading.Lock()):
                pass
        signal.raise_signal(signal.SIGQUIT)
    assert heard == ["next step"]


def test_whoever_leaves_what_it_never_entered_is_not_deaf() -> None:
    """A child that was forked in the middle, and whose own stack comes out of it."""
    heard: list[int] = []
    with handled(signal.SIGQUIT, by=heard.append):
        with Undisturbed(threading.Lock()):
            interrupts._stops.forget()
        signal.raise_signal(signal.SIGQUIT)
    assert heard == [signal.SIGQUIT]


def test_what_nobody_handles_stays_so() -> None:
    """Left to the system, a signal ends the process at once, or is ignored: also within."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        with Undisturbed(threading.Lock()):
            assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGQUIT, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_child_that_was_forked_in_the_middle_hears_at_once() -> None:
    with handled(signal.SIGQUIT, by=lambda _: os._exit(7)), Undisturbed(threading.Lock()):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGQUIT)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
