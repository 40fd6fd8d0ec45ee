"""Claims of this beat to which no answer came, on a store with leases: asked again as the same owner, each in its turn.

A planned slot comes again with the next plan. One that waited for a run, and the successor of a chain, would not: once
the claim was applied, the store shows neither of them as open, and they would lie until their lease is over.

Does not belong here: the same on a store that only takes claims (:mod:`celery_anarchon.journal`), and asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from celery_anarchon.model import Millis, RunState
from celery_anarchon.onestep import Ask
from celery_anarchon.wants import Ready

KEPT = 10_000
"""What no plan asks for again, because a newer slot has come, is forgotten at last."""


class Lost(NamedTuple):
    """What was asked."""

    ask: Ask
    along: bool
    """Its message went with it, so it may be out."""
    waited: Ready | None
    """It had waited for the end of a run."""
    end: tuple[RunState, str] | None = None
    """The plan gave it up meanwhile, as this and for this reason."""


class Unanswered:
    """By job and slot."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[Millis, Lost]] = {}
        self._size = 0

    def note(self, ask: Ask, *, along: bool, waited: Ready | None = None) -> None:
        """No answer came. What was said of it first counts: that is what its record has."""
        name, slot = ask.job.name, ask.slot
        first = self.forget(name, slot)
        lost = Lost(ask, along, waited) if first is None else first._replace(along=along or first.along)
        self._lost.setdefault(name, {})[slot] = lost
        self._size += 1
        if self._size > KEPT:
            oldest = next(iter(self._lost))
            self.forget(oldest, next(iter(self._lost[oldest])))

    def forget(self, job: str, slot: Millis) -> Lost | None:
        """It is known whose it is. What was asked, if the answer was lost."""
        of_job = self._lost.get(job)
        lost = of_job.pop(slot, None) if of_job else None
        if lost is not None:
            self._size -= 1
            if not of_job:
                del self._lost[job]
        return lost

    def as_first(self, asks: list[Ask]) -> list[Ask]:
        """*asks*, those among them that were asked before with the terms that they had then."""
        if not self._lost:
            return asks
        return [
            ask if (lost := self._of(ask.job.name).get(ask.slot)) is None else ask._replace(terms=lost.ask.terms)
            for ask in asks
        ]

    def answered(self, ask: Ask) -> bool:
        """An answer has come. True: the message of an earlier question may be out."""
        lost = self.forget(ask.job.name, ask.slot) if self._lost else None
        return lost is not None and lost.along

    def waiting(self) -> list[Ready]:
        """Slots that had waited."""
        return [lost.waited for lost in self._all() if lost.waited is not None]

    def of_chain(self, job: str) -> Ask | None:
        """The successor that was asked for in a chain."""
        return next((lost.ask for lost in self._of(job).values() if lost.waited is None), None)

    def give_up(self, job: str, after: Millis, until: Millis, end: tuple[RunState, str]) -> set[Millis]:
        """The plan gives up what the job has in (*after*, *until*]: which of it may be this beat's. That is kept until
        the store has said so."""
        of_job = self._of(job)
        found = {
            slot for slot, lost in of_job.items() if after < slot <= until and lost.waited is None and lost.end is None
        }
        for slot in found:
            of_job[slot] = of_job[slot]._replace(end=end)
        return found

    def given_up(self) -> list[Lost]:
        """What the plan gave up."""
        return [lost for lost in self._all() if lost.end is not None]

    def _of(self, job: str) -> dict[Millis, Lost]:
        return self._lost.get(job, {})

    def _all(self) -> Iterator[Lost]:
        return (lost for of_job in self._lost.values() for lost in of_job.values())
