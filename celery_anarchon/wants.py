"""What a tick wants to send, and what it has won."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from celery_anarchon.agenda import Watched
from celery_anarchon.backends.base import GivenUp, Hold
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, RunState, Terms

T = TypeVar("T")


@dataclass(eq=False)
class Want:
    """A slot that this beat would like to send."""

    watched: Watched
    slot: Millis
    cursor: Millis
    """Where the job's cursor stands once this slot is decided."""
    decided: bool = False
    due: Millis | None = None
    """When it fell due, where that is not the slot."""


class Ready(NamedTuple):
    """A slot that waited for the end of a run, and may go on."""

    job: Job
    slot: Millis
    until: Millis | None
    """The latest time at which it may be sent, where there is one."""

    def in_time(self, now: Millis) -> bool:
        return self.until is None or now <= self.until


@dataclass(eq=False)
class Won:
    """A slot that is this beat's to publish."""

    job: Job
    slot: Millis
    attempt: int
    deadline: float
    """Monotonic: past it the lease may be over, and nothing may be published on its strength."""
    want: Want | None = None
    unclear: bool = False
    """A publish of it went unanswered before."""
    held_up: bool = False
    """And that took so long that it held up the others."""
    late: Millis | None = None
    """Its message went out with the claim, so late; None: it is to be published."""
    terms: Terms | None = None
    """What its record is followed by."""
    error: Exception | None = None
    """Why it has no message, and will not have one."""

    @property
    def due(self) -> Millis:
        """From when on it is late."""
        return self.slot if self.want is None or self.want.due is None else self.want.due

    def decide(self) -> None:
        if self.want is not None:
            self.want.decided = True

    def hold(self, owner: str) -> Hold:
        return Hold(job=self.job.name, slot=self.slot, owner=owner, attempt=self.attempt)

    def ending(self, owner: str, state: RunState, reason: str) -> GivenUp:
        return GivenUp(**vars(self.hold(owner)), state=state, reason=reason)


def move_cursors(wants: Iterable[Want]) -> None:
    """Move each job's cursor over its leading decided slots: never past one that is still open."""
    stuck: set[str] = set()
    for want in wants:
        name = want.watched.job.name
        if want.decided and name not in stuck:
            want.watched.cursor = want.cursor
        else:
            stuck.add(name)


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
