"""Claims whose beat died or had no broker: who goes on with them, and how.

Belongs here: the decision over a lapsed claim, and the takeover calls. Publishing what was taken over is the
dispatcher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery_anarchon import slots
from celery_anarchon.backends.base import LapsedClaim, LeaseBackend, Takeover
from celery_anarchon.job import Job
from celery_anarchon.model import Coalesce, Millis, RunState
from celery_anarchon.pulse import STALL


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A lapsed claim that is now this beat's: publish it, or end it as `end`, for `reason`."""

    job: Job
    slot: Millis
    attempt: int
    abandoned: bool
    end: RunState | None = None
    reason: str | None = None


def verdict_on(lapsed: LapsedClaim, job: Job, now: Millis) -> tuple[RunState | None, str | None]:
    """What becomes of a lapsed claim: (None, None) to publish it, or the end and its reason.

    A claim whose holder died is a promise already made, so it is sent. One that was abandoned for lack of a broker is,
    once that is more than a slow moment, an open missed slot like its neighbours: under ``coalesce="latest"`` it gives
    way to a newer slot that has come.
    """
    if job.options.max_late is not None and lapsed.attempt == 1:
        due = slots.due_time(job.name, job.timetable, job.options, lapsed.slot)
        if now - due > job.options.max_late:
            return RunState.MISFIRE, "max-late"
    if lapsed.abandoned and now - lapsed.slot > STALL and job.options.coalesce is Coalesce.LATEST:
        newest = slots.last_due(job.name, job.timetable, job.options, now)
        if newest is not None and newest > lapsed.slot:
            return RunState.SUPERSEDED, "newer-slot"
    return None, None


def take_over(
    backend: LeaseBackend,
    lapsed: Sequence[LapsedClaim],
    job_of: Callable[[str], Job | None],
    *,
    owner: str,
    beat: str,
    lease: Millis,
    now: Millis,
) -> list[Taken]:
    """Take over those of *lapsed* whose job this beat knows; another sweeper may be faster with any of them.

    A job that this beat does not know is left alone: in a rolling deploy another beat does.
    """
    known = [(claim, job) for claim in lapsed if (job := job_of(claim.job)) is not None]
    if not known:
        return []
    attempts = backend.takeover(
        [
            Takeover(job=c.job, slot=c.slot, from_attempt=c.attempt, owner=owner, beat=beat, lease=lease)
            for c, _ in known
        ]
    )
    taken: list[Taken] = []
    for (claim, job), attempt in zip(known, attempts, strict=True):
        if attempt is None:
            continue
        end, reason = verdict_on(claim, job, now)
        taken.append(
            Taken(job=job, slot=claim.slot, attempt=attempt, abandoned=claim.abandoned, end=end, reason=reason)
        )
    return taken
