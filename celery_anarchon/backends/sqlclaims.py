"""Claims on tables: the claim, its ends, and the history.

Belongs here: the order in which a transaction uses the statements. Does not belong here: leases of others, first sights
and beats (:mod:`.sql`), calls and dialects (:mod:`.sqlstore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    GIVEN_UP,
    NEVER_A_RUN,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Outcome,
)
from celery_anarchon.backends.sqlstore import SqlStore
from celery_anarchon.backends.sqltables import LOWEST
from celery_anarchon.model import Answer, Millis, Run, RunState

_CLAIMED = str(RunState.CLAIMED)
_DISPATCHED = str(RunState.DISPATCHED)

_Key = tuple[str, Millis]


class SqlClaims(SqlStore):
    """See the module."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        if not requests:
            return []
        with self._writing() as connection:
            floors = self._floors(connection, (request.job for request in requests))
            # Read after the wait for the lock: a lease counts from when it is held.
            now = self._time(connection)
            above = sorted(
                (request for request in requests if request.slot > floors.get(request.job, LOWEST)), key=key_of
            )
            early = now + self.early_tolerance
            won = self._claim_new(connection, [request for request in above if request.slot <= early], now)
            others = [request for request in above if won.get(key_of(request)) != request.owner]
            known = self._known(connection, others)
            renewed = self._renew(
                connection,
                [r for r in others if (row := known.get(key_of(r))) and row.owner == r.owner and row.state == _CLAIMED],
                now,
            )

        def answer(request: ClaimRequest) -> ClaimResult:
            key, owner = key_of(request), request.owner
            if request.slot <= floors.get(request.job, LOWEST):
                return ClaimResult(Answer.TOO_OLD)
            if won.get(key) == owner:
                return ClaimResult(Answer.WON)
            if (key, owner) in renewed:
                return ClaimResult(Answer.WON, renewed[key, owner])
            row = known.get(key)
            if row is None:
                return ClaimResult(Answer.TOO_EARLY)
            if row.owner == owner and row.state != _CLAIMED:
                return ClaimResult(Answer.ALREADY_SENT, row.attempt)
            return ClaimResult(Answer.TAKEN)

        return [answer(request) for request in requests]

    def _claim_new(self, connection: Connection, requests: Sequence[ClaimRequest], now: Millis) -> dict[_Key, str]:
        """Insert what has no record; who owns what was inserted. Of two that ask for one slot the first gets it."""
        if not requests:
            return {}
        rows = [(request.job, request.slot, request.owner, request.lease, request.beat) for request in requests]
        return {key_of(row): row.owner for row in self._execute(connection, self._sql.claim, rows, now=now)}

    def _renew(
        self, connection: Connection, requests: Sequence[ClaimRequest], now: Millis
    ) -> dict[tuple[_Key, str], int]:
        self._lock_runs(connection, map(key_of, requests))
        rows = [(request.job, request.slot, request.owner, request.lease) for request in requests]
        renewed = self._execute(connection, self._sql.renew, rows, now=now)
        return {(key_of(row), row.owner): row.attempt for row in renewed}

    def _known(self, connection: Connection, items: Iterable[Any]) -> dict[_Key, Row[Any]]:
        keys = sorted({key_of(item) for item in items})
        return {(row.job, row.slot): row for row in self._execute(connection, self._sql.read, keys)}

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        rows = [(*_hold(confirmation), confirmation.late) for confirmation in confirmations]
        return self._end(self._sql.confirm, confirmations, rows, [_DISPATCHED] * len(rows))

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        for ending in endings:
            if ending.state not in GIVEN_UP:
                raise ValueError(f"a claim cannot be given up as {ending.state}")
        rows = [(*_hold(ending), str(ending.state), ending.reason) for ending in endings]
        return self._end(self._sql.give_up, endings, rows, [str(ending.state) for ending in endings])

    def _end(
        self, statement: Any, holds: Sequence[Hold], rows: Sequence[tuple[Any, ...]], ends: Sequence[str]
    ) -> list[bool]:
        """Execute *statement*; True for each hold whose claim its holder has brought to its end, now or earlier."""
        if not holds:
            return []
        with self._writing() as connection:
            # The first of several that name one hold: which of them an UPDATE takes is not said.
            first = {row[:4]: row for row in reversed(rows)}
            self._lock_runs(connection, map(key_of, holds))
            now = self._time(connection)
            ended = {
                (row.job, row.slot, row.owner, row.attempt): row.state
                for row in self._execute(connection, statement, sorted(first.values(), key=_first_two), now=now)
            }
            for row in self._known(connection, (hold for hold in holds if _hold(hold) not in ended)).values():
                ended[row.job, row.slot, row.owner, row.attempt] = row.state
        return [ended.get(_hold(hold)) == end for hold, end in zip(holds, ends, strict=True)]

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        if not holds:
            return []
        with self._writing() as connection:
            self._lock_runs(connection, map(key_of, holds))
            now = self._time(connection)
            # Afterwards the record does not say any more who held it.
            before = {(row.job, row.slot, row.owner, row.attempt) for row in self._known(connection, holds).values()}
            rows = sorted({_hold(hold) for hold in holds})
            open_again = {_first_two(row) for row in self._execute(connection, self._sql.abandon, rows, now=now)}
        return [key_of(hold) in open_again and _hold(hold) in before for hold in holds]

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.state not in NEVER_A_RUN:
                raise ValueError(f"{outcome.state} is no state of a slot that never became a run")
        if not outcomes:
            return
        with self._writing() as connection:
            floors = self._floors(connection, (outcome.job for outcome in outcomes))
            now = self._time(connection)
            rows = [
                (outcome.job, outcome.slot, str(outcome.state), outcome.beat, outcome.reason)
                for outcome in sorted(outcomes, key=key_of)
                if outcome.slot > floors.get(outcome.job, LOWEST)
            ]
            self._execute(connection, self._sql.record, rows, now=now)

    def history(self, job: str, limit: int) -> list[Run]:
        # A negative limit is none at all to SQLite.
        return self._runs(self._sql.history, the_job=job, the_limit=max(limit, 0))

    def last_run(self, job: str) -> Run | None:
        return next(iter(self._runs(self._sql.last_run, the_job=job)), None)

    def _runs(self, statement: Any, **values: Any) -> list[Run]:
        return [self._run(row) for row in self._look(lambda connection: connection.execute(statement, values))]

    def _run(self, row: Row[Any]) -> Run:
        return Run(
            job=row.job,
            slot=wire.moment(row.slot),
            run_id=wire.run_id(self.namespace, row.job, row.slot),
            state=RunState(row.state),
            reason=row.reason,
            attempt=row.attempt,
            claimed_at=_moment(row.claimed_at),
            sent_at=_moment(row.sent_at),
            ended_at=_moment(row.ended_at),
            late=None if row.late is None else row.late / 1000,
            beat=row.beat or None,
        )


def key_of(item: Any) -> _Key:
    return item.job, item.slot


def _first_two(row: Any) -> _Key:
    return row[0], row[1]


def _hold(hold: Hold) -> tuple[str, Millis, str, int]:
    return hold.job, hold.slot, hold.owner, hold.attempt


def _moment(at: Millis | None) -> datetime | None:
    return None if at is None else wire.moment(at)
