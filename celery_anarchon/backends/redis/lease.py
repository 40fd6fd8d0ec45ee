"""The strategy ``lease``: every clause of the contract in Lua, one script for each operation.

Belongs here: which keys and arguments a script gets, and what its reply means. The scripts are in ``lua/``.

Why it is exact. A script is one atomic step of the server, with the server's time in it. Each row of a batch is
decided by what stands there when its turn comes, and asking again with the same owner gives the same answer. Outside a
cluster a batch is one script call; in a cluster, where a call must keep to one node, it is one for each shard, and all
calls for a node go in one round trip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

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
    Traits,
)
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.store import SHARDS, RedisStore, chunks, decoded, encoded, logger
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import UNSETTLED, Answer, Millis, Run, RunState

_NO_MESSAGE = sorted(str(state) for state in GIVEN_UP | NEVER_A_RUN)
_UNSETTLED = ",".join(sorted(str(state) for state in UNSETTLED))

_ROWS_AT_ONCE = 1_000
"""Rows of one script call: the server does nothing else meanwhile. More calls still go in one round trip."""

_DROPPED_AT_ONCE = 5_000
"""Records that one call of ``tidy`` drops, for the same reason."""

_Item = TypeVar("_Item")


class RedisLease(RedisStore, LeaseBackend):
    """See the module."""

    traits = Traits(leases=True, horizon=None, server_time=True, durable=True, any_job_name=True, history_by_age=True)

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        replies = self._each(
            "claim",
            requests,
            lambda job: (self._lease_key(job), self._keys.runs(job), self._keys.slots(job)),
            lambda job, one: (job, one.slot, encoded(one.owner), encoded(one.beat), one.lease),
            before=(self.early_tolerance,),
            width=2,
            wait=True,
        )
        return [ClaimResult(self._answer(answer), int(attempt)) for answer, attempt in replies]

    def _answer(self, word: bytes) -> Answer:
        try:
            return Answer(decoded(word))
        except ValueError as error:
            # Neither yes nor no may be read into it.
            raise OutcomeUnknown(f"{self.describe()}: a claim was answered {word!r}") from error

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        return self._ended("confirm", confirmations, lambda one: (one.late,))

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        return self._ended("abandon", holds, lambda one: ())

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        for ending in endings:
            if ending.state not in GIVEN_UP:
                raise ValueError(f"a claim cannot be given up as {ending.state}")
        return self._ended("give_up", endings, lambda one: (str(one.state), _optional(one.reason)))

    def _ended(self, name: str, holds: Sequence[Any], more: Callable[[Any], tuple[Argument, ...]]) -> list[bool]:
        replies = self._each(
            name,
            holds,
            lambda job: (self._lease_key(job), self._keys.runs(job)),
            lambda job, one: (job, one.slot, encoded(one.owner), one.attempt, *more(one)),
            wait=True,
        )
        return [done == 1 for (done,) in replies]

    def record(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.state not in NEVER_A_RUN:
                raise ValueError(f"{outcome.state} is no state of a slot that never became a run")
        self._each(
            "record",
            outcomes,
            lambda job: (self._keys.runs(job), self._keys.slots(job)),
            lambda job, one: (one.slot, str(one.state), _optional(one.reason), encoded(one.beat)),
            wait=True,
        )

    def history(self, job: str, limit: int) -> list[Run]:
        return self._history(job, limit, sent_only=False)

    def last_run(self, job: str) -> Run | None:
        return next(iter(self._history(job, 1, sent_only=True)), None)

    def _history(self, job: str, limit: int, *, sent_only: bool) -> list[Run]:
        name = encoded(job)
        keys = self._keys.runs(name), self._keys.slots(name)
        call = script("history")(keys, [max(limit, 0), int(sent_only), *_NO_MESSAGE])
        found = self._reply([call], writes=False)[0]
        return [
            self._run(job, int(slot), json.loads(decoded(record)))
            for slot, record in zip(found[::2], found[1::2], strict=True)
        ]

    def _run(self, job: str, slot: Millis, record: dict[str, Any]) -> Run:
        late = record.get("late")
        return Run(
            job=job,
            slot=wire.moment(slot),
            run_id=wire.run_id(self.namespace, job, slot),
            state=RunState(record["state"]),
            reason=record.get("reason"),
            attempt=int(record["attempt"]),
            claimed_at=_moment(record.get("claimed_at")),
            sent_at=_moment(record.get("sent_at")),
            ended_at=_moment(record.get("ended_at")),
            late=None if late is None else late / 1000,
            beat=record.get("beat") or None,
        )

    # --- leases -------------------------------------------------------------------------------------------------------

    def register(self, sightings: Sequence[Sighting]) -> list[Registration]:
        replies = self._each(
            "register",
            sightings,
            lambda job: (self._keys.runs(job), self._keys.slots(job)),
            lambda job, one: (encoded(one.fingerprint),),
            before=(FINGERPRINTS_KEPT,),
            width=2,
        )
        return [Registration(since=int(since), last=int(last) if last else None) for since, last in replies]

    def lapsed(self, limit: int) -> list[LapsedClaim]:
        keys = [self._keys.leases(shard) for shard in range(SHARDS)]
        groups = [[key] for key in keys] if self._source.sharded else [keys]
        look = script("lapsed")
        found: list[tuple[int, bytes]] = []
        for reply in self._reply([look(group, [max(limit, 0)]) for group in groups], writes=False):
            found += [(int(end), lease) for end, lease in zip(reply[::2], reply[1::2], strict=True)]
        return [_lapsed_claim(lease) for _, lease in sorted(found)[: max(limit, 0)]]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        replies = self._each(
            "takeover",
            wishes,
            lambda job: (self._lease_key(job), self._keys.runs(job)),
            lambda job, one: (job, one.slot, one.from_attempt, encoded(one.owner), encoded(one.beat), one.lease),
            wait=True,
        )
        return [int(attempt) or None for (attempt,) in replies]

    def tidy(self, keeps: Sequence[Keep]) -> int:
        groups = self._grouped(keeps)
        calls = [self._tidy([keep for _, keep in some]) for group in groups for some in chunks(group, _ROWS_AT_ONCE)]
        total = 0
        while calls:
            replies = self._reply(calls, writes=True)
            total += sum(dropped for dropped, _ in replies)
            calls = [call for call, (_, more) in zip(calls, replies, strict=True) if more]
        return total

    def _tidy(self, keeps: Sequence[Keep]) -> Call:
        keys: list[bytes] = []
        args: list[Argument] = [_DROPPED_AT_ONCE, _UNSETTLED]
        for keep in keeps:
            job = encoded(keep.job)
            keys += (self._keys.runs(job), self._keys.slots(job))
            args += (keep.decided, max(keep.history_size, 0), "" if keep.history_ttl is None else keep.history_ttl)
        return script("tidy")(keys, args)

    def beat_seen(self, beat: Beat) -> Millis:
        entry = {name: value for name, value in vars(beat).items() if name not in ("owner", "seen")}
        args: list[Argument] = [
            *(encoded(beat.owner), encoded(json.dumps(entry, ensure_ascii=False)), BEATS_KEPT),
            *(wire.LAYOUT_VERSION, encoded(self._app_name or "")),
        ]
        call = script("beat_seen")([self._keys.beats, self._keys.seen, self._keys.meta], args)
        now, emptied = self._reply([call], writes=True)[0]
        if emptied:
            logger.warning(
                "%s lost keys while beats were running (it was emptied, or it evicts): claims are forgotten, and their "
                "slots could be sent again",
                self.describe(),
            )
        return int(now)

    def beat_left(self, owner: str) -> None:
        self._reply([script("beat_left")([self._keys.beats, self._keys.seen], [encoded(owner)])], writes=True)

    def beats(self, within: Millis) -> list[Beat]:
        found = self._reply([script("beats")([self._keys.beats, self._keys.seen], [within])], writes=False)[0]
        beats = [
            Beat(owner=decoded(owner), seen=int(seen), **_known(json.loads(decoded(entry))))
            for owner, seen, entry in zip(found[::3], found[1::3], found[2::3], strict=True)
        ]
        return sorted(beats, key=lambda beat: (beat.label, beat.owner))

    # --- batches ------------------------------------------------------------------------------------------------------

    def _lease_key(self, job: bytes) -> bytes:
        return self._keys.leases(self._keys.shard(job))

    def _grouped(self, items: Sequence[_Item]) -> list[list[tuple[int, _Item]]]:
        """The items with their places: all together, or by shard where a call must keep to one."""
        numbered = list(enumerate(items))
        if not self._source.sharded:
            return [numbered] if numbered else []
        groups: dict[int, list[tuple[int, _Item]]] = {}
        for number, item in numbered:
            groups.setdefault(self._keys.shard(encoded(item.job)), []).append((number, item))  # type: ignore[attr-defined]
        return list(groups.values())

    def _each(
        self,
        name: str,
        items: Sequence[Any],
        keys_of: Callable[[bytes], tuple[bytes, ...]],
        args_of: Callable[[bytes, Any], tuple[Argument, ...]],
        *,
        before: tuple[Argument, ...] = (),
        width: int = 1,
        wait: bool = False,
    ) -> list[Sequence[Any]]:
        """Ask a script for each item; what it replied to each, *width* values long, in their order."""
        operation = script(name)
        calls: list[Call] = []
        places: list[list[int]] = []
        for group in self._grouped(items):
            for some in chunks(group, _ROWS_AT_ONCE):
                keys: list[bytes] = []
                args: list[Argument] = [*before]
                for _, item in some:
                    job = encoded(item.job)
                    keys += keys_of(job)
                    args += args_of(job, item)
                calls.append(operation(keys, args))
                places.append([number for number, _ in some])
        answers: dict[int, Sequence[Any]] = {}
        for numbers, reply in zip(places, self._reply(calls, writes=True, wait=wait), strict=True):
            if not isinstance(reply, list) or len(reply) != width * len(numbers):
                raise OutcomeUnknown(f"{self.describe()}: {name} was answered {str(reply)[:200]}")
            for position, number in enumerate(numbers):
                answers[number] = reply[width * position : width * (position + 1)]
        return [answers[number] for number in range(len(items))]


def _optional(text: str | None) -> bytes:
    return b"-" if text is None else b"=" + encoded(text)


def _moment(at: float | None) -> datetime | None:
    return None if at is None else wire.moment(int(at))


def _lapsed_claim(lease: bytes) -> LapsedClaim:
    slot, attempt, mark, job = lease.split(b":", 3)
    return LapsedClaim(job=decoded(job), slot=int(slot), attempt=int(attempt), abandoned=mark == b"a")


def _known(entry: dict[str, Any]) -> dict[str, Any]:
    """Without the fields of a newer release."""
    return {name: value for name, value in entry.items() if name in Beat.__dataclass_fields__}
