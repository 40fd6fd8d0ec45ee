"""Pure: which slots of a job are to be sent now, and which are given up.

Belongs here: arithmetic on instants that are handed in. No clock, no store, no Celery.

Two kinds of slots fall due. A *current* one came while this beat was working: it is sent, however many others of the
job came at the same moment, because a slow second is no downtime. A *missed* one came while this beat was not working
(not started yet, frozen, its store or broker away): how far back those are sent, and how many, is the job's choice
(``catch_up``, ``coalesce``). ``max_late`` cuts both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from celery_anarchon import wire
from celery_anarchon.model import Coalesce, Millis
from celery_anarchon.options import JobOptions
from celery_anarchon.timetable import Timetable


@dataclass(frozen=True)
class Cut:
    """Slots given up for one reason: how many, and the latest of them (bounded), newest first."""

    total: int = 0
    latest: tuple[Millis, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a job owes now."""

    send: tuple[Millis, ...] = ()
    """Oldest first."""
    too_late: Cut = Cut()
    """Beyond ``max_late``."""
    not_caught_up: Cut = Cut()
    """Missed, and further back than ``catch_up``."""
    superseded: Cut = Cut()
    """Missed, and a newer missed slot is sent instead."""
    cursor: Millis
    """Once `send` is decided, every slot at or below this is decided. Where `send` was cut at its limit, its last."""


def delay_of(job: str, slot: Millis, jitter: Millis, next_slot: Millis | None) -> Millis:
    """How long after *slot* it is dispatched: in [0, jitter), the same in every beat, never past the next slot."""
    if jitter <= 0:
        return 0
    digest = hashlib.blake2b(f"{slot}\0{job}".encode(), digest_size=8).digest()
    delay = int.from_bytes(digest, "big") % jitter
    return delay if next_slot is None else min(delay, next_slot - slot - 1)


def due_at(job: str, timetable: Timetable, options: JobOptions, after: Millis) -> Millis | None:
    """When the first slot after *after* falls due, its jitter included; None when there is none."""
    slot = timetable.next(after)
    return None if slot is None else due_time(job, timetable, options, slot)


def due_time(job: str, timetable: Timetable, options: JobOptions, slot: Millis) -> Millis:
    """When *slot* falls due: its instant, or later by its jitter. Grows with the slot."""
    if not options.jitter:
        return slot
    return slot + delay_of(job, slot, options.jitter, timetable.next(slot))


def refuse_to_spin(job: str, timetable: Timetable, options: JobOptions, after: Millis, now: Millis) -> None:
    """For a job that fell due and owes nothing: it would fall due again at once, and for ever.

    :raises ValueError: its timetable's own answers contradict each other.
    """
    slot = timetable.next(after)
    if slot is not None and due_time(job, timetable, options, slot) <= now:
        raise ValueError(
            f"the timetable's next() names {wire.time_text(slot)}, which last({wire.time_text(now)}) does not know"
        )


def last_due(job: str, timetable: Timetable, options: JobOptions, now: Millis) -> Millis | None:
    """The latest slot that has fallen due by *now*, its jitter included. Jitter ends before the next slot, so only the
    very last one can still be waiting."""
    slot = timetable.last(now)
    if slot is None or not options.jitter:
        return slot
    return slot if due_time(job, timetable, options, slot) <= now else timetable.last(slot - 1)


def plan(
    job: str,
    timetable: Timetable,
    options: JobOptions,
    *,
    cursor: Millis,
    now: Millis,
    working_since: Millis,
    limit: int,
) -> Plan:
    """What *job* owes at *now*, everything at or below *cursor* being decided.

    Slots that fell due before *working_since* are missed ones. At most *limit* slots to send are listed, and at most
    ``history_size`` of those given up; a year of missed minutes is counted, not listed.
    """
    newest = last_due(job, timetable, options, now)
    if newest is None or newest <= cursor:
        return Plan(cursor=cursor)
    if cursor >= working_since and options.max_late is None and timetable.next(cursor) == newest:
        # Nearly always: one slot, and nothing before it that could have been missed.
        return Plan(send=(newest,), cursor=newest)
    border = last_due(job, timetable, options, min(working_since, now))
    missed_to = cursor if border is None else max(cursor, border)

    # Lines: slots at or below one are given up for its reason.
    late_line = cursor
    if options.max_late is not None:
        # Late is counted from the moment a slot fell due: its own jitter does not make it late.
        late = last_due(job, timetable, options, now - options.max_late - 1)
        late_line = cursor if late is None else max(cursor, late)
    reach_line = cursor if options.catch_up is None else now - options.catch_up
    too_late = _cut(timetable, options, cursor, min(late_line, newest))
    not_caught_up = _cut(timetable, options, late_line, min(reach_line, missed_to))

    missed_from = max(late_line, reach_line)
    superseded = Cut()
    send: list[Millis] = []
    if missed_from < missed_to:
        if options.coalesce is Coalesce.ALL:
            send.extend(_slots(timetable, missed_from, missed_to, limit + 1))
        else:
            latest = timetable.last(missed_to)
            if latest is not None and latest > missed_from:
                send.append(latest)
                superseded = _cut(timetable, options, missed_from, latest - 1)
    send.extend(_slots(timetable, max(late_line, missed_to), newest, limit + 1 - len(send)))
    return Plan(
        send=tuple(send[:limit]),
        too_late=too_late,
        not_caught_up=not_caught_up,
        superseded=superseded,
        cursor=newest if len(send) <= limit else send[limit - 1],
    )


def _slots(timetable: Timetable, after: Millis, until: Millis, limit: int) -> Iterator[Millis]:
    for _ in range(limit):
        slot = timetable.next(after)
        if slot is None or slot > until:
            return
        if slot <= after:
            # The same slot would be listed again and again.
            raise ValueError(
                f"the timetable's next({wire.time_text(after)}) names {wire.time_text(slot)}, which is not later"
            )
        yield slot
        after = slot


def _cut(timetable: Timetable, options: JobOptions, after: Millis, until: Millis) -> Cut:
    if until <= after:
        return Cut()
    total = timetable.count(after, until)
    latest: list[Millis] = []
    while len(latest) < min(total, options.history_size):
        slot = timetable.last(until)
        if slot is None or slot <= after:
            break
        latest.append(slot)
        until = slot - 1
    return Cut(total, tuple(latest))
