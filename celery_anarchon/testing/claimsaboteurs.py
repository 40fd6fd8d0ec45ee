"""Backends that answer claims wrongly, or keep them badly (C); part of :mod:`.saboteurs`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_anarchon.backends.base import (
    NEVER_A_RUN,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    Outcome,
    Takeover,
)
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, Run, RunState
from celery_anarchon.testing.claimonly import ClaimOnlyMemory


class ReadsThenClaims(MemoryBackend):
    """C1: looks whether the slot is free, and writes in a second step."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        free = space.find(request.job, request.slot) is None
        if free:
            threading.Event().wait(1e-4)
            space.runs[request.job].pop(request.slot, None)
        return super()._claim(space, now, request)

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        yield self._store.spaces[self.namespace], self._store.clock.wall()


class OwnerIsTheHost(SqliteBackend):
    """C1, between processes: every beat of a host is the same owner, and is told "won again"."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, owner=socket.gethostname()) for request in requests])


class ForgetsItsOwner(MemoryBackend):
    """C2: whoever asks a second time is told "taken"."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        known = space.find(request.job, request.slot)
        return ClaimResult(Answer.TAKEN) if known is not None else super()._claim(space, now, request)


class OwnerIsTheConnection(MemoryBackend):
    """C3: the token is made by the client, not by the process that asks."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, owner=f"{request.owner} of {id(self)}") for request in requests])


class ReadsALossAsNo(SqliteBackend):
    """C3: a claim whose answer was lost was somebody else's."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        try:
            return super().claim(requests)
        except OutcomeUnknown:
            return [ClaimResult(Answer.TAKEN)] * len(requests)


class CutsToSeconds(MemoryBackend):
    """C4: slots are kept in seconds."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, slot=request.slot // 1000 * 1000) for request in requests])


class StripsNames(MemoryBackend):
    """C4: names are made tidy on the way to the store."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, job=request.job.strip()) for request in requests])


class ReadsASnapshot(MemoryBackend):
    """C5: sees of others what was there when it connected. What it writes reaches everybody."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        with self._locked() as (space, _):
            self._seen = {(job, slot) for job, runs in space.runs.items() for slot in runs}

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        if (request.job, request.slot) not in self._seen:
            space.runs[request.job].pop(request.slot, None)
        self._seen.add((request.job, request.slot))
        return super()._claim(space, now, request)


class NewerForgetsOlder(MemoryBackend):
    """C6: one row for each job, the latest claim."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim(space, now, request)
        if result.answer is Answer.WON:
            for slot in [slot for slot in space.runs[request.job] if slot < request.slot]:
                del space.runs[request.job][slot]
        return result


class ForgetsTheFloor(MemoryBackend):
    """C7: what was dropped from the history is free again."""

    def _tidy(self, space: Any, now: Millis, keep: Keep) -> int:
        dropped = super()._tidy(space, now, keep)
        space.floors.clear()
        return dropped


class EndsBySlot(MemoryBackend):
    """C8: confirm, abandon and give_up look at the slot only."""

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        return super().confirm([self._as_holder(confirmation) for confirmation in confirmations])

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        return super().abandon([self._as_holder(hold) for hold in holds])

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        return super().give_up([self._as_holder(ending) for ending in endings])

    def _as_holder(self, hold: Any) -> Any:
        record = self._store.spaces[self.namespace].find(hold.job, hold.slot)
        return hold if record is None else replace(hold, owner=record.owner, attempt=record.attempt)


class AbandonsWhatWasSent(MemoryBackend):
    """C8: its holder may give a slot back, also when it has been sent."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is not None and record.state is RunState.DISPATCHED and record.ended_by(hold):
            space.put(hold.job, hold.slot, record, RunState.CLAIMED, now)
        return super()._abandon(space, now, hold)


class DropsWhatIsOver(MemoryBackend):
    """C9: keeps the newest `history_size`, whatever the others are."""

    def _tidy(self, space: Any, now: Millis, keep: Keep) -> int:
        records = space.runs.get(keep.job, {})
        over = sorted(records)[: max(0, len(records) - keep.history_size)]
        for slot in over:
            del records[slot]
            space.leased.discard((keep.job, slot))
            space.floors[keep.job] = slot
        return len(over)


class ForgetsAtTheEnd(SqliteBackend):
    """C10: claims live as long as the process that made them."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        self._mine = [*getattr(self, "_mine", []), *requests]
        return super().claim(requests)

    def close(self) -> None:
        runs = self.tables.runs
        for request in getattr(self, "_mine", []):
            with self._writing() as connection:
                connection.execute(runs.delete().where(runs.c.job == request.job, runs.c.slot == request.slot))
        self._mine = []
        super().close()


