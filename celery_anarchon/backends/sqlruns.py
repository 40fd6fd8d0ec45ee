"""Runs on their workers, on tables: the clauses W of :mod:`.runs` but for the claim's own.

Belongs here: the order in which a transaction uses the statements of :mod:`.sqlrunstatements`. Does not belong here:
claims and what becomes of slots that may not overlap (:mod:`.sqlclaims`).

Every operation is one write transaction. A batch that names one run twice is done in rounds, so that each row of an
UPDATE has one cause; mostly there is one round.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Row

from celery_anarchon.backends.runs import (
    WORKERS_KEPT,
    GiveBack,
    LapsedEnd,
    NextTry,
    RunBackend,
    RunHold,
    Settlement,
    Start,
    StartResult,
    Unstarted,
    Waiting,
    Worker,
    check_ends_of_a_body,
    check_ends_of_a_wait,
)
from celery_anarchon.backends.sqlclaims import SqlClaims, key_of
from celery_anarchon.backends.sqloverlap import terms_row
from celery_anarchon.backends.sqlstore import chunks
from celery_anarchon.backends.sqltables import LOWEST, MADE, TERMS
from celery_anarchon.model import GateAnswer, Millis, Overlap, Run, RunState

_CLAIMED, _QUEUED, _RUNNING = str(RunState.CLAIMED), str(RunState.QUEUED), str(RunState.RUNNING)
_RETRYING, _LOST_IN_QUEUE = str(RunState.RETRYING), str(RunState.LOST_IN_QUEUE)

_T = TypeVar("_T")


class SqlRuns(SqlClaims, RunBackend):
    """See the module."""

    # --- the gate -----------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> list[StartResult]:
        if not starts:
            return []
        # What one job may not have twice is started one after the other.
        tight = {start.job for start in starts if start.terms.overlap is not Overlap.ALLOW}
        results: dict[int, StartResult] = {}
        with self._writing() as connection:
            # Of these jobs nobody else makes a run alive meanwhile.
            floors = self._floors(connection, (start.job for start in starts))
            self._lock_runs(connection, map(key_of, starts))
            now = self._time(connection)
            for part in rounds(starts, lambda start: (start.job,) if start.job in tight else key_of(start)):
                results.update(self._start(connection, part, floors, now))
        return [results[number] for number in range(len(starts))]

    def _start(
        self, connection: Connection, starts: Mapping[int, Start], floors: Mapping[str, Millis], now: Millis
    ) -> dict[int, StartResult]:
        numbers = {key_of(start): number for number, start in starts.items()}
        results: dict[int, StartResult] = {}

        def left() -> list[Start]:
            return [start for number, start in starts.items() if number not in results]

        # More than once only where transactions run side by side, and another one came between the two statements.
        while recorded := left():
            rows = [_gate_row(start) for start in recorded]
            for row in self._execute(connection, self._run_sql.start, rows, now=now):
                results[numbers[key_of(row)]] = StartResult(GateAnswer.START, row.attempt)
            rows = [_gate_row(start) for start in left()]
            for row in self._execute(connection, self._run_sql.refuse, rows, now=now):
                answer = GateAnswer(row.refusal)
                holder = row.worker if answer is GateAnswer.DUPLICATE else None
                results[numbers[key_of(row)]] = StartResult(answer, row.attempt, holder)
            rest = left()
            if not rest or not self._known(connection, rest):
                break
        for start in left():
            if start.slot <= floors.get(start.job, LOWEST):
                results[numbers[key_of(start)]] = StartResult(GateAnswer.TRIMMED)
        unknown = left()
        occupied = self._occupied(connection, {s.job for s in unknown if s.terms.overlap is not Overlap.ALLOW})
        admitted = [s for s in unknown if s.job not in occupied or s.terms.overlap is Overlap.ALLOW]
        made = [_row_from_message(start, now) for start in admitted]
        for row in self._execute(connection, self._run_sql.make, made, now=now):
            number = numbers[key_of(row)]
            results[number] = StartResult(GateAnswer.UNKNOWN, starts[number].attempt)
        for start in left():
            results[numbers[key_of(start)]] = StartResult(GateAnswer.OVERLAPS)
        return results

    def _occupied(self, connection: Connection, jobs: set[str]) -> set[str]:
        """Which of *jobs* have an unsettled run, besides slots that wait."""
        found: set[str] = set()
        for some in chunks(sorted(jobs)):
            rows = connection.execute(self._run_sql.living_of, {"the_jobs": some}).fetchall()
            found |= {row.job for row in rows if row.state != RunState.WAITING}
        return found

    # --- what its holder says -----------------------------------------------------------------------------------------

    def heartbeat(self, holds: Sequence[RunHold]) -> list[bool]:
        return self._write(self._run_sql.heartbeat, holds, _fence)

    def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        check_ends_of_a_body(settlements)
        return self._write(
            self._run_sql.settle,
            settlements,
            lambda end: (*_fence(end), str(end.state), end.reason),
            lambda end, row: _fence_of(row) == _fence(end) and row.state == end.state,
        )

    def retrying(self, tries: Sequence[NextTry]) -> list[bool]:
        return self._write(
            self._run_sql.retrying,
            tries,
            lambda a_try: (*_fence(a_try), a_try.delay),
            lambda a_try, row: _fence_of(row) == _fence(a_try) and row.state == _RETRYING,
        )

    def give_back(self, backs: Sequence[GiveBack]) -> list[bool]:
        return self._write(
            self._run_sql.give_back,
            backs,
            lambda back: (*_fence(back), back.message_attempt),
            lambda back, row: (
                (row.state, row.retries) == _given_back(back) and (row.token, row.attempt) == (back.token, back.attempt)
            ),
        )

    def release(self, holds: Sequence[RunHold]) -> list[bool]:
        return self._write(self._run_sql.release, holds, _fence)

    # --- ends without a body ------------------------------------------------------------------------------------------

    def unstarted(self, messages: Sequence[Unstarted]) -> list[bool]:
        return self._write(
            self._run_sql.unstarted,
            messages,
            lambda message: (message.job, message.slot, message.attempt, message.retries, message.reason),
            lambda message, row: (
                (row.state, row.attempt, row.reason) == (_LOST_IN_QUEUE, message.attempt, message.reason)
            ),
        )

    def end_lapsed(self, endings: Sequence[LapsedEnd]) -> list[bool]:
        check_ends_of_a_wait(endings)
        return self._write(
            self._run_sql.end_lapsed,
            endings,
            lambda end: (end.job, end.slot, end.attempt, str(end.was), str(end.state), end.reason),
            lambda end, row: (row.state, row.attempt, row.reason) == (end.state, end.attempt, end.reason),
        )

    def waiting(self, limit: int) -> list[Waiting]:
        rows = self._look(lambda connection: connection.execute(self._run_sql.waiting, {"the_limit": max(limit, 0)}))
        return [Waiting(job=row.job, slot=row.slot) for row in rows]

    def living(self, job: str) -> list[Run]:
        return self._runs(self._run_sql.living, the_job=job)

    def release_job(self, job: str) -> list[Run]:
        with self._writing() as connection:
            # Without it of two that settle several runs each could wait for the other.
            self._lock_runs(connection, self._held(connection, job))
            values = {"the_job": job, "now": self._time(connection)}
            rows = connection.execute(self._run_sql.release_job, values).fetchall()
        return [self._run(row) for row in sorted(rows, key=key_of)]

    def _held(self, connection: Connection, job: str) -> list[tuple[str, Millis]]:
        return [key_of(row) for row in connection.execute(self._run_sql.living_of, {"the_jobs": [job]}).fetchall()]

    def _write(
        self,
        statement: Any,
        items: Sequence[_T],
        values: Callable[[_T], tuple[Any, ...]],
        is_so: Callable[[_T, Row[Any]], bool] = lambda item, row: False,
    ) -> list[bool]:
        """Execute *statement* with the *values* of the items. True for each whose record it changed, and where it
        changed nothing because it *is so* already: the reply was lost, and it is asked again."""
        if not items:
            return []
        done = [False] * len(items)
        with self._writing() as connection:
            self._lock_runs(connection, map(key_of, items))
            now = self._time(connection)
            for part in rounds(items, key_of):
                numbers = {key_of(item): number for number, item in part.items()}
                rows = [values(item) for item in part.values()]
                for row in self._execute(connection, statement, rows, now=now):
                    done[numbers[key_of(row)]] = True
                rest = [key_of(item) for number, item in part.items() if not done[number]]
                for row in self._execute(connection, self._run_sql.read, rest):
                    number = numbers[key_of(row)]
                    done[number] = is_so(items[number], row)
        return done

    # --- presence -----------------------------------------------------------------------------------------------------

    def worker_seen(self, worker: Worker) -> Millis:
        with self._writing() as connection:
            now = self._time(connection)
            row = {**vars(worker), "queues": json.dumps(worker.queues), "seen": now}
            connection.execute(self._run_sql.worker_seen, [row])
            connection.execute(self._run_sql.had_workers, [{"key": "workers", "value": "seen"}])
            connection.execute(self._run_sql.old_workers, {"the_oldest": now - WORKERS_KEPT})
        return now

    def worker_left(self, owner: str) -> None:
        with self._writing() as connection:
            connection.execute(self._run_sql.worker_left, {"the_owner": owner})

    def workers(self, within: Millis) -> list[Worker]:
        rows = self._look(lambda connection: connection.execute(self._run_sql.workers, {"within": within}))
        return [Worker(**{**row._mapping, "queues": tuple(json.loads(row.queues))}) for row in rows]

    def ever_had_workers(self) -> bool:
        return bool(self._look(lambda connection: connection.execute(self._run_sql.ever_had_workers)))


def rounds(items: Sequence[_T], key: Callable[[_T], tuple[Any, ...]]) -> Iterator[dict[int, _T]]:
    """*items* by their numbers, in parts that have each key once, sorted: first the first of each key."""
    parts: list[dict[int, _T]] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    for number, item in sorted(enumerate(items), key=lambda pair: key(pair[1])):
        turn = seen[key(item)]
        seen[key(item)] += 1
        if turn == len(parts):
            parts.append({})
        parts[turn][number] = item
    return iter(parts)


def _fence(hold: RunHold) -> tuple[Any, ...]:
    return hold.job, hold.slot, hold.attempt, hold.retries, hold.token


def _fence_of(row: Row[Any]) -> tuple[Any, ...]:
    return row.job, row.slot, row.attempt, row.retries, row.token


def _given_back(back: GiveBack) -> tuple[str, int]:
    """The state and the retries of a run that was given back."""
    if back.attempt > back.message_attempt:
        return _CLAIMED, 0
    return (_RETRYING, back.retries - 1) if back.retries else (_QUEUED, 0)


def _gate_row(start: Start) -> tuple[Any, ...]:
    return (
        *(start.job, start.slot, start.attempt, start.retries, start.token, start.worker),
        *terms_row(start.terms),
        *(int(start.acks_late), start.late),
    )


def _row_from_message(start: Start, now: Millis) -> tuple[Any, ...]:
    """Of a run that the store has forgotten."""
    terms = start.terms
    row = {
        **dict.fromkeys(MADE),
        "job": start.job,
        "slot": start.slot,
        "state": _RUNNING,
        "attempt": start.attempt,
        "beat": start.beat,
        **dict(zip(TERMS, terms_row(terms), strict=True)),
        "lease_until": now + terms.lease,
        "patience": terms.queue_timeout if start.acks_late and terms.max_attempts is None else 0,
        "sent_at": now,
        "late": start.late,
        "started_at": now,
        "retries": start.retries,
        "token": start.token,
        "worker": start.worker,
    }
    return tuple(row[name] for name in MADE)
