"""Claims whose beat died or had no broker, runs whose worker did, slots that waited: who goes on with them, and how.

Belongs here: when to look for what lapsed, which of it to take over, and what becomes of the rest. Publishing what was
taken over is the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from celery_anarchon import events, slots
from celery_anarchon.backends.base import ClaimBackend, ClaimResult, Enqueue, LapsedClaim, LeaseBackend, Takeover
from celery_anarchon.backends.runs import JOB_REMOVED, LapsedEnd, RunBackend, Waiting
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable
from celery_anarchon.job import Job
from celery_anarchon.model import Answer, Coalesce, Millis, RunState, Terms
from celery_anarchon.onestep import Ask, Message, OneStep
from celery_anarchon.options import Settings
from celery_anarchon.outage import LONGEST_WAIT
from celery_anarchon.pulse import STALL
from celery_anarchon.wants import Ready


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """A lapsed claim that is now this beat's: publish it, or end it as `end`, for `reason`; or it is sent already."""

    job: Job
    slot: Millis
    attempt: int
    abandoned: bool
    started: bool
    """A worker had it."""
    terms: Terms | None
    """What it is followed by."""
    deadline: float
    """Monotonic: when the lease may be over again."""
    end: RunState | None = None
    reason: str = ""
    late: Millis | None = None
    """Its message went out with the takeover, so late."""
    error: Exception | None = None
    """Why it has no message, and will not have one."""


class _Judged(NamedTuple):
    """A lapsed claim that this beat may go on with, and how: as in :class:`TakenOver`."""

    claim: LapsedClaim
    job: Job
    terms: Terms | None
    end: RunState | None
    reason: str


def verdict_on(lapsed: LapsedClaim, job: Job, now: Millis) -> tuple[RunState | None, str]:
    """What becomes of a lapsed claim: (None, "") to publish it, or the end and its reason.

    A claim whose holder died is a promise already made, so it is sent. One that was abandoned for lack of a broker is,
    once that is more than a slow moment, an open missed slot like its neighbours: under ``coalesce="latest"`` it gives
    way to a newer slot that has come. Raises what the job's timetable raises.
    """
    if lapsed.state is RunState.RUNNING or lapsed.attempt > 1:
        # A body of it has started, so an attempt is owed; it may be abandoned because a worker gave it back.
        return None, ""
    until = latest_start(job, lapsed.slot)
    if until is not None and now > until:
        return RunState.MISFIRE, "max-late"
    if lapsed.abandoned and now - lapsed.slot > STALL and job.options.coalesce is Coalesce.LATEST:
        newest = slots.last_due(job.name, job.timetable, job.options, now)
        if newest is not None and newest > lapsed.slot:
            return RunState.SUPERSEDED, "newer-slot"
    return None, ""


def latest_start(job: Job, slot: Millis) -> Millis | None:
    """When a first publish of this slot still keeps the job's ``max_late``."""
    if job.options.max_late is None:
        return None
    return slots.due_time(job.name, job.timetable, job.options, slot) + job.options.max_late


def end_of(lapsed: LapsedClaim, *, known: bool, agreed: bool, had_workers: bool) -> tuple[RunState, str] | None:
    """How a lapsed run ends that nobody goes on with, and why; None: it is to be taken over, or left to other beats.

    :param known: this beat has the job in its schedule.
    :param agreed: all living beats have this beat's schedule.
    :param had_workers: a worker that asks the store was ever seen.
    """
    if lapsed.state is RunState.RETRYING or (lapsed.state is RunState.QUEUED and had_workers):
        return RunState.LOST_IN_QUEUE, "queue-timeout"
    if lapsed.state is RunState.QUEUED:
        return RunState.DISPATCHED, "no-gate-seen"
    if lapsed.state is RunState.RUNNING and lapsed.max_attempts is None:
        return RunState.LOST, lapsed.reason or "worker-lost"
    if lapsed.state is RunState.RUNNING and lapsed.attempt >= (lapsed.max_attempts or 0):
        return RunState.LOST, lapsed.reason or "attempts-used-up"
    if not known and agreed:
        return RunState.LOST, JOB_REMOVED
    return None


def _in_vain(slot: Waiting) -> LapsedEnd:
    return LapsedEnd(
        job=slot.job,
        slot=slot.slot,
        attempt=1,
        was=RunState.WAITING,
        state=RunState.SUPERSEDED,
        reason=JOB_REMOVED,
    )


