"""What a beat must keep in mind on a store that only takes claims.

There a slot that was won here is nobody else's, ever, and the store may say WON again for it. So this process
remembers, for as long as a claim could be asked again, which slots it has published or holds, and which claims it does
not know the answer to. On a store with leases all of this is the store's, and nothing is kept.

Does not belong here: publishing and asking, which are the dispatcher's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from celery_anarchon import slots
from celery_anarchon.backends.base import ClaimBackend, LeaseBackend
from celery_anarchon.clock import Clock
from celery_anarchon.job import Job
from celery_anarchon.model import Millis
from celery_anarchon.options import CLAIM_ONLY_MAX_LATE
from celery_anarchon.wants import Want

_Key = tuple[str, Millis]


class Journal:
    """A beat's own memory of its claims. It dies with the beat, as do the slots that it won and did not send."""

    def __init__(self, backend: ClaimBackend, clock: Clock) -> None:
        self.applies = not isinstance(backend, LeaseBackend)
        """Whether this beat alone answers for what it wins."""
        self._horizon = backend.traits.horizon
        self._clock = clock
        self._held: set[_Key] = set()
        self._forgetting: list[tuple[float, _Key]] = []
        self._doubted: dict[_Key, tuple[Want, float]] = {}

    def deadline(self, job: Job, slot: Millis) -> float:
        """Monotonic: until when this slot may be published, which is as long as ``max_late`` admits."""
        try:
            due = slots.due_time(job.name, job.timetable, job.options, slot)
        except Exception:
            # Told when it is planned; the others of a batch must not pay for it.
            due = slot
        return self._clock.monotonic() + (due + reach(job) - self._clock.wall()) / 1000

    # --- slots that are this beat's -----------------------------------------------------------------------------------

    def hold(self, job: Job, slot: Millis) -> None:
        """This slot was published, or is kept to be published: WON licenses nothing more (protocol H14)."""
        if not self.applies:
            return
        now = self._clock.monotonic()
        while self._forgetting and self._forgetting[0][0] <= now:
            self._held.discard(heapq.heappop(self._forgetting)[1])
        key = job.name, slot
        if key not in self._held:
            self._held.add(key)
            # Beyond it no plan asks for the slot; where claims are remembered for ever, twice as long as one does.
            span = self._horizon or 2 * (reach(job) + job.options.jitter)
            heapq.heappush(self._forgetting, (now + span / 1000, key))

    def holds(self, job: Job, slot: Millis) -> bool:
        return (job.name, slot) in self._held

    # --- claims without an answer -------------------------------------------------------------------------------------

    def doubt(self, wants: Iterable[Want]) -> None:
        """These were asked for, and the answer did not come: each may be this beat's, and then nobody else's."""
        if self.applies:
            for want in wants:
                job = want.watched.job
                self._doubted.setdefault((job.name, want.slot), (want, self.deadline(job, want.slot)))

    def doubts(self, job: Job, slot: Millis) -> bool:
        return (job.name, slot) in self._doubted

    def answered(self, want: Want) -> bool:
        """The store has answered. True: after it had failed to before."""
        if not self._doubted:
            return False
        return self._doubted.pop((want.watched.job.name, want.slot), None) is not None

    def to_ask_again(self) -> list[Want]:
        """As the same owner, oldest first: the answer is the one that was lost."""
        return [want for want, _ in sorted(self._doubted.values(), key=lambda item: item[0].slot)]

    def lost(self, *, all_of_them: bool = False) -> list[Want]:
        """Those that will not be asked again: too late to be sent, or this beat stops. They are forgotten."""
        now = self._clock.monotonic()
        over = [key for key, (_, deadline) in self._doubted.items() if all_of_them or deadline <= now]
        return [self._doubted.pop(key)[0] for key in over]


def reach(job: Job) -> Millis:
    """How late a slot may be sent where nobody knows since when a job is scheduled."""
    return CLAIM_ONLY_MAX_LATE if job.options.max_late is None else job.options.max_late
