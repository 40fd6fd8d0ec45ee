"""Many that want the same at the same moment, children of a fork, calls that are interrupted: what clauses need of the
machine they run on. Knows no clause and no store.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from threading import BrokenBarrierError
from typing import Any, TypeVar

import pytest

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.model import Answer, Millis
from celery_anarchon.testing.harness import BackendHarness, ask, claim_all

_T = TypeVar("_T")


# --- races ------------------------------------------------------------------------------------------------------------


def at_once(calls: Sequence[Callable[[], _T]], patience: float = 60) -> list[_T]:
    """What each of *calls* returns when all begin at the same moment, each in a thread of its own. Raises what any of
    them raises; fails when one has not ended after *patience* seconds."""
    barrier = threading.Barrier(len(calls), timeout=patience)
    results: dict[int, _T] = {}
    failures: list[BaseException] = []

    def run(number: int, call: Callable[[], _T]) -> None:
        try:
            barrier.wait()
            results[number] = call()
        except BaseException as error:
            failures.append(error)

    deadline = time.monotonic() + patience
    crowd = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(calls)]
    with _restless():
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in crowd):
        pytest.fail(f"of {len(calls)} calls at once {len(calls) - len(results)} hang: nothing for {patience} s")
    return [results[number] for number in range(len(calls))]


@contextmanager
def _restless() -> Iterator[None]:
    """Threads of one process change places often, or a gap between reading and writing is never hit."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


_BLOCK = 10
"""A barrier every so many slots keeps all contenders on the same ones."""


def race(
    harness: BackendHarness,
    job: str,
    slots: Sequence[Millis],
    *,
    processes: int,
    threads: int,
    batched: bool = False,
    patience: float = 120,
) -> dict[Millis, list[str]]:
    """Let *processes* x *threads* clients, each its own owner, claim the same slots; who was told WON, slot by slot.

    One process: this one. *batched*: a whole block in one call, each contender in an order of its own. *patience*: the
    seconds without any answer after which it fails.
    """
    winners: dict[Millis, list[str]] = {slot: [] for slot in slots}
    if processes == 1:
        specs = [harness.connect_spec() for _ in range(threads)]
        results = _contend(specs, job, slots, threading.Barrier(threads, timeout=patience), "0", batched, patience)
    else:
        results = _contend_in_processes(harness, job, slots, processes, threads, batched, patience)
    for owner, slot in results:
        winners[slot].append(owner)
    return winners


def _contend(
    specs: Sequence[Callable[[], ClaimBackend]],
    job: str,
    slots: Sequence[Millis],
    barrier: Any,
    label: str,
    batched: bool,
    patience: float,
) -> list[tuple[str, Millis]]:
    """One thread for each spec. Every failure of a contender is raised."""
    won: list[tuple[str, Millis]] = []
    failures: list[BaseException] = []
    heard = time.monotonic()

    def contender(number: int) -> None:
        nonlocal heard
        owner = f"{label}-{number}-{uuid.uuid4().hex}"
        try:
            client = specs[number]()
            for start in range(0, len(slots), _BLOCK):
                block = list(slots[start : start + _BLOCK])
                if batched:
                    turn = number % len(block)
                    block = block[turn:] + block[:turn]
                barrier.wait()
                for part in [block] if batched else [[slot] for slot in block]:
                    answers = claim_all(client, [ask(job, slot, owner) for slot in part])
                    heard = time.monotonic()
                    won.extend(
                        (owner, slot) for slot, answer in zip(part, answers, strict=True) if answer is Answer.WON
                    )
            client.close()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    crowd = [threading.Thread(target=contender, args=(number,), daemon=True) for number in range(len(specs))]
    with _restless():
        for thread in crowd:
            thread.start()
        for thread in crowd:
            while thread.is_alive() and (left := heard + patience - time.monotonic()) > 0:
                thread.join(left)
    hanging = sum(thread.is_alive() for thread in crowd)
    said = [error for error in failures if not isinstance(error, BrokenBarrierError)]
    if said:
        raise said[0]
    if hanging:
        # Where they hang is all that will ever be known of it.
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        pytest.fail(f"{hanging} of {len(crowd)} contenders hang: no answer for {patience} s")
    if failures:
        raise failures[0]
    return won


