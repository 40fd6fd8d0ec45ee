"""What of a store that follows runs was asked and not answered (C12). Each docstring names the incident it prevents.

Belongs here: every call of workers and sweepers, unreachable or with its answer lost. Does not belong here: the same of
claims (:mod:`.endings`) and leases (:mod:`.leases`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.runs import RunBackend, Worker
from celery_anarchon.model import Millis
from celery_anarchon.testing.gates import (
    RUNNING,
    START,
    SUCCEEDED,
)
from celery_anarchon.testing.harness import BackendHarness, needs, take
from celery_anarchon.testing.onestep import QUEUE, OneStepSuite
from celery_anarchon.testing.runforms import (
    ONCE,
    TWICE,
    bring,
    confirm_run,
    delivery,
    end_lapsed,
    ending,
    give_back,
    heartbeat,
    release,
    retrying,
    send,
    settle,
    start,
    state_of,
    unstarted,
)


class UnansweredSuite(OneStepSuite):
    """A part of :class:`~celery_anarchon.testing.runs.RunSuite`: inherit that."""

    @needs("breakable")
    def test_C12_of_a_run_no_lost_answer_is_a_refusal(self, harness: BackendHarness) -> None:
        """The answer to a start is lost: taken for "no", the message is dropped and nobody runs what was granted. To a
        settle: the worker reports as taken over what it has ended itself."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        send(client, "job", base, TWICE)
        self.unanswered(harness, client, partial(start, client, "job", base, "d", of=TWICE))
        result = start(client, "job", base, "d", of=TWICE)
        assert (result.answer, result.attempt) == (START, 1), harness.raw_read("job", base)
        steps: list[Callable[[], object]] = [
            partial(heartbeat, client, "job", base, "d"),
            partial(retrying, client, "job", base, "d"),
            lambda: start(client, "job", base, "e", 1, 1, TWICE).answer is START,
            partial(give_back, client, "job", base, "e", 1, 1),
            lambda: start(client, "job", base, "f", 1, 1, TWICE).answer is START,
            partial(settle, client, "job", base, "f", 1, 1),
        ]
        for number, step in enumerate(steps):
            self.unanswered(harness, client, step)
            assert step(), f"step {number} asked again, record {harness.raw_read('job', base)}"
        assert state_of(other, "job", base) is SUCCEEDED
        bring(client, "job", base + 1, RUNNING, TWICE)
        self.unanswered(harness, client, partial(release, client, "job", base + 1, "d"))
        assert self.lapsed(other) == [("job", base + 1)]
        self.unanswered(harness, client, partial(take, client, "job", base + 1, "x"))
        assert take(client, "job", base + 1, "x") == 2, harness.raw_read("job", base + 1)
        assert confirm_run(client, "job", base + 1, "x", 2)

    @needs("breakable")
    def test_C12_of_what_had_no_body_no_lost_answer_is_a_refusal(self, harness: BackendHarness) -> None:
        """A run is ended, the answer is lost, and it is looked for as one that lives."""
        client, other = harness.connect_run(), harness.connect_run()
        base = self.base(client)
        send(client, "job", base)
        bring(client, "job", base + 1, RUNNING, ONCE)
        harness.lapse("job", base + 1)
        ends: list[Callable[[], bool]] = [
            partial(unstarted, client, "job", base),
            partial(end_lapsed, client, "job", base + 1, RUNNING),
        ]
        for end in ends:
            self.unanswered(harness, client, end)
            assert end(), "asked again"
        bring(client, "job", base + 2, RUNNING)
        self.unanswered(harness, client, partial(client.release_job, "job"))
        assert client.release_job("job") == [] == other.living("job")
        self.unanswered(harness, client, partial(client.worker_seen, Worker(owner="1", label="host", version="1")))
        assert [worker.owner for worker in other.workers(within=60_000)] == ["1"]
        self.unanswered(harness, client, partial(client.worker_left, "1"))
        assert other.workers(within=60_000) == [] and other.ever_had_workers()

    def calls(self, harness: BackendHarness, client: ClaimBackend, slot: Millis) -> dict[str, Callable[[], object]]:
        assert isinstance(client, RunBackend)
        calls: dict[str, Callable[[], object]] = {
            **super().calls(harness, client, slot),
            "start": partial(start, client, "job", slot, "d"),
            "heartbeat": partial(heartbeat, client, "job", slot, "d"),
            "settle": partial(settle, client, "job", slot, "d"),
            "settle_and_start": partial(
                client.settle_and_start, [ending("job", slot, "d")], [delivery("job", slot + 1, "d")]
            ),
            "retrying": partial(retrying, client, "job", slot, "d"),
            "give_back": partial(give_back, client, "job", slot, "d"),
            "release": partial(release, client, "job", slot, "d"),
            "unstarted": partial(unstarted, client, "job", slot),
            "end_lapsed": partial(end_lapsed, client, "job", slot, RUNNING),
            "waiting": partial(client.waiting, 1),
            "living": partial(client.living, "job"),
            "release_job": partial(client.release_job, "job"),
            "worker_seen": partial(client.worker_seen, Worker(owner="1", label="host", version="1")),
            "worker_left": partial(client.worker_left, "1"),
            "workers": partial(client.workers, 60_000),
            "ever_had_workers": client.ever_had_workers,
        }
        if isinstance(client, OneStepBackend) and harness.traits.one_step:
            calls |= {
                "claim_and_send": partial(client.claim_and_send, [self.asked(harness, slot, "a")]),
                "begin_claims": lambda: client.begin_claims([self.asked(harness, slot, "a")])(),
                "takeover_and_send": partial(client.takeover_and_send, [self.wish(harness, slot, "a", 1, 1)]),
                "decided": partial(client.decided, [("job", slot)], "a"),
                "write": partial(client.write, harness.message_writes(QUEUE, "alone")),
            }
        return calls
