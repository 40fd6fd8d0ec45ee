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
    """Won by this owner earlier and no longer `claimed`: nothing to publish (protocol H14)."""
    TOO_OLD = "too-old"
    """At or below the job's floor: its record was dropped, so nobody may claim it again."""
    TOO_EARLY = "too-early"
    """Later than the store's clock allows: ask again when its time has come."""

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
    started_at: datetime | None = None
    ended_at: datetime | None = None
    late: float | None = None
    """Seconds between the slot and the first publish."""
    beat: str | None = None
    worker: str | None = None
    blocked_by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields in their public order, times still datetimes; :func:`celery_anarchon.wire.run_json` makes text."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
