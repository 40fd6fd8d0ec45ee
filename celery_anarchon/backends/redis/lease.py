"""The strategy ``lease``: every clause of the contract in Lua, one script for each operation.

Belongs here: which keys and arguments a script gets, and what its reply means. The scripts are in ``lua/``.

Why it is exact. A script is one atomic step of the server, with the server's time in it. Each row of a batch is
decided by what stands there when its turn comes, and asking again with the same owner gives the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    BEATS_KEPT,
    FINGERPRINTS_KEPT,
    Beat,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    LapsedClaim,
    Outcome,
    Registration,
    Sighting,
    Takeover,
    Traits,
    check_given_up,
    check_never_a_run,
)
from celery_anarchon.backends.redis.keys import decoded, encoded
from celery_anarchon.backends.redis.onestep import RedisOneStep
from celery_anarchon.backends.redis.past import RedisPast
from celery_anarchon.backends.redis.records import known, lapsed_claim, optional
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.store import logger
from celery_anarchon.model import UNSETTLED, Millis

_UNSETTLED = ",".join(sorted(str(state) for state in UNSETTLED))


class RedisLease(RedisOneStep, RedisPast):
    """See the module; what workers ask is in :mod:`.runs`, claims with their messages are in :mod:`.onestep`."""

    traits = Traits(
        leases=True,
        horizon=None,
        server_time=True,
        durable=True,
        any_job_name=True,
        history_by_age=True,
        follows_runs=True,
        one_step=True,
    )

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        return self._claims(requests, with_messages=False)

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        return self._done("confirm", confirmations, lambda one: (*_named(one), one.late, one.delay))

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        return self._done("abandon", holds, _named)

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        check_given_up(endings)
        return self._done("give_up", endings, lambda one: (*_named(one), str(one.state), optional(one.reason)))

    def record(self, outcomes: Sequence[Outcome]) -> None:
        check_never_a_run(outcomes)
        self._each(
            "record",
            outcomes,
            lambda job: (self._keys.runs(job), self._keys.slots(job)),
            lambda job, one: (one.slot, str(one.state), optional(one.reason), encoded(one.beat)),
            wait=True,
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
        found: list[tuple[int, bytes]] = []
        for reply in self._of_all_shards("lapsed", self._keys.leases, limit):
            found += [(int(end), lease) for end, lease in zip(reply[::2], reply[1::2], strict=True)]
        return [lapsed_claim(lease) for _, lease in sorted(found)[: max(limit, 0)]]

    def takeover(self, wishes: Sequence[Takeover]) -> list[int | None]:
        return [int(attempt) or None for attempt, _ in self._takeovers(wishes, with_messages=False)]

    def _tidy(self, keeps: Sequence[Keep], at_once: int) -> Call:
        keys: list[bytes] = []
        args: list[Argument] = [at_once, _UNSETTLED]
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
            Beat(owner=decoded(owner), seen=int(seen), **known(entry, Beat))
            for owner, seen, entry in zip(found[::3], found[1::3], found[2::3], strict=True)
        ]
        return sorted(beats, key=lambda beat: (beat.label, beat.owner))


def _named(hold: Hold) -> tuple[Argument, ...]:
    return encoded(hold.owner), hold.attempt
