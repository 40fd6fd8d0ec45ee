"""How fast a job's slots follow each other, and whether the store can tell them apart.

Does not belong here: what a single option may be (:mod:`celery_anarchon.options`), or which slots a job owes.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery_anarchon.errors import OptionError
from celery_anarchon.model import Millis, Traits
from celery_anarchon.options import THIS_STORE, JobOptions
from celery_anarchon.timetable import Timetable

PACE_SLOTS = 100
"""How many slots are looked at to tell how fast they follow each other."""


def check_pace(
    job: str, options: JobOptions, timetable: Timetable, traits: Traits, now: Millis, store: str = THIS_STORE
) -> None:
    """Refuse a job whose slots follow each other faster than this store can tell them apart.

    Looks at the slots that come after *now*; for an interval they are all alike.

    :param store: the name of the backend, for refusals.
    :raises OptionError: the text names the job, the numbers and the fix.
    """
    if not traits.any_order and options.jitter:
        gap = min((later - slot for slot, later in _pairs(timetable, now)), default=None)
        if gap is not None and options.jitter >= gap:
            raise OptionError(
                f"job {job!r}: option 'jitter' ({options.jitter / 1000:g} s) must be shorter than the time between two "
                f"slots ({gap / 1000:g} s): on {store} a newer claim closes the older slots; lower it"
            )
    if traits.claims_kept is not None and traits.horizon is not None:
        span = traits.horizon * 5 // 4
        most = max((timetable.count(slot - 1, slot - 1 + span) for slot, _ in _pairs(timetable, now)), default=0)
        if most > traits.claims_kept:
            raise OptionError(
                f"job {job!r}: it has {most} slots in {span / 1000:g} s, and {store} remembers {traits.claims_kept} "
                "claims of a job: the oldest could be won again; raise its max_size or lower its duration"
            )


def _pairs(timetable: Timetable, now: Millis) -> Iterator[tuple[Millis, Millis]]:
    """Neighbouring slots after *now*, as many as tell what the job's pace is."""
    slot = timetable.next(now)
    for _ in range(PACE_SLOTS):
        later = None if slot is None else timetable.next(slot)
        if slot is None or later is None:
            return
        yield slot, later
        slot = later