class Sweeper:
    """Looks for lapsed claims once a heartbeat. On a store without leases there are none."""

    def __init__(
        self,
        backend: ClaimBackend,
        settings: Settings,
        clock: Clock,
        job_named: Callable[[str], Job | None],
        terms_of: Callable[[Job], Terms | None],
        fanout: events.Fanout,
        one_step: OneStep,
        *,
        owner: str,
        label: str,
    ) -> None:
        self._one_step = one_step
        self._backend = backend if isinstance(backend, LeaseBackend) else None
        self._runs = backend if isinstance(backend, RunBackend) else None
        self._fanout = fanout
        self._settings = settings
        self._clock = clock
        self._job_named = job_named
        self._terms_of = terms_of
        self._owner = owner
        self._label = label
        self._size = settings.batch
        self._free_size = settings.batch
        """How many slots that waited are listed at once."""
        self._look_at = clock.monotonic()
        self._waits_in_vain: list[LapsedEnd] = []
        """Slots that waited, of jobs that this beat does not know."""
        self._left: dict[tuple[str, Millis], float] = {}
        """Slots abandoned here, and until when they are left to other beats (protocol R9)."""
        self._unanswered: list[LapsedClaim] = []
        """What this beat wanted to take over, and no answer came: it may be its own, and lapsed for nobody."""
        self._failing: set[str] = set()
        """Jobs whose timetables failed when they were looked at last."""

    def next_at(self) -> float | None:
        """The monotonic time of the next look."""
        return None if self._backend is None else self._look_at

    def is_time(self) -> bool:
        return self._backend is not None and self._clock.monotonic() >= self._look_at

    def look_now(self) -> None:
        """Look at the next chance, whenever the next look would be."""
        self._look_at = self._clock.monotonic()

    def wait(self) -> None:
        """Look again a heartbeat from now."""
        self._look_at = self._clock.monotonic() + self._settings.heartbeat / 1000

    def store_is_back(self, away: float) -> None:
        """It was away for so many seconds. Leases that ended meanwhile may be those of the living, whose waits until
        they look again are as long as this beat's were: they come first."""
        if away * 1000 < self._settings.lease:
            self.look_now()
        else:
            self._look_at = self._clock.monotonic() + max(self._settings.heartbeat / 1000, LONGEST_WAIT + 1)

    def leave_to_others(self, job: str, slot: Millis) -> None:
        """This beat has just abandoned that slot: another one may have what it lacked."""
        self._left[job, slot] = self._clock.monotonic() + 2 * self._settings.heartbeat / 1000

    def forgive(self) -> None:
        """What this beat lacked is back: it may go on with what it abandoned."""
        self._left.clear()

    def ready(self) -> tuple[list[Ready], bool]:
        """Slots of known jobs that waited for another run and may be claimed now, one batch at most; and whether there
        may be more of them."""
        if self._runs is None:
            return [], False
        batch = self._settings.batch
        listed = self._runs.waiting(self._free_size)
        full = len(listed) == self._free_size
        in_vain: list[LapsedEnd] = []
        ready: list[Ready] = []
        for slot in listed:
            job = self._job_named(slot.job)
            if job is None:
                in_vain.append(_in_vain(slot))
            elif len(ready) == batch:
                full = True
            else:
                with self._apart(job):
                    ready.append(Ready(job, slot.slot, latest_start(job, slot.slot)))
        self._waits_in_vain = in_vain[:batch]
        if ready:
            self._free_size = batch
        elif full:
            # None of it is for this beat to do: as with what lapsed, look further at once.
            self._free_size *= 2
            self.look_now()
        return ready, full

    def in_time(self, slot: Ready) -> bool:
        return slot.in_time(self._clock.wall())

    @contextmanager
    def _apart(self, job: Job) -> Iterator[None]:
        """What fails within is this one job's trouble, told once until it works again. The store is not away for it."""
        try:
            yield
        except Exception as error:
            if job.name not in self._failing:
                self._fanout.emit(events.JobTrouble(job=job.name, error=error))
            self._failing.add(job.name)
        else:
            self._failing.discard(job.name)

    def take_over(self, *, others_live: bool, agreed: bool = False) -> list[TakenOver]:
        """Take over what lapsed, longest lapsed first, one batch at most, and end what nobody can go on with. Another
        sweeper may be faster with any.

        A job that this beat does not know is left alone: in a rolling deploy another beat does.
        """
        if self._backend is None:
            return []
        # First of all: what fails below is not tried again at once.
        self.wait()
        found = self._backend.lapsed(self._size)
        lapsed = found if self._runs is None else self._end(self._runs, found, agreed)
        now = self._clock.monotonic()
        self._left = {key: until for key, until in self._left.items() if until > now and others_live}
        listed = {(claim.job, claim.slot) for claim in lapsed} if self._unanswered else ()
        known = self._judge([*(one for one in self._unanswered if (one.job, one.slot) not in listed), *lapsed])
        full = len(found) == self._size
        if known:
            self._size = self._settings.batch
        elif full:
            # All of it is for others to do: look further at once, or what is ours would never come up.
            self._size *= 2
            self.look_now()
        if not known:
            return []
        messages = self._messages(known)
        deadline = self._clock.monotonic() + self._settings.lease / 1000
        taken = [
            self._taken_over(judged, result, deadline, message)
            for judged, message, result in zip(known, messages, self._ask(known, messages), strict=True)
            if result is not None
        ]
        if taken and full:
            self.look_now()
        return taken

    def _judge(self, lapsed: Sequence[LapsedClaim]) -> list[_Judged]:
        """What this beat may go on with, one batch at most."""
        wall = self._clock.wall()
        judged: list[_Judged] = []
        for claim in lapsed:
            job = self._job_named(claim.job)
            if job is None or (claim.job, claim.slot) in self._left:
                continue
            with self._apart(job):
                judged.append(_Judged(claim, job, self._terms(claim, job), *verdict_on(claim, job, wall)))
            if len(judged) == self._settings.batch:
                break
        return judged

    def _end(self, runs: RunBackend, lapsed: Sequence[LapsedClaim], agreed: bool) -> list[LapsedClaim]:
        """End what is to end; the rest."""
        had_workers = any(claim.state is RunState.QUEUED for claim in lapsed) and runs.ever_had_workers()
        endings, rest = [], []
        for claim in lapsed:
            known = self._job_named(claim.job) is not None
            end = end_of(claim, known=known, agreed=agreed, had_workers=had_workers)
            if end is None:
                rest.append(claim)
            else:
                state, reason = end
                endings.append(
                    LapsedEnd(
                        job=claim.job,
                        slot=claim.slot,
                        attempt=claim.attempt,
                        was=claim.state,
                        state=state,
                        reason=reason,
                    )
                )
        if agreed:
            # The store ends them when their time is over, and not before.
            endings += self._waits_in_vain
            self._waits_in_vain = []
        for ending, ended in zip(endings, runs.end_lapsed(endings) if endings else [], strict=True):
            if ended:
                self._fanout.emit(
                    events.RunEnded(job=ending.job, slot=ending.slot, state=ending.state, reason=ending.reason)
                )
        return rest

    def _messages(self, known: Sequence[_Judged]) -> list[Message]:
        asks = [
            # It was granted to a body, or is only a promise: the header must say what the record will.
            Ask(job, claim.slot, claim.attempt + (claim.state is RunState.RUNNING), terms=terms)
            for claim, job, terms, end, _ in known
            if end is None
        ]
        made = iter(self._one_step.messages(asks))
        return [next(made) if judged.end is None else None for judged in known]

    def _terms(self, claim: LapsedClaim, job: Job) -> Terms | None:
        """A run that a worker had is followed, whatever its beat knew of workers."""
        had = claim.state is RunState.RUNNING or claim.attempt > 1
        return job.terms if had else self._terms_of(job)

    def _ask(self, known: Sequence[_Judged], messages: Sequence[Message]) -> Sequence[ClaimResult | None]:
        try:
            results = self._take(known, messages)
        except BackendUnavailable:
            raise
        except Exception:
            # Asked again as the same owner, for the answer that was lost.
            self._unanswered = [judged.claim for judged in known]
            raise
        self._unanswered = []
        return results

    def _take(self, known: Sequence[_Judged], messages: Sequence[Message]) -> Sequence[ClaimResult | None]:
        wishes = [self._wish(judged.claim, message) for judged, message in zip(known, messages, strict=True)]
        if any(wish.enqueue is not None for wish in wishes):
            return self._one_step.store.takeover_and_send(wishes)
        assert self._backend is not None
        return [
            None if attempt is None else ClaimResult(Answer.WON, attempt) for attempt in self._backend.takeover(wishes)
        ]

    def _wish(self, claim: LapsedClaim, message: Message) -> Takeover:
        return Takeover(
            job=claim.job,
            slot=claim.slot,
            from_attempt=claim.attempt,
            owner=self._owner,
            beat=self._label,
            lease=self._settings.lease,
            enqueue=message if isinstance(message, Enqueue) else None,
        )

    @staticmethod
    def _taken_over(judged: _Judged, result: ClaimResult, deadline: float, message: Message) -> TakenOver:
        claim, job, terms, end, reason = judged
        return TakenOver(
            job=job,
            slot=claim.slot,
            attempt=result.attempt,
            abandoned=claim.abandoned,
            started=claim.state is RunState.RUNNING,
            terms=terms,
            deadline=deadline,
            end=end,
            reason=reason,
            late=message.late if result.sent and isinstance(message, Enqueue) else None,
            error=message if isinstance(message, Exception) else None,
        )
