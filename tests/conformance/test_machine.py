"""Any order of calls by several owners over several clients, against a model that shares nothing with the backends."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from conformance.harnesses import MemoryHarness, SqliteHarness
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_anarchon.backends.base import Keep, LeaseBackend
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing import BackendHarness
from celery_anarchon.testing.harness import abandon, ask, claim_all, confirm, give_up, raised_by, record, take

JOBS = st.sampled_from(["a", "b"])
NUMBERS = st.integers(0, 4)
OWNERS = st.sampled_from(["x", "y", "z"])
ATTEMPTS = st.sampled_from([1, 1, 1, 2])
CLIENTS = st.integers(0, 2)
GIVEN_UP = st.sampled_from([RunState.NOT_SENT, RunState.MISFIRE, RunState.SUPERSEDED])
NEVER = st.sampled_from([RunState.MISFIRE, RunState.SUPERSEDED, RunState.SKIPPED, RunState.PAUSED])


@dataclass
class Entry:
    state: str
    owner: str | None
    over: bool = False


class Machine(RuleBasedStateMachine):
    harness_class: ClassVar[type[BackendHarness]]

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        directory = Path(tempfile.mkdtemp(prefix="anarchon-"))
        self.stack.callback(shutil.rmtree, directory)
        self.harness = self.stack.enter_context(self.harness_class(directory))
        self.clients: list[LeaseBackend] = [self.harness.connect_lease() for _ in range(3)]
        self.base = self.clients[0].now() - 3_600_000
        self.entries: dict[tuple[str, int], Entry] = {}
        self.floors: dict[str, int] = {}
        self.winners: dict[tuple[str, int], set[str]] = {}
        """Who was told WON, since the slot was last taken over."""

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    def expected(self, job: str, number: int, owner: str) -> Answer:
        if number <= self.floors.get(job, -1):
            return Answer.TOO_OLD
        entry = self.entries.setdefault((job, number), Entry("claimed", owner))
        if entry.owner != owner:
            return Answer.TAKEN
        if entry.state != "claimed":
            return Answer.ALREADY_SENT
        entry.over = False
        return Answer.WON

    def holds(self, job: str, number: int, owner: str, attempt: int) -> Entry | None:
        entry = self.entries.get((job, number))
        return entry if entry is not None and entry.owner == owner and attempt == 1 else None

    @rule(client=CLIENTS, asked=st.lists(st.tuples(JOBS, NUMBERS, OWNERS), min_size=1, max_size=5))
    def claims(self, client: int, asked: list[tuple[str, int, str]]) -> None:
        answers = claim_all(self.clients[client], [ask(job, self.base + n, owner) for job, n, owner in asked])
        assert answers == [self.expected(*question) for question in asked]
        for (job, number, owner), answer in zip(asked, answers, strict=True):
            if answer is Answer.WON:
                self.winners.setdefault((job, number), set()).add(owner)

    @precondition(lambda self: self.harness.breakable)
    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS)
    def claims_and_hears_nothing(self, client: int, job: str, number: int, owner: str) -> None:
        with self.harness.reply_lost(self.clients[client]):
            error = raised_by(lambda: claim_all(self.clients[client], [ask(job, self.base + number, owner)]))
        assert isinstance(error, OutcomeUnknown)
        if self.expected(job, number, owner) is Answer.WON:
            self.winners.setdefault((job, number), set()).add(owner)

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=ATTEMPTS)
    def confirms(self, client: int, job: str, number: int, owner: str, attempt: int) -> None:
        entry = self.holds(job, number, owner, attempt)
        done = entry is not None and entry.state in ("claimed", "dispatched")
        if entry is not None and done:
            entry.state, entry.over = "dispatched", False
        assert confirm(self.clients[client], job, self.base + number, owner, attempt) == done

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=ATTEMPTS)
    def abandons(self, client: int, job: str, number: int, owner: str, attempt: int) -> None:
        entry = self.holds(job, number, owner, attempt)
        done = entry is not None and entry.state == "claimed"
        if entry is not None and done:
            entry.owner, entry.over = None, True
        assert abandon(self.clients[client], job, self.base + number, owner, attempt) == done

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=ATTEMPTS, state=GIVEN_UP)
    def gives_up(self, client: int, job: str, number: int, owner: str, attempt: int, state: RunState) -> None:
        entry = self.holds(job, number, owner, attempt)
        done = entry is not None and entry.state in ("claimed", state.value)
        if entry is not None and done:
            entry.state, entry.over = state.value, False
        assert give_up(self.clients[client], job, self.base + number, owner, attempt, state) == done

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, state=NEVER)
    def records(self, client: int, job: str, number: int, state: RunState) -> None:
        if number > self.floors.get(job, -1):
            self.entries.setdefault((job, number), Entry(state.value, None))
        record(self.clients[client], job, self.base + number, state)

    @precondition(lambda self: any(entry.state == "claimed" for entry in self.entries.values()))
    @rule(data=st.data())
    def lapses(self, data: st.DataObject) -> None:
        job, number = data.draw(
            st.sampled_from(sorted(key for key, entry in self.entries.items() if entry.state == "claimed"))
        )
        self.entries[job, number].over = True
        self.harness.lapse(job, self.base + number)

    @rule(client=CLIENTS, job=JOBS, number=NUMBERS, owner=OWNERS, attempt=ATTEMPTS)
    def takes_over(self, client: int, job: str, number: int, owner: str, attempt: int) -> None:
        entry = self.entries.get((job, number))
        done = entry is not None and entry.state == "claimed" and attempt == 1 and (entry.over or entry.owner == owner)
        if entry is not None and done:
            entry.owner, entry.over = owner, False
        answer = take(self.clients[client], job, self.base + number, owner, attempt)
        if answer is not None:
            self.winners[job, number] = {owner}
        assert answer == (1 if done else None)

    @rule(client=CLIENTS, job=JOBS, decided=NUMBERS, size=st.integers(0, 3))
    def tidies(self, client: int, job: str, decided: int, size: int) -> None:
        numbers = sorted(number for name, number in self.entries if name == job)
        over = numbers[: max(0, len(numbers) - size)]
        dropped = 0
        for number in over:
            if number > decided or self.entries[job, number].state == "claimed":
                break
            del self.entries[job, number]
            self.floors[job] = number
            dropped += 1
        keep = Keep(job=job, decided=self.base + decided, history_size=size)
        assert self.clients[client].tidy([keep]) == dropped

    @rule(client=CLIENTS)
    def reconnects(self, client: int) -> None:
        self.clients[client].close()
        self.clients[client] = self.harness.connect_lease()

    @invariant()
    def the_history_is_the_model_s(self) -> None:
        for job in ("a", "b"):
            found = [
                (round(run.slot.timestamp() * 1000) - self.base, str(run.state))
                for run in self.clients[0].history(job, 100)
            ]
            mine = ((number, entry.state) for (name, number), entry in self.entries.items() if name == job)
            assert found == sorted(mine, reverse=True)

    @invariant()
    def the_lapsed_are_the_model_s(self) -> None:
        found = {(claim.job, claim.slot - self.base, claim.abandoned) for claim in self.clients[1].lapsed(100)}
        over = {(job, n, entry.owner is None) for (job, n), entry in self.entries.items() if entry.over}
        assert found == over

    @invariant()
    def a_slot_is_won_once(self) -> None:
        assert all(len(owners) == 1 for owners in self.winners.values())


def machine_for(harness: type[Any], examples: int, steps: int) -> Any:
    kind = type(f"{harness.__name__}Machine", (Machine,), {"harness_class": harness})
    case = kind.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestMemoryMachine = machine_for(MemoryHarness, 100, 40)
TestSqliteMachine = machine_for(SqliteHarness, 15, 30)
TestMemoryMachineLong = pytest.mark.long(machine_for(MemoryHarness, 3_000, 60))
TestSqliteMachineLong = pytest.mark.long(machine_for(SqliteHarness, 400, 60))
