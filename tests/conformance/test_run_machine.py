"""Any order of what beats and workers say of runs, on a store and on the reference beside it.

Both must answer the same and keep the same; and what :mod:`celery_anarchon.backends.runs` is for must hold in itself,
whatever the reference says: a body is licensed once, attempts never fall and are bounded, an end is an end, and runs
that may not overlap do not.
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
import pytest
from conformance.harnesses import MemoryHarness
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_anarchon import wire
from celery_anarchon.backends.base import Hold, Keep, Takeover, Terms
from celery_anarchon.backends.runs import LapsedEnd, NextTry, RunBackend, RunHold, Settlement, Start, Unstarted
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import SETTLED, UNSETTLED, Answer, GateAnswer, Overlap, Run, RunState
from celery_anarchon.testing import BackendHarness
from celery_anarchon.testing.harness import LONG, give_up, raised_by
from celery_anarchon.testing.runforms import ask_run, confirm_run, give_back, slot_of, terms

JOBS = st.sampled_from(["job", "job", "job", "other"])
NUMBERS = st.integers(0, 2)
OWNERS = st.sampled_from(["x", "y"])
CLIENTS = st.integers(0, 1)
FAULTS = st.sampled_from([False, False, False, True])
"""Whether the reply is lost and the same is asked again."""
AGO = st.sampled_from([1, 1, LONG + 1, 2 * LONG + 1])
BODY_ENDS = st.sampled_from([RunState.SUCCEEDED, RunState.FAILED, RunState.TIMED_OUT, RunState.LOST])
ENDINGS = st.sampled_from(
    [
        (RunState.LOST, "worker-lost"),
        (RunState.LOST, "job-removed"),
        (RunState.LOST_IN_QUEUE, "queue-timeout"),
        (RunState.DISPATCHED, "no-gate-seen"),
    ]
)
GIVEN_UP = st.sampled_from([RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED])
WRONG = st.sampled_from([(0, 0), (0, 0), (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])
"""What is added to the right attempt and retries."""
LICENCES = (GateAnswer.START, GateAnswer.UNKNOWN)


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
class Side:
    """One of the two stores."""

    client: RunBackend
    base: int

    def at(self, number: int) -> int:
        return self.base + number


class RunMachine(RuleBasedStateMachine):
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
        self.terms: dict[str, Terms | None] = {"job": terms(most, overlap), "other": terms() if followed else None}
        self.acks_late = acks_late
        self.messages: list[Message] = []
        self.deliveries: list[tuple[Message, str]] = []
        self.grips: list[Grip] = []
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

    # --- beats --------------------------------------------------------------------------------------------------------

    @rule(client=CLIENTS, asked=st.lists(st.tuples(JOBS, NUMBERS, OWNERS), min_size=1, max_size=3), lost=FAULTS)
    def claims(self, client: int, asked: list[tuple[str, int, str]], lost: bool) -> None:
        results = self.both(
            client,
            lambda side: side.client.claim(
                [ask_run(job, side.at(n), owner, self.terms[job]) for job, n, owner in asked]
            ),
            lost,
        )
        for (job, number, _), result in zip(asked, results, strict=True):
            if result.answer is Answer.WON:
                self.publish(Message(job, number, result.attempt, 0))

    def publish(self, message: Message) -> None:
        if message not in self.messages:
            self.messages.append(message)

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=st.sampled_from([1, 1, 2]), lost=FAULTS)
    def confirms(self, client: int, job: str, number: int, owner: str, attempt: int, lost: bool) -> None:
        self.both(client, lambda side: confirm_run(side.client, job, side.at(number), owner, attempt), lost)

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=st.sampled_from([1, 1, 2]))
    def abandons(self, client: int, job: str, number: int, owner: str, attempt: int) -> None:
        self.both(
            client,
            lambda side: side.client.abandon([Hold(job=job, slot=side.at(number), owner=owner, attempt=attempt)]),
        )

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=st.sampled_from([1, 1, 2]), state=GIVEN_UP)
    def gives_up(self, client: int, job: str, number: int, owner: str, attempt: int, state: RunState) -> None:
        self.both(client, lambda side: give_up(side.client, job, side.at(number), owner, attempt, state))

    @rule(client=CLIENTS, data=st.data(), owner=OWNERS, lost=FAULTS)
    def takes_over(self, client: int, data: st.DataObject, owner: str, lost: bool) -> None:
        listed = [(found.job, found.slot - self.honest.base, found.attempt) for found in self.honest.client.lapsed(9)]
        guesses = [("job", 0, 1), ("other", 0, 1), ("job", 1, 2)]
        job, number, attempt = data.draw(st.sampled_from(listed + listed + guesses))
        results = self.both(
            client,
            lambda side: side.client.takeover(
                [Takeover(job=job, slot=side.at(number), from_attempt=attempt, owner=owner, beat="sweeper", lease=LONG)]
            ),
            lost,
        )
        if results[0] is not None:
            self.publish(Message(job, number, results[0], 0))

    @rule(client=CLIENTS, data=st.data(), ending=ENDINGS, wrong=WRONG, lost=FAULTS)
    def ends_what_lapsed(
        self, client: int, data: st.DataObject, ending: tuple[RunState, str], wrong: tuple[int, int], lost: bool
    ) -> None:
        runs = [(job, run) for job in self.terms for run in self.honest.client.history(job, 9)]
        if not runs:
            return
        job, run = data.draw(st.sampled_from(runs))
        number, (state, reason) = slot_of(run) - self.honest.base, ending
        self.both(
            client,
            lambda side: side.client.end_lapsed(
                [
                    LapsedEnd(
                        job=job,
                        slot=side.at(number),
                        attempt=run.attempt + wrong[0],
                        was=run.state,
                        state=state,
                        reason=reason,
                    )
                ]
            ),
            lost,
        )

    @rule(client=CLIENTS, job=JOBS, decided=NUMBERS, size=st.integers(0, 2))
    def tidies(self, client: int, job: str, decided: int, size: int) -> None:
        self.both(client, lambda side: side.client.tidy([Keep(job=job, decided=side.at(decided), history_size=size)]))

    @rule(client=CLIENTS, job=JOBS)
    def releases_the_job(self, client: int, job: str) -> None:
        self.both(client, lambda side: [self.seen_from(side, run) for run in side.client.release_job(job)])

    # --- workers ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.messages)
    @rule(client=CLIENTS, data=st.data(), again=st.booleans(), lost=FAULTS)
    def starts(self, client: int, data: st.DataObject, again: bool, lost: bool) -> None:
        if again and self.deliveries:
            message, token = data.draw(st.sampled_from(self.deliveries))
        else:
            message = data.draw(st.sampled_from(self.messages))
            self.tokens += 1
            token = f"delivery {self.tokens}"
            self.deliveries.append((message, token))
        self.begin_body(client, message, token, lost)

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, retries=st.integers(0, 1))
    def starts_what_the_store_forgot(self, client: int, job: str, number: int, retries: int) -> None:
        """Or a message that no step here has sent, of the first attempt."""
        message = Message(job, number, 1, retries)
        self.publish(message)
        self.tokens += 1
        token = f"delivery {self.tokens}"
        self.deliveries.append((message, token))
        self.begin_body(client, message, token, False)

    def begin_body(self, client: int, message: Message, token: str, lost: bool) -> None:
        results = self.both(
            client,
            lambda side: side.client.start(
                [
                    Start(
                        job=message.job,
                        slot=side.at(message.number),
                        attempt=message.attempt,
                        retries=message.retries,
                        token=token,
                        worker=f"worker {int(token.split()[1]) % 3}",
                        terms=self.terms_of(message.job),
                        acks_late=self.acks_late,
                    )
                ]
            ),
            lost,
        )
        if results[0].answer in LICENCES:
            grip = Grip(message, results[0].attempt, token)
            if grip not in self.grips:
                self.grips.append(grip)
            which = (message.job, message.number, grip.attempt, message.retries)
            first = self.licensed.setdefault(which, token)
            assert first == token, f"I1: the body {which} was licensed to {first} and to {token}"
            attempts = {attempt for job, number, attempt, _ in self.licensed if (job, number) == which[:2]}
            most = self.terms_of(message.job).max_attempts
            assert most is None or len(attempts) <= most, f"I2: {attempts} of {most}"

    def draw_hold(self, data: st.DataObject, side: Side, grip: Grip, wrong: tuple[int, int], token: str) -> RunHold:
        return RunHold(
            job=grip.message.job,
            slot=side.at(grip.message.number),
            attempt=grip.attempt + wrong[0],
            retries=grip.message.retries + wrong[1],
            token=token,
        )

    @precondition(lambda self: self.grips)
    @rule(
        client=CLIENTS,
        data=st.data(),
        wrong=WRONG,
        step=st.sampled_from(["heartbeat", "heartbeat", "settle", "settle", "retrying", "retrying", "release"]),
        state=BODY_ENDS,
        lost=FAULTS,
    )
    def says(
        self, client: int, data: st.DataObject, wrong: tuple[int, int], step: str, state: RunState, lost: bool
    ) -> None:
        """A holder, or one that was, or one that never was."""
        grip = data.draw(st.sampled_from(self.grips + self.grips[-1:] * 3))
        token = data.draw(st.sampled_from([grip.token] * 5 + [self.grips[0].token, "nobody"]))

        def call(side: Side) -> Any:
            hold = self.draw_hold(data, side, grip, wrong, token)
            if step == "settle":
                return side.client.settle([Settlement(**vars(hold), state=state, reason=f"why {state}")])
            if step == "retrying":
                return side.client.retrying([NextTry(**vars(hold), delay=0)])
            return getattr(side.client, step)([hold])

        if step == "retrying" and wrong == (0, 0):
            # Celery publishes first.
            message = grip.message
            self.publish(Message(message.job, message.number, grip.attempt, message.retries + 1))
        self.both(client, call, lost)

    @precondition(lambda self: self.grips)
    @rule(client=CLIENTS, data=st.data(), wrong=WRONG, lost=FAULTS)
    def gives_back(self, client: int, data: st.DataObject, wrong: tuple[int, int], lost: bool) -> None:
        grip = data.draw(st.sampled_from(self.grips + self.grips[-1:] * 3))
        message = grip.message
        attempt, retries = grip.attempt + wrong[0], message.retries + wrong[1]
        done = self.both(
            client,
            lambda side: give_back(
                side.client, message.job, side.at(message.number), grip.token, attempt, retries, message.attempt
            ),
            lost,
        )
        which = (message.job, message.number, attempt, retries)
        if done and self.licensed.get(which) == grip.token:
            del self.licensed[which]

    @precondition(lambda self: self.messages)
    @rule(client=CLIENTS, data=st.data(), wrong=WRONG, lost=FAULTS)
    def finds_it_expired(self, client: int, data: st.DataObject, wrong: tuple[int, int], lost: bool) -> None:
        message = data.draw(st.sampled_from(self.messages))
        self.both(
            client,
            lambda side: side.client.unstarted(
                [
                    Unstarted(
                        job=message.job,
                        slot=side.at(message.number),
                        attempt=message.attempt + wrong[0],
                        retries=message.retries + wrong[1],
                        reason="expired",
                    )
                ]
            ),
            lost,
        )

    # --- time ---------------------------------------------------------------------------------------------------------

    def with_an_end(self) -> list[tuple[str, int]]:
        """The slots with a lease or a queue limit."""
        found = []
        for job in self.terms:
            for run in self.honest.client.living(job):
                raw = self.reference.raw_read(job, slot_of(run))
                if raw is not None and raw["lease_until"] is not None:
                    found.append((job, slot_of(run) - self.honest.base))
        return found

    @rule(data=st.data(), ago=AGO)
    def lapses(self, data: st.DataObject, ago: int) -> None:
        ending = self.with_an_end()
        if ending:
            job, number = data.draw(st.sampled_from(ending))
            self.harness.lapse(job, self.base + number, ago)
            self.reference.lapse(job, self.honest.at(number), ago)

    @rule(client=CLIENTS)
    def reconnects(self, client: int) -> None:
        self.clients[client].close()
        self.clients[client] = self.harness.connect_run()

    # --- what is kept -------------------------------------------------------------------------------------------------

    def seen_from(self, side: Side, run: Run) -> tuple[Any, ...]:
        """All of a run that has no instant in it."""
        number = slot_of(run) - side.base
        blocker = None if run.blocked_by is None else self.numbered(side, run.job, run.blocked_by)
        return number, run.state, run.attempt, run.reason, run.beat, run.worker, run.refused, blocker

    def numbered(self, side: Side, job: str, run_id: str) -> int | str:
        numbers = {wire.run_id(side.client.namespace, job, side.at(number)): number for number in range(3)}
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
                    found.abandoned and found.state is RunState.CLAIMED,
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


def run_machine_for(harness: type[Any], examples: int, steps: int) -> Any:
    kind = type(f"{harness.__name__}RunMachine", (RunMachine,), {"harness_class": harness})
    case = kind.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestMemoryRunMachine = run_machine_for(MemoryHarness, 100, 40)
TestMemoryRunMachineLong = pytest.mark.long(run_machine_for(MemoryHarness, 3_000, 60))
