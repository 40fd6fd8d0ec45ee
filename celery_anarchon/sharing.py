"""How a fleet shares a burst: which of many due jobs a beat begins with, and where it goes on.

All beats have one ring of jobs, and each begins at a place of its own, which follows from who else lives. It goes
forward until it comes to what another beat has sent by now; then backward from where it began, towards the beat behind
it. So two beats meet at the edges of what they did, and not at every second job. Up to the place of the next beat the
ring is a beat's own part; beyond, others have most likely been, and it looks before it makes messages. Where a beat has
met others on both sides, what lies between is theirs, most likely, and it leaves them a moment for it.

Nothing is agreed upon, and nothing depends on it: who sends a slot is the store's answer.
"""

from __future__ import annotations

import enum
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

from celery_anarchon.agenda import Watched

_RING = 2**32


class Side(enum.Enum):
    """An end of what is left."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


class Share:
    """The jobs that are due, in the order of one beat.

    :param begin: its place in the ring, from 0 to less than 1.
    :param part: how much of the ring is its own, from there on: the whole is 1.
    """

    def __init__(self, due: Iterable[Watched], begin: float, part: float = 1.0) -> None:
        first = round(begin * _RING)

        def place(watched: Watched) -> int:
            return (_place(watched.job.name) - first) % _RING

        ordered = sorted(due, key=place)
        self._left = deque(ordered)
        self._own = bisect_left(ordered, round(part * _RING), key=place)
        """How many of its own part are left, in front."""
        self._met: set[Side] = set()
        self.side = Side.FORWARD
        """From where the next one is taken."""

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Watched]:
        """What is left."""
        return iter(self._left)

    @property
    def abroad(self) -> bool:
        """The next one is of another beat's part."""
        return self._own <= 0 or self.side is Side.BACKWARD

    def take(self) -> Watched:
        """The next one."""
        if self.side is Side.BACKWARD:
            return self._left.pop()
        self._own -= 1
        return self._left.popleft()

    def was_open(self, side: Side) -> None:
        """What was taken from there was this beat's, most of it."""
        self._met.discard(side)

    def was_taken(self, side: Side) -> None:
        """What was taken from there was another beat's by then: go on from the other side."""
        self._met.add(side)
        if self.side is side:
            self.side = Side.BACKWARD if side is Side.FORWARD else Side.FORWARD

    @property
    def enclosed(self) -> bool:
        """Others were met on both sides."""
        return len(self._met) == len(Side)


def _place(text: str) -> int:
    """The same in every process. It need not be even, only cheap: it is asked of each job that is due."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))
