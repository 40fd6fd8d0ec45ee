"""What must hold for each store that appends, whatever it appends to. *connect* makes an opened client of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_anarchon.backends.base import Confirmation, Outcome
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import claim, confirm, give_up


def history_with_three_readers_at_once(connect: Callable[[], Any], count: int) -> None:
    client = connect()
    base = client.now() - 3_600_000
    slots = [base + number for number in range(count)]
    client.confirm([Confirmation(job="job", slot=slot, owner="a", attempt=1, late=3) for slot in slots])
    client.record([Outcome(job="job", slot=base + 5_000, state=RunState.SKIPPED, reason="paused")])
    assert give_up(client, "job", base + 4_000, "a")
    right = [base + 5_000, base + 4_000, *reversed(slots)]
    found: list[Any] = []

    def read(reader: Any) -> None:
        for _ in range(3):
            runs = [round(run.slot.timestamp() * 1000) for run in reader.history("job", 9_999)]
            last = reader.last_run("job")
            found.append((runs, last and round(last.slot.timestamp() * 1000)))

    readers = [connect() for _ in range(3)]
    at_once([partial(read, reader) for reader in readers])
    assert found == [(right, slots[-1])] * 9


def a_claim_without_an_end_is_in_the_history(connect: Callable[[], Any]) -> None:
    """The beat that won it has died: somebody will want to know."""
    client = connect()
    now = client.now()
    assert claim(client, "job", now, "a") is Answer.WON
    run = connect().history("job", 1)[0]
    assert (run.state, run.beat) == (RunState.CLAIMED, "beat") and run.claimed_at is not None
    assert client.last_run("job") is None
    assert confirm(client, "job", now, "a", late=1_500)
    run = connect().history("job", 1)[0]
    assert (run.state, run.beat, run.late) == (RunState.DISPATCHED, "beat", 1.5)
    assert run.claimed_at is not None and run.sent_at is not None


def eight_open_an_empty_namespace_at_once(connect: Callable[[], Any]) -> None:
    at_once([connect] * 8)
