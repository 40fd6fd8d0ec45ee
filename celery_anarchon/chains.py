"""Jobs without slots of their own: each run is claimed as the successor of the one before.

Belongs here: from what the store knows of the last run to the one slot that may be claimed next. Does not belong here:
asking the schedule's object (:class:`celery_anarchon.timetable.Chain`), and claiming.

The successor's slot is worked out from what never changes in the record before it: its own slot, and when it was first
claimed, by the store's clock. So all beats ask the store for the same slot, and of their claims one wins. A beat that
read an older record asks for a slot that is taken.
"""

from __future__ import annotations

from celery_anarchon.agenda import Watched
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.model import Millis, Run, RunState
from celery_anarchon.roster import Roster
from celery_anarchon.timetable import Chain
from celery_anarchon.unanswered import Unanswered
from celery_anarchon.wants import Want
from celery_anarchon.wire import instant

SHORTEST: Millis = 1_000
"""The least time from one run to the next: an object that says "due" whatever it is asked would never rest."""

UNSENT_WAIT: Millis = 1_000
"""How soon to look again at a run that was claimed and not sent yet."""

_LOOKED_THROUGH = 20
"""How many of the latest records may be of runs that somebody triggered by hand."""


class Chains:
    """Asks for successors."""

    def __init__(self, backend: ClaimBackend, roster: Roster, unanswered: Unanswered, max_interval: float) -> None:
        self._backend = backend
        self._roster = roster
        self._unanswered = unanswered
        self._longest = max(round(max_interval * 1000), SHORTEST)

    def wants(self, watched: Watched, chain: Chain, now: Millis) -> list[Want]:
        """The successor of the last run, if it is due; else *watched* is told when to look again.

        Raises what the store and the schedule's object raise.
        """
        # However this ends, the same look is not made twice in a row.
        watched.not_before = now + UNSENT_WAIT
        lost = self._unanswered.of_chain(watched.job.name)
        if lost is not None:
            # Its record may be the newest by now, claimed by nobody else than this beat.
            return [Want(watched, lost.slot, lost.slot, due=lost.due)]
        before = self._run_before(watched)
        if before is None:
            return []
        due, pause = chain.ask(before)
        wait = self._longest if pause is None else min(pause, self._longest)
        if due:
            wait = before + SHORTEST - now
        if wait > 0:
            watched.not_before = now + min(wait, self._longest)
            return []
        slot = before + 1
        return [Want(watched, slot, slot, due=now)]

    def _run_before(self, watched: Watched) -> Millis | None:
        """When the last run was; None: it is claimed, and not sent yet."""
        run = self._newest(watched)
        if run is None:
            (known,) = self._roster.first_sight([watched.job])
            # Once more: the first run may have come since, and then what is known of the job is that very run.
            run = self._newest(watched)
            if run is None:
                # The last slot is of another definition of this job, with its history gone.
                return known.since if known.last is None else max(known.since, known.last)
        if run.state is RunState.CLAIMED:
            return None
        slot = instant(run.slot)
        # It and all before it are decided: what exceeds the history may go.
        watched.cursor = max(watched.cursor, slot)
        return slot if run.claimed_at is None else max(slot, instant(run.claimed_at))

    def _newest(self, watched: Watched) -> Run | None:
        """The latest record, whatever became of it, that is not of a run by hand."""
        runs = self._backend.history(watched.job.name, _LOOKED_THROUGH)
        return next((run for run in runs if not run.manual), None)
