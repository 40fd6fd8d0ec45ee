"""For each clause a backend that breaks it, in the way in which somebody once did.

Belongs here: backends that are wrong in one way each. ``tests/conformance/test_saboteurs.py`` runs the suites on them
and requires that very clause to fail: a clause that no saboteur can break proves nothing.
"""

from __future__ import annotations

import copy
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_anarchon.backends.base import (
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    LapsedClaim,
    Outcome,
    Registration,
    Sighting,
    Takeover,
)
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.clock import SystemClock
from celery_anarchon.model import Answer, Millis, Run, RunState
from celery_anarchon.testing.claimonly import ClaimOnlyMemory
from celery_anarchon.testing.onestepsaboteurs import ONE_STEP_SABOTEURS
from celery_anarchon.testing.runsaboteurs import RUN_SABOTEURS


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


class CutsToSeconds(MemoryBackend):
    """C4: slots are kept in seconds."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, slot=request.slot // 1000 * 1000) for request in requests])


class StripsNames(MemoryBackend):
    """C4: names are made tidy on the way to the store."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return super().claim([replace(request, job=request.job.strip()) for request in requests])


class ReadsASnapshot(MemoryBackend):
    """C5: sees the store as it was when it connected."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        self._store.lock, lock = None, self._store.lock  # type: ignore[assignment]
        try:
            mine = copy.deepcopy(self._store)
        finally:
            self._store.lock = lock
        mine.lock = threading.RLock()
        self._store = mine


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

    def _as_holder(self, hold: Any) -> Any:
        record = self._store.spaces[self.namespace].find(hold.job, hold.slot)
        return hold if record is None else replace(hold, owner=record.owner, attempt=record.attempt)


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


class BelievesTheCaller(MemoryBackend):
    """C13: any slot is due if a beat says so."""

    def _claim(self, space: Any, now: Millis, request: ClaimRequest) -> ClaimResult:
        return super()._claim(space, max(now, request.slot), request)


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


class SightsAnew(MemoryBackend):
    """L1: the last sighting says since when."""

    def _register(self, space: Any, now: Millis, sighting: Sighting) -> Registration:
        space.sights[sighting.job].pop(sighting.fingerprint, None)
        return super()._register(space, now, sighting)


class KeepsOneFingerprint(MemoryBackend):
    """L1: a job has one schedule at a time."""

    def _register(self, space: Any, now: Millis, sighting: Sighting) -> Registration:
        for other in [name for name in space.sights[sighting.job] if name != sighting.fingerprint]:
            del space.sights[sighting.job][other]
        return super()._register(space, now, sighting)


class ListsByName(MemoryBackend):
    """L2: lapsed claims come in the order of their jobs."""

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        return sorted(super().lapsed(1_000_000), key=lambda found: (found.job, found.slot))[:limit]


class ListsWhatIsHeld(MemoryBackend):
    """L2: everything that has a lease is in the list."""

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        with self._locked() as (space, _):
            return [
                LapsedClaim(job=job, slot=slot, attempt=space.runs[job][slot].attempt, abandoned=False)
                for job, slot in sorted(space.leased)[:limit]
            ]


class TakesFromTheList(MemoryBackend):
    """L3: what was in the list is the sweeper's."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        if record is None:
            return None
        record.owner, record.state, record.lease_until = wish.owner, RunState.CLAIMED, now + wish.lease
        space.leased.add((wish.job, wish.slot))
        return wish.from_attempt


class CountsTakeovers(MemoryBackend):
    """L4: each takeover is an attempt."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        attempt = super()._takeover(space, now, wish)
        if attempt is not None:
            record = space.find(wish.job, wish.slot)
            record.attempt += 1
            return int(record.attempt)
        return None


class AbandonsToTheLease(MemoryBackend):
    """L5: abandon says yes, and leaves the slot to its lease."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        return record is not None and record.held_by(hold)


class AbandonsByForgetting(MemoryBackend):
    """L5: an abandoned slot is deleted, so that a claim can begin anew."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        done = super()._abandon(space, now, hold)
        if done:
            del space.runs[hold.job][hold.slot]
            space.leased.discard((hold.job, hold.slot))
        return done


class FirstOwnerStays(MemoryBackend):
    """L6: who won the claim may write, whoever holds it now."""

    def _confirm(self, space: Any, now: Millis, confirmation: Confirmation) -> bool:
        record = space.find(confirmation.job, confirmation.slot)
        if record is not None and record.state is RunState.CLAIMED and record.attempt == confirmation.attempt:
            confirmation = replace(confirmation, owner=record.owner)
        return super()._confirm(space, now, confirmation)


class AbandonsWhatOthersHold(MemoryBackend):
    """L6: abandon frees the lease, whoever has it."""

    def _abandon(self, space: Any, now: Millis, hold: Hold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is not None and record.state in (RunState.CLAIMED, RunState.RUNNING):
            record.lease_until = now
            return True
        return super()._abandon(space, now, hold)


class RefusesEverybody(MemoryBackend):
    """L7: after a takeover nobody may write."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        attempt = super()._takeover(space, now, wish)
        if attempt is not None:
            record = space.find(wish.job, wish.slot)
            record.held_by = record.ended_by = lambda hold: False
        return attempt


