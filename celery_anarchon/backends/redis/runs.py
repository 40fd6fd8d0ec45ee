"""The run on its worker, of the strategy ``lease``: the clauses W of :mod:`celery_anarchon.backends.runs` in Lua.

As in :mod:`.lease`: which arguments a script gets, and what its reply means. Overlap is not here: the claim's own
script decides it. All writes wait for the replicas where claims do: a start that a failover forgets is a second body.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from celery_anarchon.backends.redis.batches import ROWS_AT_ONCE, RedisBatches
from celery_anarchon.backends.redis.records import known, optional, read_optional, runs, terms_json
from celery_anarchon.backends.redis.scripts import Argument, script
from celery_anarchon.backends.redis.store import decoded, encoded
from celery_anarchon.backends.runs import (
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
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import UNSETTLED, GateAnswer, Millis, Run


class RedisRuns(RedisBatches, RunBackend):
    """The half of :class:`~celery_anarchon.backends.redis.lease.RedisLease` that workers use."""

    # --- the gate -----------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> list[StartResult]:
        replies = self._asked("start", starts, _question, before=(0,))
        where = self.describe()
        return [_start_result(reply, where) for (reply,) in replies]

    def tells_along(self) -> bool:
        return not self._source.sharded

    def settle_and_start(
        self, settlements: Sequence[Settlement], starts: Sequence[Start]
    ) -> tuple[list[bool], list[StartResult]]:
        if not self.tells_along() or max(len(settlements), len(starts)) > ROWS_AT_ONCE:
            return super().settle_and_start(settlements, starts)
        check_ends_of_a_body(settlements)
        rows = [(one, _end(one)) for one in settlements] + [(one, _question(one)) for one in starts]
        keys: list[bytes] = []
        args: list[Argument] = [len(settlements)]
        for one, said in rows:
            job = encoded(one.job)
            keys += self._keys.of(job)
            args += (job, one.slot, *said)
        (reply,) = self._reply([script("start")(keys, args)], writes=True, wait=True)
        found = self._rows("start", reply if isinstance(reply, list) else [], len(rows), reply)
        where, ended = self.describe(), len(settlements)
        return [done == 1 for done in found[:ended]], [_start_result(answer, where) for answer in found[ended:]]

    # --- what its holder says -----------------------------------------------------------------------------------------

    def heartbeat(self, holds: Sequence[RunHold]) -> list[bool]:
        return self._done("heartbeat", holds, _fence)

    def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        check_ends_of_a_body(settlements)
        return self._done("settle", settlements, _end)

    def retrying(self, tries: Sequence[NextTry]) -> list[bool]:
        return self._done("retrying", tries, lambda one: (*_fence(one), one.delay))

    def give_back(self, backs: Sequence[GiveBack]) -> list[bool]:
        return self._done("give_back", backs, lambda one: (*_fence(one), one.message_attempt))

    def release(self, holds: Sequence[RunHold]) -> list[bool]:
        return self._done("release", holds, _fence)

    # --- ends without a body ------------------------------------------------------------------------------------------

    def unstarted(self, messages: Sequence[Unstarted]) -> list[bool]:
        return self._done("unstarted", messages, lambda one: (one.attempt, one.retries, encoded(one.reason)))

    def end_lapsed(self, endings: Sequence[LapsedEnd]) -> list[bool]:
        check_ends_of_a_wait(endings)
        return self._done(
            "end_lapsed",
            endings,
            lambda one: (one.attempt, str(one.was), str(one.state), encoded(one.reason)),
            before=(WITHOUT_TERMS,),
        )

    def waiting(self, limit: int) -> list[Waiting]:
        found = [
            entry.split(b":", 1) for reply in self._of_all_shards("waiting", self._keys.free, limit) for entry in reply
        ]
        first = sorted((int(slot), job) for slot, job in found)[: max(limit, 0)]
        return [Waiting(job=decoded(job), slot=slot) for slot, job in first]

    def living(self, job: str) -> list[Run]:
        name = encoded(job)
        found = self._reply([script("living")([self._keys.runs(name), self._keys.living(name)], [])], writes=False)[0]
        alive = [run for run in runs(self.namespace, job, found) if run.state in UNSETTLED]
        return sorted(alive, key=lambda run: run.slot)

    def release_job(self, job: str) -> list[Run]:
        name = encoded(job)
        found = self._reply([script("release_job")(self._keys.of(name), [name])], writes=True, wait=True)[0]
        return runs(self.namespace, job, found)

    # --- presence -----------------------------------------------------------------------------------------------------

    def worker_seen(self, worker: Worker) -> Millis:
        entry = {"label": worker.label, "version": worker.version, "queues": worker.queues}
        keys = [self._keys.workers, self._keys.workers_seen, self._keys.workers_since]
        args: list[Argument] = [encoded(worker.owner), encoded(json.dumps(entry, ensure_ascii=False)), WORKERS_KEPT]
        return int(self._reply([script("worker_seen")(keys, args)], writes=True)[0])

    def worker_left(self, owner: str) -> None:
        keys = [self._keys.workers, self._keys.workers_seen]
        self._reply([script("beat_left")(keys, [encoded(owner)])], writes=True)

    def workers(self, within: Millis) -> list[Worker]:
        keys = [self._keys.workers, self._keys.workers_seen]
        found = self._reply([script("beats")(keys, [within])], writes=False)[0]
        workers = []
        for owner, seen, entry in zip(found[::3], found[1::3], found[2::3], strict=True):
            said = known(entry, Worker)
            queues = tuple(said.pop("queues", ()))
            workers.append(Worker(owner=decoded(owner), seen=int(seen), queues=queues, **said))
        return sorted(workers, key=lambda worker: (worker.label, worker.owner))

    def ever_had_workers(self) -> bool:
        return bool(self._reply([script("had_workers")([self._keys.workers_since], [])], writes=False)[0])


def _question(one: Start) -> tuple[Argument, ...]:
    return (
        *(one.attempt, one.retries, encoded(one.token), encoded(one.worker), terms_json(one.terms)),
        *(int(one.acks_late), "" if one.late is None else one.late, encoded(one.beat)),
    )


def _end(one: Settlement) -> tuple[Argument, ...]:
    return (*_fence(one), str(one.state), optional(one.reason))


def _start_result(reply: Any, where: str) -> StartResult:
    try:
        word, attempt, holder = reply.split(b" ", 2)
        return StartResult(_answer(word), int(attempt), read_optional(holder))
    except (AttributeError, ValueError) as error:
        # Neither yes nor no may be read into it.
        raise OutcomeUnknown(f"{where}: the answer was {reply!r}") from error


@lru_cache
def _answer(word: bytes) -> GateAnswer:
    return GateAnswer(word.decode())


def _fence(hold: RunHold) -> tuple[Argument, ...]:
    return hold.attempt, hold.retries, encoded(hold.token)
