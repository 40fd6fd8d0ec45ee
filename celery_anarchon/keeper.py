"""What a worker process holds: its runs' leases, their ends on the way to the store, its presence.

Belongs here: one thread (a greenlet where Celery has patched threads) that heartbeats and tells, in batches. Does not
belong here: Celery. The gate and the callbacks of requests hand in what happened and never wait for the store, but for
the one question whether a run may start.

Rules of the protocol kept here: a run's end is told before any release (R4); a release is handed in only when the body
has stopped; a write names attempt, retries and token (R6); a failed heartbeat is no loss; a question that was not
answered is asked again as the same delivery (R2), before anything else is said of its run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.runs import (
    GiveBack,
    NextTry,
    RunBackend,
    RunHold,
    Settlement,
    Start,
    StartResult,
    Unstarted,
    Worker,
)
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.errors import AnarchonError
from celery_anarchon.events import Fanout, HoldLost, RunEnded, Settled
from celery_anarchon.forks import ForkLock
from celery_anarchon.held import End, Held, Told, hold_of
from celery_anarchon.interrupts import Bell, Undisturbed
from celery_anarchon.model import GRANTED, GateAnswer, Millis, RunState
from celery_anarchon.outage import Outage
from celery_anarchon.wire import time_text

logger = logging.getLogger("celery_anarchon.worker")

ROWS_A_CALL = 500
GATHER = 0.05
"""Seconds that the end of a run waits for others to go with it. A call costs its thread three waits, whatever it tells:
at 100 short runs a second that is a fifth of what telling each would cost the worker's main process."""
LAST_WORDS = 3.0
"""Seconds that a stopping worker gives the store to hear the ends of its runs."""

TOO_LATE = "ended here too late: it was not this worker's any more, and its record stands"
OVERTAKEN = "ended in a retry, and its record had moved on: the next try, or another worker"


