"""What the suites know of a store, and the means to race for it, to break it and to look past the backend.

Belongs here: everything that a clause needs besides the contract. Does not belong here: clauses, and names of products.
"""

from __future__ import annotations

import abc
import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from celery_anarchon.backends.base import (
    ClaimBackend,
    ClaimRequest,
    ClaimResult,
    Command,
    Confirmation,
    GivenUp,
    Hold,
    LeaseBackend,
    Outcome,
    Takeover,
    Traits,
)
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import Answer, Millis, RunState

LONG: Millis = 600_000
"""A lease that no test outlives."""

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., None])
_CLAUSE = re.compile(r"test_([CLXWO]\d+)_")


class BackendHarness(abc.ABC):
    """One store, one fresh namespace in it. A context manager; the suites make one for each test.

    Nothing is ever flushed: a harness may stand on a server that others use.
    """

    traits: ClassVar[Traits]
    """Those of the backend's class. They choose the clauses."""
    processes: ClassVar[bool] = True
    """Another process can be a client of the same store. False only where the store is this process's memory."""
    breakable: ClassVar[bool] = True
    """There is a driver between client and store that can fail. False only where the store is memory."""
    app_name: ClassVar[str] = "conformance"
    short: ClassVar[Millis] = 250
    """A lease that a test waits for; long enough for two calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self._clients: list[ClaimBackend] = []

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()

    @abc.abstractmethod
    def connect_spec(self, app_name: str | None = None) -> Callable[[], ClaimBackend]:
        """A callable that gives a new client of this namespace, opened for *app_name*, in whatever process calls it.

        Where :attr:`processes` holds it can be pickled, and a process that is no fork of this one can import it: a
        function of a module on ``sys.path``, or a partial of one.
        """

    def connect(self) -> ClaimBackend:
        """A new client, as independent as another beat."""
        client = self.connect_spec()()
        self._clients.append(client)
        return client

    def connect_lease(self) -> LeaseBackend:
        client = self.connect()
        assert isinstance(client, LeaseBackend), f"{client.name}: traits.leases, but it is no LeaseBackend"
        return client

    def connect_run(self) -> RunBackend:
        client = self.connect()
        assert isinstance(client, RunBackend), f"{client.name}: traits.follows_runs, but it is no RunBackend"
        return client

    def connect_one_step(self) -> OneStepBackend:
        client = self.connect()
        assert isinstance(client, OneStepBackend), f"{client.name}: traits.one_step, but it is no OneStepBackend"
        return client

    @abc.abstractmethod
    def raw_read(self, job: str, slot: Millis) -> Mapping[str, Any] | None:
        """The stored record, read past the backend: its fields by any names, as long as equal records are equal."""

    def connect_short(self) -> ClaimBackend:
        """Only where traits.horizon is set: a new client whose horizon a test can wait for, of another namespace if
        need be. Longer than some calls in any case."""
        raise NotImplementedError(f"{type(self).__name__} has traits.horizon, but no connect_short()")

    def raw_forge_lease(self, job: str, slot: Millis, lease_until: Millis) -> None:
        """Write the end of a lease, or of a run's wait in its queue, past the backend. A store that cannot, overrides
        :meth:`lapse` and waits."""
        raise NotImplementedError(f"{type(self).__name__} has leases, but no raw_forge_lease()")

    def message_writes(self, queue: str, payload: str) -> tuple[Command, ...]:
        """Only where traits.one_step: the store's commands that put *payload* into that queue."""
        raise NotImplementedError(f"{type(self).__name__} has traits.one_step, but no message_writes()")

    def refused_write(self) -> Command:
        """Only where traits.one_step: a command of a message that the store refuses, when all before it were done."""
        raise NotImplementedError(f"{type(self).__name__} has traits.one_step, but no refused_write()")

    def raw_queue(self, queue: str) -> list[str]:
        """Only where traits.one_step: the payloads in that queue, oldest first, read past the backend."""
        raise NotImplementedError(f"{type(self).__name__} has traits.one_step, but no raw_queue()")

    @abc.abstractmethod
    def raw_forge_layout(self, version: int) -> None:
        """Make the namespace one that a release with this layout version wrote."""

    def lapse(self, job: str, slot: Millis, ago: Millis = 1) -> None:
        """The lease of this claim or run, or its queue limit, has been over for *ago*, by the store's clock."""
        self.raw_forge_lease(job, slot, self.connect().now() - ago)

    def pass_time(self, span: Millis) -> None:
        """Let the store's clock go on by *span*: a harness with a clock of its own turns that instead."""
        threading.Event().wait(span / 1000)

    def restart(self) -> None:
        """Only for a durable store: end it and all its clients, and start it again with what it kept."""
        raise NotImplementedError(f"{type(self).__name__} has traits.durable, but no restart()")

    def unreachable(self, client: ClaimBackend) -> AbstractContextManager[None]:
        """Only where :attr:`breakable`: meanwhile no call of *client* reaches the store, and none is applied."""
        raise NotImplementedError(f"{type(self).__name__} is breakable, but has no unreachable()")

    def reply_lost(self, client: ClaimBackend) -> AbstractContextManager[None]:
        """Only where :attr:`breakable`: meanwhile each write of *client* is applied, and the reply does not arrive."""
        raise NotImplementedError(f"{type(self).__name__} is breakable, but has no reply_lost()")


def needs(*conditions: str) -> Callable[[_F], _F]:
    """This clause can only be asked of a backend whose traits, and whose harness, say so. Others do not collect it."""

    def mark(clause: _F) -> _F:
        clause.__dict__["conformance_needs"] = conditions
        return clause

    return mark


