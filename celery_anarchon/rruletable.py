"""redbeat's ``rrule`` as a timetable.

Its own search begins at ``dtstart`` each time that it is asked, so a replay of it would too. The rule names local
times; each is one slot, as a timed crontab's: the first instant at which the clock of dtstart's zone shows it or later.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone, tzinfo
from zoneinfo import ZoneInfo

from celery_anarchon.model import Millis
from celery_anarchon.timetable import at_instant

_KEPT = 4_096


class RRule:
    """The slots of a recurrence rule (a :class:`celery_anarchon.timetable.Timetable`).

    :param times: yields the rule's aware datetimes from its beginning, ascending, whenever it is iterated.
    :param zone: that of dtstart; None: a fixed offset.
    """

    def __init__(self, times: Iterable[datetime], zone: ZoneInfo | None, key: str) -> None:
        self.key = key
        self.zone = zone
        self._times = times
        self._lock = threading.Lock()
        self._begin()

    def __repr__(self) -> str:
        return f"<{self.key}>"

    def next(self, after: Millis) -> Millis | None:
        with self._lock:
            self._reach(after)
            place = bisect_right(self._seen, after)
            return self._seen[place] if place < len(self._seen) else None

    def last(self, until: Millis) -> Millis | None:
        with self._lock:
            self._reach(until)
            place = bisect_right(self._seen, until)
            return self._seen[place - 1] if place else None

    def count(self, after: Millis, until: Millis) -> int:
        with self._lock:
            self._reach(after)
            start = self._dropped + bisect_right(self._seen, after)
            self._reach(until)
            return max(self._dropped + bisect_right(self._seen, until) - start, 0)

    def _begin(self) -> None:
        self._coming: Iterator[datetime] = iter(self._times)
        self._seen: list[Millis] = []
        self._dropped = 0

    def _reach(self, instant: Millis) -> None:
        """Have the slots around *instant*, and the one after it if there is one, in `_seen`."""
        if self._dropped and instant < self._seen[0]:
            self._begin()
        while not self._seen or self._seen[-1] <= instant:
            time = next(self._coming, None)
            if time is None:
                return
            slot = self._slot(time)
            # Times that a gap brings together are one slot.
            if not self._seen or slot > self._seen[-1]:
                self._seen.append(slot)
            if len(self._seen) > 2 * _KEPT:
                self._dropped += _KEPT
                del self._seen[:_KEPT]

    def _slot(self, time: datetime) -> Millis:
        if self.zone is None:
            return at_instant(time, _UTC)
        return at_instant(time.replace(tzinfo=None), self.zone)


_UTC = ZoneInfo("UTC")


def is_fixed(zone: tzinfo | None) -> bool:
    """Whether *zone* is an offset that is the same everywhere and always, and needs no name."""
    return isinstance(zone, timezone)
