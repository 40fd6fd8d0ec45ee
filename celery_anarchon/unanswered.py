"""Claims of this beat to which no answer came, on a store with leases: asked again as the same owner, each in its turn.

A planned slot comes again with the next plan. One that waited for a run, and the successor of a chain, would not: once
the claim was applied, the store shows neither of them as open, and they would lie until their lease is over.

Does not belong here: the same on a store that only takes claims (:mod:`celery_anarchon.journal`), and asking.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_anarchon.model import Millis
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


class Unanswered:
    """By job and slot."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, Millis], Lost] = {}

    def note(self, ask: Ask, *, along: bool, waited: Ready | None = None) -> None:
        """No answer came. What was said of it first counts: that is what its record has."""
        key = ask.job.name, ask.slot
        first = self._lost.pop(key, None)
        self._lost[key] = Lost(ask, along, waited) if first is None else first._replace(along=along or first.along)
        if len(self._lost) > KEPT:
            del self._lost[next(iter(self._lost))]

    def as_first(self, asks: list[Ask]) -> list[Ask]:
        """*asks*, those among them that were asked before with the terms that they had then."""
        if not self._lost:
            return asks
        return [
            ask if (lost := self._lost.get((ask.job.name, ask.slot))) is None else ask._replace(terms=lost.ask.terms)
            for ask in asks
        ]

    def answered(self, ask: Ask) -> bool:
        """An answer has come. True: the message of an earlier question may be out."""
        lost = self._lost.pop((ask.job.name, ask.slot), None) if self._lost else None
        return lost is not None and lost.along

    def waiting(self) -> list[Ready]:
        """Slots that had waited."""
        return [lost.waited for lost in self._lost.values() if lost.waited is not None]

    def of_chain(self, job: str) -> Ask | None:
        """The successor that was asked for in a chain."""
        found = (lost.ask for (name, _), lost in self._lost.items() if name == job and lost.waited is None)
        return next(found, None)
