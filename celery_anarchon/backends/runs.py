"""The contract, continued: a lease store that also follows a run on its worker.

Each operation is one row (or a few) of the protocol's table, and one atomic step of the store: its precondition is
checked and its effect written in the same step, anything else changes nothing. Where a worker writes, its right is
(attempt, retries) and the token of its delivery: the fence. The table is in ``tests/model/protocol.md``, and
``tests/model/run_protocol.py`` checks it.

Clauses have the letter W. All of :mod:`.base` holds as well, with these additions to ``claim``, ``confirm``,
``lapsed`` and ``takeover``:

* W1 A claim with ``terms`` that is confirmed is QUEUED, not DISPATCHED: unsettled until its worker or its queue limit
  (``terms.queue_timeout`` after the confirm, or after the message's ETA) settles it. Without terms nothing changes.
* W2 ``overlap`` is decided inside the claim's own step. *skip*: while another run of the job is queued, running,
  retrying or waiting, lapsed or not, an open slot is recorded SKIPPED with ``blocked_by`` that run, and the answer is
  SKIPPED. If the other is only claimed the answer is WAIT and nothing is recorded. Of one batch, too.
* W3 *queue_one*: in the same place the slot is recorded WAITING, and the answer is WAITING. At most one slot of a job
  waits, the newest: an older one becomes SUPERSEDED (``newer-slot``); first asked for then, it is recorded so at once,
  and the answer is SKIPPED. A claim of a waiting slot is WON by whoever asks once no other run of the job is unsettled;
  a newer slot that is WON then supersedes the one that waits.
* W4 ``lapsed`` also lists runs: RUNNING ones whose lease is over (where ``max_attempts`` is unset and the task
  acknowledges late: whose lease has been over for ``queue_timeout``), QUEUED and RETRYING ones past their queue limit.
* W5 ``takeover`` of a lapsed RUNNING run with attempts left makes it CLAIMED again, with attempt + 1 and no retries; of
  one without (used up, or ``max_attempts`` unset) it does nothing. What then holds attempt 2 or later has had a body:
  ``give_up`` as MISFIRE is refused.
* W16 A late ``confirm`` never changes a run that a worker has started.
* W25 ``sent_at`` and ``late`` are those of the first publish: the ``confirm`` of a later attempt leaves them.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from celery_anarchon.backends.base import LeaseBackend, Terms
from celery_anarchon.model import GateAnswer, Millis, Run, RunState

__all__ = [
    "ENDS_OF_A_BODY",
    "ENDS_OF_A_WAIT",
    "JOB_REMOVED",
    "RELEASED",
    "WITHOUT_TERMS",
    "WORKERS_KEPT",
    "GiveBack",
    "LapsedEnd",
    "NextTry",
    "RunBackend",
    "RunHold",
    "Settlement",
    "Start",
    "StartResult",
    "Unstarted",
    "Waiting",
    "Worker",
    "check_ends_of_a_body",
    "check_ends_of_a_wait",
]

ENDS_OF_A_BODY = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, RunState.LOST})
"""The states that :meth:`RunBackend.settle` takes."""

ENDS_OF_A_WAIT = frozenset({RunState.LOST, RunState.LOST_IN_QUEUE, RunState.DISPATCHED, RunState.SUPERSEDED})
"""The states that :meth:`RunBackend.end_lapsed` takes."""

JOB_REMOVED = "job-removed"
"""Why :meth:`RunBackend.end_lapsed` may end a run that somebody could go on with: nobody has its job any more."""

RELEASED = "worker-stopped"
"""Why a run is up for takeover before its lease was over: its worker stopped on purpose."""

WITHOUT_TERMS: Millis = 24 * 3_600_000
"""In the place of ``queue_timeout``, of a claim without terms."""

WORKERS_KEPT: Millis = 24 * 3_600_000
"""How long a worker that vanished is remembered."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A delivery of a run's message wants to execute its body."""

    job: str
    slot: Millis
    attempt: int
    """What the message says."""
    retries: int
    """Celery's: how many tries of this attempt came before."""
    token: str
    """Of this delivery. An unanswered question is asked again with the same one; another delivery has another."""
    worker: str
    """A label for people."""
    terms: Terms
    """From the message: used when the store has no record, or none that was to be followed."""
    acks_late: bool = False
    """The broker will deliver the message again if the worker dies."""
    late: Millis | None = None
    """From the message, for a record whose confirm has not come."""
    beat: str = ""


