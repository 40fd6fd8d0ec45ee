"""The six tables of a namespace on a SQL store, and the statements of beats over them, built once.

Belongs here: SQLAlchemy Core. Does not belong here: the order in which a transaction uses the statements
(:mod:`.sqlclaims`, :mod:`.sql`), the statements of workers (:mod:`.sqlrunstatements`), and what a dialect does in its
own way.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    FromClause,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.types import TypeEngine

from celery_anarchon.backends.base import NO_MESSAGE
from celery_anarchon.model import UNSETTLED, Millis, RunState

_CLAIMED = str(RunState.CLAIMED)
_DISPATCHED = str(RunState.DISPATCHED)
_QUEUED = str(RunState.QUEUED)
LOWEST: Millis = -(2**63)
"""Below every slot."""
TERMS = ("run_lease", "queue_timeout", "max_attempts", "overlap")
"""The columns of what a job asks of its runs."""
MADE = (
    *("job", "slot", "state", "owner", "attempt", "lease_until", "patience", "claimed_at", "sent_at", "ended_at"),
    *("late", "beat", "reason", *TERMS, "retries", "token", "worker", "started_at", "blocked_by"),
)
"""The columns of a row that is made whole."""


class Dialect(Protocol):
    """What the statements need of a dialect; see :class:`.sqlstore.SqlStore`."""

    tables: Tables
    _text: TypeEngine[str]

    def _clock(self) -> ColumnElement[int]: ...

    def _insert(self, table: Table) -> Any: ...

    def _given(self, **columns: TypeEngine[Any]) -> CTE: ...


def in_state(runs: FromClause, *states: RunState) -> ColumnElement[bool]:
    # Literals: whether a partial index may be used must not depend on a parameter. SQLite would otherwise prepare each
    # statement anew for each call.
    words = [literal_column(f"'{state}'", String) for state in sorted(states)]
    column: ColumnElement[str] = runs.c.state
    return column == words[0] if len(words) == 1 else column.in_(words)


def by_job(runs: FromClause) -> ColumnElement[str]:
    """The job, for a look at its unsettled runs only."""
    # Not the column: of two indexes that begin with one column SQLite takes the primary key, and walks the settled.
    job: ColumnElement[str] = runs.c.job
    return job.concat(literal_column("''"))


class Tables:
    """The six tables of a namespace. Every instant and duration is a BIGINT of milliseconds."""

    def __init__(self, name: str, schema: str | None, text: TypeEngine[str]) -> None:
        self.metadata = MetaData(schema=schema)
        self.runs = Table(
            name,
            self.metadata,
            Column("job", text, primary_key=True),
            Column("slot", BigInteger, primary_key=True, autoincrement=False),
            Column("state", String(16), nullable=False),
            Column("owner", text),  # the beat that holds it, or ended it; null: abandoned, or never a run
            Column("attempt", Integer, nullable=False),
            # Of every unsettled run but a waiting one, and of no other; in a queue: when it is given up.
            Column("lease_until", BigInteger),
            Column("patience", BigInteger, nullable=False, server_default="0"),  # sweepers wait so long after the lease
            Column("claimed_at", BigInteger),
            Column("sent_at", BigInteger),
            Column("ended_at", BigInteger),
            Column("late", BigInteger),
            Column("beat", text),
            Column("reason", text),
            # The rest is of runs that are followed on their workers; run_lease is null: it is not.
            Column("run_lease", BigInteger),
            Column("queue_timeout", BigInteger),
            Column("max_attempts", Integer),
            Column("overlap", String(16)),
            Column("retries", Integer, nullable=False, server_default="0"),
            Column("token", text),  # the delivery that holds it on a worker, or ended it there
            Column("worker", text),
            Column("started_at", BigInteger),
            Column("blocked_by", BigInteger),  # the slot whose run this one would have overlapped
            Column("refused", Integer, nullable=False, server_default="0"),
            Column("refusal", String(16)),  # why the gate refused it last
            sqlite_with_rowid=False,
        )
        # What is settled is in none of these, so that a look costs the same however long the past is.
        self.held = self.runs.c.lease_until.is_not(None)
        self.sweep_at = self.runs.c.lease_until + self.runs.c.patience
        self.waits = in_state(self.runs, RunState.WAITING)
        self.alive = or_(self.held, self.waits)
        for suffix, where, columns in (
            ("_lease", self.held, [self.sweep_at]),
            ("_alive", self.alive, [by_job(self.runs), self.runs.c.slot]),
            ("_waits", self.waits, [self.runs.c.slot, self.runs.c.job]),
        ):
            Index(name + suffix, *columns, sqlite_where=where, postgresql_where=where)
        self.jobs = Table(
            name + "_jobs",
            self.metadata,
            Column("job", text, primary_key=True),
            Column("floor", BigInteger),
            sqlite_with_rowid=False,
        )
        self.sights = Table(
            name + "_sights",
            self.metadata,
            Column("job", text, primary_key=True),
            Column("fingerprint", text, primary_key=True),
            Column("since", BigInteger, nullable=False),
            Column("turn", BigInteger, nullable=False),  # the highest of a job was sighted last
            sqlite_with_rowid=False,
        )
        self.beats = Table(
            name + "_beats",
            self.metadata,
            Column("owner", text, primary_key=True),
            Column("label", text, nullable=False),
            Column("version", text, nullable=False),
            Column("skew", BigInteger, nullable=False),
            Column("schedule", text, nullable=False),
            Column("zones", text, nullable=False),
            Column("seen", BigInteger, nullable=False),
        )
        self.workers = Table(
            name + "_workers",
            self.metadata,
            Column("owner", text, primary_key=True),
            Column("label", text, nullable=False),
            Column("version", text, nullable=False),
            Column("queues", text, nullable=False),  # a JSON array
            Column("seen", BigInteger, nullable=False),
        )
        self.meta = Table(
            name + "_meta",
            self.metadata,
            Column("key", text, primary_key=True),
            Column("value", text, nullable=False),
        )


class Statements:
    """Every statement, built once: SQLAlchemy then compiles each once, and the driver prepares each once."""

    def __init__(self, dialect: Dialect) -> None:
        tables, insert, given, text = dialect.tables, dialect._insert, dialect._given, dialect._text
        runs, jobs, sights, beats = tables.runs, tables.jobs, tables.sights, tables.beats
        now: ColumnElement[int] = bindparam("now", type_=BigInteger)
        the_job: ColumnElement[str] = bindparam("the_job", type_=text)
        the_jobs = bindparam("the_jobs", expanding=True, type_=text)
        claimed = in_state(runs, RunState.CLAIMED)

        def same(asked: CTE, *names: str) -> ColumnElement[bool]:
            return and_(*(runs.c[name] == asked.c[name] for name in ("job", "slot", *names)))

        self.now = select(dialect._clock())
        # From a table, so that the answer comes from the store and not from its driver.
        self.ping = self.now.select_from(tables.meta).limit(1)
        floored = given(job=text)
        self.floors = select(jobs.c.job, jobs.c.floor).where(jobs.c.job == floored.c.job, jobs.c.floor.is_not(None))

        def claim(*terms: str) -> Any:
            asked: dict[str, TypeEngine[Any]] = {"job": text, "slot": BigInteger(), "owner": text, "beat": text}
            new = given(**asked, lease=BigInteger(), **{name: runs.c[name].type for name in terms})
            return new_rows(
                dialect,
                runs,
                new,
                **{name: new.c[name] for name in (*asked, *terms)},
                state=literal(_CLAIMED, String(16)),
                attempt=literal(1, Integer),
                lease_until=now + new.c.lease,
                claimed_at=now,
            ).returning(runs.c.job, runs.c.slot, runs.c.owner)

        self.claim, self.claim_followed = claim(), claim(*TERMS)
        outcomes = given(job=text, slot=BigInteger(), state=text, beat=text, reason=text)
        self.record = new_rows(
            dialect,
            runs,
            outcomes,
            **{name: outcomes.c[name] for name in ("job", "slot", "state", "beat", "reason")},
            attempt=literal(1, Integer),
            ended_at=now,
        )
        keys = given(job=text, slot=BigInteger())
        self.read = select(runs.c.job, runs.c.slot, runs.c.state, runs.c.owner, runs.c.attempt).where(same(keys))
        asked = given(job=text, slot=BigInteger(), owner=text, lease=BigInteger())
        self.renew = (
            update(runs)
            .where(same(asked, "owner"), claimed)
            .values(lease_until=now + asked.c.lease)
            .returning(runs.c.job, runs.c.slot, runs.c.owner, runs.c.attempt)
        )

        def of_holder(*columns: tuple[str, TypeEngine[Any]]) -> tuple[CTE, ColumnElement[bool]]:
            held = given(job=text, slot=BigInteger(), owner=text, attempt=Integer(), **dict(columns))
            return held, and_(same(held, "owner", "attempt"), claimed)

        key = (runs.c.job, runs.c.slot, runs.c.owner, runs.c.attempt, runs.c.state)

        def confirm(*delays: tuple[str, TypeEngine[Any]]) -> Any:
            sent, holds = of_holder(("late", BigInteger()), *delays)
            eta = now + sent.c.delay if delays else now
            return (
                update(runs)
                .where(holds)
                .values(
                    state=case((runs.c.run_lease.is_(None), _DISPATCHED), else_=_QUEUED),
                    # Null where the run is not followed.
                    lease_until=eta + runs.c.queue_timeout,
                    # Those of the first publish: a later attempt leaves them.
                    sent_at=func.coalesce(runs.c.sent_at, now),
                    late=case((runs.c.sent_at.is_(None), sent.c.late), else_=runs.c.late),
                )
                .returning(*key)
            )

        # Most messages have no ETA, and each parameter of a large batch counts.
        self.confirm, self.confirm_delayed = confirm(), confirm(("delay", BigInteger()))
        _, holds = of_holder()
        self.abandon = update(runs).where(holds).values(owner=null(), lease_until=now).returning(*key)
        ending, holds = of_holder(("ending", text), ("why", text))
        # A later attempt has had a body.
        unbegun = or_(ending.c.ending != str(RunState.MISFIRE), ending.c.attempt == 1)
        self.give_up = (
            update(runs)
            .where(holds, unbegun)
            .values(state=ending.c.ending, reason=ending.c.why, lease_until=null(), ended_at=now)
            .returning(*key)
        )
        wish = given(job=text, slot=BigInteger(), attempt=Integer(), owner=text, beat=text, lease=BigInteger())
        # A run that was started goes on as its next attempt; a claim keeps its own.
        started = and_(in_state(runs, RunState.RUNNING), runs.c.attempt < runs.c.max_attempts)
        lapsed = and_(runs.c.lease_until <= now, runs.c.attempt == wish.c.attempt)
        just_taken = and_(
            runs.c.owner == wish.c.owner,
            or_(runs.c.attempt == wish.c.attempt, runs.c.attempt == wish.c.attempt + 1),
        )
        self.takeover = (
            update(runs)
            .where(same(wish), or_(and_(lapsed, or_(started, claimed)), and_(claimed, just_taken)))
            .values(
                state=_CLAIMED,
                owner=wish.c.owner,
                beat=wish.c.beat,
                token=null(),
                lease_until=now + wish.c.lease,
                patience=0,
                attempt=case((started, runs.c.attempt + 1), else_=runs.c.attempt),
                retries=case((started, 0), else_=runs.c.retries),
                reason=case((started, null()), else_=runs.c.reason),
            )
            .returning(*key)
        )
        self.lapsed = (
            select(
                *(runs.c[name] for name in ("job", "slot", "attempt", "owner", "state", "max_attempts", "reason")),
            )
            .where(tables.sweep_at <= now, tables.held)
            .order_by(tables.sweep_at, runs.c.job, runs.c.slot)
            .limit(bindparam("the_limit", type_=Integer))
        )

        newest_first = select(runs).where(runs.c.job == the_job).order_by(runs.c.slot.desc())
        self.history = newest_first.limit(bindparam("the_limit", type_=Integer))
        self.last_run = newest_first.where(not_(in_state(runs, *NO_MESSAGE))).limit(1)

        sightings = given(job=text)
        self.new_jobs = new_rows(dialect, jobs, sightings, job=sightings.c.job)
        self.sights = select(sights).where(sights.c.job.in_(the_jobs))
        sighted = insert(sights)
        self.sighted = sighted.on_conflict_do_update(
            index_elements=[sights.c.job, sights.c.fingerprint],
            # Who comes first says since when. Moving it would fire, or skip, the past.
            set_={"turn": sighted.excluded.turn},
        )
        self.forget_sight = delete(sights).where(
            sights.c.job == the_job, sights.c.fingerprint == bindparam("the_fingerprint", type_=text)
        )
        newest = select(func.max(runs.c.slot)).where(runs.c.job == jobs.c.job).scalar_subquery()
        self.lasts = select(jobs.c.job, jobs.c.floor, newest.label("newest")).where(jobs.c.job.in_(the_jobs))

        self.surplus = _surplus(runs, given(job=text, decided=BigInteger()))
        below = and_(runs.c.job == the_job, runs.c.slot <= bindparam("the_bound", type_=BigInteger))
        highest = select(func.max(runs.c.slot)).where(below).scalar_subquery()
        self.raise_floor = update(jobs).where(jobs.c.job == the_job).values(floor=highest)
        self.drop = delete(runs).where(below)

        seen = insert(beats)
        self.beat_seen = seen.on_conflict_do_update(
            index_elements=[beats.c.owner],
            set_={name: seen.excluded[name] for name in ("label", "version", "skew", "schedule", "zones", "seen")},
        )
        self.old_beats = delete(beats).where(beats.c.seen < bindparam("the_oldest", type_=BigInteger))
        self.beat_left = delete(beats).where(beats.c.owner == bindparam("the_owner", type_=text))
        self.beats = (
            select(beats)
            .where(beats.c.seen >= dialect._clock() - bindparam("within", type_=BigInteger))
            .order_by(beats.c.label, beats.c.owner)
        )


def _surplus(runs: Table, keeps: CTE) -> Any:
    """For each job its oldest slot, and the first that must stay whatever `decided` says: an unsettled one, or one that
    is among the `size` newest and not too old. Below that one everything may go."""
    inner, outer = runs.alias("inner_runs"), runs.alias("outer_runs")
    first_over = (
        select(inner.c.slot)
        .where(inner.c.job == keeps.c.job)
        .order_by(inner.c.slot.desc())
        .limit(1)
        .offset(bindparam("size", type_=Integer))
        .correlate(keeps)
        .scalar_subquery()
    )
    stays = or_(
        in_state(outer, *UNSETTLED),
        and_(
            outer.c.slot > func.coalesce(first_over, literal(LOWEST, BigInteger)),
            func.coalesce(outer.c.ended_at, outer.c.sent_at, outer.c.claimed_at)
            >= bindparam("fresh_since", type_=BigInteger),
        ),
    )
    first_stays = select(func.min(outer.c.slot)).where(outer.c.job == keeps.c.job, stays).correlate(keeps)
    oldest = select(func.min(inner.c.slot)).where(inner.c.job == keeps.c.job).correlate(keeps)
    return select(
        keeps.c.job,
        keeps.c.decided,
        first_stays.scalar_subquery().label("first_stays"),
        oldest.scalar_subquery().label("oldest"),
    )


def new_rows(dialect: Dialect, table: Table, rows: CTE, **columns: Any) -> Any:
    """An INSERT of *rows* that leaves alone what is there."""
    # SQLite takes ON CONFLICT after a SELECT for a join's ON unless there is a WHERE.
    source = select(*columns.values()).select_from(rows).where(true())
    return dialect._insert(table).from_select(list(columns), source).on_conflict_do_nothing()
