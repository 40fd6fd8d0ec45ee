"""THE LOOP: due -> claim -> publish -> confirm, for one tick. The first file to read.

Go on with ``backends/base.py`` (what a store promises), ``backends/memory.py`` (its shortest text), ``slots.py`` (which
slots a job owes) and ``scheduler.py`` (how Celery calls this).

The order of a tick is the promise:

* nothing is claimed unless the broker could be reached a moment ago, so a dead broker consumes no slot;
* nothing is published unless this very process was told WON and its lease, by the monotonic clock, still runs;
* the in-memory cursor moves last, so whatever fails half-way is asked again, as the same owner;
* no belief of ownership is kept: each slot is decided by the store's answer to a claim of that slot.

No Celery, no thread and no sleep in here: :meth:`Dispatcher.tick` returns how long to wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from celery_anarchon import events
from celery_anarchon.agenda import Agenda
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.burst import Burst
from celery_anarchon.chains import Chains
from celery_anarchon.claiming import Asked, Claiming
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.errors import AnarchonError, BackendUnavailable, OutcomeUnknown
from celery_anarchon.job import Job
from celery_anarchon.journal import Journal
from celery_anarchon.ledger import Ledger
from celery_anarchon.model import RunState
from celery_anarchon.neighbours import Neighbours
from celery_anarchon.newcomers import Newcomers
from celery_anarchon.onestep import OneStep
from celery_anarchon.options import Settings
from celery_anarchon.planning import Planning
from celery_anarchon.publishing import Builder, Publisher
from celery_anarchon.pulse import STALL, Pulse
from celery_anarchon.roster import Roster
from celery_anarchon.sending import Sending
from celery_anarchon.skew import FleetClock, Standing
from celery_anarchon.skips import Skips
from celery_anarchon.sweeper import Sweeper
from celery_anarchon.takeovers import Takeovers
from celery_anarchon.unanswered import Unanswered
from celery_anarchon.unsent import Unsent
from celery_anarchon.wants import Want, Won, batches

logger = logging.getLogger("celery_anarchon.beat")

UNCLEAR_WAIT = 0.5


class Dispatcher:
    """One beat's engine.

    :param builder: makes messages that go along with claims, where the broker's queues are in the store.
    :param stopping: asked between two steps; once it is true, what is won is finished and nothing new is begun.
    :param max_interval: the longest wait in seconds that :meth:`tick` may answer.
    """

    def __init__(
        self,
        *,
        backend: ClaimBackend,
        publisher: Publisher,
        builder: Builder | None = None,
        owner: str,
        label: str,
        app_name: str = "app.main",
        version: str = "",
        settings: Settings | None = None,
        clock: Clock | None = None,
        fanout: events.Fanout | None = None,
        max_interval: float = 300.0,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.backend = backend
        self.publisher = publisher
        self.owner = owner
        self.label = label
        self.app_name = app_name
        self.settings = settings or Settings()
        self.fanout = fanout or events.Fanout()
        self.clock = FleetClock(clock or SystemClock(), self.fanout, self.settings.max_skew)
        self.max_interval = max_interval
        self.stopping = stopping

        self.agenda = Agenda()
        self._opened = False
        self._closed = False

        self._ledger = Ledger(backend)
        self._journal = Journal(backend, self.clock)
        self._pulse = Pulse(self.clock, self.fanout)
        self._roster = Roster(
            backend, self.settings, self.clock, self.fanout, owner=owner, label=label, version=version
        )
        unanswered = Unanswered()
        self._planning = Planning(
            self.agenda,
            Chains(backend, self._roster, unanswered, max_interval),
            self._pulse,
            self._roster,
            self._journal,
            unanswered,
            self._ledger,
            self.clock,
            self.fanout,
            batch=self.settings.batch,
            longest=round(max_interval * 1000),
            label=label,
        )
        self._newcomers = Newcomers(
            self.agenda,
            self._roster,
            self.clock,
            plan_again=self._planning.again,
            missed=self._planning.before_first_seen,
        )
        self._skips = Skips(backend, self.fanout)
        self.one_step = OneStep(backend, builder, self.settings, self.clock, self.fanout, owner=owner)
        self._sweeper = Sweeper(
            backend,
            self.settings,
            self.clock,
            self._job_named,
            self._roster.terms_of,
            self.fanout,
            self.one_step,
            owner=owner,
            label=label,
        )
        self._neighbours = Neighbours(
            backend,
            publisher,
            self._pulse,
            self._roster,
            self._sweeper,
            self.clock,
            self.fanout,
            opened=self._open,
        )
        self._store, self._broker = self._neighbours.store, self._neighbours.broker
        self._unsent = Unsent(self._journal, self._ledger, self._sweeper, self.fanout, owner=owner)
        self._sending = Sending(
            publisher,
            self._neighbours,
            self.agenda,
            self._roster,
            self._journal,
            self._ledger,
            self._unsent,
            self.clock,
            self.fanout,
            owner=owner,
            namespace=backend.namespace,
        )
        self._claiming = Claiming(
            backend,
            self.settings,
            self.clock,
            self.fanout,
            self._roster,
            self._journal,
            unanswered,
            self._skips,
            self.one_step,
            owner=owner,
            label=label,
        )
        self._burst = Burst(
            self.agenda,
            self._planning,
            self._roster,
            self.one_step,
            self.clock,
            batch=self.settings.batch,
            begin=self._begin,
            publish=self._finish,
            goes_on=self._goes_on,
        )
        self._takeovers = Takeovers(self._sweeper, self._claiming, self._unsent, self._job_named, self.fanout)

    def open(self, opened: Callable[[], None] = lambda: None) -> None:
        """Open the store, and see whether messages can go along with claims. A store that is away is tried again by
        each tick: a beat never stops for that.

        :param opened: called then, whatever came of it, and before anything of it is told.
        :raises ConfigurationError: it can never work as it is configured.
        """
        away: Exception | None = None
        try:
            self.one_step.insist()
            self._open()
            self.one_step.begin()
        except (BackendUnavailable, OutcomeUnknown) as error:
            away = error
        finally:
            opened()
        if away is not None:
            self._neighbours.store_failed(away)

    def _open(self) -> None:
        if not self._opened:
            self.backend.open(self.app_name)
            self._opened = True

    # --- the schedule -------------------------------------------------------------------------------------------------

    def load(self, jobs: Mapping[str, Job]) -> None:
        """Take *jobs* as the whole schedule. What did not change goes on as it was; a new job, or one whose timetable
        means something else now, begins when the store first sees it."""
        self._newcomers.schedule_is(jobs)
        self._roster.schedule_is(jobs)
        self._pulse.excuse()

    # --- one tick -----------------------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Do everything that is due; seconds until there is something to do again. Raises nothing."""
        try:
            self._look()
            if self._neighbours.store_answers():
                if self._broker.away:
                    self._neighbours.broker_answers()
                self._ledger.tell(self.clock.monotonic())
                self._retry_unclear(held_up=False)
                if self._roster.show_presence():
                    self._begin_anew()
                self._register()
                if self.clock.standing is not Standing.BARRED:
                    self._ask_again()
                    self._dispatch_due()
                    self._sweep_when_due()
                    self._skips.tell()
                # Last, or it would hold up the others each time: one queue may take nothing while the rest works.
                self._retry_unclear(held_up=True)
                self._neighbours.note_work()
        except AnarchonError as error:
            self._neighbours.store_failed(error)
        except Exception as error:
            # A beat that dies for a bug serves nobody; one that goes on blindly is worse. Fail closed and try again.
            if self._neighbours.store_failed(error):
                logger.exception("unexpected error in a tick")
        wait = self._wait()
        self._pulse.resting(wait)
        return wait

    def _dispatch_due(self) -> None:
        now = self.clock.wall()
        first = self.agenda.next_due()
        if first is None or first > now or not self._neighbours.broker_answers():
            return
        self._look()
        if self._roster.in_doubt:
            # The clock may have been set before it was read: nothing is given up, or claimed, by such a reading.
            return
        self._burst.send(self.agenda.pop_due(now), now)

    def _goes_on(self) -> bool:
        return not (self.stopping() or self._broker.away)

    def _begin(self, batch: Sequence[Want], abroad: bool = False) -> Asked:
        self._look()
        return self._claiming.begin(batch, abroad=abroad)

    def _won(self, asked: Asked) -> list[Won]:
        won = asked.won()
        if won:
            # A claim that is lost may be told by one who takes no writes.
            self._store.worked()
        return won

    def _finish(self, asked: Asked) -> None:
        self._publish(self._won(asked))

    def _ask_again(self) -> None:
        """Where nobody takes over: claims whose answer was lost. What they won may be planned by nobody any more."""
        self._claiming.lose()
        wants = self._journal.to_ask_again()
        if not wants or self.stopping() or not self._neighbours.broker_answers():
            return
        for batch in batches(wants, self.settings.batch):
            self._finish(self._begin(batch))

    def _publish(self, won: Iterable[Won]) -> None:
        heard, unclear = self._sending.is_heard, False
        for item in won:
            if item.late is not None:
                # Its message went out with the claim.
                if heard:
                    self._sending.note_both(item, item.late)
                self._sending.is_out(item)
                item.decide()
                continue
            self._look()
            if item.error is not None:
                self._sending.refused(item, item.error)
            elif self._broker.away or (unclear and not self._journal.applies and self.stopping()):
                # At a stop a broker that does not answer is no longer waited for.
                self._unsent.put_back(item)
                item.decide()
            elif self._journal.applies and self.clock.monotonic() >= item.deadline:
                self._unsent.too_late(item)
                item.decide()
            elif self.clock.monotonic() >= item.deadline:
                self.fanout.emit(events.LeaseOver(job=item.job.name, slot=item.slot))
            elif self._is_late(item):
                self._unsent.give_up(item, RunState.MISFIRE, "max-late")
                item.decide()
            else:
                self._publish_one(item)
                unclear = unclear or item.unclear
        self._ledger.tell(self.clock.monotonic())

    def _is_late(self, item: Won) -> bool:
        """Whether it was planned, or taken over, in time and is too late by now. Where nobody takes over its deadline
        says so; and later attempts are not bound."""
        if item.job.options.max_late is None or item.attempt > 1 or self._journal.applies:
            return False
        return item.job.is_late(item.slot, self.clock.wall())

    def _publish_one(self, item: Won) -> None:
        self._sending.publish(item)

    def _retry_unclear(self, *, held_up: bool) -> None:
        """Publish again, with the same task id, what the broker may not have; at its deadline it is anyone's."""
        waiting = self._unsent.take_some(held_up=held_up)
        if not waiting:
            return
        reachable = self._neighbours.broker_answers()
        for item in waiting:
            self._look()
            if self.clock.monotonic() >= item.deadline:
                self._unsent.too_late(item)
            elif self.stopping() and not self._journal.applies:
                self._unsent.abandon(item)
            elif self._is_late(item):
                self._unsent.lose(item, RunState.MISFIRE, "max-late")
            elif reachable and not self._broker.away:
                self._publish_one(item)
            else:
                self._unsent.keep(item)
        self._ledger.tell(self.clock.monotonic())

    # --- first sight --------------------------------------------------------------------------------------------------

    def _register(self) -> None:
        while len(self._newcomers) and not self.stopping():
            self._newcomers.register()
            self._look()

    # --- claims that others could not finish --------------------------------------------------------------------------

    def _sweep_when_due(self) -> None:
        if not self._sweeper.is_time() or self.stopping():
            return
        self._roster.tidy()
        if not self._neighbours.broker_answers():
            self._sweeper.wait()
            return
        self._publish(self._takeovers.lapsed(others_live=self._roster.others_live, agreed=self._roster.agreed))
        self._publish(self._takeovers.waiting())

    def _job_named(self, name: str) -> Job | None:
        watched = self.agenda.get(name)
        return watched.job if watched is not None else None

    # --- clocks -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        step = self._pulse.look()
        if not step:
            return
        self._roster.doubt_clock()
        if step > 0 and not self._journal.applies:
            # Set ahead, or the host slept and its monotonic clock with it: then leases are over, and only the store
            # can tell. (Where there are none, this beat must not forget what it has sent.)
            self.clock.slept(step)
            self._pulse.excuse()

    def _begin_anew(self) -> None:
        """Slots are judged by another clock, or by this beat again: go on from what the store knows of each job. What
        fell due while a beat with the right clock was there is decided; what came since is owed in its turn."""
        self._pulse.excuse()
        if self.clock.standing is Standing.BARRED:
            return
        begin = self.clock.wall()
        if len(self.agenda):
            begin = min(begin - STALL, self.clock.right_until or begin)
        self._pulse.working_since = begin
        self._newcomers.begin_anew(begin)

    def _wait(self) -> float:
        if self._store.away:
            return min(self._store.remaining(), self.max_interval)
        monotonic = self.clock.monotonic()
        waits = [self.max_interval]
        looks = [self._roster.next_at(), self._ledger.next_at(), self._store.next_at(), self._broker.next_at()]
        if self.clock.standing is not Standing.BARRED:
            looks.append(self._sweeper.next_at())
        waits.extend(at - monotonic for at in looks if at is not None)
        if self._broker.away:
            waits.append(self._broker.remaining())
        else:
            if self._unsent.waiting or self._journal.to_ask_again():
                waits.append(UNCLEAR_WAIT)
            due = self.agenda.next_due()
            if due is not None and self.clock.standing is not Standing.BARRED:
                waits.append((due - self.clock.wall()) / 1000)
        return max(0.0, min(waits))

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave nothing to the lease: what is unclear is abandoned, what is decided is told. Repeatable; quick even
        with the store away; takes no lock."""
        if self._closed:
            return
        self._closed = True
        if self._journal.applies:
            self._send_or_lose()
        for item in self._unsent.take():
            self._unsent.abandon(item)
        if not self._store.away:
            try:
                # Records that still ripen are due as well once any living beat would have sent their slots.
                self._ledger.tell(self.clock.monotonic() + STALL / 1000)
                self._roster.leave()
            except Exception as error:
                logger.warning("could not tell the store everything before the stop: %s", error)
        self.publisher.close()
        self.backend.close()

    def _send_or_lose(self) -> None:
        """The stop where nobody takes over: what is still held is sent now, or lost, and that is said."""
        waiting = self._unsent.take()
        try:
            if waiting and self._neighbours.broker_answers(at_once=True):
                while waiting and not self._unsent.waiting:
                    # After one that failed the others would only be waited for.
                    self._publish_one(waiting.pop(0))
        except Exception as error:
            logger.warning("could not send everything before the stop: %s", error)
        for item in [*self._unsent.take(), *waiting]:
            self._unsent.lose(item, RunState.NOT_SENT, "beat-stopped")
        self._claiming.lose(all_of_them=True)
