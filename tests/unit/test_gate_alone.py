"""The gate alone, without a worker around it; what Celery makes of it is in ``tests/worker``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from weakref import WeakSet

import pytest
from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from unit.test_keeper import SECOND, TERMS, Desk

from celery_anarchon import dropped, wire
from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.backends.runs import RunHold, Settlement, Start
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.events import RunEnded
from celery_anarchon.gate import Gate
from celery_anarchon.model import GateAnswer, OnUnknown, RunState, Terms
from celery_anarchon.options import Settings
from celery_anarchon.worker import SlotBack

UNCOUNTED = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND)


class Asked:
    """A request at the gate, as much of it as the gate looks at."""

    time_limits = (None, None)
    _apply_result: Any = staticmethod(lambda: None)
    """What a pool of processes made of it."""

    def __init__(self, header: dict[str, Any], *, acks_late: bool = False, redelivered: bool = False) -> None:
        self.id = wire.run_id(header["ns"], header["job"], wire.parse_time(header["slot"]))
        self.request_dict: dict[str, Any] = {wire.HEADER: header}
        self.task = SimpleNamespace(acks_late=acks_late, time_limit=None)
        self.delivery_info = {"redelivered": redelivered}
        self.acknowledged = 0
        for name in ("on_success", "on_failure", "on_timeout", "on_retry", "_announce_revoked", "_announce_cancelled"):
            setattr(self, name, lambda *_, **__: None)

    def revoked(self) -> bool:
        return False

    def acknowledge(self) -> None:
        self.acknowledged += 1


class Door:
    """A gate, its store, and the worker around it: what waits for its time, what executes."""

    def __init__(self, slot_back: Callable[[], None] = lambda: None) -> None:
        self.desk = Desk()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.waits: list[float] = []
        self.executed: list[Any] = []
        self.room = 0
        self.gate = Gate(
            keeper=self.desk.keeper,
            namespace=self.desk.backend.namespace,
            label="w",
            settings=Settings(),
            execute=self.executed.append,
            slot_back=slot_back,
            again=lambda request: self.gate(request),
            later=self._later,
            room=self._make_room,
            enforces_timeout=True,
            clock=self.desk.clock,
        )

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        self.waits.append(seconds)
        self.later.append((self.desk.clock.monotonic() + seconds, step))

    def _make_room(self) -> Callable[[], None]:
        self.room += 1
        return self._take_room

    def _take_room(self) -> None:
        self.room -= 1

    def request(self, job: str = "job", terms: Terms = TERMS, **given: Any) -> Any:
        """One that Celery has reserved for its pool."""
        header = wire.header(
            namespace=self.desk.backend.namespace, job=job, slot=self.desk.slot, attempt=1, late=0, beat="b"
        )
        request = Asked({**header, **wire.terms_header(terms, OnUnknown.REPEAT)}, **given)
        state.task_reserved(request)
        return request

    def redelivery(self, terms: Terms = UNCOUNTED, *, acks_late: bool = True, redelivered: bool = True) -> Any:
        return self.request("job", terms, acks_late=acks_late, redelivered=redelivered)

    def elsewhere(self, terms: Terms = UNCOUNTED) -> Start:
        """Another worker runs it."""
        claim = ClaimRequest(job="job", slot=self.desk.slot, owner="b", beat="b", lease=SECOND, terms=terms)
        self.desk.reader.claim([claim])
        start = Start(
            job="job", slot=self.desk.slot, attempt=1, retries=0, token="t", worker="v", terms=terms, acks_late=True
        )
        assert self.desk.reader.start([start])[0].answer is GateAnswer.START
        return start

    def settled(self) -> None:
        self.desk.keeper.settle(self.desk.start(), RunState.SUCCEEDED)
        self.desk.keeper.turn()

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds * 2):
            self.desk.clock.advance(SECOND // 2)
            now = self.desk.clock.monotonic()
            due, self.later = (
                [step for at, step in self.later if at <= now],
                [(at, step) for at, step in self.later if at > now],
            )
            for step in due:
                step()


@pytest.fixture(autouse=True)
def celerys_lists() -> Iterator[None]:
    state.reset_state()
    yield
    state.reset_state()


def test_messages_held_for_losses_with_work_between_them_wait_no_longer_each_time() -> None:
    door = Door()
    for number in range(6):
        request = door.request(f"job-{number}")
        door.desk.backend.failing["start"] = OutcomeUnknown("the reply was lost")
        door.gate(request)
        door.desk.backend.failing.clear()
        door.desk.clock.advance(SECOND // 2)
        door.gate(request)
        assert door.desk.run(f"job-{number}").state is RunState.RUNNING
    assert door.waits == pytest.approx([0.51] * 6)


# --- pool slots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["the store is away", "they have ended"])
def test_a_thousand_that_wait_for_a_slot_and_do_not_run(why: str) -> None:
    """Prefork: each gives the slot on to the next one, and the stack grew with each. The error ended the worker, and
    the end of the body whose slot it was went untold."""
    semaphore = LaxBoundedSemaphore(2)
    worker: Any = SimpleNamespace(_quick_release=semaphore.release)
    door = Door(SlotBack(worker))
    worker.process_task = worker._process_task_sem = lambda request: semaphore.acquire(door.gate, request)
    for _ in range(2):
        semaphore.acquire(lambda: None)
    if why == "the store is away":
        door.desk.backend.failing["start"] = BackendUnavailable("away")
    else:
        door.settled()
    requests = [door.request() for _ in range(1_000)]
    for request in requests:
        worker.process_task(request)
    # One of the two bodies ends.
    semaphore.release()
    assert (semaphore.value, len(semaphore._waiting)) == (1, 0)
    held = 1_000 if why == "the store is away" else 0
    assert (len(door.waits), len(door.gate._waiting)) == (held, held)
    assert sum(request.acknowledged for request in requests) == 1_000 - held


def test_an_error_of_the_next_one_costs_no_slot() -> None:
    semaphore = LaxBoundedSemaphore(2)
    worker: Any = SimpleNamespace(_quick_release=semaphore.release)
    worker.process_task = worker._process_task_sem = lambda request: None
    slot_back = SlotBack(worker)

    def fail() -> None:
        slot_back()
        raise KeyError("of the next one")

    for callback in (lambda: None, lambda: None, fail):
        semaphore.acquire(callback)
    with pytest.raises(KeyError):
        slot_back()
    slot_back()
    assert semaphore.value == 2


def test_pools_that_take_no_slot_before_the_gate_get_none_back() -> None:
    released: list[int] = []
    worker: Any = SimpleNamespace(process_task=1, _process_task_sem=2, _quick_release=lambda: released.append(1))
    SlotBack(worker)()
    SlotBack(SimpleNamespace(process_task=1))()
    assert released == []


def test_what_is_held_has_its_turn_before_others_come() -> None:
    def next_one_fails() -> None:
        raise KeyError("of the next one")

    door = Door(next_one_fails)
    door.desk.backend.failing["start"] = BackendUnavailable("away")
    with pytest.raises(KeyError):
        door.gate(door.request())
    assert len(door.waits) == len(door.gate._waiting) == 1


# --- Celery's lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["active_requests", "reserved_requests"])
@pytest.mark.parametrize("restless", ["once", "always"])
def test_threads_that_change_celerys_lists_meanwhile(monkeypatch: pytest.MonkeyPatch, name: str, restless: str) -> None:
    """Pool threads: "Set changed size during iteration" came out of a refusal, and ended the worker."""
    newcomers: list[Any] = []

    class Restless(WeakSet):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for number, item in enumerate(super().__iter__()):
                yield item
                if number == 0 and (restless == "always" or not newcomers):
                    newcomers.append(MagicMock(id="another"))
                    self.add(newcomers[-1])

    door = Door()
    door.settled()
    copy, runs = door.request(), door.request()
    monkeypatch.setattr(state, name, Restless([copy, runs]))
    state.requests[copy.id] = copy
    door.gate(copy)
    assert copy.acknowledged == 1 and newcomers
    if restless == "once":
        assert state.requests[copy.id] is runs


# --- redeliveries that the store waits for ----------------------------------------------------------------------------


def test_a_redelivery_inside_the_lease_goes_on_when_it_is_over() -> None:
    """A killed worker's message is back in milliseconds. To drop it was the end of the run: the store left it to the
    broker's redelivery, an hour or a day long, and there was none."""
    door = Door()
    door.elsewhere()
    request = door.redelivery()
    door.gate(request)
    assert (door.executed, request.acknowledged, door.room) == ([], 0, 1)
    door.pass_time(29)
    assert (door.executed, request.acknowledged) == ([], 0)
    door.pass_time(10)
    assert (door.executed, request.acknowledged, door.room) == ([request], 0, 0)
    assert request.request_dict[wire.HEADER]["attempt"] == 2
    assert state.requests[request.id] is request
    run = door.desk.run()
    assert (run.state, run.attempt, run.worker) == (RunState.RUNNING, 2, "w")
    assert (door.gate._waiting, door.later) == ({}, [])


