"""What this beat has decided and must still tell the store.

A decision outlives a lost answer: each list is forgotten only once its answer is here, and telling it again does no
harm.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from celery_anarchon.backends.base import ClaimBackend, Confirmation, GivenUp, Hold, Outcome

RECORDS_A_CALL = 500


class Ledger:
    """Confirmations, abandons and endings, told at once; outcomes of slots without a run, told when they are ripe."""

    def __init__(self, backend: ClaimBackend) -> None:
        self._backend = backend
        self._confirmations: list[Confirmation] = []
        self._abandoned: list[Hold] = []
        self._given_up: list[GivenUp] = []
        self._ripening: list[tuple[float, int, Outcome]] = []
        self._ripe: list[Outcome] = []
        self._order = itertools.count()

    def confirm(self, confirmation: Confirmation) -> None:
        self._confirmations.append(confirmation)

    def abandon(self, hold: Hold) -> None:
        self._abandoned.append(hold)

    def give_up(self, ending: GivenUp) -> None:
        self._given_up.append(ending)

    def record(self, outcomes: Iterable[Outcome], when: float) -> None:
        """Record *outcomes*, not before the monotonic time *when*."""
        for outcome in outcomes:
            heapq.heappush(self._ripening, (when, next(self._order), outcome))

    def next_at(self) -> float | None:
        """The monotonic time at which there is something to tell again."""
        if self._ripe:
            return 0.0
        return self._ripening[0][0] if self._ripening else None

    def tell(self, monotonic: float) -> None:
        """Tell the store everything that can be told now. Raises what the store raises; nothing is lost by that."""
        if self._confirmations:
            self._backend.confirm(self._confirmations)
            self._confirmations = []
        if self._given_up:
            self._backend.give_up(self._given_up)
            self._given_up = []
        if self._abandoned:
            self._backend.abandon(self._abandoned)
            self._abandoned = []
        while self._ripening and self._ripening[0][0] <= monotonic and len(self._ripe) < RECORDS_A_CALL:
            self._ripe.append(heapq.heappop(self._ripening)[2])
        if self._ripe:
            # One bounded call a tick: after a long downtime of many jobs the records must not hold up the sending.
            self._backend.record(self._ripe)
            self._ripe = []
