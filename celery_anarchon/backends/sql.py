"""The contract on tables, in SQLAlchemy Core, for every SQL store.

Belongs here: tables, statements and the order in which a transaction uses them. Does not belong here: what a dialect
does in its own way: connections, the begin of a write transaction, the store's clock, error words. Those are the
methods under "what a dialect says", and a dialect's module is little more than they.

Why it is exact. A batch is one transaction that is a *write* transaction from its first statement on, sorted by
(job, slot). The floors of its jobs are read (and, where transactions run side by side, locked) by a statement of their
own before anything else, because a lock taken inside the claiming statement is younger than that statement's view. Each
answer is what a conditional write returned; rows that it did not touch are read afterwards, in the same transaction.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Row,
    Table,
    bindparam,
    inspect,
    literal_column,
    select,
    text,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.types import TypeEngine

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    BEATS_KEPT,
    FINGERPRINTS_KEPT,
    GIVEN_UP,
    NEVER_A_RUN,
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    LapsedClaim,
    LeaseBackend,
    Outcome,
    Registration,
    Sighting,
    Takeover,
)
from celery_anarchon.backends.sqltables import LOWEST, Statements, Tables
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch
from celery_anarchon.model import Answer, Millis, Run, RunState

_CLAIMED = str(RunState.CLAIMED)
_DISPATCHED = str(RunState.DISPATCHED)
_ROWS_AT_ONCE = 5_000
"""Rows of one statement: six values each stay below the 32,766 parameters that SQLite allows."""

_SUFFIXES = ("_jobs", "_sights", "_beats", "_meta")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_NAME = 63 - len("_sights")
"""PostgreSQL cuts longer names silently, and two tables would become one."""

_Key = tuple[str, Millis]
_T = TypeVar("_T")


class Unusable(BackendUnavailable):
    """It will not get better by itself. :meth:`SqlBackend.open` raises it as a ConfigurationError; a call in a running
    beat as what it is to the beat: nothing was applied, ask again later."""


class NoTables(Unusable):
    """There are no tables of ours. To readers that were not to make any it is an empty store."""


class SqlBackend(LeaseBackend):
    """See the module. Subclasses name themselves, their traits, and what their dialect says."""

    _has_schemas = False

    def __init__(self, table: str, *, early_tolerance: Millis = 5_000) -> None:
        schema, name = self._table_name(table)
        self.namespace = table
        self.early_tolerance = early_tolerance
        self._may_be_empty = True
        self.tables = Tables(name, schema)
        self._sql = Statements(self)

    # --- what a dialect says ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _connection(self) -> AbstractContextManager[Connection]:
        """A connection of nobody else's, in autocommit, and with no transaction open."""

    @abc.abstractmethod
    def _begin(self, connection: Connection) -> None:
        """Begin a write transaction whose statements each see what was committed before them."""

    @abc.abstractmethod
    def _commit(self, connection: Connection) -> None:
        """Commit. Raises OutcomeUnknown when it may or may not have been."""

    @abc.abstractmethod
    def _error(self, error: SQLAlchemyError) -> BackendUnavailable:
        """What a driver's error means, in one line with the fix. Nothing was committed."""

    @abc.abstractmethod
    def _clock(self) -> ColumnElement[int]:
        """The store's clock at this statement, in milliseconds."""

    @abc.abstractmethod
    def _insert(self, table: Table) -> Any:
        """The dialect's INSERT, which knows ON CONFLICT."""

    def _given(self, **columns: TypeEngine[Any]) -> CTE:
        """A table of the rows that a statement is executed with, as its parameter ``rows``."""
        # A join, because SQLite walks the whole table for (job, slot) IN (VALUES ...). Core's own VALUES would be
        # compiled anew for each number of rows; an expanding parameter is not, and no construct takes one as a table.
        names = (
            literal_column(f"column{number}", type_).label(name)
            for number, (name, type_) in enumerate(columns.items(), 1)
        )
        rows = text(":rows AS given_rows").bindparams(bindparam("rows", expanding=True))
        return select(*names).select_from(rows).cte("given")

    def _patiently(self, step: Callable[[], _T]) -> _T:
        """Do *step*; again and again where a store answers "busy" to what is only read."""
        return step()

    def _floors(self, connection: Connection, jobs: Iterable[str]) -> dict[str, Millis]:
        """The floors of *jobs*. A dialect whose transactions run side by side locks these jobs until the commit."""
        floors: dict[str, Millis] = {}
        for some in _chunks(sorted(set(jobs))):
            floors.update((job, floor) for job, floor in connection.execute(self._sql.floors, {"the_jobs": some}))
        return floors

    def _create_tables(self, connection: Connection) -> None:
        """Make the tables, within a write transaction that found none."""
        self.tables.metadata.create_all(connection, checkfirst=False)

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self, app_name: str, *, create: bool = True) -> None:
        try:
            meta = self._read_meta()
            if create and "app" not in (meta or {}):
                meta = self._initialise(app_name)
            self._may_be_empty = meta is None
        except Unusable as error:
            raise ConfigurationError(str(error)) from error
        if meta is not None:
            self._check_meta(meta, app_name)

    def _read_meta(self) -> dict[str, str] | None:
        try:
            with self._reading() as connection:
                return self._patiently(lambda: self._meta_in(connection))
        except NoTables:
            return None

    def _initialise(self, app_name: str) -> dict[str, str]:
        with self._writing() as connection:
            # Once more, now that nobody else can: of many beats that start at once one makes the tables.
            meta = self._meta_in(connection)
            if meta is None:
                self._create_tables(connection)
                meta = {"layout": str(wire.LAYOUT_VERSION)}
            new = [] if "app" in meta else [{"key": "app", "value": app_name}]
            new += [{"key": "layout", "value": meta["layout"]}]
            connection.execute(self._insert(self.tables.meta).on_conflict_do_nothing(), new)
            return {"app": app_name, **meta}

    def _meta_in(self, connection: Connection) -> dict[str, str] | None:
        """What the namespace says of itself, None: there is no such namespace."""
        schema = self.tables.metadata.schema

        def there(table: Table) -> bool:
            # A new inspector each time: one remembers its answers.
            return inspect(connection).has_table(table.name, schema)

        foreign: list[str] = []
        if not there(self.tables.meta):
            foreign = [table.name for table in self.tables.metadata.sorted_tables if there(table)]
            # A look without a transaction is several: another beat may have made the tables between the first and the
            # last of them.
            if not there(self.tables.meta):
                if not foreign:
                    return None
                raise Unusable(
                    f"{self.describe()}: there is a table {foreign[0]} that is not of this namespace; set table=... to "
                    "a name that nobody uses"
                )
        return {row.key: row.value for row in connection.execute(select(self.tables.meta))}

    def _check_meta(self, meta: dict[str, str], app_name: str) -> None:
        if int(meta["layout"]) > wire.LAYOUT_VERSION:
            raise LayoutMismatch(
                f"{self.describe()}: layout {meta['layout']} was written by a newer celery-anarchon; this one knows "
                f"{wire.LAYOUT_VERSION}: upgrade this process"
            )
        if meta.get("app", app_name) != app_name:
            raise LayoutMismatch(
                f"namespace {self.namespace}: belongs to app {meta['app']}, and this is app {app_name}; set table=... "
                "to give this app its own"
            )

    def now(self) -> Millis:
        try:
            with self._reading() as connection:
                return int(self._patiently(lambda: connection.execute(self._sql.ping).scalar_one()))
        except NoTables:
            if not self._may_be_empty:
                raise
            return SystemClock().wall()

    def _time(self, connection: Connection) -> Millis:
        return int(connection.execute(self._sql.now).scalar_one())

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        if not requests:
            return []
        with self._writing() as connection:
            floors = self._floors(connection, (request.job for request in requests))
            # Read after the wait for the lock: a lease counts from when it is held.
            now = self._time(connection)
            above = sorted(
                (request for request in requests if request.slot > floors.get(request.job, LOWEST)), key=_key
            )
            early = now + self.early_tolerance
            won = self._claim_new(connection, [request for request in above if request.slot <= early], now)
            others = [request for request in above if won.get(_key(request)) != request.owner]
            known = self._known(connection, others)
            renewed = self._renew(
                connection,
                [r for r in others if (row := known.get(_key(r))) and row.owner == r.owner and row.state == _CLAIMED],
                now,
            )

        def answer(request: ClaimRequest) -> ClaimResult:
            key, owner = _key(request), request.owner
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
        rows = [
            {
                "job": request.job,
                "slot": request.slot,
                "state": _CLAIMED,
                "owner": request.owner,
                "attempt": 1,
                "lease_until": now + request.lease,
                "claimed_at": now,
                "beat": request.beat,
            }
            for request in requests
        ]
        # fetchall: SQLite cannot commit while rows of a RETURNING are still to come.
        return {(job, slot): owner for job, slot, owner in connection.execute(self._sql.claim, rows).fetchall()}

    def _renew(
        self, connection: Connection, requests: Sequence[ClaimRequest], now: Millis
    ) -> dict[tuple[_Key, str], int]:
        rows = [(request.job, request.slot, request.owner, request.lease) for request in requests]
        renewed = self._execute(connection, self._sql.renew, rows, now=now)
        return {(_key(row), row.owner): row.attempt for row in renewed}

    def _known(self, connection: Connection, items: Iterable[Any]) -> dict[_Key, Row[Any]]:
        keys = sorted({_key(item) for item in items})
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
            now = self._time(connection)
            # Afterwards the record does not say any more who held it.
            before = {(row.job, row.slot, row.owner, row.attempt) for row in self._known(connection, holds).values()}
            rows = sorted({_hold(hold) for hold in holds})
            open_again = {_first_two(row) for row in self._execute(connection, self._sql.abandon, rows, now=now)}
        return [_key(hold) in open_again and _hold(hold) in before for hold in holds]

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
                {
                    "job": outcome.job,
                    "slot": outcome.slot,
                    "state": str(outcome.state),
                    "attempt": 1,
                    "ended_at": now,
                    "beat": outcome.beat,
                    "reason": outcome.reason,
                }
                for outcome in sorted(outcomes, key=_key)
                if outcome.slot > floors.get(outcome.job, LOWEST)
            ]
            if rows:
                connection.execute(self._sql.record, rows)

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

    # --- leases -------------------------------------------------------------------------------------------------------

    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        # Part by part: a beat that starts with 100,000 jobs must not keep the claims of others waiting for seconds.
        return [registration for some in _chunks(sightings) for registration in self._register(some)]

    def _register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        jobs = sorted({sighting.job for sighting in sightings})
        with self._writing() as connection:
            connection.execute(self._sql.new_jobs, [{"job": job} for job in jobs])
            self._floors(connection, jobs)
            now = self._time(connection)
            sinces = self._sight(connection, sightings, jobs, now)
            lasts: dict[str, Millis | None] = {
                row.job: row.floor if row.newest is None else row.newest
                for row in connection.execute(self._sql.lasts, {"the_jobs": jobs})
            }
        return [
            Registration(since=since, last=lasts[sighting.job])
            for since, sighting in zip(sinces, sightings, strict=True)
        ]

    def _sight(
        self, connection: Connection, sightings: Sequence[Sighting], jobs: Sequence[str], now: Millis
    ) -> list[Millis]:
        known: dict[str, dict[str, tuple[Millis, int]]] = {job: {} for job in jobs}
        for row in connection.execute(self._sql.sights, {"the_jobs": jobs}):
            known[row.job][row.fingerprint] = row.since, row.turn
        changed: set[tuple[str, str]] = set()
        forgotten: set[tuple[str, str]] = set()
        sinces = []
        for sighting in sightings:
            job, fingerprint, of_job = sighting.job, sighting.fingerprint, known[sighting.job]
            latest = max((turn for _, turn in of_job.values()), default=0)
            since, turn = of_job.get(fingerprint, (now, 0))
            sinces.append(since)
            if turn == latest > 0:
                continue
            of_job[fingerprint] = since, latest + 1
            changed.add((job, fingerprint))
            if len(of_job) > FINGERPRINTS_KEPT:
                oldest = min(of_job, key=lambda name: of_job[name][1])
                del of_job[oldest]
                forgotten.add((job, oldest))
        if forgotten:
            rows = [{"the_job": job, "the_fingerprint": fingerprint} for job, fingerprint in sorted(forgotten)]
            connection.execute(self._sql.forget_sight, rows)
        sighted = [
            {"job": job, "fingerprint": fingerprint, "since": since, "turn": turn}
            for job, fingerprint in sorted(changed)
            if fingerprint in known[job]
            for since, turn in (known[job][fingerprint],)
        ]
        if sighted:
            connection.execute(self._sql.sighted, sighted)
        return sinces

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        def read(connection: Connection) -> Iterable[Row[Any]]:
            return connection.execute(self._sql.lapsed, {"now": self._time(connection), "the_limit": max(limit, 0)})

        return [
            LapsedClaim(job=row.job, slot=row.slot, attempt=row.attempt, abandoned=row.owner is None)
            for row in self._look(read)
        ]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        if not wishes:
            return []
        rows = [(w.job, w.slot, w.from_attempt, w.owner, w.beat, w.lease) for w in sorted(wishes, key=_key)]
        with self._writing() as connection:
            now = self._time(connection)
            taken = {
                (row.job, row.slot, row.owner, row.attempt)
                for row in self._execute(connection, self._sql.takeover, rows, now=now)
            }
        return [
            wish.from_attempt if (wish.job, wish.slot, wish.owner, wish.from_attempt) in taken else None
            for wish in wishes
        ]

    def tidy(self, keeps: Sequence[Keep]) -> int:
        if not keeps:
            return 0
        with self._reading() as connection:
            # Mostly there is nothing to drop: find out without keeping claims waiting.
            if not self._patiently(lambda: self._bounds(connection, keeps)):
                return 0
        with self._writing() as connection:
            connection.execute(self._sql.new_jobs, [{"job": job} for job in sorted({keep.job for keep in keeps})])
            self._floors(connection, (keep.job for keep in keeps))
            bounds = self._bounds(connection, keeps)
            if not bounds:
                return 0
            rows = [{"the_job": job, "the_bound": bound} for job, bound in sorted(bounds.items())]
            connection.execute(self._sql.raise_floor, rows)
            return connection.execute(self._sql.drop, rows).rowcount

    def _bounds(self, connection: Connection, keeps: Sequence[Keep]) -> dict[str, Millis]:
        """For each job that has something to drop, the slot up to which it goes."""
        alike: dict[tuple[int, Millis | None], list[tuple[str, Millis]]] = {}
        for keep in keeps:
            alike.setdefault((keep.history_size, keep.history_ttl), []).append((keep.job, keep.decided))
        now = self._time(connection)
        bounds: dict[str, Millis] = {}
        for (size, ttl), rows in alike.items():
            fresh_since = LOWEST if ttl is None else now - ttl
            found = self._execute(connection, self._sql.surplus, sorted(rows), size=size, fresh_since=fresh_since)
            for row in found:
                bound: Millis = row.decided if row.first_stays is None else min(row.decided, row.first_stays - 1)
                if row.oldest is not None and row.oldest <= bound:
                    bounds[row.job] = max(bound, bounds.get(row.job, bound))
        return bounds

    def beat_seen(self, beat: Beat) -> Millis:
        with self._writing() as connection:
            now = self._time(connection)
            connection.execute(self._sql.beat_seen, [{**vars(beat), "seen": now}])
            connection.execute(self._sql.old_beats, {"the_oldest": now - BEATS_KEPT})
        return now

    def beat_left(self, owner: str) -> None:
        with self._writing() as connection:
            connection.execute(self._sql.beat_left, {"the_owner": owner})

    def beats(self, within: Millis) -> list[Beat]:
        rows = self._look(lambda connection: connection.execute(self._sql.beats, {"within": within}))
        return [Beat(**row._mapping) for row in rows]

    # --- calls --------------------------------------------------------------------------------------------------------

    def _look(self, read: Callable[[Connection], Iterable[Row[Any]]]) -> list[Row[Any]]:
        """What *read* finds; nothing where there are no tables yet and we are not to make any."""
        try:
            with self._reading() as connection:
                return self._patiently(lambda: list(read(connection)))
        except NoTables:
            if not self._may_be_empty:
                raise
            return []

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._calling() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._calling() as connection:
            self._begin(connection)
            try:
                yield connection
            except BaseException:
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
                raise
            self._commit(connection)

    @contextmanager
    def _calling(self) -> Iterator[Connection]:
        try:
            with self._connection() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise self._error(error) from error

    def _execute(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], **values: Any
    ) -> list[Row[Any]]:
        """The rows that *statement* returns for the given ones."""
        found: list[Row[Any]] = []
        for some in _chunks(rows):
            found += connection.execute(statement, {"rows": some, **values}).fetchall()
        return found

    # --- names --------------------------------------------------------------------------------------------------------

    def _table_name(self, table: Any) -> tuple[str | None, str]:
        schema, dot, name = table.rpartition(".") if isinstance(table, str) else ("", "", "")
        if dot and not self._has_schemas:
            raise ConfigurationError(f"table={table!r}: {self.name} has no schemas; give a name without a dot")
        for part in (schema, name) if dot else (name,):
            if not _IDENTIFIER.fullmatch(part) or len(part) > _LONGEST_NAME or part.lower().startswith("sqlite_"):
                raise ConfigurationError(
                    f"table={table!r}: give a name of letters, digits and _, at most {_LONGEST_NAME} of them, not "
                    "beginning with a digit or sqlite_" + (", or schema.name" if self._has_schemas else "")
                )
        if name.lower().endswith(_SUFFIXES):
            raise ConfigurationError(
                f"table={table!r}: names ending in {', '.join(_SUFFIXES)} are for the tables beside it; choose another"
            )
        return schema or None, name


def _key(item: Any) -> _Key:
    return item.job, item.slot


def _first_two(row: Any) -> _Key:
    return row[0], row[1]


def _hold(hold: Hold) -> tuple[str, Millis, str, int]:
    return hold.job, hold.slot, hold.owner, hold.attempt


def _moment(at: Millis | None) -> datetime | None:
    return None if at is None else wire.moment(at)


def _chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[start : start + _ROWS_AT_ONCE] for start in range(0, len(items), _ROWS_AT_ONCE))