class Suite:
    """What all suites share: which clauses a backend is asked, and that none is silently left out."""

    harness_class: ClassVar[type[BackendHarness]]
    not_collected: ClassVar[dict[str, str]] = {}
    """Clauses that this backend is not asked -> the trait that says why."""
    wants_leases: ClassVar[bool] = False
    wants_runs: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "harness_class" not in vars(cls):
            return
        harness = cls.harness_class
        cls.not_collected = {}
        for name in dir(cls):
            clause = getattr(cls, name)
            for condition in getattr(clause, "conformance_needs", ()):
                holder = harness.traits if hasattr(harness.traits, condition) else harness
                if not getattr(holder, condition):
                    cls.not_collected[name] = condition
                    setattr(cls, name, None)

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[BackendHarness]:
        with self.harness_class(tmp_path) as harness:
            yield harness

    def test_the_suite_is_the_one_for_the_traits(self) -> None:
        """A backend with leases that is only asked the claim clauses looks tested and is not."""
        traits = self.harness_class.traits
        assert self.wants_leases == traits.leases, f"{type(self).__name__}: inherit LeaseSuite exactly if traits.leases"
        assert self.wants_runs == traits.follows_runs, (
            f"{type(self).__name__}: inherit RunSuite exactly if traits.follows_runs"
        )

    def test_no_clause_is_left_out(self) -> None:
        """A clause that its author deleted or rewrote passes for ever."""
        for suite in type(self).__mro__:
            if suite.__module__.startswith("celery_anarchon.testing."):
                for name in filter(_CLAUSE.match, vars(suite)):
                    clause = getattr(type(self), name)
                    changed = clause is not vars(suite)[name] and name not in self.not_collected
                    expected = any(
                        mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason")
                        for mark in getattr(clause, "pytestmark", ())
                    )
                    assert not changed or expected, (
                        f"{name} is changed: mark it xfail with strict=True and a reason, or leave it alone"
                    )


def clauses_of(*suites: type[Suite]) -> dict[str, list[str]]:
    """Clause id -> the tests of it, over *suites*."""
    found: dict[str, list[str]] = defaultdict(list)
    for suite in suites:
        for name in dir(suite):
            match = _CLAUSE.match(name)
            if match and name not in found[match[1]]:
                found[match[1]].append(name)
    return dict(found)


def report(suite: type[Suite]) -> dict[str, Any]:
    """What a suite with a harness asks: ``asked``, the ids of its clauses; and ``left out``, clause id -> the traits
    for whose sake tests of it are left out."""
    asked: list[str] = []
    left: dict[str, list[str]] = {}
    for clause, tests in clauses_of(suite).items():
        out = [suite.not_collected[test] for test in tests if test in suite.not_collected]
        if len(out) < len(tests):
            asked.append(clause)
        if out:
            left[clause] = sorted(set(out))
    return {"asked": sorted(asked), "left out": left}


def report_lines() -> list[str]:
    """For a terminal summary: of each suite with a harness how many clauses it asks, which it leaves out, and why."""
    lines = []
    for suite in _suites(Suite):
        if "harness_class" in vars(suite):
            tests = sum(map(len, clauses_of(suite).values())) - len(suite.not_collected)
            left = [f"{name} ({condition})" for name, condition in sorted(suite.not_collected.items())]
            lines.append(
                f"{suite.__module__}.{suite.__name__}: {len(report(suite)['asked'])} clauses, {tests} tests; "
                f"not applicable: {', '.join(left) or 'none'}"
            )
    return sorted(set(lines))


def _suites(root: type[Suite]) -> Iterator[type[Suite]]:
    for suite in root.__subclasses__():
        yield suite
        yield from _suites(suite)


# --- short forms of the contract's values -----------------------------------------------------------------------------


def ask(job: str, slot: Millis, owner: str, lease: Millis = LONG, beat: str = "beat") -> ClaimRequest:
    return ClaimRequest(job=job, slot=slot, owner=owner, beat=beat, lease=lease)


def claim(client: ClaimBackend, job: str, slot: Millis, owner: str, lease: Millis = LONG) -> Answer:
    return claim_all(client, [ask(job, slot, owner, lease)])[0]


def claim_all(client: ClaimBackend, requests: Sequence[ClaimRequest]) -> list[Answer]:
    results: list[ClaimResult] = client.claim(requests)
    assert len(results) == len(requests), f"{len(requests)} requests, {len(results)} answers"
    return [result.answer for result in results]


def confirm(client: ClaimBackend, job: str, slot: Millis, owner: str, attempt: int = 1, late: Millis = 7) -> bool:
    return client.confirm([Confirmation(job=job, slot=slot, owner=owner, attempt=attempt, late=late)])[0]


def abandon(client: ClaimBackend, job: str, slot: Millis, owner: str, attempt: int = 1) -> bool:
    return client.abandon([Hold(job=job, slot=slot, owner=owner, attempt=attempt)])[0]


def give_up(
    client: ClaimBackend,
    job: str,
    slot: Millis,
    owner: str,
    attempt: int = 1,
    state: RunState = RunState.MISFIRE,
    reason: str | None = "too-late",
) -> bool:
    ending = GivenUp(job=job, slot=slot, owner=owner, attempt=attempt, state=state, reason=reason)
    return client.give_up([ending])[0]


def record(client: ClaimBackend, job: str, slot: Millis, state: RunState = RunState.SKIPPED) -> None:
    client.record([Outcome(job=job, slot=slot, state=state, reason="a-reason", beat="beat")])


def take(
    client: LeaseBackend, job: str, slot: Millis, owner: str, from_attempt: int = 1, lease: Millis = LONG
) -> int | None:
    wish = Takeover(job=job, slot=slot, from_attempt=from_attempt, owner=owner, beat="sweeper", lease=lease)
    return client.takeover([wish])[0]


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None
