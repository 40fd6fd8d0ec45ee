"""The gate alone, without a worker around it; what Celery makes of it is in ``tests/worker``."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from unit.test_keeper import SECOND, TERMS, Desk

from celery_anarchon import wire
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.gate import Gate
from celery_anarchon.model import OnUnknown, RunState
from celery_anarchon.options import Settings


def test_messages_held_for_losses_with_work_between_them_wait_no_longer_each_time() -> None:
    desk = Desk()
    waits: list[float] = []
    gate = Gate(
        keeper=desk.keeper,
        namespace=desk.backend.namespace,
        label="w",
        settings=Settings(),
        execute=lambda request: None,
        slot_back=lambda: None,
        again=lambda request: None,
        later=lambda seconds, step: waits.append(seconds),
        enforces_timeout=True,
        clock=desk.clock,
    )
    terms = wire.terms_header(TERMS, OnUnknown.REPEAT)
    for number in range(6):
        named = wire.header(
            namespace=desk.backend.namespace, job=f"job-{number}", slot=desk.slot, attempt=1, late=0, beat="b"
        )
        request = MagicMock(request_dict={wire.HEADER: {**named, **terms}}, time_limits=(None, None))
        request.revoked.return_value = False
        desk.backend.failing["start"] = OutcomeUnknown("the reply was lost")
        gate(request)
        desk.backend.failing.clear()
        desk.clock.advance(SECOND // 2)
        gate(request)
        assert desk.run(f"job-{number}").state is RunState.RUNNING
    assert waits == pytest.approx([0.51] * 6)
