"""The contract between the engine and a store, clause by clause.

Each clause has an id (C: claims, L: leases, X: life cycle; W, runs on their workers, is in
:mod:`celery_anarchon.backends.runs`, and O, claim and message in one step, in :mod:`celery_anarchon.backends.onestep`).
The conformance kit in :mod:`celery_anarchon.testing` has a test of the same id
for each, and a saboteur backend that breaks just that clause. Ids are never used twice.

Two rules stand above the clauses:

* **One atomic step.** Each row of a batch is one conditional write whose own result is the answer: never read, then
  write.
* **The store's clock.** Leases, *too early* and *first seen* are judged by the store's clock inside that same step.

A store without leases (``traits.leases`` False, *claim-only*) answers one question: was I first? A claim there is never
given up to others: `abandon` says False, and nobody takes over. `confirm`, `give_up` and `record` write history, and
change nothing for claims. The clauses that this touches say what is left of them; the other traits say what else such a
store may lack.

All instants and durations are :data:`~celery_anarchon.model.Millis`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from celery_anarchon import wire
from celery_anarchon.errors import BackendUnavailable, LayoutMismatch
from celery_anarchon.model import Answer, Millis, Run, RunState, Terms, Traits

__all__ = [
    "BEATS_KEPT",
    "FINGERPRINTS_KEPT",
    "GIVEN_UP",
    "NEVER_A_RUN",
    "NO_MESSAGE",
    "Beat",
    "ClaimBackend",
    "ClaimRequest",
    "ClaimResult",
    "Command",
    "Confirmation",
    "Enqueue",
    "GivenUp",
    "Hold",
    "Keep",
    "LapsedClaim",
    "LeaseBackend",
    "Outcome",
    "Registration",
    "Sighting",
    "Takeover",
    "Terms",
    "Traits",
    "Unusable",
    "check_charter",
    "check_given_up",
    "check_never_a_run",
]

GIVEN_UP = frozenset({RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED})
"""The ends that :meth:`ClaimBackend.give_up` takes."""

NEVER_A_RUN = frozenset({RunState.MISFIRE, RunState.SUPERSEDED, RunState.SKIPPED, RunState.PAUSED})
"""The states that :meth:`ClaimBackend.record` takes."""

NO_MESSAGE = GIVEN_UP | NEVER_A_RUN | {RunState.WAITING}
"""The states of slots of which no message was sent: what :meth:`ClaimBackend.last_run` passes over."""

FINGERPRINTS_KEPT = 8
"""Definitions of a job whose first sight is remembered."""

BEATS_KEPT: Millis = 24 * 3_600_000
"""How long a beat that vanished is remembered, whoever asks."""


Command: TypeAlias = "tuple[str | bytes | int, ...]"
"""One write, in the words of the store that is to do it. Nothing between its maker and that store looks into it."""


@dataclass(frozen=True, kw_only=True)
class Enqueue:
    """A message as writes of the store itself, for :class:`~celery_anarchon.backends.onestep.OneStepBackend`."""

    commands: tuple[Command, ...]
    attempt: int = 1
    """What its header says."""
    late: Millis = 0
    delay: Millis = 0
    """As in :class:`Confirmation`."""


@dataclass(frozen=True, kw_only=True)
class ClaimRequest:
    """One (job, slot) that a beat would like to dispatch."""

    job: str
    slot: Millis
    owner: str
    """The random token of the asking process. Never a host name: two processes of a host are two owners."""
    beat: str
    """A label for people."""
    lease: Millis
    """How long the claim is held unless confirmed; a claim-only store ignores it."""
    terms: Terms | None = None
    """What the store must keep for the run's worker; None: the run is not followed. Only for stores that can."""
    enqueue: Enqueue | None = None
    """Its message, where claim and message are one step; all else ignores it."""


@dataclass(frozen=True)
class ClaimResult:
    """The answer, and the attempt that a WON claim licenses."""

    answer: Answer
    attempt: int = 1
    sent: bool = False
    """Its message went out in the same step: there is nothing to publish."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A claim as its holder names it; a write with another owner or attempt is refused."""

    job: str
    slot: Millis
    owner: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Confirmation(Hold):
    """The message of this claim has been published."""

    late: Millis
    """Publish time minus slot."""
    delay: Millis = 0
    """How long from now until the message's ETA: its queue limit counts from there."""


