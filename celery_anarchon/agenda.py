"""Which job falls due next: a heap of instants, so that a tick costs what is due and not what exists, and what falls
due together costs little more than one of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
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
    """Not to be looked at earlier, whatever falls due: its timetable failed or has no slots of its own, or the store's
    answer was none yet."""
    looked_at: Millis = -1
    """When it is to be looked at: the heap entry of that time counts, others are passed over. -1: not at all."""


class Agenda:
    """The watched jobs, by the time at which they fall due."""

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._heap: list[Millis] = []
        """Each instant at which there is something."""
        self._at: dict[Millis, Watched | list[Watched]] = {}
        """What is at that instant; mostly it is one, and then lists would be most of the memory."""

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[Watched]:
        return iter(self._watched.values())

    def get(self, name: str) -> Watched | None:
        return self._watched.get(name)

    def watch(self, job: Job, cursor: Millis, since: Millis) -> Watched:
        """Watch *job* from *cursor* on. It falls due once :meth:`plan_again` was called."""
        self.drop(job.name)
        watched = self._watched[job.name] = Watched(job, cursor, since)
        return watched

    def drop(self, name: str) -> None:
        watched = self._watched.pop(name, None)
        if watched is not None:
            watched.looked_at = -1

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
        if watched.looked_at == when:
            return
        watched.looked_at = when
        there = self._at.get(when)
        if there is None:
            self._at[when] = watched
            heapq.heappush(self._heap, when)
        elif isinstance(there, list):
            there.append(watched)
        else:
            self._at[when] = [there, watched]

    def next_due(self) -> Millis | None:
        """When the first job falls due; None: none ever does."""
        while self._heap:
            when = self._heap[0]
            if any(watched.looked_at == when for watched in self._there(when)):
                return when
            self._forget_first()
        return None

    def pop_due(self, now: Millis) -> list[Watched]:
        """Take out every job that has fallen due by *now*."""
        due: list[Watched] = []
        while self._heap and (when := self._heap[0]) <= now:
            for watched in self._there(when):
                # It may have been put elsewhere since, or here twice.
                if watched.looked_at == when:
                    watched.looked_at = -1
                    due.append(watched)
            self._forget_first()
        return due

    def _there(self, when: Millis) -> Sequence[Watched]:
        there = self._at[when]
        return there if isinstance(there, list) else (there,)

    def _forget_first(self) -> None:
        del self._at[heapq.heappop(self._heap)]
