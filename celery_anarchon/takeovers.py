"""What this beat goes on with for others: lapsed claims, runs whose workers let them go, slots that waited.

Does not belong here: when to look, and what lapsed (:mod:`celery_anarchon.sweeper`); publishing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from celery_anarchon import events
from celery_anarchon.claiming import Claiming
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, RunState
from celery_anarchon.sweeper import Sweeper, TakenOver
from celery_anarchon.unsent import Unsent
from celery_anarchon.wants import Ready, Won


class Takeovers:
    """Each answer is what is this beat's to publish, or is out already. What is not to be sent is given up here."""

    def __init__(
        self,
        sweeper: Sweeper,
        claiming: Claiming,
        unsent: Unsent,
        job_named: Callable[[str], Job | None],
        fanout: events.Fanout,
    ) -> None:
        self._sweeper = sweeper
        self._claiming = claiming
        self._unsent = unsent
        self._job_named = job_named
        self._fanout = fanout

    def lapsed(self, *, others_live: bool, agreed: bool) -> list[Won]:
        """Of what lapsed, what this beat took over."""
        won = []
        for claim in self._sweeper.take_over(others_live=others_live, agreed=agreed):
            # Whatever became of an earlier claim of it: this is the verdict on the slot.
            self._claiming.unanswered.forget(claim.job.name, claim.slot)
            item = Won(claim.job, claim.slot, claim.attempt, claim.deadline)
            item.terms, item.late, item.error = claim.terms, claim.late, claim.error
            if self._goes_on(claim, item):
                won.append(item)
        return won

    def _goes_on(self, claim: TakenOver, item: Won) -> bool:
        self._fanout.emit(
            events.TookOver(
                job=claim.job.name,
                slot=claim.slot,
                attempt=claim.attempt,
                abandoned=claim.abandoned,
                started=claim.started,
            )
        )
        if claim.end is None:
            return True
        self._unsent.give_up(item, claim.end, claim.reason)
        return False

    def _asked_before(self) -> Iterator[Ready]:
        """Those that had waited, and whose answers were lost. A job is asked for as it is now, and no more once it is
        gone."""
        for slot in self._claiming.unanswered.waiting():
            job = self._job_named(slot.job.name)
            if job is not None:
                yield slot._replace(job=job)

    def _given_up(self) -> dict[tuple[str, Millis], tuple[Ready, tuple[RunState, str]]]:
        """Slots that the plan gave up while it was not known whose they are."""
        found = {}
        for lost in self._claiming.unanswered.given_up():
            job, slot = self._job_named(lost.ask.job.name), lost.ask.slot
            if job is not None and lost.end is not None:
                found[job.name, slot] = Ready(job, slot, None), lost.end
        return found

    def waiting(self) -> list[Won]:
        """Slots that waited for the end of a run, now that it has ended. Those that the plan has given up are asked for
        along with them: what is this beat's ends so, unless its message is out; of the rest others tell."""
        free, full = self._sweeper.ready()
        ready = {(slot.job.name, slot.slot): slot for slot in (*self._asked_before(), *free)}
        given_up = self._given_up()
        ready |= {place: slot for place, (slot, _) in given_up.items()}
        in_time = [place not in given_up and self._sweeper.in_time(slot) for place, slot in ready.items()]
        won = []
        items = self._claiming.ask_for_waiting(list(ready.values()), in_time)
        for item in items:
            place = item.job.name, item.slot
            if item.late is not None:
                won.append(item)
            elif place in given_up:
                self._unsent.give_up(item, *given_up[place][1])
            elif self._sweeper.in_time(ready[place]):
                won.append(item)
            else:
                self._unsent.give_up(item, RunState.MISFIRE, "max-late")
        if items and full:
            self._sweeper.look_now()
        return won