def test_a_redelivery_waits_as_long_as_the_run_is_alive() -> None:
    """A visibility timeout shorter than the body: no second body, and no question oftener than a heartbeat."""
    door = Door()
    start = door.elsewhere()
    runs, request = door.request(), door.redelivery()
    door.gate(request)
    # Whoever revokes the task means the one that runs.
    assert state.requests[request.id] is runs
    hold = {key: vars(start)[key] for key in ("job", "slot", "attempt", "retries", "token")}
    for _ in range(60):
        door.pass_time(10)
        assert door.desk.reader.heartbeat([RunHold(**hold)]) == [True]
    assert (door.executed, request.acknowledged) == ([], 0)
    assert door.waits[:6] == [0.5, 1, 2, 4, 8, 10] and set(door.waits[6:]) == {10}
    record = door.desk.run()
    assert record.refused == len(door.waits) <= 600 / 10 + 6
    assert door.desk.reader.settle([Settlement(**hold, state=RunState.SUCCEEDED)]) == [True]
    door.pass_time(11)
    assert (door.executed, request.acknowledged, door.room) == ([], 1, 0)
    assert (door.gate._waiting, door.later) == ({}, [])
    assert request not in state.reserved_requests


@pytest.mark.parametrize(
    ("terms", "given"),
    [
        (UNCOUNTED, {"redelivered": False}),
        (UNCOUNTED, {"acks_late": False}),
        (Terms(lease=30 * SECOND, queue_timeout=60 * SECOND, max_attempts=2), {}),
    ],
)
def test_other_copies_are_dropped_at_once(terms: Terms, given: dict[str, bool]) -> None:
    door = Door()
    door.elsewhere(terms)
    request = door.redelivery(terms, **given)
    door.gate(request)
    assert (request.acknowledged, door.waits, door.room) == (1, [], 0)


