"""Asking the store for slots, with their messages where both are one step, and what its answers mean for this beat.

Does not belong here: which slots to ask for, and publishing what was won.
"""

from __future__ import annotations

from collections.abc import Sequence

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend, ClaimRequest, ClaimResult, Enqueue
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.journal import Journal
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.onestep import Ask, Message, OneStep
from celery_anarchon.options import Settings
from celery_anarchon.roster import Roster
from celery_anarchon.skips import Skips
from celery_anarchon.wants import Ready, Want, Won

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
        one_step: OneStep,
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
        self._one_step = one_step
        self._owner = owner
        self._label = label
        self._lost: set[tuple[str, Millis]] = set()
        """Slots that were asked for with their message, and the answer did not come: they may be sent."""

    def _request(self, ask: Ask, message: Message) -> ClaimRequest:
        return ClaimRequest(
            job=ask.job.name,
            slot=ask.slot,
            owner=self._owner,
            beat=self._label,
            lease=self._settings.lease,
            terms=ask.terms,
            enqueue=message if isinstance(message, Enqueue) else None,
        )

    def ask(self, batch: Sequence[Want]) -> list[Won]:
        """What is this beat's to publish, or is out already. The others are decided, or to be asked for again."""
        terms_of = self._roster.terms_of
        asks = [Ask(want.watched.job, want.slot, 1, want.due, terms_of(want.watched.job)) for want in batch]
        known = self._decided(asks)
        answered: list[tuple[Want, Ask, Message, ClaimResult]] = [
            (want, ask, None, result)
            for want, ask, result in zip(batch, asks, known, strict=True)
            if result is not None
        ]
        if answered:
            batch = [want for want, result in zip(batch, known, strict=True) if result is None]
            asks = [ask for ask, result in zip(asks, known, strict=True) if result is None]
        messages = self._one_step.messages(asks)
        lease_over = self._clock.monotonic() + self._settings.lease / 1000
        answered += zip(batch, asks, messages, self._answers(batch, asks, messages), strict=True)
        taken = sum(result.answer is Answer.TAKEN for *_, result in answered)
        self._one_step.was_taken(taken, len(answered))
        won = [self._won(want, ask, message, result, lease_over) for want, ask, message, result in answered]
        return [item for item in won if item is not None]

    def _decided(self, asks: Sequence[Ask]) -> list[ClaimResult | None]:
        return self._one_step.decided(asks, alone=not self._roster.others_live)

    def _won(self, want: Want, ask: Ask, message: Message, result: ClaimResult, lease_over: float) -> Won | None:
        """What of this answer is this beat's to go on with."""
        job, slot, answer = want.watched.job, want.slot, result.answer
        self._fanout.emit(events.Claimed(job=job.name, slot=slot, answer=answer))
        if answer is Answer.UNKNOWN:
            self._journal.doubt([want])
        else:
            self._resolve(want, answer)
        if answer in PAUSES:
            want.watched.not_before = self._clock.wall() + PAUSES[answer]
            return None
        if self._was_sent(want, result):
            item = Won(job, slot, result.attempt, lease_over, want)
            item.late = message.late if isinstance(message, Enqueue) else self._late(item.due)
        elif answer is Answer.WON and not self._journal.holds(job, slot):
            deadline = self._journal.deadline(job, slot) if self._journal.applies else lease_over
            error = message if isinstance(message, Exception) else None
            item = Won(job, slot, result.attempt, deadline, want, terms=ask.terms, error=error)
        else:
            want.decided = True
            self._note(want, answer)
            return None
        self._skips.won(job.name)
        return item

    def _was_sent(self, want: Want, result: ClaimResult) -> bool:
        """Whether its message is out, by this call or by one whose answer was lost."""
        doubted = (want.watched.job.name, want.slot) in self._lost
        if doubted:
            self._lost.discard((want.watched.job.name, want.slot))
        return result.sent or (doubted and result.answer is Answer.ALREADY_SENT)

    def _late(self, due: Millis) -> Millis:
        return max(0, self._clock.wall() - due)

    def ask_for_waiting(self, ready: Sequence[Ready], in_time: Sequence[bool]) -> list[Won]:
        """Slots that waited for the end of a run, and now may go on: what is won. Those not in time get no message."""
        asks = [Ask(job, slot, terms=self._roster.terms_of(job)) for job, slot, _ in ready]
        known = self._decided(asks)
        left = [(ask, fits) for ask, fits, result in zip(asks, in_time, known, strict=True) if result is None]
        if not left:
            return []
        made = iter(self._one_step.messages([ask for ask, fits in left if fits]))
        messages = [next(made) if fits else None for _, fits in left]
        deadline = self._clock.monotonic() + self._settings.lease / 1000
        results = self._claim([self._request(ask, message) for (ask, _), message in zip(left, messages, strict=True)])
        won = []
        for (ask, _), message, result in zip(left, messages, results, strict=True):
            self._fanout.emit(events.Claimed(job=ask.job.name, slot=ask.slot, answer=result.answer))
            if result.answer is Answer.WON:
                item = Won(ask.job, ask.slot, result.attempt, deadline, terms=ask.terms)
                item.late = message.late if result.sent and isinstance(message, Enqueue) else None
                item.error = message if isinstance(message, Exception) else None
                won.append(item)
        return won

    def lose(self, *, all_of_them: bool = False) -> None:
        """Say which claims without an answer will not be asked again, where nobody else can take them over."""
        for want in self._journal.lost(all_of_them=all_of_them):
            self._fanout.emit(events.ClaimUnresolved(job=want.watched.job.name, slot=want.slot))

    def _answers(self, batch: Sequence[Want], asks: Sequence[Ask], messages: Sequence[Message]) -> list[ClaimResult]:
        if not batch:
            return []
        requests = [self._request(ask, message) for ask, message in zip(asks, messages, strict=True)]
        try:
            return self._claim(requests)
        except BackendUnavailable:
            raise
        except Exception:
            self._journal.doubt(batch)
            self._lost.update((request.job, request.slot) for request in requests if request.enqueue is not None)
            raise

    def _claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        if any(request.enqueue is not None for request in requests):
            return self._one_step.store.claim_and_send(requests)
        return self._backend.claim(requests)

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
