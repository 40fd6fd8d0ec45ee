"""What a worker knows of a run that it executes, and of ends that are on their way to the store.

Does not belong here: when something is told (:mod:`celery_anarchon.keeper`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_anarchon.backends.runs import GiveBack, NextTry, RunHold, Settlement, Start, Unstarted
from celery_anarchon.model import GateAnswer, Millis
from celery_anarchon.wire import time_text

End = tuple[str, Callable[[RunHold], Any]]
"""An operation, and what it is told of a hold."""


@dataclass(eq=False)
class Held:
    """A run that this worker executes."""

    hold: RunHold
    lease: Millis
    until: float
    """Monotonic: past it the lease may be over."""
    message_attempt: int = 1
    """What its message says. A run that was granted more goes back in another way."""
    begun: bool | None = None
    """Whether its body has begun. None: not known in time, as a child of the pool begins it."""
    timeout: float | None = None
    """Seconds, where the pool cannot enforce it."""
    deadline: float | None = None
    """Monotonic: when a body that has begun is over that."""
    refused: bool = False
    """The store said that it is somebody else's now."""
    ended: bool = False
    stopped: bool = False
    """Its body was cut short by a stop of the worker or of its connection."""
    handed: Callable[[], Any] | None = None
    """What a pool of processes made of it, or None when that is no more."""
    question: Start | None = None
    """What was asked for it."""
    answer: GateAnswer | None = None
    """The no that it got right before its body would have begun."""
    start: Start | None = None
    """The question to which no answer came before the body started all the same (``on_unknown=repeat``)."""
    answered: bool = True
    followed: bool = True
    """The beat that sent it follows its runs."""
    end: End | None = None
    """What to tell of a body that ended before the answer came."""

    @property
    def name(self) -> str:
        return f"{self.hold.job} {time_text(self.hold.slot)}"


@dataclass
class Told:
    """Ends on their way, by the operation that tells them, in the order in which operations must go."""

    backs: list[GiveBack] = field(default_factory=list)
    ends: list[Settlement] = field(default_factory=list)
    tries: list[NextTry] = field(default_factory=list)
    unstarted: list[Unstarted] = field(default_factory=list)
    releases: list[RunHold] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.backs or self.ends or self.tries or self.unstarted or self.releases)


def hold_of(start: Start, attempt: int) -> RunHold:
    """Of a question to which that attempt was granted, or may have been."""
    return RunHold(job=start.job, slot=start.slot, attempt=attempt, retries=start.retries, token=start.token)
