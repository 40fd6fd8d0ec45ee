"""What is due at one moment, sent batch after batch, as one of a fleet.

Belongs here: the order of planning, asking and publishing, what of a burst is left to others, and when cursors move.
Does not belong here: how a batch is asked for (:mod:`celery_anarchon.claiming`), what others do
(:mod:`celery_anarchon.sharing`), and publishing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from celery_anarchon.agenda import Agenda, Watched
from celery_anarchon.claiming import Asked
from celery_anarchon.clock import Clock
from celery_anarchon.model import Millis
from celery_anarchon.onestep import OneStep
from celery_anarchon.planning import Planning
from celery_anarchon.roster import Roster
from celery_anarchon.sharing import Share, Side
from celery_anarchon.wants import Want, batches, move_cursors

MOMENT: Millis = 250
"""How long what is left of a burst is left to the beats that are at it: a look at each slot takes from them what they
need to send it."""


class Burst:
    """One beat's part of what falls due.

    :param batch: how many slots are asked for at once.
    :param begin: asks for a batch, of this beat's own part of the burst or of another's.
    :param publish: publishes what such a question has won.
    :param goes_on: asked between two steps; once it is false, what is won is finished and nothing new is begun.
    """

    def __init__(
        self,
        agenda: Agenda,
        planning: Planning,
        roster: Roster,
        one_step: OneStep,
        clock: Clock,
        *,
        batch: int,
        begin: Callable[[Sequence[Want], bool], Asked],
        publish: Callable[[Asked], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._agenda = agenda
        self._planning = planning
        self._roster = roster
        self._one_step = one_step
        self._clock = clock
        self._batch = batch
        self._begin = begin
        self._publish = publish
        self._goes_on = goes_on
        self._left_to_others_at = -math.inf

    def send(self, due: Sequence[Watched], now: Millis) -> None:
        """Plan, claim and publish what *due* owes at *now*; then each of it is planned anew."""
        share = Share(due, self._roster.place, self._roster.part)
        wants: list[Want] = []
        try:
            self._send(share, now, wants)
        finally:
            move_cursors(wants)
            if share and share.enclosed:
                self._left_to_others_at, then = self._clock.monotonic(), self._clock.wall() + MOMENT
                for watched in share:
                    # It is due all the while, so its timetable need not be asked.
                    self._agenda.look_at(watched, max(watched.not_before, then))
            for watched in due:
                if watched.looked_at < 0:
                    # Else its timetable has just failed, and would again.
                    self._planning.again(watched)

    def _send(self, share: Share, now: Millis, wants: list[Want]) -> None:
        """What is planned goes into *wants*. While answers are under way the next batch is begun, but for one that goes
        on with the same job: its slots are claimed in their order."""
        under_way: tuple[Asked, Side] | None = None
        last: Watched | None = None
        try:
            for batch, side, abroad in self._batches(share, now, wants):
                if under_way is not None and batch[0].watched is last:
                    first, under_way = under_way, None
                    self._finish(share, *first)
                last = batch[-1].watched
                asked = self._begin(batch, abroad)
                before, under_way = under_way, (asked, side) if asked.under_way else None
                if before is not None:
                    self._finish(share, *before)
                if not asked.under_way and self._goes_on():
                    self._finish(share, asked, side)
        finally:
            if under_way is not None:
                self._finish(share, *under_way)

    def _batches(self, share: Share, now: Millis, wants: list[Want]) -> Iterator[tuple[Sequence[Want], Side, bool]]:
        since = self._planning.working_since
        # Once: what others have not sent by then is nobody's.
        may_leave = self._clock.monotonic() - self._left_to_others_at >= 2 * MOMENT / 1000
        while share and self._goes_on() and not (may_leave and share.enclosed):
            side, abroad = share.side, share.abroad
            some = self._planning.some(share, now, since)
            wants += some
            for batch in batches(some, self._batch):
                if self._goes_on():
                    yield batch, side, abroad

    def _finish(self, share: Share, asked: Asked, side: Side) -> None:
        self._publish(asked)
        if self._one_step.others_are_faster:
            share.was_taken(side)
        else:
            share.was_open(side)