def _contend_in_processes(
    harness: BackendHarness,
    job: str,
    slots: Sequence[Millis],
    processes: int,
    threads: int,
    batched: bool,
    patience: float,
) -> list[tuple[str, Millis]]:
    # Not forks of this process: what a thread of it has locked just then would be locked there for ever.
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload([__name__])
    barrier = context.Barrier(processes * threads, timeout=patience)
    crowd: list[Any] = []
    unheard: list[Any] = []
    for number in range(processes):
        said, says = context.Pipe(duplex=False)
        arguments = (harness.connect_spec(), threads, job, list(slots), barrier, str(number), batched, patience, says)
        process = context.Process(target=_contend_there, args=arguments, daemon=True)
        process.start()
        # Then its end is that of the other process.
        says.close()
        crowd.append(process)
        unheard.append(said)
    won: list[tuple[str, Millis]] = []
    try:
        outcomes: list[Any] = []
        while unheard:
            ready: list[Any] = wait(unheard, patience)
            if not ready:
                outcomes.append(f"nothing was said for {patience} s")
                break
            for said in ready:
                try:
                    outcomes.append(said.recv())
                except EOFError:
                    outcomes.append("it died without a word; perhaps it cannot import what connect_spec() returns")
                    barrier.abort()
                said.close()
                unheard.remove(said)
        # What broke the barrier says more than that it was broken.
        outcomes.sort(key=lambda outcome: str(outcome).startswith(BrokenBarrierError.__name__))
        for outcome in outcomes:
            assert not isinstance(outcome, str), f"a contender in another process failed: {outcome}"
            won += outcome
    finally:
        for process in crowd:
            # All have answered, or something is wrong already.
            process.join(1)
            process.kill()
            process.join()
            process.close()
        for said in unheard:
            said.close()
    return won


def _contend_there(
    spec: Callable[[], ClaimBackend],
    threads: int,
    job: str,
    slots: Any,
    barrier: Any,
    label: str,
    batched: bool,
    patience: float,
    says: Any,
) -> None:
    try:
        says.send(_contend([spec] * threads, job, slots, barrier, label, batched, patience))
    except BaseException as error:
        says.send(f"{type(error).__name__}: {error}")


# --- processes, signals, leftovers ------------------------------------------------------------------------------------


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Python warns of a fork beside threads; those of a test runner only wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def in_child(function: Callable[[], _T], patience: float = 30) -> _T:
    """What *function* returns in a fork of this process; fails when it raises, dies or hangs."""
    reader, writer = os.pipe()
    with quiet_fork():
        child = os.fork()
    if child == 0:
        try:
            try:
                said = pickle.dumps((True, function()))
            except BaseException as error:
                said = pickle.dumps((False, f"{type(error).__name__}: {error}"))
            with open(writer, "wb") as pipe:
                pipe.write(said)
        finally:
            # Whatever happens: beyond this line it would go on as a second test runner.
            os._exit(1)
    os.close(writer)
    try:
        said, deadline = b"", time.monotonic() + patience
        while True:
            if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"in a child process it hangs: nothing for {patience} s")
            piece = os.read(reader, 1 << 20)
            if not piece:
                break
            said += piece
        assert said, "the child process died without a word"
        well, value = pickle.loads(said)
        assert well, f"in a child process: {value}"
        result_: _T = value
        return result_
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def interrupted(call: Callable[[], _T], interrupt: Callable[[], None], patience: float = 30) -> _T:
    """What *call* returns when *interrupt* runs at each line of it, in its own thread, as a signal handler would."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        interrupt()
        return tracer

    def run() -> None:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)
        finally:
            sys.settrace(before)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    if thread.is_alive():
        pytest.fail(f"the call and its interruption wait for each other: nothing for {patience} s")
    if failures:
        raise failures[0]
    return results[0]


def leftovers() -> dict[str, int]:
    """How many threads live and, where the system tells, how many files and sockets are open."""
    gc.collect()
    counts = {"threads": threading.active_count()}
    if os.path.isdir("/proc/self/fd"):
        counts["open files"] = len(os.listdir("/proc/self/fd"))
    return counts