class Keeper:
    """See the module.

    :param heartbeat: ms between two renewals.
    :param presence: this worker, as others see it.
    :param opened: opens *backend*; repeated until the store answers once.
    :param fanout: is told of ends, and of runs that are lost.
    """

    def __init__(
        self,
        backend: RunBackend,
        *,
        heartbeat: Millis,
        presence: Worker,
        opened: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        fanout: Fanout | None = None,
    ) -> None:
        self.fanout = fanout or Fanout()
        self._backend = backend
        self._heartbeat = heartbeat / 1000
        self._presence = presence
        self._open = opened
        self._opened = False
        self._clock = clock or SystemClock()
        self._outage = Outage(self._clock)
        self._held: dict[str, Held] = {}
        """By token."""
        self._unanswered: dict[str, Held] = {}
        """By token: whose bodies run, or ran, and the store has not said yet whether they may."""
        self._doubts: list[Start] = []
        """Questions that may have been granted unheard, who knows which attempt, of deliveries that do not start."""
        self._told = Told()
        self._lock = threading.RLock()
        """Of the four above: never held over a call to the store. Not a plain one: Celery's handler of a stop may find
        its thread in here, and makes the pool tell of ends."""
        self._io = ForkLock()
        """One call to the store at a time: a backend is one client. Forks wait for it."""
        self._undisturbed = Undisturbed(self._io)
        self._wake = Bell()
        self._gathered = threading.Event()
        """Set by the stop only: nothing is waited for any more."""
        self._went_along = 0
        """How many times ends went along with a question."""
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._beat_at = 0.0

    # --- for the gate and the requests --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the thread. After the pool has forked its children: they must not inherit it half-way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="anarchon-keeper", daemon=True)
            self._thread.start()

    def ask(self, start: Start) -> tuple[StartResult, Held | None]:
        """May this run start? The one call that its caller waits for. Of a yes: what is held from then on, and whose
        body has not begun.

        :raises AnarchonError: the store did not answer; nothing is known.
        """
        held = None
        try:
            with self._undisturbed:
                self._ready()
                asked = self._clock.monotonic()
                result = self._ask(start)
                if result.answer in GRANTED and self._clock.monotonic() - asked > start.terms.lease / 1000:
                    # This worker was frozen meanwhile, or the answer was. The run may be another's by now.
                    asked = self._clock.monotonic()
                    result = self._ask(start)
                if result.answer in GRANTED:
                    # Before any handler of a stop runs, which may sleep: leases are renewed meanwhile.
                    held = self._hold(start, result.attempt, asked)
        except BaseException:
            # Such a handler has raised.
            if held is not None:
                self.give_back_unbegun(held)
            raise
        return result, held

    def _ask(self, start: Start) -> StartResult:
        if self._told.backs or self._doubts:
            self._give_back_of(start)
        ends = self._ends_to_tell_along()
        if not ends:
            return self._backend.start([start])[0]
        told, results = self._backend.settle_and_start(ends, [start])
        self._ends_were_told(ends, told)
        return results[0]

    def _give_back_of(self, start: Start) -> None:
        """What goes back of this very run goes before its next delivery asks, which would be told that it runs."""
        run = (start.job, start.slot)
        with self._lock:
            doubts = [one for one in self._doubts if (one.job, one.slot) == run]
        self._undo(doubts)
        with self._lock:
            backs = [one for one in self._told.backs if (one.job, one.slot) == run]
        if backs:
            self._backend.give_back(backs)
            with self._lock:
                self._told.backs = [one for one in self._told.backs if one not in backs]

    def _hold(self, start: Start, attempt: int, asked: float) -> Held:
        lease = start.terms.lease
        # A lease is not older than the question to which it was granted.
        held = Held(hold_of(start, attempt), lease, asked + lease / 1000, start.attempt, begun=False, question=start)
        with self._lock:
            self._held[start.token] = held
        self.begin()
        return held

    def _ends_to_tell_along(self) -> list[Settlement]:
        """With the next question, where that costs no further wait. Not past what has to go before them."""
        told = self._told
        if not told.ends or self._outage.away or not self._backend.tells_along():
            # What could not be told just now must not keep a question from its answer.
            return []
        with self._lock:
            return [] if told.backs else told.ends[:ROWS_A_CALL]

    def _ends_were_told(self, ends: list[Settlement], answers: Sequence[bool]) -> None:
        with self._lock:
            del self._told.ends[: len(ends)]
            self._went_along += 1
        self._tell_of_ends(ends, answers)

    def add(self, held: Held) -> None:
        """One that starts without an answer: asked for from here on."""
        with self._lock:
            self._held[held.hold.token] = self._unanswered[held.hold.token] = held
        self.begin()
        self._wake.set()

    def settle(self, held: Held, state: RunState, reason: str | None = None) -> None:
        """The body has ended. The first end of a run counts."""
        self._end(held, ("ends", lambda hold: Settlement(**vars(hold), state=state, reason=reason)))

    def retry(self, held: Held, delay: Millis) -> None:
        """The body has ended in a retry, due in *delay*."""
        self._end(held, ("tries", lambda hold: NextTry(**vars(hold), delay=delay)))

    def release(self, held: Held) -> None:
        """The body has stopped before its end, and somebody else may go on."""
        self._end(held, ("releases", lambda hold: hold))

    def doubt(self, start: Start) -> None:
        """Whether this was granted nobody knows, and its body will not begin: to be undone."""
        with self._lock:
            self._doubt(start)
        self._wake.set()

    def _doubt(self, start: Start) -> None:
        """With the lock held."""
        if start.acks_late and start.terms.max_attempts is None:
            # Redeliveries say what the message always said, whichever attempt they are granted.
            self._doubts.append(start)
            return
        for attempt in (start.attempt, start.attempt + 1):
            self._told.backs.append(GiveBack(**vars(hold_of(start, attempt)), message_attempt=start.attempt))

    def begins(self, held: Held) -> bool:
        """The next thing that happens is its body. False: it must not, since the run is not held here any more; if that
        is another's doing, `held.answer` says so.

        Called by threads of a pool. It may have waited for one, as long as the bodies before it took.
        """
        if self._is_lost(held):
            self._ask_before_the_body(held)
        with self._lock:
            if held.refused:
                self._held.pop(held.hold.token, None)
                held.ended = True
            if self._held.get(held.hold.token) is not held:
                return False
            held.begun = True
            if held.timeout is not None:
                held.deadline = self._clock.monotonic() + held.timeout
        if held.deadline is not None and held.deadline < self._beat_at:
            self._wake.set()
        return True

    def _ask_before_the_body(self, held: Held) -> None:
        """Once more, where this worker's hold is in doubt. Without an answer all stays as it was; and nobody waits for
        one whose store is known to be away."""
        with self._undisturbed:
            if self._outage.away or held.question is None or held.ended or not self._is_lost(held):
                return
            asked = self._clock.monotonic()
            try:
                result = self._backend.start([held.question])[0]
            except AnarchonError as error:
                self._is_away(error)
                return
            with self._lock:
                held.refused = result.answer not in GRANTED
                held.answer = result.answer if held.refused else None
                if not held.refused:
                    held.hold = replace(held.hold, attempt=result.attempt)
                    held.until = asked + held.lease / 1000

    def _is_away(self, error: AnarchonError) -> None:
        if self._outage.failed(error):
            logger.error("the store is away; runs go on, their ends are kept: %s", error)

    def give_back_unbegun(self, held: Held) -> bool:
        """Give *held* back if its body surely has not begun; from here on it will not. Whether that is so."""
        with self._lock:
            if held.begun is not False or self._held.pop(held.hold.token, None) is None:
                return False
            self._unanswered.pop(held.hold.token, None)
            held.ended = True
            if held.answered:
                self._told.backs.append(GiveBack(**vars(held.hold), message_attempt=held.message_attempt))
            elif held.start is not None:
                self._doubt(held.start)
        self._wake.set()
        return True

    def handed_over(self) -> list[Held]:
        """What pools of processes have, and have not ended."""
        with self._lock:
            return [held for held in self._held.values() if held.handed is not None and not held.ended]

    def leave(self, held: Held) -> None:
        """Nobody will say how it ends, or whether it begins: its lease is not renewed any more."""
        with self._lock:
            self._held.pop(held.hold.token, None)
            self._unanswered.pop(held.hold.token, None)
            held.ended = True

    def unstarted(self, message: Unstarted) -> None:
        """A message is gone that never asked to start."""
        with self._lock:
            self._told.unstarted.append(message)
        self.begin()
        self._wake.set()

    def lost(self, token: str) -> bool | None:
        """Whether that run is not surely this worker's any more; None: it is not held here."""
        with self._lock:
            held = self._held.get(token)
        return None if held is None else self._is_lost(held)

    def _is_lost(self, held: Held) -> bool:
        return held.refused or self._clock.monotonic() > held.until

    def _end(self, held: Held, end: End) -> None:
        with self._lock:
            self._held.pop(held.hold.token, None)
            if held.ended:
                return
            held.ended = True
            if held.answered:
                self._hand_in(held, end)
            else:
                held.end = end
        self._wake.set()

    def _hand_in(self, held: Held, end: End) -> None:
        """To be told by the thread. With the lock held."""
        kind, of_hold = end
        if held.start is not None and held.refused:
            # The record is another's, and was from the beginning.
            return
        if kind == "tries" and held.start is not None and held.hold.attempt != held.start.attempt:
            # The next try's message carries the attempt that the body was told of, not the granted one: it will be
            # refused as stale (protocol R1, H3). So nothing is to be waited for.
            kind, of_hold = "releases", lambda hold: hold
        getattr(self._told, kind).append(of_hold(held.hold))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            if self._wake.wait(self._rest()) and not self._stopping:
                self._gather()
            self._wake.clear()
            self.turn()

    def _gather(self) -> None:
        """Ends come in bursts: a moment's patience makes one call of many. And while questions take them along, they
        need no call of their own."""
        went = -1
        while went != self._went_along and not self._stopping:
            went = self._went_along
            self._gathered.wait(GATHER)
            if self._outage.away or self._others_wait() or self._rest() <= 0:
                return

    def _others_wait(self) -> bool:
        """Whether there is something to tell or to ask that goes along with no question."""
        told = self._told
        return bool(told.backs or told.tries or told.unstarted or told.releases or self._unanswered or self._doubts)

    def turn(self) -> None:
        """Tell what there is to tell, and heartbeat when it is time. Raises nothing."""
        if self._outage.remaining() > 0 and not self._stopping:
            return
        # All of it, log lines and receivers too: a child must not be forked in the middle of any.
        with self._io:
            self._turn()

    def _turn(self) -> None:
        try:
            self._time_out()
            self._ready()
            if self._clock.monotonic() >= self._beat_at:
                # First: what cannot be told must cost no lease.
                self._renew()
                self._backend.worker_seen(self._presence)
                self._beat_at = self._clock.monotonic() + self._heartbeat
            self._ask_again()
            self._undo(self._doubts)
            self._tell()
        except AnarchonError as error:
            self._is_away(error)
        except Exception as error:
            if self._outage.failed(error):
                logger.exception("unexpected error in the keeper")
        else:
            # What failed is in each turn until it is done.
            self._outage.worked()
            if self._outage.away:
                self._outage.answered()
                logger.warning("the store is back")

    def _ready(self) -> None:
        if not self._opened:
            self._open()
            self._opened = True

    def _rest(self) -> float:
        if self._outage.away:
            return max(0.05, self._outage.remaining())
        now = self._clock.monotonic()
        with self._lock:
            deadlines = [held.deadline for held in self._held.values() if held.deadline is not None]
        return max(0.0, min([self._beat_at, *deadlines]) - now)

    def _time_out(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            over = [held for held in self._held.values() if held.deadline is not None and held.deadline <= now]
        for held in over:
            logger.error("%s runs longer than its timeout, and this pool cannot stop it: recorded so", held.name)
            self.settle(held, RunState.TIMED_OUT, "time-limit")

    def _ask_again(self) -> None:
        """Whether those may run that run without an answer. A yes: followed from here on, its end included."""
        with self._lock:
            waiting = list(self._unanswered.values())
        for first in range(0, len(waiting), ROWS_A_CALL):
            some = waiting[first : first + ROWS_A_CALL]
            asked = self._clock.monotonic()
            answers = self._backend.start([held.start for held in some if held.start is not None])
            for held, result in zip(some, answers, strict=True):
                self._answered(held, result, asked)

    def _undo(self, doubts: Sequence[Start]) -> None:
        """Which attempt was granted the store knows, and says so when it is asked as the same delivery (R2). One that
        it grants only now is given back as well."""
        for first in range(0, len(doubts), ROWS_A_CALL):
            some = doubts[first : first + ROWS_A_CALL]
            answers = self._backend.start(some)
            with self._lock:
                self._doubts = [one for one in self._doubts if one not in some]
                for start, result in zip(some, answers, strict=True):
                    if result.answer in GRANTED:
                        hold = vars(hold_of(start, result.attempt))
                        self._told.backs.append(GiveBack(**hold, message_attempt=start.attempt))

    def _answered(self, held: Held, result: StartResult, asked: float) -> None:
        granted = result.answer in GRANTED
        with self._lock:
            if self._unanswered.pop(held.hold.token, None) is None:
                # Given back meanwhile: that goes behind this question.
                return
            held.answered = True
            if granted:
                held.hold = replace(held.hold, attempt=result.attempt)
                held.until = asked + held.lease / 1000
            elif result.answer is GateAnswer.TRIMMED and not held.followed:
                # As at the gate: it runs, and its record is gone.
                held.ended = True
                return
            else:
                held.refused = True
            if held.end is not None:
                self._hand_in(held, held.end)
        if granted:
            logger.warning("%s: the store answers; the run is followed from here on", held.name)
        else:
            logger.warning("%s ran without the store's answer, which is no (%s): lost", held.name, result.answer)

    def _tell(self) -> None:
        """In the order of :class:`Told`; what was not told stays, and so do the releases behind it (R4)."""
        steps: tuple[tuple[str, Callable[[Any], Sequence[bool]]], ...] = (
            ("backs", self._backend.give_back),
            ("ends", self._backend.settle),
            ("tries", self._backend.retrying),
            ("unstarted", self._backend.unstarted),
            ("releases", self._backend.release),
        )
        for name, tell in steps:
            waiting = getattr(self._told, name)
            while waiting:
                with self._lock:
                    some = list(waiting[:ROWS_A_CALL])
                answers = tell(some)
                with self._lock:
                    del waiting[: len(some)]
                if name == "tries":
                    # No alarm as a rule: with a short countdown the next try begins before the end of this one is told.
                    self._note_refused(some, answers, logging.INFO, OVERTAKEN)
                if name == "ends":
                    self._tell_of_ends(some, answers)
                if name == "unstarted":
                    for gone, taken in zip(some, answers, strict=True):
                        if taken:
                            state = RunState.LOST_IN_QUEUE
                            self.fanout.emit(RunEnded(job=gone.job, slot=gone.slot, state=state, reason=gone.reason))

    def _tell_of_ends(self, ends: Sequence[Settlement], answers: Sequence[bool]) -> None:
        self._note_refused(ends, answers, logging.WARNING, TOO_LATE)
        if not self.fanout.is_heard(Settled):
            return
        for end, taken in zip(ends, answers, strict=True):
            if taken:
                self.fanout.emit(
                    Settled(job=end.job, slot=end.slot, attempt=end.attempt, state=end.state, reason=end.reason)
                )

    @staticmethod
    def _note_refused(told: Sequence[RunHold], answers: Sequence[bool], level: int, words: str) -> None:
        if all(answers):
            return
        for one, taken in zip(told, answers, strict=True):
            if not taken:
                logger.log(level, "%s attempt %d %s", f"{one.job} {time_text(one.slot)}", one.attempt, words)

    def _renew(self) -> None:
        with self._lock:
            held = [held for held in self._held.values() if held.answered and not (held.refused or held.ended)]
        for start in range(0, len(held), ROWS_A_CALL):
            some = held[start : start + ROWS_A_CALL]
            asked = self._clock.monotonic()
            for run, kept in zip(some, self._backend.heartbeat([run.hold for run in some]), strict=True):
                if kept:
                    run.until = asked + run.lease / 1000
                elif not run.ended:
                    run.refused = True
                    logger.warning("%s attempt %d is not this worker's any more: lost", run.name, run.hold.attempt)
                    self.fanout.emit(HoldLost(job=run.hold.job, slot=run.hold.slot, attempt=run.hold.attempt))

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Give back what has not begun, release what was cut off, tell everything, leave. Bounded by LAST_WORDS."""
        self._stopping = True
        self._gathered.set()
        with self._lock:
            left = list(self._held.values())
        for held in left:
            if self.give_back_unbegun(held):
                continue
            if held.begun and not held.stopped:
                # Nothing stops a thread, and a release now would start another body beside it (R4).
                logger.warning("%s still runs while its worker stops: free when its lease is over", held.name)
            else:
                self.release(held)
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(LAST_WORDS)
        if self._io.acquire(timeout=LAST_WORDS):
            try:
                if self._opened and (self._outage.remaining() == 0 or self._told or self._unanswered or self._doubts):
                    self._ask_again()
                    self._undo(self._doubts)
                    self._tell()
                    self._backend.worker_left(self._presence.owner)
            except Exception as error:
                logger.warning("could not tell the store everything before the stop: %s", error)
            finally:
                self._io.release()
        self._backend.close()
