"""Jobs that this beat schedules and has yet to tell the store of: when each begins, and from where it goes on.

Does not belong here: which slots a job owes, once it is watched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from celery_anarchon.agenda import Agenda, Watched
from celery_anarchon.clock import Clock
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.roster import Roster
from celery_anarchon.timetable import At

BATCH = 500


class Newcomers:
    """The way of a job into the agenda.

    :param plan_again: puts a watched job where it falls due next.
    :param missed: called for a job of one instant that lies before the store first saw it.
    """

    def __init__(
        self,
        agenda: Agenda,
        roster: Roster,
        clock: Clock,
        *,
        plan_again: Callable[[Watched], None],
        missed: Callable[[Job, Millis], None],
    ) -> None:
        self._agenda = agenda
        self._roster = roster
        self._clock = clock
        self._plan_again = plan_again
        self._missed = missed
        self._waiting: dict[str, Job] = {}
        self._since = clock.wall()

    def __len__(self) -> int:
        return len(self._waiting)

    def schedule_is(self, jobs: Mapping[str, Job]) -> None:
        """Take *jobs* as the whole schedule. What did not change goes on as it was; a new job, or one whose timetable
        means something else now, begins when the store first sees it."""
        for watched in list(self._agenda):
            if watched.job.name not in jobs:
                self._agenda.drop(watched.job.name)
        self._waiting = {name: job for name, job in self._waiting.items() if name in jobs}
        for name, job in jobs.items():
            known = self._agenda.get(name)
            if known is None or known.job.timetable.key != job.timetable.key:
                self._agenda.drop(name)
                self._waiting[name] = job
            elif known.job is not job:
                known.job = job
                self._plan_again(known)
        self._since = self._clock.wall()

    def begin_anew(self, since: Millis) -> None:
        """Go on with every job from what the store knows of it. What fell due before *since* was missed."""
        self._since = since
        for watched in list(self._agenda):
            self._agenda.drop(watched.job.name)
            self._waiting[watched.job.name] = watched.job

    def register(self) -> None:
        """Tell the store of some of them, and watch those from now on."""
        jobs = list(itertools.islice(self._waiting.values(), BATCH))
        for job, cursor in zip(jobs, self._cursors(jobs), strict=True):
            del self._waiting[job.name]
            self._plan_again(self._agenda.watch(job, cursor, self._since))
        if not self._waiting:
            # A dict keeps the room of what it once held.
            self._waiting = {}

    def _cursors(self, jobs: Sequence[Job]) -> list[Millis]:
        cursors: list[Millis] = []
        same: dict[Millis, Millis] = {}
        for job, known in zip(jobs, self._roster.first_sight(jobs), strict=True):
            at = job.timetable.instant if isinstance(job.timetable, At) else None
            if at is not None and known.last is None and at <= known.since and self._roster.registers:
                self._missed(job, at)
            cursor = known.since if known.last is None else max(known.since, known.last)
            # Jobs that the store saw in one step share the number, too: there may be very many.
            cursors.append(same.setdefault(cursor, cursor))
        return cursors
