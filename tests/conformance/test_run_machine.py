"""Any order of what beats and workers say of runs, on a store and on the reference beside it.

Both must answer the same and keep the same; and what :mod:`celery_anarchon.backends.runs` is for must hold in itself,
whatever the reference says: a body is licensed once, attempts never fall and are bounded, an end is an end, and runs
that may not overlap do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from conformance.harnesses import MemoryHarness
from conformance.two_stores import SLOTS, Claim, Grip, Message, Side, TwoStores
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from celery_anarchon.backends.base import Enqueue, Keep, Takeover
from celery_anarchon.backends.runs import LapsedEnd, NextTry, RunHold, Settlement, Start
from celery_anarchon.model import Answer, GateAnswer, RunState
from celery_anarchon.testing.harness import LONG, abandon, give_up
from celery_anarchon.testing.runforms import ask_run, confirm_run, give_back, slot_of, unstarted

JOBS = st.sampled_from(["job", "job", "job", "other"])
NUMBERS = st.sampled_from(SLOTS)
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
        (RunState.SUPERSEDED, "job-removed"),
    ]
)
STEPS_OF_A_BEAT = st.sampled_from(
    ["confirm", "confirm", "confirm", "abandon", RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED]
)
WRONG = st.sampled_from([(0, 0), (0, 0), (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])
"""What is added to the right attempt and retries."""
WHO_GOES_ON = ["sweeper", "sweeper", "redelivery", "redelivery", "old holder", "end"]
LICENCES = (GateAnswer.START, GateAnswer.UNKNOWN)


class RunMachine(TwoStores):
    # --- beats --------------------------------------------------------------------------------------------------------

    @rule(
        client=CLIENTS,
        asked=st.lists(st.tuples(JOBS, NUMBERS, OWNERS, st.booleans()), min_size=1, max_size=3),
        lost=FAULTS,
    )
    def claims(self, client: int, asked: list[tuple[str, int, str, bool]], lost: bool) -> None:
        """With their messages or without."""
        sends = self.harness.traits.one_step

        def call(side: Side) -> Any:
            requests = [ask_run(job, side.at(n), owner, self.terms[job]) for job, n, owner, _ in asked]
            if not sends:
                return side.client.claim(requests)
            return side.client.claim_and_send(
                [
                    replace(request, enqueue=self.message(side, f"{job} {n} 1 of {owner}", 1)) if with_it else request
                    for request, (job, n, owner, with_it) in zip(requests, asked, strict=True)
                ]
            )

        results = self.both(client, call, lost)
        for (job, number, owner, _), result in zip(asked, results, strict=True):
            if result.answer is Answer.WON:
                self.won(Claim(job, number, owner, result.attempt))
        self.queues_agree()

    def message(self, side: Side, text: str, attempt: int) -> Enqueue:
        harness = self.reference if side is self.honest else self.harness
        return Enqueue(commands=harness.message_writes("queue", text), attempt=attempt, late=7)

    def queues_agree(self) -> None:
        if self.harness.traits.one_step:
            assert self.harness.raw_queue("queue") == self.reference.raw_queue("queue")

    @precondition(lambda self: self.claimed)
    @rule(
        client=CLIENTS,
        data=st.data(),
        owner=st.sampled_from([None, None, None, "x", "y"]),
        wrong=st.sampled_from([0, 0, 0, 1, -1]),
        step=STEPS_OF_A_BEAT,
        lost=FAULTS,
    )
    def a_beat_goes_on(
        self, client: int, data: st.DataObject, owner: str | None, wrong: int, step: Any, lost: bool
    ) -> None:
        """Its holder, or one that was, or one that never was."""
        claim = data.draw(st.sampled_from(self.claimed + self.claimed[-1:] * 3))
        self.go_on(client, replace(claim, owner=owner or claim.owner, attempt=claim.attempt + wrong), step, lost)

    def go_on(self, client: int, claim: Claim, step: Any, lost: bool = False) -> None:
        def call(side: Side) -> bool:
            who = side.client, claim.job, side.at(claim.number), claim.owner, claim.attempt
            if step == "confirm":
                return confirm_run(*who)
            return abandon(*who) if step == "abandon" else give_up(*who, step)

        self.both(client, call, lost)

    @rule(client=CLIENTS, data=st.data(), owner=OWNERS, lost=FAULTS)
    def takes_over(self, client: int, data: st.DataObject, owner: str, lost: bool) -> None:
        ending = self.with_an_end()
        if ending and data.draw(st.booleans()):
            self.lapse(*data.draw(st.sampled_from(ending)), 1)
        listed = [(found.job, found.slot - self.honest.base, found.attempt) for found in self.honest.client.lapsed(9)]
        guesses = [("job", 0, 1), ("other", 0, 1), ("job", 1, 2)]
        job, number, attempt = data.draw(st.sampled_from(listed * 3 + guesses))
        says = data.draw(st.sampled_from([0, attempt, attempt + 1]))
        self.take_over(client, job, number, attempt, owner, lost, says)

    def take_over(
        self, client: int, job: str, number: int, attempt: int, owner: str, lost: bool, says: int = 0
    ) -> None:
        """*says*: what attempt the message says that goes along, where one does."""

        def call(side: Side) -> list[int | None]:
            slot = side.at(number)
            wish = Takeover(job=job, slot=slot, from_attempt=attempt, owner=owner, beat="sweeper", lease=LONG)
            if not (says and self.harness.traits.one_step):
                return side.client.takeover([wish])
            message = self.message(side, f"{job} {number} {says} of {owner}", says)
            (found,) = side.client.takeover_and_send([replace(wish, enqueue=message)])
            return [found and found.attempt]

        results = self.both(client, call, lost)
        if results[0] is not None:
            self.won(Claim(job, number, owner, results[0]))
        self.queues_agree()

    @rule(client=CLIENTS, data=st.data(), ending=ENDINGS, wrong=WRONG, lost=FAULTS)
    def ends_what_lapsed(
        self, client: int, data: st.DataObject, ending: tuple[RunState, str], wrong: tuple[int, int], lost: bool
    ) -> None:
        runs = [(found.job, found.slot, found.attempt, found.state) for found in self.honest.client.lapsed(9)] * 3
        for job in self.terms:
            runs += [(job, slot_of(run), run.attempt, run.state) for run in self.honest.client.history(job, 9)]
        if runs:
            job, slot, attempt, was = data.draw(st.sampled_from(runs))
            self.end(client, job, slot - self.honest.base, attempt + wrong[0], was, *ending, lost)

    def end(
        self, client: int, job: str, number: int, attempt: int, was: RunState, state: RunState, reason: str, lost: bool
    ) -> None:
        def call(side: Side) -> list[bool]:
            slot = side.at(number)
            ending = LapsedEnd(job=job, slot=slot, attempt=attempt, was=was, state=state, reason=reason)
            return side.client.end_lapsed([ending])

        self.both(client, call, lost)

    @rule(client=CLIENTS, data=st.data(), job=JOBS, number=NUMBERS, lost=FAULTS)
    def seldom(self, client: int, data: st.DataObject, job: str, number: int, lost: bool) -> None:
        """One rule, because each ends or forgets what the others need."""
        step = data.draw(st.sampled_from(["tidy", "release the job", "reconnect", "expire", "forgotten"]))
        if step == "tidy":
            size = data.draw(st.integers(0, 2))
            self.both(
                client, lambda side: side.client.tidy([Keep(job=job, decided=side.at(number), history_size=size)])
            )
        elif step == "release the job":
            self.both(client, lambda side: [self.seen_from(side, run) for run in side.client.release_job(job)])
        elif step == "reconnect":
            self.clients[client].close()
            self.clients[client] = self.harness.connect_run()
        elif step == "expire" and self.messages:
            self.expire(client, data.draw(st.sampled_from(self.messages)), data.draw(WRONG), lost)
        else:
            # A run that the store has forgotten, or never heard of.
            message = Message(job, number, 1, data.draw(st.sampled_from([0, 0, 1])))
            self.publish(message)
            self.begin_body(client, message, self.new_token(message), lost)

    def expire(self, client: int, message: Message, wrong: tuple[int, int], lost: bool) -> None:
        attempt, retries = message.attempt + wrong[0], message.retries + wrong[1]
        self.both(
            client,
            lambda side: unstarted(side.client, message.job, side.at(message.number), attempt, retries),
            lost,
        )

    # --- workers ------------------------------------------------------------------------------------------------------

    @rule(
        client=CLIENTS,
        job=JOBS,
        number=NUMBERS,
        confirmed=st.sampled_from([True, True, False]),
        step=st.sampled_from(["start", "start", "start", "none", "retrying", "settle"]),
    )
    def goes_well(self, client: int, job: str, number: int, confirmed: bool, step: str) -> None:
        """Several calls that each also are a rule of their own: else what comes after them is hardly ever reached."""
        before = len(self.claimed)
        self.claims(client, [(job, number, "x", number % 2 == 0)], False)
        if len(self.claimed) == before:
            return
        if confirmed:
            self.go_on(client, self.claimed[-1], "confirm")
        if step != "none":
            self.begin_body(client, self.messages[-1], self.new_token(self.messages[-1]), False)
        if step in ("retrying", "settle"):
            self.say(client, self.grips[-1], step, RunState.SUCCEEDED)

    @precondition(lambda self: self.running())
    @rule(client=CLIENTS, data=st.data(), by=st.sampled_from(WHO_GOES_ON))
    def goes_badly(self, client: int, data: st.DataObject, by: str) -> None:
        """A worker dies, or seems to, and somebody goes on."""
        grip = data.draw(st.sampled_from(self.running()))
        job, number = grip.message.job, grip.message.number
        self.lapse(job, number, 1)
        if by == "sweeper":
            self.take_over(client, job, number, grip.attempt, "y", False)
            if self.claimed and self.claimed[-1].owner == "y":
                self.go_on(client, self.claimed[-1], data.draw(STEPS_OF_A_BEAT))
        elif by == "redelivery":
            self.begin_body(client, grip.message, self.new_token(grip.message), False)
        elif by == "old holder":
            self.say(client, grip, data.draw(st.sampled_from(["heartbeat", "settle", "retrying"])), RunState.FAILED)
        else:
            self.end(client, job, number, grip.attempt, RunState.RUNNING, RunState.LOST, "worker-lost", False)

    @precondition(lambda self: self.messages)
    @rule(client=CLIENTS, data=st.data(), again=st.booleans(), lost=FAULTS)
    def starts(self, client: int, data: st.DataObject, again: bool, lost: bool) -> None:
        if again and self.deliveries:
            running = [(grip.message, grip.token) for grip in self.running()]
            message, token = data.draw(st.sampled_from(self.deliveries + running * 3))
        else:
            message = data.draw(st.sampled_from(self.messages + self.messages[-1:] * 2))
            token = self.new_token(message)
        self.begin_body(client, message, token, lost)

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
            self.license(Grip(message, results[0].attempt, token))

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
        grip = data.draw(st.sampled_from(self.grips + self.running() * 3))
        token = data.draw(st.sampled_from([grip.token] * 5 + [self.grips[0].token, "nobody"]))
        self.say(client, grip, step, state, wrong, token, lost)

    def say(
        self,
        client: int,
        grip: Grip,
        step: str,
        state: RunState,
        wrong: tuple[int, int] = (0, 0),
        token: str | None = None,
        lost: bool = False,
    ) -> None:
        message = grip.message

        def call(side: Side) -> Any:
            hold = RunHold(
                job=message.job,
                slot=side.at(message.number),
                attempt=grip.attempt + wrong[0],
                retries=message.retries + wrong[1],
                token=token or grip.token,
            )
            if step == "settle":
                return side.client.settle([Settlement(**vars(hold), state=state, reason=f"why {state}")])
            if step == "retrying":
                return side.client.retrying([NextTry(**vars(hold), delay=0)])
            return getattr(side.client, step)([hold])

        if step == "retrying" and wrong == (0, 0):
            # Celery publishes first.
            self.publish(Message(message.job, message.number, grip.attempt, message.retries + 1))
        self.both(client, call, lost)

    @precondition(lambda self: self.grips)
    @rule(client=CLIENTS, data=st.data(), wrong=WRONG, lost=FAULTS)
    def gives_back(self, client: int, data: st.DataObject, wrong: tuple[int, int], lost: bool) -> None:
        grip = data.draw(st.sampled_from(self.grips + self.running() * 3))
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
            self.lapse(*data.draw(st.sampled_from(ending)), ago)

    @rule(client=CLIENTS, data=st.data(), ago=AGO, end=ENDINGS)
    def waits_too_long(self, client: int, data: st.DataObject, ago: int, end: tuple[RunState, str]) -> None:
        """And a sweeper ends it, or is not allowed to."""
        ending = self.with_an_end()
        if ending:
            job, number = data.draw(st.sampled_from(ending))
            self.lapse(job, number, ago)
            run = next(run for run in self.honest.client.living(job) if slot_of(run) == self.honest.at(number))
            self.end(client, job, number, run.attempt, run.state, *end, False)

    def lapse(self, job: str, number: int, ago: int) -> None:
        self.harness.lapse(job, self.base + number, ago)
        self.reference.lapse(job, self.honest.at(number), ago)


def run_machine_for(harness: type[Any], examples: int, steps: int) -> Any:
    kind = type(f"{harness.__name__}RunMachine", (RunMachine,), {"harness_class": harness})
    case = kind.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestMemoryRunMachine = run_machine_for(MemoryHarness, 150, 40)
TestMemoryRunMachineLong = pytest.mark.long(run_machine_for(MemoryHarness, 3_000, 60))
