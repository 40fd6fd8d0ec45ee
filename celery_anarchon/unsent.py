"""Slots that were won and have not left: who has them next.

On a store with leases a slot that this beat cannot send goes back, and another beat may send it. On one that only takes
claims it is this beat's alone: it is kept until it is too late, and then lost, which is said.
"""

from __future__ import annotations

from celery_anarchon import events
from celery_anarchon.journal import Journal
from celery_anarchon.ledger import Ledger
from celery_anarchon.model import RunState
from celery_anarchon.sweeper import Sweeper
from celery_anarchon.wants import Won


class Unsent:
    """What is to be published again, and the ways out of it."""

    def __init__(
        self, journal: Journal, ledger: Ledger, sweeper: Sweeper, fanout: events.Fanout, *, owner: str
    ) -> None:
        self._journal = journal
        self._ledger = ledger
        self._sweeper = sweeper
        self._fanout = fanout
        self._owner = owner
        self.waiting: list[Won] = []
        """To be published again: the broker may not have them, or nobody else can send them."""

    def take(self) -> list[Won]:
        """All that waits; it is the caller's now."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def take_some(self, *, held_up: bool) -> list[Won]:
        """Those that held up the others when they were tried, or the rest."""
        waiting = self.take()
        self.waiting = [item for item in waiting if item.held_up is not held_up]
        return [item for item in waiting if item.held_up is held_up]

    def keep(self, item: Won) -> None:
        self._journal.hold(item.job, item.slot)
        self.waiting.append(item)

    def put_back(self, item: Won) -> None:
        """It was surely not sent, for lack of a broker: another beat may have one. Where no other can, it is kept."""
        if self._journal.applies:
            self.keep(item)
        else:
            self.abandon(item)

    def too_late(self, item: Won) -> None:
        """Its deadline is over: the slot is anyone's, or nobody's."""
        if self._journal.applies:
            self.lose(item, RunState.MISFIRE, "max-late")
        else:
            self.abandon(item)

    def abandon(self, item: Won) -> None:
        self._ledger.abandon(item.hold(self._owner))
        self._sweeper.leave_to_others(item.job.name, item.slot)

    def lose(self, item: Won, state: RunState, reason: str) -> None:
        """Nobody will send it any more, unless the broker has it already."""
        self._journal.hold(item.job, item.slot)
        self.give_up(item, state, "publish-unclear" if item.unclear else reason)

    def give_up(self, item: Won, state: RunState, reason: str) -> None:
        """It will never be sent: recorded, and said."""
        self._ledger.give_up(item.ending(self._owner, state, reason))
        self._fanout.emit(events.SlotsGivenUp(job=item.job.name, state=state, reason=reason, total=1, newest=item.slot))