@dataclass(frozen=True)
class StartResult:
    """The answer, and the attempt that START and UNKNOWN grant: it goes into the header of what runs."""

    answer: GateAnswer
    attempt: int = 1
    holder: str | None = None
    """Label of the worker that runs it, where that is why the answer is no."""


@dataclass(frozen=True, kw_only=True)
class RunHold:
    """A started run as its worker names it: a write with another attempt, retries or token is refused."""

    job: str
    slot: Millis
    attempt: int
    retries: int
    token: str


@dataclass(frozen=True, kw_only=True)
class Settlement(RunHold):
    """The body has ended."""

    state: RunState
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class NextTry(RunHold):
    """The body ended in ``retry()``."""

    delay: Millis = 0
    """How long from now until the next try's ETA."""


@dataclass(frozen=True, kw_only=True)
class GiveBack(RunHold):
    """A granted start whose body surely has not begun is not wanted any more."""

    message_attempt: int
    """What the message says, where the gate may have granted a higher one."""


@dataclass(frozen=True, kw_only=True)
class Unstarted:
    """A message whose delivery never asked to start is gone: expired, revoked, rejected."""

    job: str
    slot: Millis
    attempt: int
    retries: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LapsedEnd:
    """A run of the list of lapsed ones that nobody goes on with."""

    job: str
    slot: Millis
    attempt: int
    was: RunState
    state: RunState
    reason: str


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A slot that waited for the end of another run, and now may be claimed."""

    job: str
    slot: Millis


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The presence of one worker with the gate."""

    owner: str
    label: str
    version: str
    queues: tuple[str, ...] = ()
    seen: Millis = 0
    """Store time of its last heartbeat; filled in by the store."""


