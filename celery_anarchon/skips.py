"""Jobs that are skipped again and again because an earlier run of theirs lives: said once, with who holds them."""

from __future__ import annotations

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.runs import RunBackend

IN_A_ROW = 5
"""Skipped slots after which a person should know: a run that takes one interval longer is ordinary."""


class Skips:
    """Counts a job's skipped slots since its last one that was won here."""

    def __init__(self, backend: ClaimBackend, fanout: events.Fanout) -> None:
        self._backend = backend if isinstance(backend, RunBackend) else None
        self._fanout = fanout
        self._counts: dict[str, int] = {}
        self._to_tell: list[str] = []

    def won(self, job: str) -> None:
        self._counts.pop(job, None)

    def skipped(self, job: str) -> None:
        count = self._counts[job] = self._counts.get(job, 0) + 1
        if count == IN_A_ROW:
            self._to_tell.append(job)

    def tell(self) -> None:
        """Name who holds the jobs that have come to it. Raises what the store raises."""
        while self._backend is not None and self._to_tell:
            living = self._backend.living(self._to_tell[0])
            job = self._to_tell.pop(0)
            if living:
                self._fanout.emit(events.Blocked(job=job, skipped=IN_A_ROW, run=living[0]))
