"""What the strategies without leases share: a claim is one script, and everything else is history.

Belongs here: the history, and how rows become calls. What makes a claim exact is in :mod:`.stream_id`, :mod:`.idmp` and
:mod:`.script`, with the scripts in ``lua/claims/``.

Beside its claim a slot has a record in its job's hash, as with ``lease``: the claim's own script writes it, so history
and claims cannot differ. Only a claim decides who publishes; a record may be dropped at any time.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from celery_anarchon.backends.base import (
    AgedBackend,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Keep,
    Outcome,
    check_given_up,
    check_never_a_run,
)
from celery_anarchon.backends.redis.batches import ROWS_AT_ONCE
from celery_anarchon.backends.redis.keys import encoded
from celery_anarchon.backends.redis.past import RedisPast
from celery_anarchon.backends.redis.records import answer, optional
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.store import chunks
from celery_anarchon.errors import ConfigurationError, OutcomeUnknown
from celery_anarchon.model import Answer, Millis

DAY: Millis = 86_400_000


def horizon_of(memory: Millis) -> Millis:
    """How old a slot may be that is still claimed, where the server forgets a claim after *memory*.

    Four fifths: what is left covers clocks that differ and calls that take their time.
    """
    return memory * 4 // 5


class RedisClaims(RedisPast, AgedBackend):
    """Subclasses are the strategies."""

    strategy: ClassVar[str]
    claim_script: ClassVar[str]

    def __init__(self, product: str, server: Any, options: Mapping[str, int], **more: Any) -> None:
        self.product = product
        self.name = f"{product}:{self.strategy}"
        self._options = dict(options)
        super().__init__(server, **more)

    @property
    def _strategy_text(self) -> str:
        return " ".join([self.strategy, *(f"{name}={value}" for name, value in sorted(self._options.items()))])

    # --- claims -------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _claim_key(self, job: bytes, slot: Millis) -> bytes:
        """The key that decides about a slot."""

    @abc.abstractmethod
    def _claim_options(self) -> tuple[Argument, ...]:
        """What the script is told once for the batch, after the tolerance."""

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        calls: list[Call] = []
        places: list[int] = []
        for group in self._grouped(requests):
            # Oldest first: in a stream of ids a newer claim closes the older slots.
            for some in chunks(sorted(group, key=lambda one: one[1].slot), ROWS_AT_ONCE):
                calls.append(self._claim_call([request for _, request in some]))
                places += [place for place, _ in some]
        words = [word for reply in self._reply(calls, writes=True, wait=True) for word in self._words(reply)]
        if len(words) != len(places):
            raise OutcomeUnknown(f"{self.describe()}: {len(places)} claims got {len(words)} answers")
        results = {place: self._result(word) for place, word in zip(places, words, strict=True)}
        return [results[place] for place in range(len(requests))]

    def _claim_call(self, requests: Sequence[ClaimRequest]) -> Call:
        keys: list[bytes] = []
        # However far ahead a user lets slots be claimed: one of next year would close all before it.
        args: list[Argument] = [min(self.early_tolerance, DAY), *self._claim_options()]
        for one in requests:
            job = encoded(one.job)
            keys += (self._claim_key(job, one.slot), self._keys.runs(job), self._keys.slots(job))
            args += (one.slot, encoded(one.owner), encoded(one.beat))
        return script(f"claims/{self.claim_script}")(keys, args)

    def _words(self, reply: Any) -> Sequence[bytes]:
        if not isinstance(reply, list) or not all(isinstance(word, bytes) for word in reply):
            raise OutcomeUnknown(f"{self.describe()}: a claim was answered {str(reply)[:200]}")
        return reply

    def _result(self, word: bytes) -> ClaimResult:
        return ClaimResult(answer(Answer, word, self.describe()))

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        """Nobody could take it over."""
        return [False] * len(holds)

    # --- history ------------------------------------------------------------------------------------------------------

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        return self._written(
            "confirm", confirmations, lambda one: (one.slot, encoded(one.owner), one.attempt, one.late)
        )

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        check_given_up(endings)
        return self._written(
            "give_up",
            endings,
            lambda one: (one.slot, encoded(one.owner), one.attempt, str(one.state), optional(one.reason)),
        )

    def record(self, outcomes: Sequence[Outcome]) -> None:
        check_never_a_run(outcomes)
        self._written(
            "record", outcomes, lambda one: (one.slot, str(one.state), optional(one.reason), encoded(one.beat))
        )

    def _written(self, name: str, items: Sequence[Any], args_of: Any) -> list[bool]:
        replies = self._each(
            f"claims/{name}",
            items,
            lambda job: (self._keys.runs(job), self._keys.slots(job)),
            lambda job, one: args_of(one),
            wait=True,
        )
        return [done == 1 for (done,) in replies]

    def _tidy(self, keeps: Sequence[Keep], at_once: int) -> Call:
        keys: list[bytes] = []
        args: list[Argument] = [at_once]
        for keep in keeps:
            job = encoded(keep.job)
            keys += (self._keys.runs(job), self._keys.slots(job))
            args += (max(keep.history_size, 0), "" if keep.history_ttl is None else keep.history_ttl)
        return script("claims/tidy")(keys, args)


class Forgetful(RedisClaims):
    """Of these strategies the server forgets a claim after a while; slots beyond four fifths of it are TOO_OLD."""

    memory_option: ClassVar[str]

    @property
    def _memory(self) -> Millis:
        return self._options[self.memory_option]

    @property
    def _reach(self) -> Millis:
        """How old a slot may be."""
        return horizon_of(self._memory)

    def open(self, app_name: str, *, create: bool = True) -> None:
        # A claim may be made as early as the tolerance admits, and must be remembered for as long as its slot is asked.
        if self.early_tolerance > self._memory - self._reach:
            raise ConfigurationError(
                f"strategy {self.strategy!r}: {self.memory_option} ({self._memory / 1000:g} s) must be at least five "
                f"times the early tolerance ({self.early_tolerance / 1000:g} s): raise the one or lower the other"
            )
        super().open(app_name, create=create)
