"""Messages out of entries, over kombu's in-memory transport: what stock sends, and the run behind it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from amqp.exceptions import AccessRefused, NotAllowed
from celery import Celery, chain, chord, group
from celery.beat import BeatLazyFunc, ScheduleEntry
from kombu.exceptions import OperationalError
from servers import free_port

from celery_anarchon import wire
from celery_anarchon.job import Job
from celery_anarchon.model import OnUnknown, Terms
from celery_anarchon.options import JobOptions
from celery_anarchon.publish import CeleryPublisher
from celery_anarchon.publishing import BrokerAway, BrokerForbids, Dispatch, PublishUnclear
from celery_anarchon.timetable import Interval

SLOT = 1_774_746_000_000


@pytest.fixture
def app() -> Iterator[Celery]:
    # kombu's memory transport is one world per process: a virtual host of its own keeps tests apart.
    app = Celery("proj", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
    app.conf.task_default_queue = f"queue-{uuid.uuid4()}"

    @app.task(name="add", typing=False, shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="total", typing=False, shared=False)
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    yield app
    app.close()


@pytest.fixture
def publisher(app: Celery) -> Iterator[CeleryPublisher]:
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")
    publisher.check()
    yield publisher
    publisher.close()


def dispatch(app: Celery, definition: dict[str, Any], **options: Any) -> Dispatch:
    entry = ScheduleEntry(**{"schedule": 60, "name": "export", "app": app, **definition})
    job = Job(name="export", timetable=Interval(60_000), options=JobOptions(**options), task=entry.task, payload=entry)
    run_id = wire.run_id("runs", "export", SLOT)
    return Dispatch(job=job, slot=SLOT, attempt=1, run_id=run_id, late=12)


def received(app: Celery, queue: str | None = None) -> list[Any]:
    messages = []
    with app.connection_for_read() as connection:
        while (message := connection.default_channel.basic_get(queue or app.conf.task_default_queue)) is not None:
            message.ack()
            messages.append(message)
    return messages


def test_the_message_is_stocks_own_with_the_run_in_its_header(app: Celery, publisher: CeleryPublisher) -> None:
    publisher.publish(dispatch(app, {"task": "add", "args": (1, 2), "kwargs": {"z": 3}}))
    (message,) = received(app)
    assert message.headers["task"] == "add"
    assert message.headers["id"] == wire.run_id("runs", "export", SLOT)
    assert message.headers["celery_beat_task"] is True
    assert message.headers["anarchon"] == {
        "v": 1,
        "ns": "runs",
        "job": "export",
        "slot": "2026-03-29T01:00:00.000Z",
        "attempt": 1,
        "late": 0.012,
        "beat": "host:1",
    }
    args, kwargs, _ = message.decode()
    assert (args, kwargs) == ([1, 2], {"z": 3})


def test_the_header_says_what_the_run_s_record_says(app: Celery, publisher: CeleryPublisher) -> None:
    """Not what its job would ask for: ``queue_timeout`` is how a worker knows that a run is followed."""
    terms = Terms(lease=30_000, queue_timeout=60_000)
    plain = dispatch(app, {"task": "add"}, on_unknown=OnUnknown.SKIP)
    plain = plain._replace(job=replace(plain.job, terms=terms))
    publisher.publish(plain)
    publisher.publish(plain._replace(terms=terms))
    unfollowed, followed = (message.headers["anarchon"] for message in received(app))
    assert "queue_timeout" not in unfollowed and unfollowed["on_unknown"] == "skip"
    assert (followed["queue_timeout"], followed["lease"], followed["on_unknown"]) == (60.0, 30.0, "skip")


def test_a_task_that_this_process_does_not_know_is_sent_by_name(app: Celery, publisher: CeleryPublisher) -> None:
    publisher.publish(dispatch(app, {"task": "elsewhere.task"}))
    assert received(app)[0].headers["task"] == "elsewhere.task"


def test_options_of_the_entry_are_kept_and_ours_is_not_sent(app: Celery, publisher: CeleryPublisher) -> None:
    definition = {
        "task": "add",
        "options": {
            "queue": "other",
            "priority": 3,
            "headers": {"mine": 1},
            "soft_time_limit": 5,
            "anarchon": {"jitter": 5},
        },
    }
    publisher.publish(dispatch(app, definition, timeout=90_000))
    (message,) = received(app, "other")
    assert message.properties["priority"] == 3
    assert message.headers["mine"] == 1
    assert message.headers["timelimit"] == [90.0, 5]
    assert "anarchon" not in message.properties
    assert definition["options"]["headers"] == {"mine": 1}, "the entry's own dict must stay as it was"


def test_expires_counts_from_the_dispatch(app: Celery, publisher: CeleryPublisher) -> None:
    before = datetime.now(timezone.utc)
    publisher.publish(dispatch(app, {"task": "add", "options": {"expires": 60}}))
    expires = datetime.fromisoformat(received(app)[0].headers["expires"])
    assert 59 <= (expires - before).total_seconds() <= 120


def test_lazy_arguments_are_worked_out_at_each_publish(app: Celery, publisher: CeleryPublisher) -> None:
    numbers = iter(range(10))
    lazy = BeatLazyFunc(lambda: next(numbers))
    definition = {"task": "add", "args": (lazy,), "kwargs": {"y": lazy}}
    publisher.publish(dispatch(app, definition))
    publisher.publish(dispatch(app, definition))
    assert [message.decode()[:2] for message in received(app)] == [[[0], {"y": 1}], [[2], {"y": 3}]]


@pytest.mark.parametrize("place", ["args", "kwargs"])
def test_an_argument_that_cannot_be_worked_out_is_no_fault_of_the_broker(
    app: Celery, publisher: CeleryPublisher, place: str
) -> None:
    """Its error may be of a kind that a connection raises too. Taken for an unclear publish, the slot would be tried
    again for ever."""

    def read() -> int:
        raise FileNotFoundError("numbers.csv")

    lazy = BeatLazyFunc(read)
    with pytest.raises(FileNotFoundError):
        publisher.publish(dispatch(app, {"task": "add", place: (lazy,) if place == "args" else {"x": lazy}}))
    assert publisher.producer is not None, "the connection is as good as before"
    publisher.publish(dispatch(app, {"task": "add"}))
    assert len(received(app)) == 1


def test_canvas_entries_are_rebuilt_and_sent(app: Celery, publisher: CeleryPublisher) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    app.conf.result_backend = "cache+memory://"
    for work, tasks in (
        (chain(add.s(1, 2), add.s(3)), ["add"]),
        (group(add.s(1, 2), add.s(3, 4)), ["add", "add"]),
        (chord([add.s(1, 2), add.s(3, 4)], total.s()), ["add", "add"]),
    ):
        _, definition = app._sig_to_periodic_task_entry(60, work, name="export")
        publisher.publish(dispatch(app, definition))
        messages = received(app)
        assert [message.headers["task"] for message in messages] == tasks
        for message in messages:
            assert "anarchon" not in message.headers
            assert message.headers["anarchon_slot"]["job"] == "export"
    assert "producer_or_acquire" not in vars(app)


def test_a_bad_argument_is_the_messages_own_fault(app: Celery, publisher: CeleryPublisher) -> None:
    with pytest.raises(Exception, match="JSON") as caught:
        publisher.publish(dispatch(app, {"task": "add", "args": (object(),)}))
    assert not isinstance(caught.value, (BrokerAway, PublishUnclear))
    publisher.publish(dispatch(app, {"task": "add"}))
    assert len(received(app)) == 1


def test_a_broker_error_while_sending_is_unclear(
    app: Celery, publisher: CeleryPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_args: Any, **_kwargs: Any) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(publisher._producer, "publish", cut)
    with pytest.raises(PublishUnclear, match="reset by peer"):
        publisher.publish(dispatch(app, {"task": "add"}))
    monkeypatch.undo()
    publisher.check()
    publisher.publish(dispatch(app, {"task": "add"}))
    assert len(received(app)) == 1


def test_a_broker_that_cannot_be_reached_is_away(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OperationalError("connection refused")

    with monkeypatch.context() as patched:
        patched.setattr("kombu.connection.Connection.ensure_connection", refuse)
        with pytest.raises(BrokerAway, match="connection refused"):
            publisher.check()
    publisher.check()
    publisher.close()
    publisher.close()


class AuthenticationError(ConnectionError):
    """Such has each driver, among its errors of connections."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError("refused"), BrokerAway),
        (AuthenticationError("WRONGPASS invalid username-password pair"), BrokerForbids),
        (AccessRefused("ACCESS_REFUSED - Login was refused"), BrokerForbids),
        (NotAllowed("NOT_ALLOWED - vhost shop not found"), BrokerForbids),
    ],
)
def test_a_broker_that_lets_nobody_in_is_not_one_that_cannot_be_reached(
    app: Celery, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[BrokerAway]
) -> None:
    """It may come up with another password in the middle of an outage: that is to be told apart."""
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OperationalError(str(error)) from error

    monkeypatch.setattr("kombu.connection.Connection.ensure_connection", refuse)
    with pytest.raises(BrokerAway) as caught:
        publisher.check()
    assert type(caught.value) is kind


def test_a_result_backend_that_is_away_holds_nothing_up(app: Celery) -> None:
    """Stock beat subscribes to the result of each task that it sends, which it never reads, and fails with that."""
    app.conf.result_backend = f"redis://127.0.0.1:{free_port()}/0"
    app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")
    publisher.publish(dispatch(app, {"task": "add", "args": (1, 2)}))
    publisher.publish(dispatch(app, {"task": "elsewhere"}))
    publisher.close()
    assert [message.headers["task"] for message in received(app)] == ["add", "elsewhere"]
