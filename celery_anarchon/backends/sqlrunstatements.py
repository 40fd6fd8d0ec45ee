"""The statements of runs on their workers, over the tables of :mod:`.sqltables`, built once.

Belongs here: SQLAlchemy Core. Does not belong here: the order in which a transaction uses them (:mod:`.sqlruns`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Integer,
    and_,
    bindparam,
    case,
    delete,
    exists,
    false,
    literal,
    not_,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.types import TypeEngine

from celery_anarchon.backends.runs import JOB_REMOVED, RELEASED, WITHOUT_TERMS
from celery_anarchon.backends.sqltables import MADE, TERMS, Dialect, by_job, in_state, new_rows
from celery_anarchon.model import SETTLED, GateAnswer, Overlap, RunState

_CLAIMED, _QUEUED, _RUNNING = str(RunState.CLAIMED), str(RunState.QUEUED), str(RunState.RUNNING)
_RETRYING, _DISPATCHED = str(RunState.RETRYING), str(RunState.DISPATCHED)
_LOST, _LOST_IN_QUEUE = str(RunState.LOST), str(RunState.LOST_IN_QUEUE)

HANDED = ("job", "slot", "owner", "beat", "lease_until", *TERMS)
_KEY = ("job", "slot")
_FENCE = (*_KEY, "attempt", "retries", "token")


class RunStatements:
    """Every statement, built once, as :class:`.sqltables.Statements` are."""

    def __init__(self, dialect: Dialect) -> None:
        tables, given, text = dialect.tables, dialect._given, dialect._text
        self._fence: dict[str, TypeEngine[Any]] = {
            "job": text,
            "slot": BigInteger(),
            "attempt": Integer(),
            "retries": Integer(),
            "token": text,
        }
        self._runs = tables.runs
        self._now: ColumnElement[int] = bindparam("now", type_=BigInteger)
        runs, now = tables.runs, self._now
        r = runs.c
        the_job: ColumnElement[str] = bindparam("the_job", type_=text)
        key = r.job, r.slot
        running = in_state(runs, RunState.RUNNING)

        keys = given(job=text, slot=BigInteger())
        self.read = select(
            *(r[name] for name in (*_FENCE, "state", "reason")),
        ).where(self._same(keys))
        self._overlap(dialect)
        self._gate(dialect)

        held = given(**self._fence)
        fence = and_(self._same(held, *_FENCE), running)
        self.heartbeat = update(runs).where(fence).values(lease_until=now + r.run_lease).returning(*key)
        self.release = update(runs).where(fence).values(lease_until=now, token=null(), reason=RELEASED).returning(*key)
        ended = given(**self._fence, ending=text, why=text)
        self.settle = (
            update(runs)
            .where(self._same(ended, *_FENCE), running)
            .values(state=ended.c.ending, reason=ended.c.why, ended_at=now, lease_until=null(), patience=0)
            .returning(*key)
        )
        tried = given(**self._fence, delay=BigInteger())
        self.retrying = (
            update(runs)
            .where(self._same(tried, *_FENCE), running)
            .values(state=_RETRYING, lease_until=now + tried.c.delay + r.queue_timeout, patience=0)
            .returning(*key)
        )
        back = given(**self._fence, message_attempt=Integer())
        granted_more = back.c.attempt > back.c.message_attempt
        self.give_back = (
            update(runs)
            .where(self._same(back, *_FENCE), running)
            .values(
                state=case((granted_more, _CLAIMED), (r.retries > 0, _RETRYING), else_=_QUEUED),
                owner=case((granted_more, null()), else_=r.owner),
                retries=case((or_(granted_more, r.retries == 0), 0), else_=r.retries - 1),
                lease_until=case((granted_more, now), else_=now + r.queue_timeout),
                patience=0,
            )
            .returning(*key)
        )

        gone = given(job=text, slot=BigInteger(), attempt=Integer(), retries=Integer(), why=text)
        self.unstarted = (
            update(runs)
            .where(
                self._same(gone, *_KEY, "attempt"),
                or_(
                    in_state(runs, RunState.CLAIMED, RunState.QUEUED, RunState.DISPATCHED),
                    and_(in_state(runs, RunState.RETRYING), gone.c.retries > r.retries),
                ),
            )
            .values(state=_LOST_IN_QUEUE, reason=gone.c.why, ended_at=now, lease_until=null(), patience=0)
            .returning(*key)
        )
        end = given(job=text, slot=BigInteger(), attempt=Integer(), was=text, ending=text, why=text)
        queue_limit = case((r.run_lease.is_(None), literal(WITHOUT_TERMS, BigInteger)), else_=r.queue_timeout)
        # Of a job that nobody knows any more, nobody will publish the next attempt.
        orphan = and_(end.c.why == JOB_REMOVED, end.c.ending == _LOST)
        attempts_left = and_(running, r.max_attempts.is_not(None), r.attempt < r.max_attempts)
        ends = case(
            (and_(end.c.ending == _DISPATCHED, not_(in_state(runs, RunState.QUEUED))), false()),
            (orphan, r.lease_until + queue_limit <= now),
            else_=and_(not_(in_state(runs, RunState.CLAIMED)), not_(attempts_left)),
        )
        another = runs.alias("another_run")
        lives = exists().where(by_job(another) == by_job(runs), another.c.lease_until.is_not(None))
        waits_in_vain = and_(tables.waits, end.c.why == JOB_REMOVED, r.claimed_at + queue_limit <= now, not_(lives))
        self.end_lapsed = (
            update(runs)
            .where(
                self._same(end, *_KEY, "attempt"),
                r.state == end.c.was,
                case(
                    (end.c.ending == str(RunState.SUPERSEDED), waits_in_vain),
                    else_=and_(tables.held, tables.sweep_at <= now, ends),
                ),
            )
            .values(state=end.c.ending, reason=end.c.why, ended_at=now, lease_until=null(), patience=0)
            .returning(*key)
        )

        held_slots = select(another.c.slot).where(by_job(another) == the_job, another.c.lease_until.is_not(None))
        self.waiting = (
            select(*key)
            .where(tables.waits, not_(lives))
            .order_by(r.slot, r.job)
            .limit(bindparam("the_limit", type_=Integer))
        )
        self.living = select(runs).where(by_job(runs) == the_job, tables.alive).order_by(r.slot)
        self.release_job = (
            update(runs)
            .where(r.job == the_job, r.slot.in_(held_slots), tables.held)
            .values(state=_LOST, reason="released", ended_at=now, lease_until=null(), patience=0)
            .returning(*runs.c)
        )

        workers = tables.workers
        seen = dialect._insert(workers)
        self.worker_seen = seen.on_conflict_do_update(
            index_elements=[workers.c.owner],
            set_={name: seen.excluded[name] for name in ("label", "version", "queues", "seen")},
        )
        self.had_workers = dialect._insert(tables.meta).on_conflict_do_nothing()
        self.ever_had_workers = select(tables.meta.c.value).where(tables.meta.c.key == "workers")
        self.old_workers = delete(workers).where(workers.c.seen < bindparam("the_oldest", type_=BigInteger))
        self.worker_left = delete(workers).where(workers.c.owner == bindparam("the_owner", type_=text))
        self.workers = (
            select(workers)
            .where(workers.c.seen >= dialect._clock() - bindparam("within", type_=BigInteger))
            .order_by(workers.c.label, workers.c.owner)
        )

    def _same(self, asked: CTE, *names: str) -> ColumnElement[bool]:
        return and_(*(self._runs.c[name] == asked.c[name] for name in names or _KEY))

    def _overlap(self, dialect: Dialect) -> None:
        """W2 and W3: what :mod:`.sqloverlap` decides by and has written."""
        tables, given, runs, r, text = dialect.tables, dialect._given, self._runs, self._runs.c, dialect._text
        self.living_of = (
            select(r.job, r.slot, r.state)
            .where(by_job(runs).in_(bindparam("the_jobs", expanding=True, type_=text)), tables.alive)
            .order_by(r.job, r.slot)
        )
        made = given(**{name: r[name].type for name in MADE})
        self.make = new_rows(dialect, runs, made, **{name: made.c[name] for name in MADE}).returning(r.job, r.slot)
        waiting = given(job=text, slot=BigInteger())
        self.supersede = (
            update(runs)
            .where(self._same(waiting), tables.waits)
            .values(state=str(RunState.SUPERSEDED), ended_at=self._now, reason="newer-slot")
            .returning(r.job, r.slot)
        )
        handed = given(**{name: r[name].type for name in HANDED})
        self.hand_out = (
            update(runs)
            .where(self._same(handed), tables.waits)
            .values(state=_CLAIMED, claimed_at=self._now, **{name: handed.c[name] for name in HANDED[2:]})
            .returning(r.job, r.slot)
        )

    def _gate(self, dialect: Dialect) -> None:
        """W6 to W13, of a slot that has a record."""
        runs, now, r, text = self._runs, self._now, self._runs.c, dialect._text
        asked = dialect._given(
            **self._fence,
            worker=text,
            run_lease=BigInteger(),
            queue_timeout=BigInteger(),
            max_attempts=Integer(),
            overlap=text,
            acks_late=Integer(),
            late=BigInteger(),
        )
        another = runs.alias("another_run")
        elsewhere = exists().where(
            by_job(another) == asked.c.job, another.c.slot != asked.c.slot, another.c.lease_until.is_not(None)
        )

        running = in_state(runs, RunState.RUNNING)
        # "Is not distinct" throughout: what is null here is a no, and a no to a no is a yes.
        again = and_(running, r.token.is_not_distinct_from(asked.c.token), r.retries == asked.c.retries)
        settled = in_state(runs, *SETTLED)
        # Attempts that are not counted are granted to redeliveries of one message, which says what it always said.
        redelivered = and_(running, r.max_attempts.is_(None), asked.c.retries <= r.retries)
        stale = and_(asked.c.attempt < r.attempt, not_(redelivered))
        given_up = and_(
            in_state(runs, RunState.DISPATCHED), r.reason.is_not(None), asked.c.overlap != str(Overlap.ALLOW), elsewhere
        )
        unbegun = and_(in_state(runs, RunState.CLAIMED, RunState.QUEUED, RunState.DISPATCHED), not_(given_up))
        next_try = and_(in_state(runs, RunState.RUNNING, RunState.RETRYING), asked.c.retries > r.retries)
        lapsed = and_(running, r.lease_until.is_not(None), r.lease_until <= now)
        uncounted = or_(r.max_attempts.is_(None), and_(r.max_attempts.is_not(None), r.attempt < r.max_attempts))
        next_attempt = and_(lapsed, uncounted)
        starts = or_(again, and_(not_(stale), or_(unbegun, next_try, next_attempt)))

        # What the record says of its terms, or where it says nothing the message.
        own = r.run_lease.is_not(None)
        cap = case((own, r.max_attempts), else_=asked.c.max_attempts)
        queue_timeout = case((own, r.queue_timeout), else_=asked.c.queue_timeout)
        lease = case((own, r.run_lease), else_=asked.c.run_lease)
        counts = and_(not_(again), not_(next_try), next_attempt)
        granted = case((counts, r.attempt + 1), else_=r.attempt)
        self.start = (
            update(runs)
            .where(self._same(asked), starts)
            .values(
                state=_RUNNING,
                attempt=case((granted < asked.c.attempt, asked.c.attempt), else_=granted),
                retries=asked.c.retries,
                token=asked.c.token,
                worker=asked.c.worker,
                run_lease=lease,
                queue_timeout=queue_timeout,
                max_attempts=cap,
                overlap=case((own, r.overlap), else_=asked.c.overlap),
                lease_until=now + lease,
                # The broker will deliver it again: sweepers leave it alone so long.
                patience=case((and_(asked.c.acks_late == 1, cap.is_(None)), queue_timeout), else_=0),
                started_at=case((again, r.started_at), else_=now),
                sent_at=case((r.sent_at.is_(None), now), else_=r.sent_at),
                late=case((r.sent_at.is_(None), asked.c.late), else_=r.late),
                reason=null(),
                ended_at=null(),
            )
            .returning(r.job, r.slot, r.attempt)
        )

        # Another statement may have come between the two: what starts is left for the next look.
        verdict = case(
            (settled, str(GateAnswer.SETTLED)),
            (stale, str(GateAnswer.STALE)),
            (given_up, str(GateAnswer.OVERLAPS)),
            (lapsed, str(GateAnswer.USED_UP)),
            else_=str(GateAnswer.DUPLICATE),
        )
        used_up = and_(not_(stale), lapsed)
        self.refuse = (
            update(runs)
            .where(self._same(asked), not_(starts))
            .values(
                refusal=verdict,
                refused=r.refused + 1,
                state=case((used_up, _LOST), else_=r.state),
                reason=case((used_up, "attempts-used-up"), else_=r.reason),
                ended_at=case((used_up, now), else_=r.ended_at),
                lease_until=case((used_up, null()), else_=r.lease_until),
                patience=case((used_up, 0), else_=r.patience),
            )
            .returning(r.job, r.slot, r.attempt, r.refusal, r.worker)
        )