class TakesWhatIsHeld(MemoryBackend):
    """C11: a sweeper need not wait for the lease."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is not None and record.state is RunState.CLAIMED:
            record.lease_until = now
        return super()._takeover(space, now, wish)


class CountsByItsOwnClock(MemoryBackend):
    """C11: each client judges leases by the clock of its host."""

    @contextmanager
    def _locked(self) -> Iterator[Any]:
        with super()._locked() as (space, now):
            skew = SystemClock().wall() - getattr(self, "_started", SystemClock().wall())
            yield space, now + skew

    def open(self, app_name: str, *, create: bool = True) -> None:
        self._started = self._store.spaces[self.namespace].__dict__.setdefault("started", SystemClock().wall())
        super().open(app_name, create=create)


class PassesDriverErrors(SqliteBackend):
    """C12: what the driver raises is what the engine gets."""

    @contextmanager
    def _calling(self) -> Iterator[Connection]:
        with self._connection() as connection:
            yield connection

    def _commit(self, connection: Connection) -> None:
        connection.exec_driver_sql("COMMIT")

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        self._source.connection = _bare(self._source.connection)


def _bare(connection: Any) -> Any:
    @contextmanager
    def use() -> Iterator[Connection]:
        try:
            with connection() as found:
                yield found
        except SQLAlchemyError as error:
            raise getattr(error, "orig", None) or error from None

    return use


class CallsALossAway(SqliteBackend):
    """C12: without an answer nothing was done."""

    def _commit(self, connection: Connection) -> None:
        try:
            super()._commit(connection)
        except OutcomeUnknown as error:
            raise BackendUnavailable(str(error)) from error


class BelievesTheCaller(MemoryBackend):
    """C13: any slot is due if a beat says so."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        return super()._claim(space, max(now, request.slot), request)


class HasNoTolerance(MemoryBackend):
    """C13: a slot is claimed at its time and not a moment before."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        return ClaimResult(Answer.TOO_EARLY) if request.slot > now else super()._claim(space, now, request)


class ConfirmsOnce(MemoryBackend):
    """C14: a second confirm has nothing to change, and says so."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        held = record is not None and record.state is RunState.CLAIMED
        return held and super()._confirm(space, now, confirmation)


class ConfirmsInTimeOnly(MemoryBackend):
    """C14: a confirm that comes after the lease is refused."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        return not (record is not None and record.lapsed(now)) and super()._confirm(space, now, confirmation)


class WinsAgainAfterSending(MemoryBackend):
    """C15: the owner that won it has won it for ever."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        result = super()._claim(space, now, request)
        return replace(result, answer=Answer.WON) if result.answer is Answer.ALREADY_SENT else result


class AllOrNothing(MemoryBackend):
    """C16: one refused row undoes the batch."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        results = super().claim(requests)
        if all(result.answer is Answer.WON for result in results):
            return results
        return [ClaimResult(Answer.TAKEN)] * len(results)


class RecordsOver(MemoryBackend):
    """C17: what is recorded last is true."""

    def record(self, outcomes: Sequence[Outcome]) -> None:
        with self._locked() as (space, _):
            for outcome in outcomes:
                space.runs[outcome.job].pop(outcome.slot, None)
        super().record(outcomes)


class ClaimsWhatIsRecorded(MemoryBackend):
    """C17: a slot that never became a run may still become one."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        record = space.find(request.job, request.slot)
        if record is not None and record.state in NEVER_A_RUN and record.claimed_at is None:
            del space.runs[request.job][request.slot]
        return super()._claim(space, now, request)


class GivesUpByForgetting(MemoryBackend):
    """C18: a slot that is given up is deleted."""

    def _give_up(self, space: Any, now: Millis, ending: GivenUp) -> bool:
        ended = super()._give_up(space, now, ending)
        if ended:
            del space.runs[ending.job][ending.slot]
        return ended


class OldestFirst(MemoryBackend):
    """C19: the history from its other end."""

    def history(self, job: str, limit: int) -> list[Run]:
        return super().history(job, 1_000_000)[::-1][:limit]


class LastIsTheNewest(MemoryBackend):
    """C19: the last run is the newest record, whatever it is."""

    def last_run(self, job: str) -> Run | None:
        return next(iter(self.history(job, 1)), None)


class ForgetsTooSoon(ClaimOnlyMemory):
    """C20: a claim is remembered for half as long as is said."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> Answer:
        answer = super()._claim(space, now, request)
        if answer is Answer.WON:
            space.marks[request.job, request.slot].until = now + self._horizon // 2
        return answer


class RemembersFromTheClaim(ClaimOnlyMemory):
    """C20: whatever is not remembered is free, however old."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> Answer:
        return super()._claim(space, min(now, request.slot) if self._free(space, now, request) else now, request)

    def _free(self, space: Any, now: Millis, request: ClaimRequest) -> bool:
        mark = space.marks.get((request.job, request.slot))
        return mark is None or bool(mark.until < now)


CLAIM_SABOTEURS: dict[str, tuple[type[MemoryBackend] | type[SqliteBackend] | type[ClaimOnlyMemory], ...]] = {
    "C1": (ReadsThenClaims, OwnerIsTheHost),
    "C2": (ForgetsItsOwner,),
    "C3": (OwnerIsTheConnection, ReadsALossAsNo),
    "C4": (CutsToSeconds, StripsNames),
    "C5": (ReadsASnapshot,),
    "C6": (NewerForgetsOlder,),
    "C7": (ForgetsTheFloor,),
    "C8": (EndsBySlot, AbandonsWhatWasSent),
    "C9": (DropsWhatIsOver,),
    "C10": (ForgetsAtTheEnd,),
    "C11": (TakesWhatIsHeld, CountsByItsOwnClock),
    "C12": (PassesDriverErrors, CallsALossAway),
    "C13": (BelievesTheCaller, HasNoTolerance),
    "C14": (ConfirmsOnce, ConfirmsInTimeOnly),
    "C15": (WinsAgainAfterSending,),
    "C16": (AllOrNothing,),
    "C17": (RecordsOver, ClaimsWhatIsRecorded),
    "C18": (GivesUpByForgetting,),
    "C19": (OldestFirst, LastIsTheNewest),
    "C20": (ForgetsTooSoon, RemembersFromTheClaim),
}
"""Clause -> the backends that break it."""
