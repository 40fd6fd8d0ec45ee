"""Processes that use one store: functions that another process imports, and so stand in no test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from support.sqlite_files import base

from celery_anarchon.backends import backend_from_url
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.model import Answer
from celery_anarchon.testing.harness import claim

# Not forks of the test runner: what a thread of it has locked just then would be locked there for ever.
_CONTEXT: Any = multiprocessing.get_context("forkserver")

_PATIENCE = 60
"""Seconds of silence after which one of them hangs."""


def started(function: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """A process that runs *function* with a connection to say things by behind *arguments*; and where it is heard."""
    said, says = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=function, args=(*arguments, says), daemon=True)
    process.start()
    # Then its end is that of the other process.
    says.close()
    return process, said


def heard(said: Any) -> Any:
    """The next that is said; EOFError: its process has ended."""
    assert wait([said], _PATIENCE), f"nothing was said for {_PATIENCE} s"
    return said.recv()


def _create(url: str, barrier: Any, number: int, says: Any) -> None:
    try:
        backend = backend_from_url(url)
        barrier.wait()
        backend.open("app", create=True)
        slot = backend.now() // 3_600_000 * 3_600_000 - 3_600_000
        says.send(str(claim(backend, "job", slot, f"owner {number}")))
        backend.close()
    except BaseException as error:
        says.send(repr(error))


def created_at_once(url: str, size: int = 8) -> list[str]:
    """What *size* processes are told that make the same tables, and claim the same slot, at the same moment."""
    barrier = _CONTEXT.Barrier(size, timeout=_PATIENCE)
    crowd = [started(_create, url, barrier, number) for number in range(size)]
    try:
        return sorted(heard(said) for _, said in crowd)
    finally:
        for process, said in crowd:
            process.join(1)
            process.kill()
            process.join()
            process.close()
            said.close()


def claim_for_ever(path: Any, says: Any) -> None:
    """Say each slot that was won."""
    backend = SqliteBackend(path)
    backend.open("app")
    first = base(backend)
    for number in range(1_000_000):
        if claim(backend, "job", first + number, "a") is Answer.WON:
            says.send(first + number)
