"""A job: one named entry of the schedule, resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_anarchon import slots, wire
from celery_anarchon.model import Millis, Terms
from celery_anarchon.options import JobOptions
from celery_anarchon.timetable import Timetable


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the engine needs of a schedule entry.

    ``task`` is the name of Celery's function, for people. ``payload`` is the publisher's own (what to send); the engine
    never looks into it.
    """

    name: str
    timetable: Timetable
    options: JobOptions
    task: str = ""
    payload: Any = None
    terms: Terms | None = None
    """What each run is to be followed by; None: its runs end for the store when they are sent."""
    countdown: Millis = 0
    """How long after its dispatch a message becomes due for a worker."""
    eta: Millis | None = None

    def delay(self, now: Millis) -> Millis:
        """How long from *now* until the message becomes due for a worker."""
        return self.countdown if self.eta is None else max(0, self.eta - now)

    def is_late(self, slot: Millis, now: Millis) -> bool:
        """Whether a first publish of *slot* at *now* would break ``max_late``. Raises nothing."""
        max_late = self.options.max_late
        # It falls due at its slot or later, so nearly always the timetable need not be asked.
        if max_late is None or now <= slot + max_late:
            return False
        try:
            return now > slots.due_time(self.name, self.timetable, self.options, slot) + max_late
        except Exception:
            # Told when it is planned. It was not late then.
            return False

    @property
    def fingerprint(self) -> str:
        """Stands for the meaning of the timetable: a changed one is a new definition, first seen when it appears."""
        return wire.fingerprint(self.timetable.key)
