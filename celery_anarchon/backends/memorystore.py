"""What the memory backends share: the records of one process, by namespace.

Does not belong here: what an operation does with them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from celery_anarchon import wire
from celery_anarchon.backends.base import Beat, Hold, Terms
from celery_anarchon.backends.runs import RunHold, Worker
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.model import UNSETTLED, Millis, RunState


@dataclass
class Record:
    """What is known of one (job, slot)."""

    state: RunState
    owner: str | None = None
    """The beat that holds it, sent it or ended it. None: abandoned, or never a run."""
    attempt: int = 1
    lease_until: Millis | None = None
    """Of a run that waits in a queue: when it is given up."""
    patience: Millis = 0
    """How long after `lease_until` sweepers leave it to the broker's redelivery."""
    retries: int = 0
    token: str | None = None
    """The delivery that holds it on a worker, or ended it there."""
    terms: Terms | None = None
    claimed_at: Millis | None = None
    sent_at: Millis | None = None
    ended_at: Millis | None = None
    late: Millis | None = None
    started_at: Millis | None = None
    beat: str = ""
    worker: str | None = None
    reason: str | None = None
    blocked_by: Millis | None = None
    """The slot whose run this one would have overlapped."""
    refused: int = 0

    def held_by(self, hold: Hold) -> bool:
        return self.state is RunState.CLAIMED and self.ended_by(hold)

    def ended_by(self, hold: Hold) -> bool:
        return self.owner == hold.owner and self.attempt == hold.attempt

    def run_by(self, hold: RunHold) -> bool:
        return self.state is RunState.RUNNING and self.run_ended_by(hold)

    def run_ended_by(self, hold: RunHold) -> bool:
        return (self.attempt, self.retries, self.token) == (hold.attempt, hold.retries, hold.token)

    def lapsed(self, now: Millis) -> bool:
        return self.lease_until is not None and self.lease_until <= now

    def sweep_at(self) -> Millis:
        """When a sweeper may go on with it, or end it."""
        return self.patience + (self.lease_until or 0)

    def attempts_left(self) -> bool:
        return self.terms is not None and self.terms.max_attempts is not None and self.attempt < self.terms.max_attempts

    def settled_at(self) -> Millis:
        return max(at for at in (self.claimed_at, self.sent_at, self.started_at, self.ended_at) if at is not None)


@dataclass
class Space:
    """Everything under one namespace."""

    app_name: str | None = None
    layout: int = wire.LAYOUT_VERSION
    runs: dict[str, dict[Millis, Record]] = field(default_factory=lambda: defaultdict(dict))
    leased: set[tuple[str, Millis]] = field(default_factory=set)
    """The slots with a lease or a limit, so that a look for lapsed ones is not a walk over the past."""
    held_up: set[tuple[str, Millis]] = field(default_factory=set)
    """The WAITING slots."""
    floors: dict[str, Millis] = field(default_factory=dict)
    sights: dict[str, dict[str, Millis]] = field(default_factory=lambda: defaultdict(dict))
    """job -> fingerprint -> since; the fingerprint sighted last stands last."""
    beats: dict[str, Beat] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    had_workers: bool = False

    def find(self, job: str, slot: Millis) -> Record | None:
        return self.runs.get(job, {}).get(slot)

    def put(self, job: str, slot: Millis, record: Record, state: RunState, until: Millis | None = None) -> None:
        """*record* is the one of this slot, and in *state* now, until then."""
        record.state, record.lease_until, record.patience = state, until, 0
        self.runs[job][slot] = record
        for keys, member in ((self.leased, until is not None), (self.held_up, state is RunState.WAITING)):
            (keys.add if member else keys.discard)((job, slot))

    def living(self, job: str, but: Millis | None = None) -> Iterator[tuple[Millis, Record]]:
        """The unsettled records of *job*, oldest slot first, *but* one."""
        for slot, record in sorted(self.runs.get(job, {}).items(), key=lambda item: item[0]):
            if record.state in UNSETTLED and slot != but:
                yield slot, record

    def has_living(self, job: str, but: Millis | None = None) -> bool:
        """Whether *job* has an unsettled run, *but* that one, besides slots that wait."""
        return any(record.state is not RunState.WAITING for _, record in self.living(job, but))

    def below_floor(self, job: str, slot: Millis) -> bool:
        return job in self.floors and slot <= self.floors[job]


class MemoryStore:
    """The shared part: what a server or a file is to the other backends. Its clock is the store's clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.spaces: dict[str, Space] = defaultdict(Space)
        self.queues: dict[str, list[str | bytes | int]] = defaultdict(list)
        """What messages were written, oldest first: a broker's, as far as anybody plays one."""
        self.lock = threading.RLock()