class TakesOnce(MemoryBackend):
    """L8: a takeover asked again finds nothing lapsed."""

    def _takeover(self, space: Any, now: Millis, wish: Takeover) -> int | None:
        record = space.find(wish.job, wish.slot)
        mine = record is not None and record.owner == wish.owner and not record.lapsed(now)
        return None if mine else super()._takeover(space, now, wish)


class OneBeatForEachLabel(MemoryBackend):
    """L9: beats are known by their labels."""

    def beats(self, within: Millis) -> list[Beat]:
        return list({beat.label: beat for beat in super().beats(within)}.values())


class NeverLeaves(MemoryBackend):
    """L9: a beat that stops is shown until it is forgotten."""

    def beat_left(self, owner: str) -> None:
        pass


class LeavesAThread(MemoryBackend):
    """X1: a helper that nobody stops."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


class LeavesAFile(SqliteBackend):
    """X1: connections are dropped, not closed."""

    def close(self) -> None:
        self.__dict__.setdefault("_lost", []).extend(self._source._connections._idle)
        self._source._connections._idle.clear()


class AsksThroughAThread(SqliteBackend):
    """X2: a helper does the work, and is not there after a fork."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        super().open(app_name, create=create)
        if not hasattr(self, "_work"):
            self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for requests, answer in iter(self._work.get, None):
            answer.put(super().claim(requests))

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        answer: queue.SimpleQueue[list[ClaimResult]] = queue.SimpleQueue()
        self._work.put((requests, answer))
        return answer.get()

    def close(self) -> None:
        if hasattr(self, "_work"):
            self._work.put(None)
            del self._work
        super().close()


class WaitsForItself(MemoryBackend):
    """X3: close() waits for the call that it interrupts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._call = threading.Lock()

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        with self._call:
            return super().claim(requests)

    def close(self) -> None:
        # Not for ever: its own test has to end.
        if self._call.acquire(timeout=4):
            self._call.release()
        super().close()


class AnybodysNamespace(MemoryBackend):
    """X4: opens whatever is there."""

    def open(self, app_name: str, *, create: bool = True) -> None:
        pass


SABOTEURS: dict[str, tuple[type[MemoryBackend] | type[SqliteBackend] | type[ClaimOnlyMemory], ...]] = {
    "C1": (ReadsThenClaims, OwnerIsTheHost),
    "C2": (ForgetsItsOwner,),
    "C3": (OwnerIsTheConnection,),
    "C4": (CutsToSeconds, StripsNames),
    "C5": (ReadsASnapshot,),
    "C6": (NewerForgetsOlder,),
    "C7": (ForgetsTheFloor,),
    "C8": (EndsBySlot,),
    "C9": (DropsWhatIsOver,),
    "C10": (ForgetsAtTheEnd,),
    "C11": (TakesWhatIsHeld, CountsByItsOwnClock),
    "C12": (PassesDriverErrors,),
    "C13": (BelievesTheCaller,),
    "C14": (ConfirmsOnce, ConfirmsInTimeOnly),
    "C15": (WinsAgainAfterSending,),
    "C16": (AllOrNothing,),
    "C17": (RecordsOver,),
    "C18": (GivesUpByForgetting,),
    "C19": (OldestFirst, LastIsTheNewest),
    "C20": (ForgetsTooSoon, RemembersFromTheClaim),
    "L1": (SightsAnew, KeepsOneFingerprint),
    "L2": (ListsByName, ListsWhatIsHeld),
    "L3": (TakesFromTheList,),
    "L4": (CountsTakeovers,),
    "L5": (AbandonsToTheLease, AbandonsByForgetting),
    "L6": (FirstOwnerStays, AbandonsWhatOthersHold),
    "L7": (RefusesEverybody,),
    "L8": (TakesOnce,),
    "L9": (OneBeatForEachLabel, NeverLeaves),
    "X1": (LeavesAThread, LeavesAFile),
    "X2": (AsksThroughAThread,),
    "X3": (WaitsForItself,),
    "X4": (AnybodysNamespace,),
    **RUN_SABOTEURS,
    **ONE_STEP_SABOTEURS,
}
"""Clause -> the backends that break it."""
