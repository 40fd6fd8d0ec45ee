"""The run on its worker, of the strategy ``lease``: the clauses W of :mod:`celery_anarchon.backends.runs` in Lua.

As in :mod:`.lease`: which arguments a script gets, and what its reply means. Overlap is not here: the claim's own
script decides it. All writes wait for the replicas where claims do: a start that a failover forgets is a second body.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from celery_anarchon.backends.redis.batches import ROWS_AT_ONCE, RedisBatches
from celery_anarchon.backends.redis.keys import decoded, encoded
from celery_anarchon.backends.redis.records import known, optional, runs, terms_json
from celery_anarchon.backends.redis.scripts import Argument, Call, script
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

RECORDED = ord("1")
"""Of an end, in the reply of the gate's script."""

kept = lru_cache(maxsize=1024)(encoded)
"""For words that come again and again."""


class RedisRuns(RedisBatches, RunBackend):
    """The half of :class:`~celery_anarchon.backends.redis.lease.RedisLease` that workers use."""

    # --- the gate -----------------------------------------------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> list[StartResult]:
        return self._in_calls("start", starts, lambda some: self._start_call((), some), self._start_results, wait=True)

    def tells_along(self) -> bool:
        return not self._source.sharded

    def settle_and_start(
        self, settlements: Sequence[Settlement], starts: Sequence[Start]
    ) -> tuple[list[bool], list[StartResult]]:
        ended = len(settlements)
        if self._source.sharded or ended + len(starts) > ROWS_AT_ONCE:
            return super().settle_and_start(settlements, starts)
        check_ends_of_a_body(settlements)
        (reply,) = self._reply([self._start_call(settlements, starts)], writes=True, wait=True)
        results = self._start_results(reply, ended)
        ends = reply[:ended] if isinstance(reply, bytes) else b""
        if len(results) != len(starts) or len(ends) != ended or ends.strip(b"01"):
            raise OutcomeUnknown(f"{self.describe()}: start was answered {str(reply)[:200]}")
        return [end == RECORDED for end in ends], results

    def _start_call(self, settlements: Sequence[Settlement], starts: Sequence[Start]) -> Call:
        keys: list[bytes] = []
        args: list[Argument] = [b"%d" % len(settlements)]
        for end in settlements:
            job, its_keys = self._keys.named(end.job)
            keys += its_keys
            args += (job, b"%d" % end.slot, *_end(end))
        for start in starts:
            job, its_keys = self._keys.named(start.job)
            keys += its_keys
            args += (job, b"%d" % start.slot, *_question(start))
        return script("start")(keys, args)

    def _start_results(self, reply: Any, ended: int = 0) -> list[StartResult]:
        """What it says behind the ends."""
        if not isinstance(reply, bytes):
            return []
        words = reply[ended:].split()
        try:
            if len(words) == 3:
                # What a worker asks before each run.
                return [_start_result(*words)]
            return [_start_result(*words[at : at + 3]) for at in range(0, len(words), 3)]
        except (TypeError, ValueError) as error:
            # Neither yes nor no may be read into it.
            raise OutcomeUnknown(f"{self.describe()}: the answer was {reply!r}") from error

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


def _question(one: Start) -> tuple[bytes, ...]:
    return (
        b"%d" % one.attempt,
        b"%d" % one.retries,
        encoded(one.token),
        kept(one.worker),
        kept(terms_json(one.terms)),
        b"1" if one.acks_late else b"0",
        b"" if one.late is None else b"%d" % one.late,
        kept(one.beat),
    )


def _end(one: Settlement) -> tuple[bytes, ...]:
    return (
        b"%d" % one.attempt,
        b"%d" % one.retries,
        encoded(one.token),
        kept(one.state),
        optional(one.reason),
    )


@lru_cache
def _start_result(answer: bytes, attempt: bytes, holder: bytes) -> StartResult:
    """Kept: nearly all are alike."""
    where = decoded(unquote_to_bytes(holder[1:])) if holder[:1] == b"=" else None
    return StartResult(GateAnswer(answer.decode()), int(attempt), where)


def _fence(hold: RunHold) -> tuple[Argument, ...]:
    return hold.attempt, hold.retries, encoded(hold.token)
