"""A store and the reference beside it: what a machine that drives both knows, and what must hold after each step.

Does not belong here: the steps (``test_run_machine.py``).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
from conformance.harnesses import MemoryHarness
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from celery_anarchon import wire
from celery_anarchon.backends.base import Terms
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import SETTLED, UNSETTLED, Overlap, Run, RunState
from celery_anarchon.testing import BackendHarness
from celery_anarchon.testing.harness import raised_by
from celery_anarchon.testing.runforms import slot_of, terms

SLOTS = range(4)


@dataclass(frozen=True)
class Message:
    """In the broker for ever: each message may be delivered at any time, and again."""

    job: str
    number: int
    attempt: int
    retries: int


@dataclass(frozen=True)
class Grip:
    """A delivery that was licensed, and what was granted."""

    message: Message
    attempt: int
    token: str


@dataclass(frozen=True)
class Claim:
    """What a beat was told that it may publish."""

    job: str
    number: int
    owner: str
    attempt: int


@dataclass(frozen=True)
class Side:
    """One of the two stores."""

    client: RunBackend
    base: int

    def at(self, number: int) -> int:
        return self.base + number


class TwoStores(RuleBasedStateMachine):
    harness_class: ClassVar[type[BackendHarness]]

    @initialize(
        overlap=st.sampled_from(Overlap),
        most=st.sampled_from([None, 1, 2, 2, 3]),
        acks_late=st.booleans(),
        followed=st.booleans(),
    )
    def begin(self, overlap: Overlap, most: int | None, acks_late: bool, followed: bool) -> None:
        self.stack = ExitStack()
        directory = Path(tempfile.mkdtemp(prefix="anarchon-"))
        self.stack.callback(shutil.rmtree, directory)
        self.harness = self.stack.enter_context(self.harness_class(directory))
        self.reference = self.stack.enter_context(MemoryHarness(directory))
        self.clients = [self.harness.connect_run() for _ in range(2)]
        self.base = self.clients[0].now() - 3_600_000
        honest = self.reference.connect_run()
        self.honest = Side(honest, honest.now() - 3_600_000)
        self.terms: dict[str, Terms | None] = {"job": terms(most, overlap), "other": terms(2) if followed else None}
        self.acks_late = acks_late
        self.messages: list[Message] = []
        self.deliveries: list[tuple[Message, str]] = []
        self.grips: list[Grip] = []
        self.claimed: list[Claim] = []
        self.licensed: dict[tuple[str, int, int, int], str] = {}
        self.seen: dict[tuple[str, int], Any] = {}
        self.tokens = 0

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    # --- the same on both sides ---------------------------------------------------------------------------------------

    def both(self, client: int, call: Callable[[Side], Any], lost: bool = False) -> Any:
        """What both stores answer. *lost*: the store's first reply does not arrive, and it is asked again."""
        mine = Side(self.clients[client], self.base)
        if lost and self.harness.breakable:
            with self.harness.reply_lost(mine.client):
                error = raised_by(lambda: call(mine))
            assert error is None or isinstance(error, OutcomeUnknown), error
        if lost:
            if not self.harness.breakable:
                call(mine)
            call(self.honest)
        answer, expected = call(mine), call(self.honest)
        assert answer == expected, f"the store says {answer}, the reference {expected}"
        return answer

    def terms_of(self, job: str) -> Terms:
        return self.terms[job] or terms()

    # --- what was said ------------------------------------------------------------------------------------------------

    def won(self, claim: Claim) -> None:
        if claim not in self.claimed:
            self.claimed.append(claim)
        self.publish(Message(claim.job, claim.number, claim.attempt, 0))

    def publish(self, message: Message) -> None:
        if message not in self.messages:
            self.messages.append(message)

    def license(self, grip: Grip) -> None:
        """A body may begin."""
        if grip not in self.grips:
            self.grips.append(grip)
        message = grip.message
        which = (message.job, message.number, grip.attempt, message.retries)
        first = self.licensed.setdefault(which, grip.token)
        assert first == grip.token, f"I1: the body {which} was licensed to {first} and to {grip.token}"
        attempts = {attempt for job, number, attempt, _ in self.licensed if (job, number) == which[:2]}
        most = self.terms_of(message.job).max_attempts
        assert most is None or len(attempts) <= most, f"I2: {attempts} of {most}"

    def running(self) -> list[Grip]:
        """Those that hold their runs, as far as the reference knows."""
        found = []
        for grip in self.grips:
            raw = self.reference.raw_read(grip.message.job, self.honest.at(grip.message.number))
            if raw is not None and (raw["state"], raw["token"]) == (RunState.RUNNING, grip.token):
                found.append(grip)
        return found

    def new_token(self, message: Message) -> str:
        self.tokens += 1
        token = f"delivery {self.tokens}"
        self.deliveries.append((message, token))
        return token

    # --- what is kept -------------------------------------------------------------------------------------------------

    def seen_from(self, side: Side, run: Run) -> tuple[Any, ...]:
        """All of a run that has no instant in it."""
        number = slot_of(run) - side.base
        blocker = None if run.blocked_by is None else self.numbered(side, run.job, run.blocked_by)
        return number, run.state, run.attempt, run.reason, run.beat, run.worker, run.refused, blocker

    def numbered(self, side: Side, job: str, run_id: str) -> int | str:
        numbers = {wire.run_id(side.client.namespace, job, side.at(number)): number for number in SLOTS}
        return numbers.get(run_id, run_id)

    @invariant()
    def both_keep_the_same(self) -> None:
        for job in self.terms:
            self.both(0, partial(self.kept, job))

    def kept(self, job: str, side: Side) -> list[list[Any]]:
        client = side.client
        last = client.last_run(job)
        lists = client.history(job, 9), client.living(job), [last] if last else []
        return [[self.seen_from(side, run) for run in runs] for runs in lists]

    @invariant()
    def both_list_the_same(self) -> None:
        self.both(
            1,
            lambda side: {
                (
                    found.job,
                    found.slot - side.base,
                    found.attempt,
                    found.state,
                    found.max_attempts,
                    found.reason,
                    found.abandoned,
                )
                for found in side.client.lapsed(100)
            },
        )
        self.both(0, lambda side: {(found.job, found.slot - side.base) for found in side.client.waiting(100)})

    @invariant()
    def what_the_store_keeps_is_sound(self) -> None:
        side = Side(self.clients[0], self.base)
        for job in self.terms:
            runs = side.client.history(job, 9)
            for run in runs:
                key, now = (job, slot_of(run)), (run.state, run.attempt, run.reason, run.worker)
                before = self.seen.get(key, now)
                assert run.attempt >= before[1], f"I4: attempt of {key} fell: {before}, {now}"
                assert before[0] not in SETTLED or before == now, f"I5: an end of {key} changed: {before}, {now}"
                self.seen[key] = now
            if job == "job" and self.terms_of(job).overlap is not Overlap.ALLOW:
                unsettled = [run for run in runs if run.state in UNSETTLED]
                waiting = [run for run in unsettled if run.state is RunState.WAITING]
                assert len(unsettled) - len(waiting) <= 1, f"I3: {unsettled}"
                assert len(waiting) <= 1, f"I3: {waiting}"