class RunBackend(LeaseBackend):
    """See the module."""

    @abc.abstractmethod
    def start(self, starts: Sequence[Start]) -> list[StartResult]:
        """May this delivery execute its body? The first line that fits decides:

        * W6 RUNNING, by this token and these retries: START, the recorded attempt; the lease is renewed.
        * W7 Settled: SETTLED. At or below the floor: TRIMMED.
        * W8 No record: OVERLAPS if it may not overlap and another run of the job is unsettled (one that waits
          does not count); else UNKNOWN: recorded as RUNNING from the message.
        * W9 The message's attempt is below the recorded one: STALE. Not so for a RUNNING run whose attempts are not
          counted (``max_attempts`` unset) if the message has no more retries than recorded: there each attempt is a
          redelivery of the one message that beats have sent.
        * W10 CLAIMED (lapsed or not), QUEUED or DISPATCHED: START. One that was settled DISPATCHED by its queue limit
          guards nothing any more: OVERLAPS where one without a record would be.
        * W11 RUNNING or RETRYING, and the message has more retries than recorded: START, same attempt.
        * W12 RETRYING, or RUNNING with a lease that is not over: DUPLICATE.
        * W13 RUNNING, lapsed: with attempts left (or ``max_attempts`` unset) START with attempt + 1; else it is settled
          LOST (``attempts-used-up``): USED_UP.

        A refusal is counted in the record's ``refused``. WAITING is answered DUPLICATE: no message of it exists.
        """

    @abc.abstractmethod
    def heartbeat(self, holds: Sequence[RunHold]) -> list[bool]:
        """W14: renew the leases of these runs, each by its own terms; also of one that is over and was not taken over.
        False: it is not this holder's any more, and nothing changed."""

    @abc.abstractmethod
    def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """W15: the run's end; True also when asked again. False: refused, nothing changed."""

    def tells_along(self) -> bool:
        """Whether :meth:`settle_and_start` is one round trip."""
        return False

    def settle_and_start(
        self, settlements: Sequence[Settlement], starts: Sequence[Start]
    ) -> tuple[list[bool], list[StartResult]]:
        """W27: ``settle``, and then ``start``: a worker that asks anyway tells along what has ended."""
        return self.settle(settlements), self.start(starts)

    @abc.abstractmethod
    def retrying(self, tries: Sequence[NextTry]) -> list[bool]:
        """W17: RETRYING, without a lease, with the queue limit counted from the next try's ETA. False: moved on."""

    @abc.abstractmethod
    def give_back(self, backs: Sequence[GiveBack]) -> list[bool]:
        """W18: undo a granted start without counting it. Granted what the message says and no retries: QUEUED again;
        with retries: RETRYING, one less recorded. Granted more than the message says: CLAIMED, lapsed, attempt kept: a
        beat publishes it. True also when asked again while nothing has moved on; False: moved on."""

    @abc.abstractmethod
    def release(self, holds: Sequence[RunHold]) -> list[bool]:
        """W19: the body has stopped before its end, because its worker stops: the lease is over at once, nobody holds
        it, and the reason is ``worker-stopped``. False: moved on."""

    @abc.abstractmethod
    def unstarted(self, messages: Sequence[Unstarted]) -> list[bool]:
        """W20: LOST_IN_QUEUE, if the record is CLAIMED, QUEUED or DISPATCHED with that attempt, or RETRYING with fewer
        retries than the message, and that attempt. True also when asked again. False: refused, nothing changed (a copy
        of a living run must not end it)."""

    @abc.abstractmethod
    def end_lapsed(self, endings: Sequence[LapsedEnd]) -> list[bool]:
        """W21: settle what :meth:`lapsed` listed, if it still is in the state `was`, at that attempt, and over its
        limit. True also when asked again. A CLAIMED one, and a RUNNING one with attempts left, end only as LOST with
        the reason ``job-removed``. That reason is refused until the limit has been over for another ``queue_timeout``
        (a day where there are no terms). Only what is QUEUED ends as DISPATCHED: a copy of its message may start it,
        so it must have had no body.

        * W26 A WAITING one, which no limit ends, ends as SUPERSEDED with the reason ``job-removed`` and not otherwise,
          once no other run of its job is unsettled and it has waited for its ``queue_timeout``. Nothing else becomes
          SUPERSEDED here."""

    @abc.abstractmethod
    def waiting(self, limit: int) -> list[Waiting]:
        """W22: at most *limit* WAITING slots whose job has no other unsettled run, oldest first. A hint only."""

    @abc.abstractmethod
    def living(self, job: str) -> list[Run]:
        """The unsettled runs of *job*, oldest slot first."""

    @abc.abstractmethod
    def release_job(self, job: str) -> list[Run]:
        """W23, a person's command: settle every unsettled run of *job* but a waiting one as LOST (``released``); what
        was settled, as it is now."""

    @abc.abstractmethod
    def worker_seen(self, worker: Worker) -> Millis:
        """W24: note that *worker* lives; the store's time. ``workers`` shows it until it leaves."""

    @abc.abstractmethod
    def worker_left(self, owner: str) -> None:
        """The worker stops on purpose. It is still remembered as one that has been (`workers` does not show it)."""

    @abc.abstractmethod
    def workers(self, within: Millis) -> list[Worker]:
        """The workers seen within that time by the store's clock, in the order of their labels."""

    @abc.abstractmethod
    def ever_had_workers(self) -> bool:
        """Whether a worker with the gate was ever seen in this namespace. Else a run that nobody started may well have
        been executed by workers without the gate."""


def check_ends_of_a_body(settlements: Sequence[Settlement]) -> None:
    """:raises ValueError: :meth:`RunBackend.settle` takes none of these states."""
    for settlement in settlements:
        if settlement.state not in ENDS_OF_A_BODY:
            raise ValueError(f"{settlement.state} is no end of a body")


def check_ends_of_a_wait(endings: Sequence[LapsedEnd]) -> None:
    """:raises ValueError: :meth:`RunBackend.end_lapsed` takes none of these states."""
    for ending in endings:
        if ending.state not in ENDS_OF_A_WAIT:
            raise ValueError(f"{ending.state} is no end of a run that lapsed")
