"""Asking the store for slots, with their messages where both are one step, and what its answers mean for this beat.

Does not belong here: which slots to ask for, and publishing what was won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import NamedTuple

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
from celery_anarchon.unanswered import Unanswered
from celery_anarchon.wants import Ready, Want, Won

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
        unanswered: Unanswered,
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
        self.unanswered = unanswered
        self._skips = skips
        self._one_step = one_step
        self._owner = owner
        self._label = label

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

    def begin(self, batch: Sequence[Want], *, abroad: bool = False) -> Asked:
        """Ask for *batch*, where messages go along with the claims. What is won without one waits for it to be
        published, so that is asked for only when it is this batch's turn.

        :param abroad: others have most likely sent it by now.
        """
        terms_of = self._roster.terms_of
        asks = [Ask(want.watched.job, want.slot, 1, want.due, terms_of(want.watched.job)) for want in batch]
        asks = self.unanswered.as_first(asks)
        known = self._decided(asks, abroad=abroad)
        answered: list[tuple[Want, Ask, Message, ClaimResult]] = [
            (want, ask, None, result)
            for want, ask, result in zip(batch, asks, known, strict=True)
            if result is not None
        ]
        if answered:
            batch = [want for want, result in zip(batch, known, strict=True) if result is None]
            asks = [ask for ask, result in zip(asks, known, strict=True) if result is None]
        messages = self._one_step.messages(asks)
        requests = [self._request(ask, message) for ask, message in zip(asks, messages, strict=True)]
        under_way: Callable[[], list[ClaimResult]] | None = None
        begun = self._clock.monotonic()
        if _with_messages(requests):
            with self._doubting(asks, messages, wants=batch):
                under_way = self._one_step.store.begin_claims(requests)

        def won() -> list[Won]:
            lease_over = (self._clock.monotonic() if under_way is None else begun) + self._settings.lease / 1000
            with self._doubting(asks, messages, wants=batch):
                results = self._claim(requests) if under_way is None else under_way()
            answered.extend(zip(batch, asks, messages, results, strict=True))
            taken = sum(result.answer is Answer.TAKEN for *_, result in answered)
            self._one_step.was_taken(taken, len(answered))
            heard = self._fanout.is_heard(events.Claimed)
            items = [
                self._won(want, ask, message, result, lease_over, heard) for want, ask, message, result in answered
            ]
            return [item for item in items if item is not None]

        return Asked(won, under_way is not None)

    def _decided(self, asks: Sequence[Ask], *, abroad: bool = False) -> list[ClaimResult | None]:
        return self._one_step.decided(asks, alone=not self._roster.others_live, abroad=abroad)

    def _won(
        self, want: Want, ask: Ask, message: Message, result: ClaimResult, lease_over: float, heard: bool
    ) -> Won | None:
        """What of this answer is this beat's to go on with."""
        job, slot, answer = want.watched.job, want.slot, result.answer
        if answer is Answer.UNKNOWN:
            self._journal.doubt([want])
        else:
            self._resolve(want, answer)
        sent = self._take(ask, message, result, heard)
        if answer in PAUSES:
            want.watched.not_before = self._clock.wall() + PAUSES[answer]
            return None
        if sent:
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

    def _take(self, ask: Ask, message: Message, result: ClaimResult, heard: bool, waited: Ready | None = None) -> bool:
        """Take note of an answer, or that there is none: once for each question. Whether the message is out, by this
        call or by an earlier one whose answer was lost.

        :param heard: somebody wants to hear of each answer.
        """
        if heard or result.answer in events.NEWS:
            self._fanout.emit(events.Claimed(job=ask.job.name, slot=ask.slot, answer=result.answer))
        if result.answer is Answer.UNKNOWN:
            self._lose(ask, message, waited)
            return False
        doubted = self.unanswered.answered(ask)
        return result.sent or (doubted and result.answer is Answer.ALREADY_SENT)

    def _lose(self, ask: Ask, message: Message, waited: Ready | None) -> None:
        """No answer came. Where this beat alone answers for what it wins, the journal has it."""
        if not self._journal.applies:
            self.unanswered.note(ask, along=isinstance(message, Enqueue), waited=waited)

    def _late(self, due: Millis) -> Millis:
        return max(0, self._clock.wall() - due)

    def ask_for_waiting(self, ready: Sequence[Ready], in_time: Sequence[bool]) -> list[Won]:
        """Slots that waited for the end of a run, and now may go on: what is won. Those not in time get no message."""
        asks = self.unanswered.as_first([Ask(job, slot, terms=self._roster.terms_of(job)) for job, slot, _ in ready])
        known = self._decided(asks)
        answered: list[tuple[Ask, Ready, Message, ClaimResult]] = [
            (ask, slot, None, result)
            for ask, slot, result in zip(asks, ready, known, strict=True)
            if result is not None
        ]
        left = [
            item for item, result in zip(zip(asks, ready, in_time, strict=True), known, strict=True) if result is None
        ]
        made = iter(self._one_step.messages([ask for ask, _, fits in left if fits]))
        messages = [next(made) if fits else None for *_, fits in left]
        deadline = self._clock.monotonic() + self._settings.lease / 1000
        asks, waited = [ask for ask, _, _ in left], [slot for _, slot, _ in left]
        requests = [self._request(ask, message) for ask, message in zip(asks, messages, strict=True)]
        with self._doubting(asks, messages, waited=waited):
            results = self._claim(requests)
        answered += zip(asks, waited, messages, results, strict=True)
        won = []
        heard = self._fanout.is_heard(events.Claimed)
        for ask, slot, message, result in answered:
            sent = self._take(ask, message, result, heard, slot)
            if sent or result.answer is Answer.WON:
                item = Won(ask.job, ask.slot, result.attempt, deadline, terms=ask.terms)
                if sent:
                    item.late = message.late if isinstance(message, Enqueue) else self._late(ask.slot)
                elif isinstance(message, Exception):
                    item.error = message
                won.append(item)
        return won

    def lose(self, *, all_of_them: bool = False) -> None:
        """Say which claims without an answer will not be asked again, where nobody else can take them over."""
        for want in self._journal.lost(all_of_them=all_of_them):
            self._fanout.emit(events.ClaimUnresolved(job=want.watched.job.name, slot=want.slot))

    def _claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        if _with_messages(requests):
            return self._one_step.store.claim_and_send(requests)
        return self._backend.claim(requests) if requests else []

    @contextmanager
    def _doubting(
        self,
        asks: Sequence[Ask],
        messages: Sequence[Message],
        *,
        wants: Sequence[Want] = (),
        waited: Sequence[Ready] = (),
    ) -> Iterator[None]:
        """Note what may have been won, where the answer does not come."""
        try:
            yield
        except BackendUnavailable:
            raise
        except Exception:
            self._journal.doubt(wants)
            for ask, message, ready in zip_longest(asks, messages, waited):
                self._lose(ask, message, ready)
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
        elif answer is Answer.TAKEN:
            self._skips.taken(want.watched.job.name)
        elif answer is Answer.TOO_OLD and self._journal.applies:
            # The store has recorded it, where it knows that nobody has sent it.
            self._fanout.emit(
                events.SlotsGivenUp(
                    job=want.watched.job.name, state=RunState.MISFIRE, reason="too-old", total=1, newest=want.slot
                )
            )


def _with_messages(requests: Sequence[ClaimRequest]) -> bool:
    return any(request.enqueue is not None for request in requests)
