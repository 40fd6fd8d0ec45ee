"""What the callbacks of a request mean for its run, without a pool."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_anarchon.backends.runs import RunHold
from celery_anarchon.keeper import Held
from celery_anarchon.model import RunState, Terms
from celery_anarchon.outcomes import follow


class Told:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def settle(self, held: Held, end: RunState, reason: str | None = None) -> None:
        self.ends.append((end, reason))

    def release(self, held: Held) -> None:
        self.ends.append("released")


def request_of(task_id: str) -> Any:
    names = ("on_success", "on_failure", "on_timeout", "on_retry", "_announce_revoked", "_announce_cancelled")
    return SimpleNamespace(id=task_id, **{name: lambda *_, **__: None for name in names})


@pytest.mark.parametrize(
    ("outcome", "revoked", "end"),
    [
        ((0, "result", 0.1), False, (RunState.SUCCEEDED, None)),
        ((0, None, 0.0), True, (RunState.SUCCEEDED, None)),
        ((False, None, None), True, (RunState.FAILED, "revoked")),
        ((False, None, None), False, "released"),
    ],
)
def test_a_killed_greenlet_is_no_success(outcome: Any, revoked: bool, end: Any) -> None:
    """gevent says "no failure" of a body that was killed: by a command, or because its worker stops."""
    task_id = f"of {outcome} {revoked}"
    if revoked:
        state.revoked.add(task_id)
    told: Any = Told()
    request = request_of(task_id)
    hold = RunHold(job="job", slot=1_000, attempt=1, retries=0, token="t")
    follow(request, Held(hold, 30_000, math.inf), Terms(lease=30_000, queue_timeout=60_000), told)
    request.on_success(outcome)
    assert told.ends == [end]
    state.revoked.discard(task_id)
