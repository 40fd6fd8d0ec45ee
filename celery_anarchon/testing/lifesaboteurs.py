"""Backends that leave something behind, hang, or open what is not theirs (X); part of :mod:`.saboteurs`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from celery_anarchon.backends.base import (
    ClaimRequest,
    ClaimResult,
)
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.sqlite import SqliteBackend


class LeavesAThread(MemoryBackend):
    """X1: a helper that nobody stops."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


class LeavesAFile(SqliteBackend):
    """X1: connections are dropped, not closed."""

    def close(self) -> None:
        self.__dict__.setdefault("_lost", []).extend(self._source._connections._idle)
        self._source._connections._idle.clear()


class AsksThroughAThread(SqliteBackend):
    """X2: a helper does the work, and is not there after a fork."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        if not hasattr(self, "_work"):
            self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for requests, answer in iter(self._work.get, None):
            answer.put(super().claim(requests))

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        answer: queue.SimpleQueue[list[ClaimResult]] = queue.SimpleQueue()
        self._work.put((requests, answer))
        return answer.get()

    def close(self) -> None:
        if hasattr(self, "_work"):
            self._work.put(None)
            del self._work
        super().close()


class WaitsForItself(MemoryBackend):
    """X3: close() waits for the call that it interrupts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._call = threading.Lock()

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._call:
            return super().claim(requests)

    def close(self) -> None:
        # Not for ever: its own test has to end.
        if self._call.acquire(timeout=4):
            self._call.release()
        super().close()


class AnybodysNamespace(MemoryBackend):
    """X4: opens whatever is there."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        pass


LIFE_SABOTEURS: dict[str, tuple[type[MemoryBackend] | type[SqliteBackend], ...]] = {
    "X1": (LeavesAThread, LeavesAFile),
    "X2": (AsksThroughAThread,),
    "X3": (WaitsForItself,),
    "X4": (AnybodysNamespace,),
}
"""Clause -> the backends that break it."""