def test_one_redelivery_of_a_task_is_held() -> None:
    door = Door()
    door.elsewhere()
    first, second = door.redelivery(), door.redelivery()
    door.gate(first)
    door.gate(second)
    assert (first.acknowledged, second.acknowledged, door.room) == (0, 1, 1)
    door.pass_time(40)
    assert door.executed == [first]


def test_a_redelivery_of_a_lost_connection_makes_way() -> None:
    """It can be neither acknowledged nor given back: the broker has delivered it anew."""
    door = Door()
    door.elsewhere()
    first = door.redelivery()
    door.gate(first)
    # As Celery does when its connection is gone.
    state.reserved_requests.clear()
    state.requests.clear()
    second = door.redelivery()
    door.gate(second)
    door.pass_time(40)
    assert (door.executed, first.acknowledged, second.acknowledged, door.room) == ([second], 0, 0, 0)
    assert door.gate._waiting == {}


@pytest.mark.parametrize("error", [BackendUnavailable("away"), OutcomeUnknown("no answer")])
def test_a_held_redelivery_never_starts_without_a_yes(error: Exception) -> None:
    """Another body may live, and patience with the store (``anarchon_gate_wait``) is for those of whom nothing is
    known."""
    door = Door()
    door.elsewhere()
    request = door.redelivery()
    door.gate(request)
    door.desk.backend.failing["start"] = error
    door.pass_time(300)
    assert (door.executed, request.acknowledged) == ([], 0)
    door.desk.backend.failing.clear()
    door.pass_time(10)
    assert door.executed == [request] and door.desk.run().attempt == 2


def test_held_redeliveries_go_back_when_the_worker_stops() -> None:
    door = Door()
    door.elsewhere()
    request = door.redelivery()
    door.gate(request)
    door.gate.stop()
    assert request.acknowledged == 0 and door.gate._waiting == {}
    door.desk.keeper.turn()
    assert door.desk.run().worker == "v"


