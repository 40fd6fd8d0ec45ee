"""Claim and message as one write: whether this beat may do so, and the messages that go along with what it asks for.

The broker's queues must be in the store itself, and what is written there must be what the broker's own client would
have written. Both are found out, never assumed, and looked at again from time to time; where either does not hold, or
is not known just now, claims go without messages, and what they win is published as ever.

Does not belong here: how a message is made (:mod:`celery_anarchon.publishing`), and asking the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from celery_anarchon import events, wire
from celery_anarchon.backends.base import ClaimBackend, ClaimResult, Enqueue
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.clock import Clock
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, Terms
from celery_anarchon.options import Settings
from celery_anarchon.publishing import BrokerAway, Builder, Dispatch, NotOneStep, PublishUnclear

LOOK_AGAIN = 60
"""Heartbeats after which a broker that was not the store's server is looked at again."""


class Ask(NamedTuple):
    """A slot that is about to be asked for."""

    job: Job
    slot: Millis
    attempt: int = 1
    """What its record will have if it is won."""
    due: Millis | None = None
    """When it fell due, where that is not the slot."""
    terms: Terms | None = None
    """What the run is followed by, if it is."""


Message = Enqueue | Exception | None
"""A message; why it cannot be made; or None: the slot is asked for without one."""


class OneStep:
    """One beat's use of a store in which messages can go along with claims."""

    def __init__(
        self,
        backend: ClaimBackend,
        builder: Builder | None,
        settings: Settings,
        clock: Clock,
        fanout: events.Fanout,
        *,
        owner: str,
    ) -> None:
        self._store = backend if isinstance(backend, OneStepBackend) and backend.traits.one_step else None
        self._builder = builder
        self._namespace = backend.namespace
        self._name = backend.name
        self._wanted = settings.one_step
        self._heartbeat = settings.heartbeat / 1000
        self._clock = clock
        self._fanout = fanout
        self._owner = owner
        self.on = False
        self.reason: str | None = self._never()
        """Why it is off; empty: that is not known yet."""
        self._never_on = bool(self.reason)
        self._look_at = clock.monotonic()
        self.others_are_faster = False
        """Of the last batch much was another beat's already."""

    @property
    def store(self) -> OneStepBackend:
        """The store. Only where a message was made for it."""
        assert self._store is not None
        return self._store

    def _never(self) -> str | None:
        if self._wanted is False:
            return "anarchon_one_step is False"
        if self._store is None:
            return f"a store of the kind {self._name} cannot take messages"
        if self._builder is None:
            return "there is nothing that makes messages for it"
        return self._store.why_not_one_step() or self._builder.why_not() or ""

    # --- whether ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out, as far as store and broker answer.

        :raises ConfigurationError: see :meth:`insist`.
        """
        if not self._never_on:
            self._look(announce=False)
        self.insist()

    def insist(self) -> None:
        """Refuse to go on without it, where it is asked for and known that it cannot be.

        :raises ConfigurationError: the text says why.
        """
        if self._wanted is True and self.reason:
            raise ConfigurationError(
                f"anarchon_one_step is True, but claim and message cannot be one write: {self.reason}; "
                'change that, or set anarchon_one_step to "auto"'
            )

    def _ready(self) -> bool:
        if self._never_on or self._builder is None:
            return False
        if self._builder.is_new or self._clock.monotonic() >= self._look_at:
            self._look(announce=True)
        return self.on

    def _look(self, *, announce: bool) -> None:
        if self._store is None or self._builder is None:
            return
        before, reason = (self.on, self.reason), None
        self.on = False
        try:
            self._builder.verify(self._store)
        except NotOneStep as error:
            reason = str(error)
        except (BrokerAway, PublishUnclear, BackendUnavailable, OutcomeUnknown):
            # Whoever is away says so itself, and until it is back nothing is sent in any way.
            return
        self.on, self.reason = reason is None, reason
        self._look_at = self._clock.monotonic() + self._heartbeat * (1 if self.on else LOOK_AGAIN)
        if announce and before != (self.on, reason):
            self._fanout.emit(events.OneStepChanged(reason=reason, wanted=self._wanted is True))

    # --- messages -----------------------------------------------------------------------------------------------------

    def decided(self, asks: Sequence[Ask], *, alone: bool, abroad: bool) -> list[ClaimResult | None]:
        """The answers that the store has for these slots already, where looking for them first pays: a message that
        another beat has sent by now would be made in vain, and its signals would lie.

        :param alone: no other beat was seen lately.
        :param abroad: others have most likely sent them by now.
        """
        known: list[ClaimResult | None] = [None] * len(asks)
        if not asks or not self._ready():
            return known
        all_of_them = abroad or self.others_are_faster
        numbers = [
            number
            for number, ask in enumerate(asks)
            if all_of_them or not (alone or self.builder.quick(ask.job, ask.terms))
        ]
        if numbers:
            places = [(asks[number].job.name, asks[number].slot) for number in numbers]
            for number, answer in zip(numbers, self.store.decided(places, self._owner), strict=True):
                known[number] = answer
        return known

    def messages(self, asks: Sequence[Ask]) -> list[Message]:
        """The messages of these slots, each as its own writes."""
        if not asks or not self._ready():
            return [None] * len(asks)
        return [self._message(ask) for ask in asks]

    def was_taken(self, taken: int, asked: int) -> None:
        """So many slots of a batch were another beat's already: then looking first costs less than most messages."""
        self.others_are_faster = taken * 4 >= asked

    @property
    def builder(self) -> Builder:
        assert self._builder is not None
        return self._builder

    def _message(self, ask: Ask) -> Message:
        job, wall = ask.job, self._clock.wall()
        if ask.attempt == 1 and job.options.max_late is not None and job.is_late(ask.slot, wall):
            # What is won so is given up.
            return None
        make = self.builder.quick(job, ask.terms) if ask.attempt == 1 else None
        if make is None:
            if not self.builder.takes(job):
                return None
            make = self.builder.build
        late = max(0, wall - (ask.slot if ask.due is None else ask.due))
        run_id = wire.run_id(self._namespace, job.name, ask.slot)
        try:
            commands = make(
                Dispatch(job=job, slot=ask.slot, attempt=ask.attempt, run_id=run_id, late=late, terms=ask.terms)
            )
        except (BrokerAway, PublishUnclear, NotOneStep):
            # Nothing is out yet. What is won is published as ever, and says then what is wrong.
            return None
        except Exception as error:
            return error
        return Enqueue(commands=commands, attempt=ask.attempt, late=late, delay=job.delay(wall))
