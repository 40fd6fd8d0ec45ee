"""The five tables of a namespace on a SQL store, and every statement over them, built once.

Belongs here: SQLAlchemy Core. Does not belong here: the order in which a transaction uses the statements
(:mod:`.sql`), and what a dialect does in its own way.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    bindparam,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.types import TypeEngine

from celery_anarchon.backends.base import GIVEN_UP, NEVER_A_RUN
from celery_anarchon.model import UNSETTLED, Millis, RunState

_NO_MESSAGE = sorted(str(state) for state in GIVEN_UP | NEVER_A_RUN)
_CLAIMED = str(RunState.CLAIMED)
_DISPATCHED = str(RunState.DISPATCHED)
LOWEST: Millis = -(2**63)
"""Below every slot."""


class Dialect(Protocol):
    """What the statements need of a dialect; see :class:`.sql.SqlBackend`."""

    tables: Tables
    _text: TypeEngine[str]

    def _clock(self) -> ColumnElement[int]: ...

    def _insert(self, table: Table) -> Any: ...

    def _given(self, **columns: TypeEngine[Any]) -> CTE: ...


class Tables:
    """The five tables of a namespace. Every instant and duration is a BIGINT of milliseconds."""

    def __init__(self, name: str, schema: str | None, text: TypeEngine[str]) -> None:
        self.metadata = MetaData(schema=schema)
        self.runs = Table(
            name,
            self.metadata,
            Column("job", text, primary_key=True),
            Column("slot", BigInteger, primary_key=True, autoincrement=False),
            Column("state", String(16), nullable=False),
            Column("owner", text),  # who holds it, or who ended it; null: abandoned, or never a run
            Column("attempt", Integer, nullable=False),
            Column("lease_until", BigInteger),
            Column("claimed_at", BigInteger),
            Column("sent_at", BigInteger),
            Column("ended_at", BigInteger),
            Column("late", BigInteger),
            Column("beat", text),
            Column("reason", text),
            sqlite_with_rowid=False,
        )
        held = self.runs.c.lease_until.is_not(None)
        # Only held claims are in it, so that a look for lapsed ones costs the same however long the past is.
        Index(f"{name}_lease", self.runs.c.lease_until, sqlite_where=held, postgresql_where=held)
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
        claimed = runs.c.state == _CLAIMED

        def same(asked: CTE, *names: str) -> ColumnElement[bool]:
            return and_(*(runs.c[name] == asked.c[name] for name in ("job", "slot", *names)))

        self.now = select(dialect._clock())
        # From a table, so that the answer comes from the store and not from its driver.
        self.ping = self.now.select_from(tables.meta).limit(1)
        self.floors = select(jobs.c.job, jobs.c.floor).where(jobs.c.job.in_(the_jobs), jobs.c.floor.is_not(None))

        def new(table: Table, rows: CTE, **columns: Any) -> Any:
            # SQLite takes ON CONFLICT after a SELECT for a join's ON unless there is a WHERE.
            source = select(*columns.values()).select_from(rows).where(true())
            return insert(table).from_select(list(columns), source).on_conflict_do_nothing()

        new_claims = given(job=text, slot=BigInteger(), owner=text, lease=BigInteger(), beat=text)
        self.claim = new(
            runs,
            new_claims,
            job=new_claims.c.job,
            slot=new_claims.c.slot,
            state=literal(_CLAIMED, String(16)),
            owner=new_claims.c.owner,
            attempt=literal(1, Integer),
            lease_until=now + new_claims.c.lease,
            claimed_at=now,
            beat=new_claims.c.beat,
        ).returning(runs.c.job, runs.c.slot, runs.c.owner)
        outcomes = given(job=text, slot=BigInteger(), state=text, beat=text, reason=text)
        self.record = new(
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
        sent, holds = of_holder(("late", BigInteger()))
        self.confirm = (
            update(runs)
            .where(holds)
            .values(state=_DISPATCHED, lease_until=null(), sent_at=now, late=sent.c.late)
            .returning(*key)
        )
        _, holds = of_holder()
        self.abandon = update(runs).where(holds).values(owner=null(), lease_until=now).returning(*key)
        ending, holds = of_holder(("ending", text), ("why", text))
        self.give_up = (
            update(runs)
            .where(holds)
            .values(state=ending.c.ending, reason=ending.c.why, lease_until=null(), ended_at=now)
            .returning(*key)
        )
        wish = given(job=text, slot=BigInteger(), attempt=Integer(), owner=text, beat=text, lease=BigInteger())
        self.takeover = (
            update(runs)
            .where(same(wish, "attempt"), claimed, or_(runs.c.lease_until <= now, runs.c.owner == wish.c.owner))
            .values(owner=wish.c.owner, beat=wish.c.beat, lease_until=now + wish.c.lease)
            .returning(*key)
        )
        self.lapsed = (
            select(runs.c.job, runs.c.slot, runs.c.attempt, runs.c.owner)
            .where(runs.c.lease_until <= now, claimed)
            .order_by(runs.c.lease_until, runs.c.job, runs.c.slot)
            .limit(bindparam("the_limit", type_=Integer))
        )

        newest_first = select(runs).where(runs.c.job == the_job).order_by(runs.c.slot.desc())
        self.history = newest_first.limit(bindparam("the_limit", type_=Integer))
        self.last_run = newest_first.where(runs.c.state.not_in(_NO_MESSAGE)).limit(1)

        sightings = given(job=text)
        self.new_jobs = new(jobs, sightings, job=sightings.c.job)
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
        outer.c.state.in_(sorted(str(state) for state in UNSETTLED)),
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
