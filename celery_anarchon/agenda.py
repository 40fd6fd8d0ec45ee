"""Which job falls due next: a heap, so that a tick costs what is due and not what exists."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from celery_anarchon import slots
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.timetable import Chain


@dataclass(eq=False, slots=True)
class Watched:
    """A job and how far this beat has come with it."""

    job: Job
    cursor: Millis
    """Every slot at or below this is decided, as far as this beat knows. Moves last, and only forward."""
    since: Millis
    """When this beat began to watch it: what fell due before was missed."""
    not_before: Millis = 0
    """Not to be looked at earlier, whatever falls due: its timetable failed, or the store called it too early."""
    looked_at: Millis = -1
    """When it is to be looked at: the heap entry of that time counts, others are passed over. -1: not at all."""


class Agenda:
    """The watched jobs, by the time at which they fall due."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._heap: list[tuple[Millis, str]] = []

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[Watched]:
        return iter(self._watched.values())

    def get(self, name: str) -> Watched | None:
        return self._watched.get(name)

    def watch(self, job: Job, cursor: Millis, since: Millis) -> Watched:
        """Watch *job* from *cursor* on. It falls due once :meth:`plan_again` was called."""
        watched = self._watched[job.name] = Watched(job, cursor, since)
        return watched

    def drop(self, name: str) -> None:
        self._watched.pop(name, None)

    def plan_again(self, watched: Watched) -> None:
        """Put the job where its next undecided slot falls due. Raises what its timetable raises."""
        if isinstance(watched.job.timetable, Chain):
            # Only by asking it, with the store's last run, is it known when.
            self.look_at(watched, watched.not_before)
            return
        due = slots.due_at(watched.job.name, watched.job.timetable, watched.job.options, watched.cursor)
        if due is not None:
            self.look_at(watched, max(due, watched.not_before))

    def look_at(self, watched: Watched, when: Millis) -> None:
        """Put the job at *when*, whatever its timetable says."""
        if self._watched.get(watched.job.name) is not watched:
            return
        if watched.looked_at != when:
            watched.looked_at = when
            heapq.heappush(self._heap, (when, watched.job.name))

    def next_due(self) -> Millis | None:
        """When the first job falls due; None: none ever does."""
        while self._heap:
            when, name = self._heap[0]
            watched = self._watched.get(name)
            if watched is not None and watched.looked_at == when:
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: Millis) -> list[Watched]:
        """Take out every job that has fallen due by *now*."""
        due: list[Watched] = []
        while (when := self.next_due()) is not None and when <= now:
            _, name = heapq.heappop(self._heap)
            watched = self._watched[name]
            watched.looked_at = -1
            due.append(watched)
        return due
