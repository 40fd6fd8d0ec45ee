"""The store and the broker, as one beat has found them: who is away, when to look again, and what that says of slots.

Does not belong here: how waits grow (:mod:`celery_anarchon.outage`), and what to do while one of them is away.
"""

from __future__ import annotations

from collections.abc import Callable

from celery_anarchon import events
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.clock import Clock
from celery_anarchon.outage import Outage
from celery_anarchon.publishing import BrokerAway, Publisher, PublishUnclear
from celery_anarchon.pulse import STALL, Pulse
from celery_anarchon.roster import Roster
from celery_anarchon.sweeper import Sweeper


class Neighbours:
    """See the module.

    :param opened: makes sure that the store is open, once it may be there again.
    """

    def __init__(
        self,
        backend: ClaimBackend,
        publisher: Publisher,
        pulse: Pulse,
        roster: Roster,
        sweeper: Sweeper,
        clock: Clock,
        fanout: events.Fanout,
        *,
        opened: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._publisher = publisher
        self._pulse = pulse
        self._roster = roster
        self._sweeper = sweeper
        self._fanout = fanout
        self._opened = opened
        self.store = Outage(clock)
        self.broker = Outage(clock)

    def store_answers(self) -> bool:
        """Whether the store may be asked; one that was away is looked at, where it is time. Raises what it raises."""
        if self.store.away:
            if self.store.remaining() > 0:
                return False
            self._opened()
            self._backend.now()
            away = self.store.reachable()
            self._missed_for(away)
            self._roster.show_again()
            self._sweeper.store_is_back(away)
        return True

    def store_failed(self, error: Exception) -> bool:
        """Note that the store did not do its work; True: that is news."""
        news = self.store.failed(error)
        if news:
            self._fanout.emit(events.StoreChanged(error=error))
        return news

    def broker_answers(self, *, at_once: bool = False) -> bool:
        """Whether the broker can be reached, as far as it is time to look.

        :param at_once: look, whether it is time or not.
        """
        if self.broker.remaining() > 0 and not at_once:
            return False
        try:
            self._publisher.check()
        except BrokerAway as error:
            self.broker_failed(error)
            return False
        if self.broker.away:
            self._missed_for(self.broker.reachable())
            self._sweeper.forgive()
            self._sweeper.look_now()
        return True

    def broker_failed(self, error: BrokerAway | PublishUnclear) -> None:
        """Note that the broker did not take a message, or is not there."""
        if self.broker.failed(error):
            self._fanout.emit(events.BrokerChanged(error=error))

    def broker_works(self) -> None:
        """It has taken a message, or was there for long enough."""
        if self.broker.answered():
            self._fanout.emit(events.BrokerChanged(error=None))

    def note_work(self) -> None:
        """A tick went well. Where there are leases it has written that this beat lives, whatever was due."""
        if (self._roster.registers or self.store.lasts) and self.store.answered():
            self._fanout.emit(events.StoreChanged(error=None))
        if self.broker.lasts:
            self.broker_works()

    def _missed_for(self, away: float) -> None:
        """What fell due in an outage was missed; one that is over before it counts as a pause is a slow moment."""
        if away * 1000 > STALL:
            self._pulse.restart()
