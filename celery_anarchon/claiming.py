"""Asking the store for slots, with their messages where both are one step, and what its answers mean for this beat.

Does not belong here: which slots to ask for, and publishing what was won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend, ClaimRequest, ClaimResult, Enqueue
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.job import Job
from celery_anarchon.journal import Journal
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.onestep import Ask, Message, OneStep
from celery_anarchon.options import Settings
from celery_anarchon.roster import Roster
from celery_anarchon.skips import Skips
from celery_anarchon.wants import Want, Won

PAUSES: dict[Answer, Millis] = {Answer.TOO_EARLY: 1_000, Answer.WAIT: 500, Answer.UNKNOWN: 500}
"""After these answers the slot is asked for again, so much later."""


class Asked(NamedTuple):
    """A batch that was asked for, or is about to be."""

    won: Callable[[], list[Won]]
    """What of it is this beat's to publish, or is out already; the others are decided, or to be asked for again. It is
    called once, and raises what the store raises."""
    under_way: bool
    """The answers are. Else nothing is asked before `won` is called."""


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

    def request(self, job: Job, slot: Millis, message: Message = None) -> ClaimRequest:
        followed = job.options.needs_workers or self._roster.had_workers
        return ClaimRequest(
            job=job.name,
            slot=slot,
            owner=self._owner,
            beat=self._label,
            lease=self._settings.lease,
            terms=job.terms if followed else None,
            enqueue=message if isinstance(message, Enqueue) else None,
        )

    def begin(self, batch: Sequence[Want]) -> Asked:
        """Ask for *batch*, where messages go along with the claims. What is won without one waits for it to be
        published, so that is asked for only when it is this batch's turn."""
        asks = [Ask(want.watched.job, want.slot, 1, want.due) for want in batch]
        known = self._decided(asks)
        answered: list[tuple[Want, Message, ClaimResult]] = [
            (want, None, result) for want, result in zip(batch, known, strict=True) if result is not None
        ]
        if answered:
            batch = [want for want, result in zip(batch, known, strict=True) if result is None]
            asks = [ask for ask, result in zip(asks, known, strict=True) if result is None]
        messages = self._one_step.messages(asks)
        requests = [
            self.request(want.watched.job, want.slot, message) for want, message in zip(batch, messages, strict=True)
        ]
        under_way = self._begin_claims(batch, requests)
        begun = self._clock.monotonic()

        def won() -> list[Won]:
            lease_over = (self._clock.monotonic() if under_way is None else begun) + self._settings.lease / 1000
            with self._doubting(batch, requests):
                results = self._backend.claim(requests) if under_way is None else under_way()
            answered.extend(zip(batch, messages, results, strict=True))
            taken = sum(result.answer is Answer.TAKEN for _, _, result in answered)
            self._one_step.was_taken(taken, len(answered))
            items = [self._won(want, message, result, lease_over) for want, message, result in answered]
            return [item for item in items if item is not None]

        return Asked(won, under_way is not None)

    def _begin_claims(
        self, batch: Sequence[Want], requests: Sequence[ClaimRequest]
    ) -> Callable[[], list[ClaimResult]] | None:
        """Where the answers will be; None: it is yet to be asked."""
        if all(request.enqueue is None for request in requests):
            return None
        with self._doubting(batch, requests):
            return self._one_step.store.begin_claims(requests)

    @contextmanager
    def _doubting(self, batch: Sequence[Want], requests: Sequence[ClaimRequest]) -> Iterator[None]:
        """Note what may have been won, where the answer does not come."""
        try:
            yield
        except BackendUnavailable:
            raise
        except Exception:
            self._journal.doubt(batch)
            self._lost.update((request.job, request.slot) for request in requests if request.enqueue is not None)
            raise

    def _decided(self, asks: Sequence[Ask]) -> list[ClaimResult | None]:
        return self._one_step.decided(asks, alone=not self._roster.others_live)

    def _won(self, want: Want, message: Message, result: ClaimResult, lease_over: float) -> Won | None:
        """What of this answer is this beat's to go on with."""
        job, slot, answer = want.watched.job, want.slot, result.answer
        self._tell(job, slot, answer)
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
            item = Won(job, slot, result.attempt, deadline, want, error=error)
        else:
            want.decided = True
            self._note(want, answer)
            return None
        self._skips.won(job.name)
        return item

    def _tell(self, job: Job, slot: Millis, answer: Answer) -> None:
        if answer in events.NEWS or self._fanout.is_heard(events.Claimed):
            self._fanout.emit(events.Claimed(job=job.name, slot=slot, answer=answer))

    def _was_sent(self, want: Want, result: ClaimResult) -> bool:
        """Whether its message is out, by this call or by one whose answer was lost."""
        doubted = (want.watched.job.name, want.slot) in self._lost
        if doubted:
            self._lost.discard((want.watched.job.name, want.slot))
        return result.sent or (doubted and result.answer is Answer.ALREADY_SENT)

    def _late(self, due: Millis) -> Millis:
        return max(0, self._clock.wall() - due)

    def ask_for_waiting(self, ready: Sequence[tuple[Job, Millis]], in_time: Sequence[bool]) -> list[Won]:
        """Slots that waited for the end of a run, and now may go on: what is won. Those not in time get no message."""
        asks = [Ask(job, slot) for job, slot in ready]
        known = self._decided(asks)
        left = [(ask, fits) for ask, fits, result in zip(asks, in_time, known, strict=True) if result is None]
        if not left:
            return []
        made = iter(self._one_step.messages([ask for ask, fits in left if fits]))
        messages = [next(made) if fits else None for _, fits in left]
        deadline = self._clock.monotonic() + self._settings.lease / 1000
        requests = [self.request(ask.job, ask.slot, message) for (ask, _), message in zip(left, messages, strict=True)]
        one_step = any(request.enqueue is not None for request in requests)
        results = self._one_step.store.claim_and_send(requests) if one_step else self._backend.claim(requests)
        won = []
        for ((job, slot, _, _), _), message, result in zip(left, messages, results, strict=True):
            self._tell(job, slot, result.answer)
            if result.answer is Answer.WON:
                item = Won(job, slot, result.attempt, deadline)
                item.late = message.late if result.sent and isinstance(message, Enqueue) else None
                item.error = message if isinstance(message, Exception) else None
                won.append(item)
        return won

    def lose(self, *, all_of_them: bool = False) -> None:
        """Say which claims without an answer will not be asked again, where nobody else can take them over."""
        for want in self._journal.lost(all_of_them=all_of_them):
            self._fanout.emit(events.ClaimUnresolved(job=want.watched.job.name, slot=want.slot))

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
