"""What happened, as typed events, and a fan-out that cannot raise.

The engine only emits; the log, metrics, signals and tests listen. An observer can never break what it observes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from celery_anarchon.model import Answer, Millis, Run, RunState

logger = logging.getLogger("celery_anarchon.beat")


NEWS = frozenset({Answer.SKIPPED, Answer.WAITING})
"""Answers to claims that are told whoever listens; of the others there are one or two for each slot."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """The store answered a claim."""

    job: str
    slot: Millis
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Sending:
    """The message of a won slot is about to go to the broker."""

    job: str
    slot: Millis
    attempt: int
    late: Millis
    run_id: str
    task: str


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The broker has the message."""

    job: str
    slot: Millis
    attempt: int
    late: Millis
    run_id: str


@dataclass(frozen=True, kw_only=True)
class NotSent:
    """The message could not be made or was refused, and not for the broker's sake: this slot is over."""

    job: str
    slot: Millis
    run_id: str
    error: BaseException


@dataclass(frozen=True, kw_only=True)
class Unclear:
    """The broker may or may not have the message; it is published again with the same id."""

    job: str
    slot: Millis
    run_id: str
    error: BaseException


@dataclass(frozen=True, kw_only=True)
class TookOver:
    """A claim whose beat died or gave it up, or a run whose worker did, is now this beat's."""

    job: str
    slot: Millis
    attempt: int
    abandoned: bool
    started: bool = False
    """A worker had it."""


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """A run of which no body will end: its worker is gone and no attempt is left, nobody started it in time, or its
    message is gone."""

    job: str
    slot: Millis
    state: RunState
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaseOver:
    """A won slot was not sent because its lease ran out first (this process was paused): the store decides anew."""

    job: str
    slot: Millis


@dataclass(frozen=True, kw_only=True)
class ClaimUnresolved:
    """The reply to a claim was lost for good. If the claim was applied, nobody sends the slot. Claim-only stores."""

    job: str
    slot: Millis


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """So many slots of a job were skipped in a row, because this run of it lives."""

    job: str
    skipped: int
    run: Run


@dataclass(frozen=True, kw_only=True)
class NoWorkers:
    """These jobs rely on workers that ask the store, and none is there."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SlotsGivenUp:
    """Slots of one job that will not be sent, and why (kebab-case)."""

    job: str
    state: RunState
    reason: str
    total: int
    newest: Millis


@dataclass(frozen=True, kw_only=True)
class StoreChanged:
    """The store went away (with its error) or is back (None)."""

    error: BaseException | None


@dataclass(frozen=True, kw_only=True)
class BrokerChanged:
    """The broker went away (with its error) or is back (None)."""

    error: BaseException | None


@dataclass(frozen=True, kw_only=True)
class OneStepChanged:
    """Claims and messages are one write from now on (None), or two, and why."""

    reason: str | None
    wanted: bool
    """The settings ask for one."""


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """This process did nothing for that long, though it should have: what fell due meanwhile is missed, not current."""

    pause: Millis


@dataclass(frozen=True, kw_only=True)
class ClockStepped:
    """This host's wall clock jumped against its monotonic clock."""

    step: Millis


@dataclass(frozen=True, kw_only=True)
class SkewSeen:
    """This host's clock is off from the store's by more than a second."""

    skew: Millis


@dataclass(frozen=True, kw_only=True)
class SkewBeyond:
    """This host's clock is off by more than is allowed: this beat claims nothing, or follows the store's clock."""

    skew: Millis
    limit: Millis
    following: bool


@dataclass(frozen=True, kw_only=True)
class SkewWithin:
    """This host's clock is right again, as far as is asked."""

    skew: Millis


@dataclass(frozen=True, kw_only=True)
class ZonesDiffer:
    """Another beat reads other clock changes out of its zone data: the two may name different slots."""

    label: str
    zones: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JobTrouble:
    """One job failed in a way that no other job shares; it is tried again later."""

    job: str
    error: BaseException


# --- on workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The store has taken the end of a run that this worker executed."""

    job: str
    slot: Millis
    attempt: int
    state: RunState
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class HoldLost:
    """A run that this worker executes is somebody else's now."""

    job: str
    slot: Millis
    attempt: int


@dataclass(frozen=True, kw_only=True)
class ClaimForgotten:
    """The store had no record of a run whose message came: it was wiped, or rolled back."""

    job: str
    slot: Millis


Event: TypeAlias = (
    Claimed
    | Sending
    | Sent
    | NotSent
    | Unclear
    | TookOver
    | RunEnded
    | Blocked
    | NoWorkers
    | LeaseOver
    | ClaimUnresolved
    | SlotsGivenUp
    | StoreChanged
    | BrokerChanged
    | OneStepChanged
    | Stalled
    | ClockStepped
    | SkewSeen
    | SkewBeyond
    | SkewWithin
    | ZonesDiffer
    | JobTrouble
    | Settled
    | HoldLost
    | ClaimForgotten
)

Listener: TypeAlias = Callable[[Event], None]


Wants: TypeAlias = Callable[[type[Event]], bool]


def anything(kind: type[Event]) -> bool:
    """What a listener wants that does not say."""
    return True


class Fanout:
    """Hands each event to every listener; what a listener raises is logged and goes no further."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)
        self._wants: list[Wants] = [anything for _ in listeners]

    def add(self, listener: Listener, wants: Wants = anything) -> None:
        """
        :param wants: whether an event of that kind would be of interest just now. The listener may be given it anyway.
        """
        self._listeners.append(listener)
        self._wants.append(wants)

    def is_heard(self, kind: type[Event]) -> bool:
        """Whether anybody wants events of that kind: for those of each slot, which are not even made for nobody."""
        for wants in self._wants:  # noqa: SIM110 - a generator costs as much as all else here
            if wants(kind):
                return True
        return False

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %r", event)
