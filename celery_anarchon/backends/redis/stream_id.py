"""The strategy ``stream-id``: the slot is the id of an entry, and a stream takes ids in ascending order only.

A claim is ``XADD job <slot>-0 o <owner>``. The server refuses an id that is not greater than the last one, for ever,
whatever was trimmed since. Refused, the same script reads the entry of that id back: it may be the asker's own. So a
slot that comes after a newer one of its job is lost: it is TOO_OLD, and recorded as a misfire.
"""

from __future__ import annotations

from celery_anarchon.backends.redis.claims import RedisClaims
from celery_anarchon.backends.redis.scripts import Argument
from celery_anarchon.model import Millis, Traits

_ENTRIES_KEPT = 1_000
"""Entries of each job that can be read back: for how long an owner can learn that it won, and a late slot be told from
a taken one. That no slot is won twice does not depend on it."""


class StreamId(RedisClaims):
    """See the module."""

    strategy = "stream-id"
    claim_script = "stream_id"
    traits = Traits(
        leases=False,
        horizon=None,
        server_time=True,
        durable=True,
        any_job_name=True,
        history_by_age=True,
        any_order=False,
    )

    def _claim_key(self, job: bytes, slot: Millis) -> bytes:
        return self._keys.claims(job)

    def _claim_options(self) -> tuple[Argument, ...]:
        return (_ENTRIES_KEPT,)
