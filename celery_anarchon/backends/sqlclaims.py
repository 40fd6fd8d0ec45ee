"""Claims on tables: the claim, its ends, and the history.

Belongs here: the order in which a transaction uses the statements. Does not belong here: what becomes of slots that may
not overlap (:mod:`.sqloverlap`), leases of others, first sights and beats (:mod:`.sql`), calls and dialects
(:mod:`.sqlstore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Outcome,
    check_given_up,
    check_never_a_run,
)
from celery_anarchon.backends.sqloverlap import Overlaps, may_not_overlap, terms_of
from celery_anarchon.backends.sqlstore import SqlStore, chunks
from celery_anarchon.backends.sqltables import LOWEST, MADE
from celery_anarchon.model import Answer, Millis, Run, RunState

_CLAIMED = str(RunState.CLAIMED)
_WAITING = str(RunState.WAITING)
_WON = ClaimResult(Answer.WON)
_CONFIRMED = frozenset({str(RunState.DISPATCHED), str(RunState.QUEUED)})

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
            latest = now + self.early_tolerance
            asked = [request for request in requests if request.slot > floors.get(request.job, LOWEST)]
            # Whose slots may not overlap, is decided job by job in the order of the requests.
            tight = {request.job for request in asked if may_not_overlap(request)}
            plain = sorted((request for request in asked if request.job not in tight), key=key_of)
            won = self._claim_new(connection, [request for request in plain if request.slot <= latest], now)
            others = [request for request in asked if won.get((request.job, request.slot)) != request.owner]
            known = self._known(connection, others)
            # A waiting slot is claimed like one that may not overlap, whoever asks.
            tight |= {row.job for row in known.values() if row.state == _WAITING}
            overlaps = {}
            if tight:
                of_them = {
                    number: request
                    for number, request in enumerate(requests)
                    if request.job in tight and request.slot > floors.get(request.job, LOWEST)
                }
                overlaps = self._overlaps(connection, of_them, known, won, now)
            held = [
                r for r in others if (row := known.get(key_of(r))) and (row.owner, row.state) == (r.owner, _CLAIMED)
            ]
            renewed = self._renew(connection, sorted(held, key=key_of), now)

        def answer(number: int, request: ClaimRequest) -> ClaimResult:
            key, owner = (request.job, request.slot), request.owner
            if request.slot <= floors.get(request.job, LOWEST):
                return ClaimResult(Answer.TOO_OLD)
            if won.get(key) == owner:
                return _WON
            if (key, owner) in renewed:
                return ClaimResult(Answer.WON, renewed[key, owner])
            if number in overlaps:
                return ClaimResult(overlaps[number])
            row = known.get(key)
            if row is None:
                return ClaimResult(Answer.TOO_EARLY)
            if row.owner == owner and row.state != _CLAIMED:
                return ClaimResult(Answer.ALREADY_SENT, row.attempt)
            return ClaimResult(Answer.TAKEN)

        return [answer(number, request) for number, request in enumerate(requests)]

    def _claim_new(self, connection: Connection, requests: Sequence[ClaimRequest], now: Millis) -> dict[_Key, str]:
        """Insert what has no record; who owns what was inserted. Of two that ask for one slot the first gets it."""
        rows: list[tuple[Any, ...]] = [(r.job, r.slot, r.owner, r.beat, r.lease) for r in requests]
        statement = self._sql.claim
        if any(request.terms is not None for request in requests):
            statement = self._sql.claim_followed
            rows = [(*row, *terms_of(request)) for row, request in zip(rows, requests, strict=True)]
        return {(row.job, row.slot): row.owner for row in self._execute(connection, statement, rows, now=now)}

    def _overlaps(
        self,
        connection: Connection,
        requests: Mapping[int, ClaimRequest],
        known: Mapping[_Key, Row[Any]],
        won: Mapping[_Key, str],
        now: Millis,
    ) -> dict[int, Answer]:
        """Decide *requests*, all of certain jobs, in their order, and write it: the answers to those that are not to be
        answered by what is known of their slots, by number."""
        living: dict[str, dict[Millis, str]] = {}
        for some in chunks(sorted({request.job for request in requests.values()})):
            for row in connection.execute(self._run_sql.living_of, {"the_jobs": some}).fetchall():
                if key_of(row) not in won:
                    living.setdefault(row.job, {})[row.slot] = row.state
        batch = Overlaps(now, now + self.early_tolerance, living, known)
        answers: dict[int, Answer] = {}
        for number, request in requests.items():
            if won.get(key_of(request)) == request.owner:
                batch.has_won(request)
                continue
            answer = batch.ask(request)
            if answer is not None:
                answers[number] = answer
        made = [tuple(row[name] for name in MADE) for _, row in sorted(batch.made.items())]
        handed = [
            (request.job, request.slot, request.owner, request.beat, now + request.lease, *terms_of(request))
            for _, request in sorted(batch.handed.items())
        ]
        written = {
            key_of(row)
            for statement, rows in (
                (self._run_sql.make, made),
                (self._run_sql.hand_out, handed),
                (self._run_sql.supersede, sorted(batch.superseded)),
            )
            for row in self._execute(connection, statement, rows, now=now)
        }
        # What was read could not change meanwhile. Should a store let it happen, nobody is told what is not so.
        for number in answers:
            key = key_of(requests[number])
            if (key in batch.made or key in batch.handed) and key not in written:
                answers[number] = Answer.WAIT
        return answers

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
        statement = self._sql.confirm
        rows: list[tuple[Any, ...]] = [(*_hold(confirmation), confirmation.late) for confirmation in confirmations]
        if any(confirmation.delay for confirmation in confirmations):
            statement = self._sql.confirm_delayed
            rows = [(*row, confirmation.delay) for row, confirmation in zip(rows, confirmations, strict=True)]
        return self._end(statement, confirmations, rows, [_CONFIRMED] * len(rows))

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        check_given_up(endings)
        rows = [(*_hold(ending), str(ending.state), ending.reason) for ending in endings]
        return self._end(self._sql.give_up, endings, rows, [frozenset({str(ending.state)}) for ending in endings])

    def _end(
        self, statement: Any, holds: Sequence[Hold], rows: Sequence[tuple[Any, ...]], ends: Sequence[frozenset[str]]
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
        return [ended.get(_hold(hold)) in end for hold, end in zip(holds, ends, strict=True)]

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
        check_never_a_run(outcomes)
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
            started_at=_moment(row.started_at),
            ended_at=_moment(row.ended_at),
            late=None if row.late is None else row.late / 1000,
            beat=row.beat or None,
            worker=row.worker,
            blocked_by=None if row.blocked_by is None else wire.run_id(self.namespace, row.job, row.blocked_by),
            refused=row.refused,
        )


def key_of(item: Any) -> _Key:
    return item.job, item.slot


def _first_two(row: Any) -> _Key:
    return row[0], row[1]


def _hold(hold: Hold) -> tuple[str, Millis, str, int]:
    return hold.job, hold.slot, hold.owner, hold.attempt


def _moment(at: Millis | None) -> datetime | None:
    return None if at is None else wire.moment(at)
