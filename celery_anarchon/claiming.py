"""Asking the store for slots, and what its answers mean for this beat.

Does not belong here: which slots to ask for, and publishing what was won.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend, ClaimRequest, ClaimResult
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.job import Job
from celery_anarchon.journal import Journal
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.options import Settings
from celery_anarchon.roster import Roster
from celery_anarchon.skips import Skips
from celery_anarchon.wants import Want, Won

PAUSES: dict[Answer, Millis] = {Answer.TOO_EARLY: 1_000, Answer.WAIT: 500, Answer.UNKNOWN: 500}
"""After these answers the slot is asked for again, so much later."""


class Claiming:
    """This beat's questions, as one owner."""

    def __init__(
        self,
        backend: ClaimBackend,
        settings: Settings,
        clock: Clock,
        fanout: events.Fanout,
        roster: Roster,
        journal: Journal,
        skips: Skips,
        *,
        owner: str,
        label: str,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._fanout = fanout
        self._roster = roster
        self._journal = journal
        self._skips = skips
        self._owner = owner
        self._label = label

    def request(self, job: Job, slot: Millis) -> ClaimRequest:
        followed = job.options.needs_workers or self._roster.had_workers
        return ClaimRequest(
            job=job.name,
            slot=slot,
            owner=self._owner,
            beat=self._label,
            lease=self._settings.lease,
            terms=job.terms if followed else None,
        )

    def ask(self, batch: Sequence[Want]) -> list[Won]:
        """What is this beat's to publish. The others are decided, or to be asked for again."""
        lease_over = self._clock.monotonic() + self._settings.lease / 1000
        won: list[Won] = []
        for want, result in zip(batch, self._answers(batch), strict=True):
            job, answer = want.watched.job, result.answer
            self._fanout.emit(events.Claimed(job=job.name, slot=want.slot, answer=answer))
            if answer is Answer.UNKNOWN:
                self._journal.doubt([want])
            else:
                self._resolve(want, answer)
            if answer in PAUSES:
                want.watched.not_before = self._clock.wall() + PAUSES[answer]
            elif answer is Answer.WON and not self._journal.holds(job, want.slot):
                deadline = self._journal.deadline(job, want.slot) if self._journal.applies else lease_over
                won.append(Won(job, want.slot, result.attempt, deadline, want))
                self._skips.won(job.name)
            else:
                want.decided = True
                self._note(want, answer)
        return won

    def lose(self, *, all_of_them: bool = False) -> None:
        """Say which claims without an answer will not be asked again, where nobody else can take them over."""
        for want in self._journal.lost(all_of_them=all_of_them):
            self._fanout.emit(events.ClaimUnresolved(job=want.watched.job.name, slot=want.slot))

    def _answers(self, batch: Sequence[Want]) -> list[ClaimResult]:
        try:
            return self._backend.claim([self.request(want.watched.job, want.slot) for want in batch])
        except BackendUnavailable:
            raise
        except Exception:
            self._journal.doubt(batch)
            raise

    def _resolve(self, want: Want, answer: Answer) -> None:
        doubted = self._journal.answered(want)
        if doubted and answer is Answer.TAKEN and not self._backend.traits.knows_owner:
            self._fanout.emit(events.ClaimUnresolved(job=want.watched.job.name, slot=want.slot))

    def _note(self, want: Want, answer: Answer) -> None:
        if answer in (Answer.SKIPPED, Answer.WAITING):
            # It has a record now, so an old one of its job may have to go.
            self._roster.touched(want.watched)
            if answer is Answer.SKIPPED:
                self._skips.skipped(want.watched.job.name)
        elif answer is Answer.TOO_OLD and self._journal.applies:
            # The store has recorded it, where it knows that nobody has sent it.
            self._fanout.emit(
                events.SlotsGivenUp(
                    job=want.watched.job.name, state=RunState.MISFIRE, reason="too-old", total=1, newest=want.slot
                )
            )
