"""The run on its worker, in plain dictionaries: the shortest text of the clauses W of :mod:`.runs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from celery_anarchon import wire
from celery_anarchon.backends.memorystore import MemoryStore, Record, Space
from celery_anarchon.backends.runs import (
    JOB_REMOVED,
    RELEASED,
    WITHOUT_TERMS,
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
from celery_anarchon.model import SETTLED, GateAnswer, Millis, Overlap, Run, RunState


class MemoryRuns(RunBackend):
    """The half of :class:`~celery_anarchon.backends.memory.MemoryBackend` that workers use."""

    _store: MemoryStore

    # --- the gate -----------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> list[StartResult]:
        with self._locked() as (space, now):
            return [self._start(space, now, start) for start in starts]

    def _start(self, space: Space, now: Millis, start: Start) -> StartResult:
        record = space.find(start.job, start.slot)
        if record is None and space.below_floor(start.job, start.slot):
            return StartResult(GateAnswer.TRIMMED)
        answer = GateAnswer.UNKNOWN if record is None else self._judge(record, now, start)
        if answer in (GateAnswer.START, GateAnswer.UNKNOWN):
            unguarded = record is None or (record.state is RunState.DISPATCHED and record.reason is not None)
            alone = start.terms.overlap is Overlap.ALLOW or not space.has_living(start.job, start.slot)
            if alone or not unguarded:
                return StartResult(answer, self._run_it(space, now, record, start))
            answer = GateAnswer.OVERLAPS
        if record is None:
            return StartResult(answer)
        record.refused += 1
        if answer is GateAnswer.USED_UP:
            self._settle_as(space, now, start.job, start.slot, RunState.LOST, "attempts-used-up")
        return StartResult(answer, record.attempt, record.worker if answer is GateAnswer.DUPLICATE else None)

    @staticmethod
    def _judge(record: Record, now: Millis, start: Start) -> GateAnswer:
        running = record.state is RunState.RUNNING
        if running and record.token == start.token and record.retries == start.retries:
            return GateAnswer.START
        if record.state in SETTLED:
            return GateAnswer.SETTLED
        uncounted = record.terms is not None and record.terms.max_attempts is None
        # Uncounted attempts are granted to redeliveries of one message, which says what it always said.
        redelivered = running and uncounted and start.retries <= record.retries
        if start.attempt < record.attempt and not redelivered:
            return GateAnswer.STALE
        if record.state in (RunState.CLAIMED, RunState.QUEUED, RunState.DISPATCHED):
            return GateAnswer.START
        if start.retries > record.retries and record.state is not RunState.WAITING:
            return GateAnswer.START
        if not running or not record.lapsed(now):
            return GateAnswer.DUPLICATE
        return GateAnswer.START if uncounted or record.attempts_left() else GateAnswer.USED_UP

    @staticmethod
    def _run_it(space: Space, now: Millis, record: Record | None, start: Start) -> int:
        if record is None:
            record = Record(RunState.CLAIMED, attempt=start.attempt, beat=start.beat)
        again = record.state is RunState.RUNNING and record.token == start.token
        if record.state is RunState.RUNNING and not again and start.retries <= record.retries:
            record.attempt += 1
        record.attempt = max(record.attempt, start.attempt)
        record.terms = record.terms or start.terms
        record.retries, record.token, record.worker = start.retries, start.token, start.worker
        record.reason, record.ended_at = None, None
        if not again:
            record.started_at = now
        if record.sent_at is None:
            record.sent_at, record.late = now, start.late
        space.put(start.job, start.slot, record, RunState.RUNNING, now + record.terms.lease)
        if start.acks_late and record.terms.max_attempts is None:
            record.patience = record.terms.queue_timeout
        return record.attempt

    # --- what its holder says -----------------------------------------------------------------------------------------

    def heartbeat(self, holds: Sequence[RunHold]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._heartbeat(space, now, hold) for hold in holds]

    def _heartbeat(self, space: Space, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or record.terms is None or not record.run_by(hold):
            return False
        record.lease_until = now + record.terms.lease
        return True

    def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        check_ends_of_a_body(settlements)
        with self._locked() as (space, now):
            return [self._settle(space, now, settlement) for settlement in settlements]

    def _settle(self, space: Space, now: Millis, settlement: Settlement) -> bool:
        record = space.find(settlement.job, settlement.slot)
        if record is None or not record.run_ended_by(settlement):
            return False
        if record.state is RunState.RUNNING:
            self._settle_as(space, now, settlement.job, settlement.slot, settlement.state, settlement.reason)
        return record.state is settlement.state

    def retrying(self, tries: Sequence[NextTry]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._retrying(space, now, a_try) for a_try in tries]

    def _retrying(self, space: Space, now: Millis, a_try: NextTry) -> bool:
        record = space.find(a_try.job, a_try.slot)
        if record is None or record.terms is None or not record.run_ended_by(a_try):
            return False
        if record.state is RunState.RUNNING:
            until = now + a_try.delay + record.terms.queue_timeout
            space.put(a_try.job, a_try.slot, record, RunState.RETRYING, until)
        return record.state is RunState.RETRYING

    def give_back(self, backs: Sequence[GiveBack]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._give_back(space, now, back) for back in backs]

    def _give_back(self, space: Space, now: Millis, back: GiveBack) -> bool:
        record = space.find(back.job, back.slot)
        if record is None or record.terms is None:
            return False
        state, retries, until = RunState.QUEUED, 0, now + record.terms.queue_timeout
        if back.attempt > back.message_attempt:
            state, until = RunState.CLAIMED, now
        elif back.retries:
            state, retries = RunState.RETRYING, back.retries - 1
        if not record.run_by(back):
            return record.state is state and record.run_ended_by(replace(back, retries=retries))
        record.retries = retries
        if state is RunState.CLAIMED:
            record.owner = None
        space.put(back.job, back.slot, record, state, until)
        return True

    def release(self, holds: Sequence[RunHold]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._release(space, now, hold) for hold in holds]

    @staticmethod
    def _release(space: Space, now: Millis, hold: RunHold) -> bool:
        record = space.find(hold.job, hold.slot)
        if record is None or not record.run_by(hold):
            return False
        record.lease_until, record.token, record.reason = now, None, RELEASED
        return True

    # --- ends without a body ------------------------------------------------------------------------------------------

    def unstarted(self, messages: Sequence[Unstarted]) -> list[bool]:
        with self._locked() as (space, now):
            return [self._unstarted(space, now, message) for message in messages]

    def _unstarted(self, space: Space, now: Millis, message: Unstarted) -> bool:
        record = space.find(message.job, message.slot)
        if record is None or record.attempt != message.attempt:
            return False
        if record.state is RunState.LOST_IN_QUEUE:
            return record.reason == message.reason
        unbegun = record.state in (RunState.CLAIMED, RunState.QUEUED, RunState.DISPATCHED)
        if not unbegun and not (record.state is RunState.RETRYING and message.retries > record.retries):
            return False
        self._settle_as(space, now, message.job, message.slot, RunState.LOST_IN_QUEUE, message.reason)
        return True

    def end_lapsed(self, endings: Sequence[LapsedEnd]) -> list[bool]:
        check_ends_of_a_wait(endings)
        with self._locked() as (space, now):
            return [self._end_lapsed(space, now, ending) for ending in endings]

    def _end_lapsed(self, space: Space, now: Millis, ending: LapsedEnd) -> bool:
        record = space.find(ending.job, ending.slot)
        if record is None or record.attempt != ending.attempt:
            return False
        if record.state is ending.state and record.reason == ending.reason:
            return True
        if RunState.WAITING in (record.state, ending.was) or ending.state is RunState.SUPERSEDED:
            return self._end_waiting(space, now, ending, record)
        if record.state is not ending.was or record.lease_until is None or record.sweep_at() > now:
            return False
        if ending.state is RunState.DISPATCHED and record.state is not RunState.QUEUED:
            return False
        if ending.state is RunState.LOST and ending.reason == JOB_REMOVED:
            patience = WITHOUT_TERMS if record.terms is None else record.terms.queue_timeout
            if record.lease_until + patience > now:
                return False
        elif record.state is RunState.CLAIMED or (record.state is RunState.RUNNING and record.attempts_left()):
            return False
        self._settle_as(space, now, ending.job, ending.slot, ending.state, ending.reason)
        return True

    def _end_waiting(self, space: Space, now: Millis, ending: LapsedEnd, record: Record) -> bool:
        asked = (record.state, ending.was, ending.state, ending.reason)
        if asked != (RunState.WAITING, RunState.WAITING, RunState.SUPERSEDED, JOB_REMOVED):
            return False
        patience = WITHOUT_TERMS if record.terms is None else record.terms.queue_timeout
        if (record.claimed_at or 0) + patience > now or space.has_living(ending.job, ending.slot):
            return False
        self._settle_as(space, now, ending.job, ending.slot, ending.state, ending.reason)
        return True

    def waiting(self, limit: int) -> list[Waiting]:
        with self._locked() as (space, _):
            free = sorted((slot, job) for job, slot in space.held_up if not space.has_living(job))
            return [Waiting(job=job, slot=slot) for slot, job in free[:limit]]

    def living(self, job: str) -> list[Run]:
        with self._locked() as (space, _):
            return [self._run(job, slot, record) for slot, record in space.living(job)]

    def release_job(self, job: str) -> list[Run]:
        with self._locked() as (space, now):
            held = [(slot, record) for slot, record in space.living(job) if record.state is not RunState.WAITING]
            for slot, _ in held:
                self._settle_as(space, now, job, slot, RunState.LOST, "released")
            return [self._run(job, slot, record) for slot, record in held]

    @staticmethod
    def _settle_as(space: Space, now: Millis, job: str, slot: Millis, state: RunState, reason: str | None) -> None:
        record = space.runs[job][slot]
        record.ended_at, record.reason = now, reason
        space.put(job, slot, record, state)

    # --- presence -----------------------------------------------------------------------------------------------------

    def worker_seen(self, worker: Worker) -> Millis:
        with self._locked() as (space, now):
            space.workers[worker.owner] = replace(worker, seen=now)
            space.had_workers = True
            for owner, known in list(space.workers.items()):
                if known.seen < now - WORKERS_KEPT:
                    del space.workers[owner]
            return now

    def worker_left(self, owner: str) -> None:
        with self._locked() as (space, _):
            space.workers.pop(owner, None)

    def workers(self, within: Millis) -> list[Worker]:
        with self._locked() as (space, now):
            seen = [worker for worker in space.workers.values() if worker.seen >= now - within]
            return sorted(seen, key=lambda worker: (worker.label, worker.owner))

    def ever_had_workers(self) -> bool:
        with self._locked() as (space, _):
            return space.had_workers

    # --- small things -------------------------------------------------------------------------------------------------

    def _run(self, job: str, slot: Millis, record: Record) -> Run:
        def moment(at: Millis | None) -> datetime | None:
            return None if at is None else wire.moment(at)

        blocker = record.blocked_by
        return Run(
            job=job,
            slot=wire.moment(slot),
            run_id=wire.run_id(self.namespace, job, slot),
            state=record.state,
            reason=record.reason,
            attempt=record.attempt,
            claimed_at=moment(record.claimed_at),
            sent_at=moment(record.sent_at),
            started_at=moment(record.started_at),
            ended_at=moment(record.ended_at),
            late=None if record.late is None else record.late / 1000,
            beat=record.beat or None,
            worker=record.worker,
            blocked_by=None if blocker is None else wire.run_id(self.namespace, job, blocker),
            refused=record.refused,
        )

    @contextmanager
    def _locked(self) -> Iterator[tuple[Space, Millis]]:
        """The one atomic step: this namespace and the store's time, for nobody else meanwhile."""
        with self._store.lock:
            yield self._store.spaces[self.namespace], self._store.clock.wall()
