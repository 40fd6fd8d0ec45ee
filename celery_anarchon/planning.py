"""From jobs that have fallen due to the slots that this beat wants to send, and what becomes of those it gives up.

Does not belong here: the arithmetic (:mod:`celery_anarchon.slots`), and claiming.
"""

from __future__ import annotations

from celery_anarchon import events, slots
from celery_anarchon.agenda import Agenda, Watched
from celery_anarchon.backends.base import Outcome
from celery_anarchon.chains import Chains
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.journal import Journal
from celery_anarchon.ledger import Ledger
from celery_anarchon.model import Millis, RunState
from celery_anarchon.pulse import STALL, Pulse
from celery_anarchon.roster import Roster
from celery_anarchon.sharing import Share
from celery_anarchon.timetable import Chain
from celery_anarchon.unanswered import Unanswered
from celery_anarchon.wants import Want

SETTLING: Millis = 2 * STALL
"""How long a slot that this beat gives up stays unrecorded while other beats live: one of them may just be slow with
it, and a record would take it away from it."""


class Planning:
    """One beat's plans.

    :param batch: how many slots are claimed at once.
    :param longest: the longest time in milliseconds until a job is looked at again whose timetable failed.
    """

    def __init__(
        self,
        agenda: Agenda,
        chains: Chains,
        pulse: Pulse,
        roster: Roster,
        journal: Journal,
        unanswered: Unanswered,
        ledger: Ledger,
        clock: Clock,
        fanout: events.Fanout,
        *,
        batch: int,
        longest: Millis,
        label: str,
    ) -> None:
        self._agenda = agenda
        self._chains = chains
        self._pulse = pulse
        self._roster = roster
        self._journal = journal
        self._unanswered = unanswered
        self._ledger = ledger
        self._clock = clock
        self._fanout = fanout
        self._batch = batch
        self._longest = longest
        self._label = label

    @property
    def working_since(self) -> Millis:
        """What fell due before was missed."""
        return self._pulse.working_since

    def some(self, share: Share, now: Millis, working_since: Millis) -> list[Want]:
        """What the next few jobs of *share* owe, those of one job together and oldest first: enough for a batch, and
        none of another beat's part together with those of this beat's own.

        :param working_since: as it was when the burst began: a pause in the middle of it makes nothing a missed slot
            that fell due before.
        """
        wants: list[Want] = []
        abroad = share.abroad
        while share and len(wants) < self._batch and share.abroad is abroad:
            wants += self._of(share.take(), now, working_since)
        return wants

    def _of(self, watched: Watched, now: Millis, working_since: Millis) -> list[Want]:
        """What the job owes; a timetable that fails is one job's trouble, and tried again later."""
        try:
            if isinstance(watched.job.timetable, Chain):
                return self._chains.wants(watched, watched.job.timetable, now)
            return self._of_slots(watched, now, working_since)
        except (BackendUnavailable, OutcomeUnknown):
            raise
        except Exception as error:
            self._fanout.emit(events.JobTrouble(job=watched.job.name, error=error))
            watched.not_before = now + self._longest
            self._agenda.look_at(watched, watched.not_before)
            return []

    def _of_slots(self, watched: Watched, now: Millis, working_since: Millis) -> list[Want]:
        job = watched.job
        plan = slots.plan(
            job.name,
            job.timetable,
            job.options,
            cursor=watched.cursor,
            now=now,
            working_since=max(working_since, watched.since),
            limit=self._batch,
        )
        if not plan.send and plan.cursor == watched.cursor:
            slots.refuse_to_spin(job.name, job.timetable, job.options, watched.cursor, now)
        after = watched.cursor
        self._give_up(job, RunState.MISFIRE, "max-late", plan.too_late, after)
        self._give_up(job, RunState.MISFIRE, "catch-up", plan.not_caught_up, after)
        self._give_up(job, RunState.SUPERSEDED, "newer-slot", plan.superseded, after)
        # All that was given up lies below the first slot to send: noted once, whatever becomes of the claims.
        watched.cursor = plan.send[0] - 1 if plan.send else plan.cursor
        wants = [Want(watched, slot, slot) for slot in plan.send]
        if wants:
            wants[-1].cursor = plan.cursor
        return wants

    def again(self, watched: Watched) -> None:
        """Put the job where it falls due next; a timetable that fails is one job's trouble."""
        try:
            self._agenda.plan_again(watched)
        except Exception as error:
            self._fanout.emit(events.JobTrouble(job=watched.job.name, error=error))
            self._agenda.look_at(watched, self._clock.wall() + self._longest)

    # --- slots given up -----------------------------------------------------------------------------------------------

    def before_first_seen(self, job: Job, slot: Millis) -> None:
        """Its one slot lies before the store first saw the job."""
        self._give_up(job, RunState.MISFIRE, "before-first-seen", slots.Cut(1, (slot,)), after=slot - 1)

    def _give_up(self, job: Job, state: RunState, reason: str, cut: slots.Cut, after: Millis) -> None:
        """
        :param after: the cut has no slot at or below this.
        """
        if not cut.latest:
            # Nearly always: this is asked three times for each job that is due.
            return
        # What may have been won is still to be sent, or to be ended as this beat's, though the plan has gone on.
        doubted = self._unanswered.give_up(job.name, after, cut.latest[0], (state, reason))
        doubted |= {slot for slot in cut.latest if self._journal.doubts(job, slot)}
        cut = slots.Cut(cut.total - len(doubted), tuple(slot for slot in cut.latest if slot not in doubted))
        if not cut.latest:
            return
        self._fanout.emit(
            events.SlotsGivenUp(job=job.name, state=state, reason=reason, total=cut.total, newest=cut.latest[0])
        )
        now, wall = self._clock.monotonic(), self._clock.wall()
        for slot in reversed(cut.latest):
            settled_in = max(0, slot + SETTLING - wall) if self._roster.others_live else 0
            outcome = Outcome(job=job.name, slot=slot, state=state, reason=reason, beat=self._label)
            self._ledger.record([outcome], now + settled_in / 1000)