@pytest.mark.parametrize(
    "wrong", [{"job": 5}, {"beat": None}, {"slot": "soon"}, {"lease": "30"}, {"on_unknown": []}, {"attempt": "one"}]
)
def test_a_header_that_nobody_of_ours_wrote_ends_no_worker(wrong: dict[str, Any]) -> None:
    """Its task runs, untracked. What the gate would raise ends the worker, and then the next that is given it."""
    door = Door()
    request = door.request()
    request.request_dict[wire.HEADER].update(wrong)
    door.gate(request)
    assert door.executed == [request]
    assert "start" not in door.desk.backend.told


def test_a_closed_pool_takes_nothing_without_a_word() -> None:
    """A worker that stops has closed its pool, and what comes to it then goes back: released, it would have cost an
    attempt, and with max_attempts=1 the run."""
    door = Door()
    request = door.request()
    request._apply_result = None
    door.desk.claim("job", TERMS)
    door.gate(request)
    door.desk.keeper.turn()
    assert door.desk.run().state is RunState.QUEUED and not request.acknowledged
    door.desk.keeper.stop()
    assert door.desk.reader.lapsed(10) == []


def test_a_run_that_is_lost_at_the_gate_is_told_of() -> None:
    door = Door()
    once = Terms(lease=30 * SECOND, queue_timeout=3_600 * SECOND, max_attempts=1)
    door.elsewhere(once)
    door.desk.clock.advance(31 * SECOND)
    door.gate(door.redelivery(once))
    told = RunEnded(job="job", slot=door.desk.slot, state=RunState.LOST, reason="attempts-used-up")
    assert door.desk.run().state is RunState.LOST and door.desk.told == [told]


class Pool:
    """Of processes."""

    def __init__(self, early: bool) -> None:
        self.jobs: dict[str, Any] = {}
        self.early = early

    def take(self, request: Any, name: str, alive: bool | None, accepted: bool) -> None:
        """*alive*: the process that it was written to; None: it was not."""
        job = SimpleNamespace(
            _job=name,
            _cache=self.jobs,
            _accepted=accepted,
            ready=lambda: False,
            _write_to=None if alive is None else SimpleNamespace(_is_alive=lambda: alive),
        )
        self.jobs[name] = job
        request._apply_result = lambda: job

    def flush(self) -> None:
        """Before 5.7 it forgets everything, if nothing is on its way just then."""
        for name, job in list(self.jobs.items()):
            if self.early or not job._accepted:
                del self.jobs[name]


@pytest.mark.parametrize("early", [True, False], ids=["Celery 5.6", "Celery 5.7"])
def test_what_a_pool_forgets_with_the_broker(early: bool) -> None:
    """Nobody says so: its leases would be renewed for ever, and its redeliveries be refused."""
    door = Door()
    pool = Pool(early)
    dropped.watch(pool, door.desk.keeper)
    for job, alive, accepted in (
        ("waits", None, False),
        ("on its way", True, False),
        ("went astray", False, False),
        ("runs", True, True),
    ):
        door.desk.claim(job, TERMS)
        request = door.request(job)
        pool.take(request, job, alive, accepted)
        door.gate(request)
    pool.flush()
    door.desk.clock.advance(20 * SECOND)
    door.desk.keeper.turn()
    assert door.desk.run("waits").state is RunState.QUEUED
    door.desk.clock.advance(20 * SECOND)
    assert [claim.job for claim in door.desk.reader.lapsed(10)] == ["went astray"]
    assert {"on its way", "runs"} <= set(pool.jobs), "their ends will be heard"


def test_what_runs_without_an_answer_goes_back_when_its_pool_raises() -> None:
    door = Door()
    door.desk.claim("job", TERMS)
    door.desk.backend.failing["start"] = BackendUnavailable("away")

    def refuse(_: Any) -> None:
        raise OSError("no more processes")

    door.gate._execute = refuse
    door.gate(door.request())
    with pytest.raises(OSError, match="no more processes"):
        door.pass_time(40)
    door.desk.backend.failing.clear()
    door.desk.clock.advance(10 * SECOND)
    door.desk.keeper.turn()
    door.desk.keeper.turn()
    assert door.desk.run().state is RunState.QUEUED and not door.desk.told
    assert not (door.desk.keeper._held or door.desk.keeper._unanswered)
