"""Jobs that are skipped again and again because an earlier run of theirs lives: said once, with who holds them."""

from __future__ import annotations

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import Run, RunState

IN_A_ROW = 5
"""Skipped slots after which a person should know: a run that takes one interval longer is ordinary."""


class Skips:
    """Counts the slots of a job, from the first that this beat recorded as skipped on.

    That is a reason to look, no more: what other beats decided may have been sent, and some of it is never heard of.
    """

    def __init__(self, backend: ClaimBackend, fanout: events.Fanout) -> None:
        self._backend = backend if isinstance(backend, RunBackend) else None
        self._fanout = fanout
        self._counts: dict[str, int] = {}
        self._to_tell: list[str] = []
        self._told: dict[str, str] = {}
        """Job -> the run that was named."""

    def won(self, job: str) -> None:
        self._counts.pop(job, None)

    def taken(self, job: str) -> None:
        """Another beat decided a slot: of a job that was skipped it may have been skipped, too."""
        if job in self._counts:
            self.skipped(job)

    def skipped(self, job: str) -> None:
        count = self._counts[job] = self._counts.get(job, 0) + 1
        if count == IN_A_ROW:
            del self._counts[job]
            self._to_tell.append(job)

    def tell(self) -> None:
        """Name who holds the jobs that have come to it. Raises what the store raises."""
        while self._backend is not None and self._to_tell:
            run = self._blocking(self._backend, self._to_tell[0])
            job = self._to_tell.pop(0)
            if run is not None and self._told.get(job) != run.run_id:
                self._told[job] = run.run_id
                self._fanout.emit(events.Blocked(job=job, skipped=IN_A_ROW, run=run))

    @staticmethod
    def _blocking(backend: RunBackend, job: str) -> Run | None:
        """The living run for which the latest slots of *job* were skipped, all of them."""
        latest = backend.history(job, IN_A_ROW)
        holders = {run.blocked_by if run.state is RunState.SKIPPED else None for run in latest}
        if len(latest) < IN_A_ROW or len(holders) > 1:
            return None
        return next((run for run in backend.living(job) if run.run_id in holders), None)
