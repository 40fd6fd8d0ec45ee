"""The strategy ``idmp``: the server itself drops the second entry with the same idempotency id. Redis 8.6 and newer.

A claim is ``XADD job IDMP cron <slot> * o <owner>``. A second one gets the id of the first, and no word that it is a
second: so the same script reads the entry of that id back, and whose owner it names has won. The stream must remember
long enough, and enough of them: how long and how many is set in the very script that makes the stream, because a later
``XCFGSET`` with other values clears what is remembered. Where it finds other values nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery_anarchon.backends.redis.claims import Forgetful, horizon_of
from celery_anarchon.backends.redis.keys import decoded
from celery_anarchon.backends.redis.scripts import Argument
from celery_anarchon.errors import ConfigurationError, LayoutMismatch
from celery_anarchon.model import Millis, Traits

OLDEST = (8, 6)


class Idmp(Forgetful):
    """See the module."""

    strategy = "idmp"
    claim_script = "idmp"
    memory_option = "duration"

    def __init__(self, product: str, server: Any, options: Mapping[str, int], **more: Any) -> None:
        self.traits = Traits(
            leases=False,
            horizon=horizon_of(options["duration"]),
            server_time=True,
            durable=True,
            any_job_name=True,
            history_by_age=True,
            claims_kept=options["max_size"],
        )
        super().__init__(product, server, options, **more)

    def _claim_key(self, job: bytes, slot: Millis) -> bytes:
        return self._keys.claims(job)

    def _claim_options(self) -> tuple[Argument, ...]:
        return self._memory // 1000, self._options["max_size"], self._reach

    def _words(self, reply: Any) -> Sequence[bytes]:
        words = super()._words(reply)
        if words and words[0] == b"other":
            # Said before anything is written.
            _, duration, size, key = map(decoded, words)
            wanted = f"{self._memory // 1000} and {self._options['max_size']}"
            raise LayoutMismatch(
                f"{self.describe()}: stream {key} has IDMP-DURATION {duration} and IDMP-MAXSIZE {size}, and this beat "
                f"wants {wanted}. Changing them would forget claims, so nothing was written: use the same values in "
                "all beats, or delete the stream while none runs"
            )
        return words

    def _check_server(self, facts: Mapping[str, str]) -> None:
        super()._check_server(facts)
        where, wanted = self._source.where, "strategy 'idmp' needs Redis 8.6 or newer"
        if facts.get("server_name") == "valkey" or "valkey_version" in facts:
            raise ConfigurationError(
                f"{where}: {wanted}, and this is Valkey {facts.get('valkey_version', '')}: use 'script' or 'lease'"
            )
        version = facts.get("redis_version", "")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if len(numbers) == 2 and numbers < OLDEST:
            raise ConfigurationError(f"{where}: {wanted}, and this is {version}: use 'script' or 'lease'")
        if not numbers and not any(self._source.ask("COMMAND", "INFO", "XCFGSET")):
            raise ConfigurationError(f"{where}: {wanted}, and this server lacks XCFGSET: use 'script' or 'lease'")