@dataclass(frozen=True, kw_only=True)
class GivenUp(Hold):
    """This claim will never be published: NOT_SENT, MISFIRE or SUPERSEDED, and why (kebab-case)."""

    state: RunState
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A slot that never became a run (MISFIRE, SUPERSEDED, SKIPPED, PAUSED), and why (kebab-case)."""

    job: str
    slot: Millis
    state: RunState
    reason: str | None = None
    beat: str = ""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A beat has this job in its schedule, with a timetable of this fingerprint."""

    job: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What the store knows of a job."""

    since: Millis
    """Store time at which this (job, fingerprint) was first seen by any beat. No slot before it is ever dispatched."""
    last: Millis | None
    """The highest slot of the job that has a record or lies at the floor; None: none yet."""


@dataclass(frozen=True, kw_only=True)
class LapsedClaim:
    """A claim whose lease is over and whose message was, as far as the store knows, not published; or, in a store that
    follows runs, a run that its worker or its queue let go (see :mod:`celery_anarchon.backends.runs`)."""

    job: str
    slot: Millis
    attempt: int
    abandoned: bool
    """Its holder gave it up for lack of a broker. False: the holder died or was paused."""
    state: RunState = RunState.CLAIMED
    """Or RUNNING, QUEUED, RETRYING."""
    max_attempts: int | None = None
    reason: str | None = None
    """Why a run was let go, where its worker said so."""


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """A wish to go on with a lapsed claim, if it still is as the list said."""

    job: str
    slot: Millis
    from_attempt: int
    owner: str
    beat: str
    lease: Millis
    enqueue: Enqueue | None = None
    """As in :class:`ClaimRequest`."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How much of a job's past to keep."""

    job: str
    decided: Millis
    """Every slot at or below this one is decided, as far as the caller knows."""
    history_size: int
    history_ttl: Millis | None = None


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The presence of one beat."""

    owner: str
    label: str
    version: str
    skew: Millis = 0
    """Its wall clock minus the store's."""
    schedule: str = ""
    """Fingerprint of its whole schedule."""
    zones: str = ""
    """Fingerprint of the zone data that its schedule uses."""
    seen: Millis = 0
    """Store time of its last heartbeat; filled in by the store."""


class Unusable(BackendUnavailable):
    """It will not get better by itself. ``open`` raises it as a ConfigurationError; a call in a running beat as what it
    is to the beat: nothing was applied, ask again later."""


