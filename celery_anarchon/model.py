"""Frozen values and enums that cross a module line.

Belongs here: data without behaviour beyond reading itself. Does not belong here: I/O, clocks, parsing.

Inside the package an instant is :data:`Millis`, whole milliseconds since 1970-01-01T00:00Z, and a duration is the same
unit: integers cannot lose a fold, a zone or a fraction. Aware datetimes appear only in what people and their programs
read (:class:`Run`) and in :mod:`celery_anarchon.wire`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeAlias

Millis: TypeAlias = int
"""An instant (since 1970-01-01T00:00Z) or a duration, in whole milliseconds."""


class RunState(str, enum.Enum):
    """Where a run stands. The value is the word in JSON, in the store and in the log."""

    CLAIMED = "claimed"
    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"
    RETRYING = "retrying"
    DISPATCHED = "dispatched"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    LOST = "lost"
    LOST_IN_QUEUE = "lost-in-queue"
    NOT_SENT = "not-sent"
    SKIPPED = "skipped"
    MISFIRE = "misfire"
    SUPERSEDED = "superseded"
    PAUSED = "paused"

    def __str__(self) -> str:
        return self.value


UNSETTLED = frozenset({RunState.CLAIMED, RunState.QUEUED, RunState.WAITING, RunState.RUNNING, RunState.RETRYING})
"""States in which somebody still has something to do. Everything else is an end, and never changes."""


SETTLED = frozenset(RunState) - UNSETTLED - {RunState.DISPATCHED}
"""Ends, for a worker that asks to start. ``dispatched`` is an end for beats only: its message may still be started."""


class Overlap(str, enum.Enum):
    """What becomes of a slot that is due while an earlier run of its job lives."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"

    def __str__(self) -> str:
        return self.value


class OnUnknown(str, enum.Enum):
    """What a worker does with a run when the store cannot be asked: run it all the same, or drop it."""

    REPEAT = "repeat"
    SKIP = "skip"

    def __str__(self) -> str:
        return self.value


class GateAnswer(str, enum.Enum):
    """What the store says to a worker that asks to start a run. START and UNKNOWN license a body, nothing else."""

    START = "start"
    UNKNOWN = "unknown"
    """Started, and the store had no record of it: it was made from the message."""
    DUPLICATE = "duplicate"
    """Another delivery runs it, or it waits for its own retry."""
    SETTLED = "settled"
    TRIMMED = "trimmed"
    """Settled so long ago that its record was dropped: at or below the job's floor."""
    STALE = "stale"
    """The message is of an earlier attempt."""
    USED_UP = "used-up"
    """Its holder is gone and no attempt is left: it has just been settled as lost."""
    OVERLAPS = "overlaps"
    """The store had no record of it, and another run of the job lives that it may not overlap."""

    def __str__(self) -> str:
        return self.value


GRANTED = frozenset({GateAnswer.START, GateAnswer.UNKNOWN})
"""The answers that license a body."""


class Coalesce(str, enum.Enum):
    """What becomes of several missed slots of one job: the latest one is sent, or all of them."""

    LATEST = "latest"
    ALL = "all"

    def __str__(self) -> str:
        return self.value


class Answer(str, enum.Enum):
    """What the store says to a claim. Only WON licenses a publish."""

    WON = "won"
    TAKEN = "taken"
    ALREADY_SENT = "already-sent"
    """Won by this owner earlier and no longer `claimed`: nothing to publish."""
    TOO_OLD = "too-old"
    """At or below the job's floor: its record was dropped, so nobody may claim it again."""
    TOO_EARLY = "too-early"
    """Later than the store's clock allows: ask again when its time has come."""
    WAIT = "wait"
    """Another slot of the job is claimed and not published yet, and may not overlap: nothing is recorded, ask again
    soon."""
    SKIPPED = "skipped"
    """An earlier run of the job lives: recorded as an end, nothing to publish."""
    WAITING = "waiting"
    """An earlier run of the job lives: recorded as the one slot that waits for its end."""
    UNKNOWN = "unknown"
    """The answer to this one row of a batch was lost: ask again as the same owner. Never to be read as "taken"."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a store can do. Declared per class, tested by the conformance kit, shown in the docs' table."""

    leases: bool
    """It stores who holds a run and until when, so that another process can take it over."""
    horizon: Millis | None
    """How long a claim is remembered; None: always."""
    server_time: bool
    """Leases and *too early* are judged by one clock that all beats share."""
    durable: bool
    """Claims survive a restart of the store."""
    any_job_name: bool
    """Job names may be any text."""
    history_by_age: bool
    """``history_ttl`` can be honoured."""
    max_key_length: int | None = None
    """Longest key in bytes, None: no limit that matters."""
    knows_owner: bool = True
    """It keeps whose a claim is: its owner, asking again, is told WON. Only a claim-only store may lack it; there a
    lost reply can cost the slot."""
    any_order: bool = True
    """An older slot stays open when a newer one of its job is claimed. Only a claim-only store may lack it."""
    exact_history: bool = True
    """What `confirm`, `abandon`, `give_up` and `record` write is checked against the claim. Only a claim-only store may
    lack it: there these add to the history, whoever asks."""
    claims_kept: int | None = None
    """So many claims of one job are remembered at most, within the horizon too; None: all."""
    history_ttl_above: Millis = 0
    """A job's `history_ttl` must be longer than this."""
    one_history_size: bool = False
    """There is one `history_size` for all of its jobs: the largest that any of them asks for."""
    follows_runs: bool = False
    """It also keeps what becomes of a run on its worker: a :class:`~celery_anarchon.backends.runs.RunBackend`."""
    one_step: bool = False
    """A broker may have its queues in it, and a claim and its message can be one write: a
    :class:`~celery_anarchon.backends.onestep.OneStepBackend`."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a job asks of each of its runs, kept with the run: a worker needs no schedule."""

    lease: Millis
    """How long a worker holds the run between two heartbeats."""
    queue_timeout: Millis
    """How long its message may wait for a worker, and a retry for its turn."""
    max_attempts: int | None = None
    """Bodies started at most; None: the task's own acknowledgement decides, as in stock Celery."""
    overlap: Overlap = Overlap.ALLOW


@dataclass(frozen=True)
class Run:
    """One run as people read it: ``history()``, ``last_run()`` and the command line. Times are aware UTC datetimes."""

    job: str
    slot: datetime
    run_id: str
    state: RunState
    reason: str | None = None
    attempt: int = 1
    manual: bool = False
    claimed_at: datetime | None = None
    """When it was first claimed. It never changes: a takeover leaves it, and chained jobs build on it."""
    sent_at: datetime | None = None
    """When it was first published; as ``late``, a later attempt leaves it."""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    late: float | None = None
    """Seconds between the slot and the first publish."""
    beat: str | None = None
    worker: str | None = None
    blocked_by: str | None = None
    """The id of the run that a skipped slot would have overlapped."""
    refused: int = 0
    """How many deliveries of it were refused at the gate: copies, stale attempts."""

    def as_dict(self) -> dict[str, Any]:
        """The fields in their public order, times still datetimes; :func:`celery_anarchon.wire.run_json` makes text."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "refused"}
