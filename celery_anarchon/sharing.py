"""How a fleet shares a burst: which of many due jobs a beat begins with, and where it goes on.

All beats have one ring of jobs, and each begins at a place of its own. It goes forward until it comes to what another
beat has sent by now; then it goes backward from where it began, towards the beat behind it, and so on, turning at each
end. So two beats meet at the edges of what they did, and not at every second job. Nothing is agreed upon, and nothing
depends on it: who sends a slot is the store's answer.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable

from celery_anarchon.agenda import Watched

_RING = 2**32


class Share:
    """The jobs that are due, in the order of one beat."""

    def __init__(self, due: Iterable[Watched], owner: str) -> None:
        begin = _place(owner)
        self._left = deque(sorted(due, key=lambda watched: (_place(watched.job.name) - begin) % _RING))
        self._backward = False

    def __len__(self) -> int:
        return len(self._left)

    def take(self) -> Watched:
        """The next one."""
        return self._left.pop() if self._backward else self._left.popleft()

    def turn(self) -> None:
        """Another beat has been here."""
        self._backward = not self._backward


def _place(text: str) -> int:
    """The same in every process. It need not be even, only cheap: it is asked of each job that is due."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))