class ClaimBackend(abc.ABC):
    """A store that can say who was first.

    Errors of every method: :class:`~celery_anarchon.errors.BackendUnavailable` (nothing was applied) and
    :class:`~celery_anarchon.errors.OutcomeUnknown` (it may have been; ask again with the same owner). No driver's
    exception passes (C12).
    """

    name: str
    """``sqlite``, ``redis:lease``, ... : what logs and ``status`` show."""
    traits: Traits
    namespace: str
    """Keeps services on one store apart; part of every run id."""
    early_tolerance: Millis = 5_000
    """How far ahead of the store's clock a slot may be claimed: a mad clock cannot burn tomorrow's slots."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Where the store is, for the first log line, with secrets masked."""

    @abc.abstractmethod
    def open(self, app_name: str, *, create: bool = True) -> None:
        """Connect and check. Repeatable.

        X4: a namespace with a layout newer than ours, or recorded for another app, raises
        :class:`~celery_anarchon.errors.LayoutMismatch` and changes nothing. *create* False (the command line's readers)
        makes nothing that is not there.

        :raises ConfigurationError: the store can never work as it is configured.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what we opened, never what we were handed.

        X1: repeatable, leaves no thread, socket or file open. X2: a client that was made before a fork works in the
        child, over connections of its own. X3: takes no lock that a call in progress may hold (Celery calls it from a
        signal handler).
        """

    @abc.abstractmethod
    def now(self) -> Millis:
        """The store's clock; this host's where the store has none."""

    @abc.abstractmethod
    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """Claim each slot. Answers in the order of the requests; the number of round trips does not grow with them.

        * C1 Of all owners that ever ask for a slot exactly one is told WON.
        * C2 That owner is told WON again, with the same attempt, while the claim is still its own and not confirmed
          (lapsed or not); its lease is renewed.
        * C3 Also when its first reply was lost and it asks over another connection. A store without
          ``traits.knows_owner`` keeps neither C2 nor C3: it raises OutcomeUnknown for the lost reply, and what it then
          answers is TAKEN.
        * C4 Other jobs and other slots are independent: any text as a name, slots one millisecond apart.
        * C5 A claim is seen by clients that were connected before it was made.
        * C6 A newer claim changes nothing for an older slot, neither for a taken nor for an open one. Without
          ``traits.any_order`` an open one becomes TOO_OLD.
        * C7 A slot at or below the floor is TOO_OLD.
        * C13 A slot later than the store's clock plus the tolerance is TOO_EARLY, and nothing is stored.
        * C15 The owner that won it and has confirmed or given it up is told ALREADY_SENT. Everyone else: TAKEN. A
          claim-only store may say WON to the owner again and again: WON licenses one publish, and who has published
          knows it.
        * C10 A durable store remembers claims over a restart of its server or of every process that used it.
        * C16 A batch answers each request by its own; one refused row harms no other. A row whose own answer was lost
          may be UNKNOWN where the others have theirs.
        * C20 A claim is remembered for ``traits.horizon`` at least, counted from the slot: until then it is TAKEN for
          everyone else. A slot so old that its claim may have been forgotten is TOO_OLD by the store's clock, where it
          has one (``traits.server_time``); nobody is ever told WON for it.
        """

    @abc.abstractmethod
    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        """The messages were published: the run is `dispatched` and holds no lease. True: so recorded (C14: also when
        the lease had lapsed, and when asked again). False: it has moved on, nothing changed (C8); not an error. Without
        ``traits.exact_history``: True, whoever asks."""

    @abc.abstractmethod
    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        """The messages were surely not published. True: the slot is open to a takeover at once (L5), by anyone but with
        the same attempt. False: moved on (C8), or the store cannot (claim-only). The caller publishes it no more."""

    @abc.abstractmethod
    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        """End a claimed slot without a message. True: so recorded, for good (C18), also when asked again.
        False: moved on (C8). Without ``traits.exact_history``: True, whoever asks."""

    @abc.abstractmethod
    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Write slots that never became a run into the history. C17: never over an existing record, never at or below
        the floor. Such a slot cannot be claimed any more; on a claim-only store it can, and the claim then replaces the
        record. A message is shown before such a record in any case, whichever came first."""

    @abc.abstractmethod
    def history(self, job: str, limit: int) -> list[Run]:
        """The latest *limit* records of *job*, newest slot first (C19)."""

    @abc.abstractmethod
    def last_run(self, job: str) -> Run | None:
        """The newest record of *job* that stands for a message (not one of :meth:`record`'s, nor a slot given up)."""

    def tidy(self, keeps: Sequence[Keep]) -> int:
        """Drop what exceeds `history_size` or `history_ttl` of each job; how many records were dropped. On a claim-only
        store it is about history alone: no claim is forgotten for it. It may also bound its history otherwise."""
        return 0


class AgedBackend(ClaimBackend):
    """A claim-only store that can drop history by age: so type checkers know that it takes ``history_ttl``."""


class LeaseBackend(ClaimBackend):
    """A store that also knows who holds a run and until when.

    C11 (every lease store): a claim that is neither confirmed nor given up is takeable once its lease is over by the
    store's clock, and never before.
    """

    @abc.abstractmethod
    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        """Note that these jobs are scheduled. L1: `since` of a (job, fingerprint) is the store time of its first
        sighting by anyone, set once and never moved, and kept for the job's 8 latest fingerprints: a rolling deploy or
        a rollback moves nothing."""

    @abc.abstractmethod
    def lapsed(self, limit: int) -> list[LapsedClaim]:
        """At most *limit* claims whose lease is over, longest lapsed first (L2): exactly the lapsed ones. A hint only.
        Its cost does not grow with the number of jobs or of settled runs."""

    @abc.abstractmethod
    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        """Go on with lapsed claims: the attempt that is now the caller's to publish, or None: no longer lapsed.

        * L3 A compare-and-set on (claimed, lapsed, from_attempt): of two sweepers one gets it.
        * L4 A claim keeps its attempt: nothing has started. It keeps the time of its first claim too, for good.
        * L6 The old holder's later confirm, abandon and give_up are refused and change nothing.
        * L7 The new holder can do everything.
        * L8 Asked again by the owner that just got it (lost reply), the answer is the same.
        """

    @abc.abstractmethod
    def tidy(self, keeps: Sequence[Keep]) -> int:
        """Drop what exceeds `history_size` or `history_ttl` of each job and raise the floor over it; how many were
        dropped. C9: never an unsettled record, never one above `decided`, never one with an unsettled or undecided slot
        at or below it; what was claimed stays refused afterwards (C7)."""

    @abc.abstractmethod
    def beat_seen(self, beat: Beat) -> Millis:
        """Note that *beat* lives; the store's time. L9: `beats` shows it until it leaves."""

    @abc.abstractmethod
    def beat_left(self, owner: str) -> None:
        """The beat stops on purpose."""

    @abc.abstractmethod
    def beats(self, within: Millis) -> list[Beat]:
        """The beats seen within that time by the store's clock, in the order of their labels. Older ones are forgotten
        in time."""


def check_charter(backend: ClaimBackend, app_name: str, *, layout: int, app: str | None, own: str) -> None:
    """Whether a namespace that says this of itself is for us (X4). *own*: the option that makes another.

    :raises LayoutMismatch: it is a newer release's, or another app's.
    """
    if layout > wire.LAYOUT_VERSION:
        raise LayoutMismatch(
            f"{backend.describe()}: layout {layout} was written by a newer celery-anarchon; this one knows "
            f"{wire.LAYOUT_VERSION}: upgrade this process"
        )
    if app is not None and app != app_name:
        raise LayoutMismatch(
            f"namespace {backend.namespace!r} belongs to app {app}, and this is app {app_name}; set {own} to give this "
            "app its own"
        )


def check_given_up(endings: Sequence[GivenUp]) -> None:
    """:raises ValueError: :meth:`ClaimBackend.give_up` takes none of these states."""
    for ending in endings:
        if ending.state not in GIVEN_UP:
            raise ValueError(f"a claim cannot be given up as {ending.state}")


def check_never_a_run(outcomes: Sequence[Outcome]) -> None:
    """:raises ValueError: :meth:`ClaimBackend.record` takes none of these states."""
    for outcome in outcomes:
        if outcome.state not in NEVER_A_RUN:
            raise ValueError(f"{outcome.state} is no state of a slot that never became a run")
