"""The strategy ``script``: a key for each claim, which the server forgets after the window.

A claim is ``SET marker <owner> NX PX <window>``, counted from the slot, and the record, in one script. Who finds the
marker there reads in the same step whose it is. Once it may have expired, a slot is TOO_OLD by the server's clock.

The record is in the job's hash, not in a stream: it changes when its message is sent, and an entry of a stream cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_anarchon.backends.redis.claims import Forgetful, horizon_of
from celery_anarchon.backends.redis.scripts import Argument
from celery_anarchon.model import Millis, Traits


class Script(Forgetful):
    """See the module."""

    strategy = "script"
    claim_script = "script"
    memory_option = "window"
    _claims_expire = True

    def __init__(self, product: str, server: Any, options: Mapping[str, int], **more: Any) -> None:
        window = options["window"]
        self.traits = Traits(
            leases=False,
            horizon=horizon_of(window),
            server_time=True,
            durable=True,
            any_job_name=True,
            history_by_age=True,
            history_ttl_above=window,
        )
        super().__init__(product, server, options, **more)

    def _claim_key(self, job: bytes, slot: Millis) -> bytes:
        return self._keys.marker(job, slot)

    def _claim_options(self) -> tuple[Argument, ...]:
        return self._memory, self._reach
