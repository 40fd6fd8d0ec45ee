"""One won slot and its message: what came of publishing it, who has the slot then, and who is told.

Does not belong here: which slots are published, and in what order (:mod:`celery_anarchon.dispatcher`).
"""

from __future__ import annotations

from celery_anarchon import events, wire
from celery_anarchon.agenda import Agenda
from celery_anarchon.backends.base import Confirmation
from celery_anarchon.clock import Clock
from celery_anarchon.journal import Journal
from celery_anarchon.ledger import Ledger
from celery_anarchon.model import Millis, RunState
from celery_anarchon.neighbours import Neighbours
from celery_anarchon.publishing import BrokerAway, Dispatch, Publisher, PublishUnclear
from celery_anarchon.roster import Roster
from celery_anarchon.unsent import Unsent
from celery_anarchon.wants import Won

SILENCE = 1.0
"""Seconds without an answer to one message after which the broker counts as away: all others would wait as long, one
after the other."""


class Sending:
    """Publishes for one beat."""

    def __init__(
        self,
        publisher: Publisher,
        neighbours: Neighbours,
        agenda: Agenda,
        roster: Roster,
        journal: Journal,
        ledger: Ledger,
        unsent: Unsent,
        clock: Clock,
        fanout: events.Fanout,
        *,
        owner: str,
        namespace: str,
    ) -> None:
        self._publisher = publisher
        self._neighbours = neighbours
        self._broker = neighbours.broker
        self._agenda = agenda
        self._roster = roster
        self._journal = journal
        self._ledger = ledger
        self._unsent = unsent
        self._clock = clock
        self._fanout = fanout
        self._owner = owner
        self._namespace = namespace

    def publish(self, item: Won) -> None:
        """Try once. Whatever comes of it, the slot is with somebody then."""
        late = max(0, self._clock.wall() - item.due)
        job, slot, run_id = item.job, item.slot, self._run_id(item)
        self._note_sending(item, late)
        begun = self._clock.monotonic()
        try:
            self._publisher.publish(
                Dispatch(job=job, slot=slot, attempt=item.attempt, run_id=run_id, late=late, terms=item.terms)
            )
        except BrokerAway as error:
            self._neighbours.broker_failed(error)
            self._unsent.put_back(item)
        except PublishUnclear as error:
            if not item.unclear:
                self._fanout.emit(events.Unclear(job=job.name, slot=slot, run_id=run_id, error=error))
            item.unclear = True
            if self._clock.monotonic() - begun >= SILENCE:
                item.held_up = True
                self._neighbours.broker_failed(error)
            self._unsent.keep(item)
        except Exception as error:
            self.refused(item, error)
        else:
            self._ledger.confirm(
                Confirmation(**vars(item.hold(self._owner)), late=late, delay=job.delay(self._clock.wall()))
            )
            self._note_sent(item, late)
            self.is_out(item)
        # Each branch left the slot with somebody: the store by a list above, or the retries by `_unsent`.
        self._journal.hold(job, slot)
        item.decide()

    def is_out(self, item: Won) -> None:
        """Its message is with the broker."""
        self._broker.worked()
        if self._broker.goes_on:
            self._neighbours.broker_works()
        watched = self._agenda.get(item.job.name)
        if watched is not None:
            self._roster.touched(watched)

    def refused(self, item: Won, error: Exception) -> None:
        """It has no message, and will not have one."""
        self._fanout.emit(events.NotSent(job=item.job.name, slot=item.slot, run_id=self._run_id(item), error=error))
        self._ledger.give_up(item.ending(self._owner, RunState.NOT_SENT, "publish-error"))
        item.decide()

    # --- who is told --------------------------------------------------------------------------------------------------

    @property
    def is_heard(self) -> bool:
        """Somebody wants to hear of each message."""
        return self._fanout.is_heard(events.Sending) or self._fanout.is_heard(events.Sent)

    def note_both(self, item: Won, late: Millis) -> None:
        """Its message went out along with its claim, so late."""
        self._note_sending(item, late)
        self._note_sent(item, late)

    def _run_id(self, item: Won) -> str:
        return wire.run_id(self._namespace, item.job.name, item.slot)

    def _note_sending(self, item: Won, late: Millis) -> None:
        if not self._fanout.is_heard(events.Sending):
            return
        run_id, task = self._run_id(item), item.job.task
        self._fanout.emit(
            events.Sending(job=item.job.name, slot=item.slot, run_id=run_id, attempt=item.attempt, late=late, task=task)
        )

    def _note_sent(self, item: Won, late: Millis) -> None:
        if not self._fanout.is_heard(events.Sent):
            return
        name, slot, run_id = item.job.name, item.slot, self._run_id(item)
        self._fanout.emit(events.Sent(job=name, slot=slot, run_id=run_id, attempt=item.attempt, late=late))
