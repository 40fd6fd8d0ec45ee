"""Messages that go along with claims, on a real Redis: byte for byte what kombu would have written."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
import redis as driver
from celery import Celery, Task, signals
from celery.beat import BeatLazyFunc, ScheduleEntry
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import EncodeError
from support.beats import until
from support.redis_servers import Private, private_server

from celery_anarchon import RedisBackend, wire
from celery_anarchon.backends.base import Command
from celery_anarchon.building import CeleryBuilder
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.job import Job
from celery_anarchon.model import Terms
from celery_anarchon.options import JobOptions
from celery_anarchon.publish import CeleryPublisher
from celery_anarchon.publishing import BrokerAway, Dispatch, NothingToSend, NotOneStep, PublishUnclear
from celery_anarchon.scheduler import Scheduler
from celery_anarchon.timetable import Interval

SLOT = 1_774_746_000_000
TOPIC = Exchange("news", type="topic")
TAGS = re.compile(rb'"delivery_tag": "[0-9a-f-]{36}"')
TIMES = re.compile(rb'"(eta|expires)": "[^"]+"')

QUEUES = (
    Queue("celery"),
    Queue("named"),
    Queue("brief", expires=60.0),
    Queue("sports", TOPIC, routing_key="news.sports.*"),
    Queue("all", TOPIC, routing_key="news.#"),
    Queue("bound", Exchange("straight", type="direct"), routing_key="a-key"),
    Broadcast("everyone"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """A Redis of this module: its keys may be deleted."""
    with private_server(tmp_path_factory.mktemp("redis"), options=("--save", "")) as running:
        yield running


@pytest.fixture
def raw(server: Private) -> Iterator[driver.Redis]:
    with server.client() as client:
        client.flushall()
        yield client


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("proj", broker=url, set_as_current=False)
    app.conf.update({"task_queues": QUEUES, "accept_content": ["json", "pickle", "msgpack", "yaml"], **settings})

    @app.task(name="add", typing=False, shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="routed", typing=False, shared=False, time_limit=40)
    def routed() -> None: ...

    return app


class Press:
    """Makes messages in both ways."""

    def __init__(self, app: Celery, server: Private) -> None:
        self.app = app
        self.publisher = CeleryPublisher(app, namespace="runs", label="host:1")
        self.builder = CeleryBuilder(self.publisher)
        self.store = RedisBackend(server.url, prefix="runs")
        self.store.open("proj")
        assert self.builder.why_not() is None
        self.builder.verify(self.store)
        for queue in QUEUES:
            # Whoever sends to all must: else kombu takes it for another kind of exchange.
            queue(self.publisher.producer.channel).declare()
        self._jobs: dict[str, Job] = {}

    def close(self) -> None:
        self.publisher.close()
        self.store.close()
        self.app.close()

    def make(self, dispatch: Dispatch) -> tuple[Command, ...]:
        """As the engine has it made."""
        quick = self.builder.quick(dispatch.job, dispatch.terms) if dispatch.attempt == 1 else None
        return (quick or self.builder.build)(dispatch)

    def dispatch(self, definition: Mapping[str, Any], slot: int = SLOT, late: int = 12, attempt: int = 1) -> Dispatch:
        key = repr(definition)
        if key not in self._jobs:
            entry = ScheduleEntry(**{"schedule": 60, "name": key, "app": self.app, **definition})
            self._jobs[key] = Job(
                name="export", timetable=Interval(60_000), options=JobOptions(), task=entry.task, payload=entry
            )
        run_id = wire.run_id("runs", "export", slot)
        return Dispatch(job=self._jobs[key], slot=slot, attempt=attempt, run_id=run_id, late=late)


@pytest.fixture
def press(server: Private, raw: driver.Redis) -> Iterator[Callable[..., Press]]:
    made: list[Press] = []

    def make(**settings: Any) -> Press:
        made.append(Press(make_app(server.url, **settings), server))
        return made[-1]

    yield make
    for one in made:
        one.close()


@contextmanager
def listening(raw: driver.Redis) -> Iterator[list[tuple[bytes, bytes]]]:
    """What is published within, once the context is left."""
    heard: list[tuple[bytes, bytes]] = []
    with raw.pubsub(ignore_subscribe_messages=False) as ear:
        ear.psubscribe("*")
        assert ear.get_message(timeout=10)["type"] == "psubscribe"
        yield heard
        raw.publish("the end", "")
        while (said := ear.get_message(timeout=10))["channel"] != b"the end":
            heard.append((said["channel"], normal(said["data"])))


def normal(payload: bytes) -> bytes:
    """Without what is another one each time."""
    return TIMES.sub(rb'"\1": "a time"', TAGS.sub(b'"delivery_tag": ""', payload))


def written(raw: driver.Redis, write: Callable[[], Any]) -> dict[Any, Any]:
    """All that *write* puts into queues and says to listeners: the queues are emptied before."""
    before = {key for key in raw.keys("*") if raw.type(key) == b"list"}
    if before:
        raw.delete(*before)
    with listening(raw) as heard:
        write()
    lists = [key for key in raw.keys("*") if raw.type(key) == b"list"]
    found: dict[Any, Any] = {key: [normal(one) for one in raw.lrange(key, 0, -1)] for key in lists}
    found["expire"] = sorted(key for key in lists if 0 < raw.pttl(key) <= 60_000)
    found["said"] = heard
    return found


def both(raw: driver.Redis, press: Press, dispatch: Dispatch) -> tuple[dict[Any, Any], dict[Any, Any]]:
    stock = written(raw, lambda: press.publisher.publish(dispatch))

    def in_one_step() -> None:
        assert press.store.write(press.make(dispatch))

    return stock, written(raw, in_one_step)


SENT_AS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named queue": {"options": {"queue": "named"}},
    "unknown queue": {"options": {"queue": "made-up"}},
    "priority 3": {"options": {"priority": 3}},
    "priority 6": {"options": {"priority": 6}},
    "priority 9": {"options": {"priority": 9}},
    "queue that expires": {"options": {"queue": "brief"}},
    "topic, two queues": {"options": {"exchange": "news", "routing_key": "news.sports.goal", "queue": "sports"}},
    "topic, one queue": {"options": {"queue": "all", "routing_key": "news.weather"}},
    "direct exchange": {"options": {"queue": "bound", "exchange": "straight", "routing_key": "a-key"}},
    "fanout": {"options": {"queue": "everyone"}},
    "task_routes": {"task": "routed", "args": ()},
    "pickle": {"options": {"serializer": "pickle"}},
    "msgpack": {"options": {"serializer": "msgpack"}},
    "compressed": {"options": {"compression": "zlib"}},
    "countdown": {"options": {"countdown": 30}},
    "eta": {"options": {"eta": datetime(2030, 1, 1, tzinfo=timezone.utc)}},
    "expires": {"options": {"expires": 60}},
    "headers": {"options": {"headers": {"mine": 1}}},
    "limits": {"options": {"time_limit": 50, "soft_time_limit": 40, "ignore_result": True}},
    "unknown task": {"task": "elsewhere.task"},
    "text": {"args": ('ü \\ " \n €', {"a": [1, None, 0.1]})},
    "link": {"options": {"link": {"task": "add", "args": [1], "kwargs": {}, "options": {}, "immutable": False}}},
    "shadow": {"options": {"shadow": "another name"}},
}
NO_TEMPLATE = {"topic, two queues", "topic, one queue", "direct exchange", "fanout", "countdown", "eta", "expires"}
"""Each message is made anew: a time is in it, or the queues that are bound just now."""

QUEUES_OF = {"topic, two queues": 2, "fanout": 0}

SETTINGS: dict[str, dict[str, Any]] = {
    "settings as they come": {},
    "key prefix": {"broker_transport_options": {"global_keyprefix": "pre:"}},
    "other priorities": {"broker_transport_options": {"priority_steps": [0, 5], "sep": ":", "fanout_prefix": False}},
    "events": {"task_send_sent_event": True},
    "results": {"result_backend": "rpc://"},
}


@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))
def test_it_is_what_kombu_would_have_written(press: Callable[..., Press], raw: driver.Redis, settings: Any) -> None:
    routes = {"routed": {"queue": "named", "priority": 6}}
    one = press(task_routes=routes, **settings)
    templated = set()
    for name, definition in SENT_AS.items():
        definition = {"task": "add", "args": (1, 2), **definition}
        for slot in (SLOT, SLOT + 1_234_567):
            dispatch = one.dispatch(definition, slot, late=slot % 100_000)
            if one.builder.quick(dispatch.job, None):
                templated.add(name)
            stock, ours = both(raw, one, dispatch)
            if "task_send_sent_event" in settings:
                stock["said"], ours["said"] = [len(stock["said"])], [len(ours["said"])]
            assert ours == stock, name
            assert len(ours) == 2 + QUEUES_OF.get(name, 1), f"{name}: {list(ours)}"
    assert templated == (set() if "task_send_sent_event" in settings else set(SENT_AS) - NO_TEMPLATE)


def test_ids_and_times_are_new_each_time(press: Callable[..., Press]) -> None:
    one = press()
    seen = set()
    for number in range(4):
        dispatch = one.dispatch({"task": "add", "args": (1, 2)}, SLOT + number, late=number)
        ((_, _, payload),) = one.make(dispatch)
        message = json.loads(payload)
        headers, properties = message["headers"], message["properties"]
        assert headers["id"] == headers["root_id"] == properties["correlation_id"] == dispatch.run_id
        assert headers["anarchon"]["slot"] == wire.time_text(SLOT + number)
        assert headers["anarchon"]["late"] == number / 1000
        seen.add(properties["delivery_tag"])
    assert len(seen) == 4


# --- when a template may not be used ----------------------------------------------------------------------------------


def test_who_listens_to_messages_hears_of_each(press: Callable[..., Press]) -> None:
    one = press()
    definition = {"task": "add", "args": (1, 2)}
    one.make(one.dispatch(definition))
    assert one.builder.quick(one.dispatch(definition).job, None)
    heard: list[str] = []

    def hear(headers: Any = None, **_: Any) -> None:
        heard.append(headers["id"])

    signals.before_task_publish.connect(hear)
    try:
        assert not one.builder.quick(one.dispatch(definition).job, None)
        one.make(one.dispatch(definition, SLOT + 1))
    finally:
        signals.before_task_publish.disconnect(hear)
    assert heard == [wire.run_id("runs", "export", SLOT + 1)]
    assert one.builder.quick(one.dispatch(definition).job, None)


def test_arguments_that_changed_in_place_are_seen(press: Callable[..., Press]) -> None:
    one = press()
    numbers = [1]
    dispatch = one.dispatch({"task": "add", "args": (numbers, 2)})
    one.make(dispatch)
    numbers.append(2)
    assert not one.builder.quick(dispatch.job, None)
    ((_, _, payload),) = one.make(dispatch)
    assert json.loads(payload)["headers"]["argsrepr"] == "[[1, 2], 2]"


def test_a_template_is_of_runs_that_are_followed_or_of_those_that_are_not(press: Callable[..., Press]) -> None:
    """The first worker that asks is seen while the beat runs."""
    one = press()
    plain = one.dispatch({"task": "add", "args": (1, 2)})
    terms = Terms(lease=30_000, queue_timeout=60_000)
    plain = plain._replace(job=replace(plain.job, terms=terms))
    said = []
    for dispatch in (plain, plain, plain._replace(terms=terms), plain._replace(terms=terms)):
        ((_, _, payload),) = one.make(dispatch)
        said.append(json.loads(payload)["headers"]["anarchon"].get("queue_timeout"))
    assert said == [None, None, 60.0, 60.0]
    assert one.builder.quick(plain.job, terms) and not one.builder.quick(plain.job, None)


class OfItsOwn:
    def __json__(self) -> str:
        return "another text each time"


@pytest.mark.parametrize(
    ("settings", "definition"),
    [
        ({"task_routes": (lambda *_, **__: {"queue": "named"},)}, {}),
        ({}, {"args": (OfItsOwn(), 2)}),
        ({"task_protocol": 1}, {}),
    ],
)
def test_what_may_be_another_each_time_has_no_template(
    press: Callable[..., Press], settings: Any, definition: Any
) -> None:
    one = press(**settings)
    dispatch = one.dispatch({"task": "add", "args": (1, 2), **definition})
    assert one.make(dispatch)
    assert not one.builder.quick(dispatch.job, None)


def test_a_later_attempt_is_made_by_its_own_rules(press: Callable[..., Press]) -> None:
    one = press()
    definition = {"task": "add", "args": (1, 2)}
    one.make(one.dispatch(definition))
    ((_, _, payload),) = one.make(one.dispatch(definition, attempt=2))
    assert json.loads(payload)["headers"]["anarchon"]["attempt"] == 2


# --- what is published as ever ----------------------------------------------------------------------------------------


class Headstrong(Task):  # type: ignore[misc]
    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        return super().apply_async(*args, **kwargs)


def test_jobs_that_go_their_own_way(press: Callable[..., Press]) -> None:
    one = press()

    @one.app.task(name="headstrong", base=Headstrong, shared=False)
    def headstrong() -> None: ...

    lazy = BeatLazyFunc(lambda: 1)
    for definition, takes in (
        ({"task": "add", "args": (1, 2)}, True),
        ({"task": "elsewhere"}, True),
        ({"task": "add", "args": (lazy, 2)}, False),
        ({"task": "add", "kwargs": {"x": lazy}}, False),
        ({"task": "celery.chain"}, False),
        ({"task": "headstrong"}, False),
        ({"task": "add", "options": {"connection": object()}}, False),
    ):
        assert one.builder.takes(one.dispatch(definition).job) is takes, definition
    one.app.conf.task_always_eager = True
    assert not one.builder.takes(one.dispatch({"task": "add", "args": (1, 2)}).job)


def test_a_message_that_would_go_nowhere_is_an_error(press: Callable[..., Press], raw: driver.Redis) -> None:
    """Stock writes nothing, and says nothing."""
    one = press()
    dispatch = one.dispatch({"task": "add", "options": {"exchange": "unheard-of", "routing_key": "x"}})
    assert written(raw, lambda: one.publisher.publish(dispatch)) == {"expire": [], "said": []}
    with pytest.raises(NothingToSend, match="no queue is bound"):
        one.make(dispatch)


def test_nothing_is_left_changed_in_kombu(press: Callable[..., Press], raw: driver.Redis) -> None:
    one = press(result_backend="cache+memory://")
    channel = one.publisher.producer.channel
    one.make(one.dispatch({"task": "add", "args": (1, 2)}))
    with pytest.raises(EncodeError):
        one.make(one.dispatch({"task": "add", "args": (object(),)}))
    assert not {"_put", "_put_fanout", "conn_or_acquire"} & set(vars(channel))
    assert "on_task_call" not in vars(one.app.backend)


# --- is the broker the store? -----------------------------------------------------------------------------------------


def test_when_the_connection_breaks_no_other_one_is_used(
    press: Callable[..., Press], raw: driver.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery has a pool of its own to go on with, and what goes that way is sent before it is claimed."""
    one = press()

    def broken(dispatch: Dispatch) -> None:
        raise ConnectionResetError("the connection is closed")

    monkeypatch.setattr(one.publisher, "send", broken)
    with pytest.raises(BrokerAway):
        one.make(one.dispatch({"task": "unheard.of"}))
    monkeypatch.undo()
    with pytest.raises(PublishUnclear, match="not the one of a moment ago"):
        one.make(one.dispatch({"task": "add", "args": (1, 2)}))
    assert raw.keys("celery*") == [], "declared, sent, or waiting"


def left_behind(raw: driver.Redis) -> list[bytes]:
    return [key for key in raw.keys("*") if b"one-step" in key]


def test_another_database_is_another_store(server: Private, raw: driver.Redis) -> None:
    app = make_app(server.url.replace("/0", "/5"))
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")
    store = RedisBackend(server.url, prefix="runs")
    store.open("proj")
    with pytest.raises(NotOneStep, match="not one database of one server"):
        CeleryBuilder(publisher).verify(store)
    publisher.close()
    store.close()
    app.close()


def test_a_layout_that_is_not_known(
    press: Callable[..., Press], raw: driver.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kombu to come, or a transport of the user's own."""
    one = press()
    assert left_behind(raw) == []
    kind = type(one.publisher.producer.channel)
    put = kind._put

    def append(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        with self.conn_or_acquire() as client:
            client.rpush(queue, json.dumps(message))

    def once_more(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        # Only for real: what is taken down differs from what is written.
        put(self, queue, message, **kwargs)
        if "conn_or_acquire" not in vars(self):
            put(self, queue, message, **kwargs)

    for another in (append, once_more):
        monkeypatch.setattr(kind, "_put", another)
        one.publisher.close()
        for _ in range(2):
            # The second time on a connection that has been looked at, in vain.
            with pytest.raises(NotOneStep, match="not known here"):
                one.builder.verify(one.store)
        monkeypatch.undo()
    assert left_behind(raw) == []
    one.publisher.close()
    one.builder.verify(one.store)


def test_a_user_that_may_not_write_queues(server: Private, raw: driver.Redis) -> None:
    raw.execute_command("ACL", "SETUSER", "keeper", "on", ">secret", "~runs*", "+@all")
    raw.execute_command("ACL", "SETUSER", "mailer", "on", ">secret", "~celery*", "&*", "+@all")
    address = server.url.removeprefix("redis://")
    store = RedisBackend(f"redis://keeper:secret@{address}", prefix="runs")
    store.open("proj")
    app = make_app(f"redis://mailer:secret@{address}")
    publisher = CeleryPublisher(app, namespace="runs", label="host:1")
    with pytest.raises(NotOneStep, match="the broker says"):
        CeleryBuilder(publisher).verify(store)
    publisher.close()
    store.close()
    app.close()


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("memory://", "messages go to memory"),
        ("amqp://localhost", "messages go to amqp"),
        ("sentinel://localhost:26379", "through sentinels"),
    ],
)
def test_other_brokers(broker: str, words: str) -> None:
    app = Celery("proj", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = {"master_name": "mine"}
    reason = CeleryBuilder(CeleryPublisher(app, namespace="runs", label="host:1")).why_not()
    assert reason is not None and words in reason


# --- the scheduler ----------------------------------------------------------------------------------------------------


def lines_of(app: Celery, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, "celery_anarchon.beat")
    scheduler = Scheduler(app)
    scheduler.close()
    return [record.getMessage() for record in caplog.records if record.name == "celery_anarchon.beat"]


def test_the_first_log_line_says_whether(server: Private, raw: driver.Redis, caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(make_app(server.url), caplog)[0].endswith("(setting broker_url); claim and enqueue in one step")
    caplog.clear()
    app = make_app("memory://", anarchon_backend=server.url)
    assert lines_of(app, caplog)[0].endswith("; claim and enqueue in two steps: messages go to memory, not to Redis")
    caplog.clear()
    app = make_app(server.url, anarchon_one_step=False)
    assert lines_of(app, caplog)[0].endswith("; claim and enqueue in two steps: anarchon_one_step is False")


def test_who_insists_gets_no_start_without(server: Private, raw: driver.Redis) -> None:
    Scheduler(make_app(server.url, anarchon_one_step=True)).close()
    app = make_app(server.url.replace("/0", "/5"), anarchon_backend=server.url, anarchon_one_step=True)
    with pytest.raises(SystemExit):
        Scheduler(app)
    with pytest.raises(ConfigurationError, match="True, but claim and message cannot be one write"):
        Scheduler._set_up(Scheduler(app, lazy=True))


def test_a_queue_key_of_another_kind_is_one_jobs_trouble(
    server: Private, raw: driver.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    raw.set("named", "somebody else's")
    app = make_app(
        server.url,
        beat_schedule={
            "bad": {"task": "add", "schedule": 0.5, "args": (1, 2), "options": {"queue": "named"}},
            "good": {"task": "add", "schedule": 0.5, "args": (1, 2)},
        },
    )
    scheduler = Scheduler(app)
    store = scheduler.dispatcher.backend  # type: ignore[union-attr]

    def both_have_ended() -> bool:
        scheduler.tick()
        return raw.llen("celery") >= 2 and any(str(run.state) == "not-sent" for run in store.history("bad", 5))

    until(both_have_ended, "two messages of the one, an end of the other")
    scheduler.close()
    assert raw.get("named") == b"somebody else's"
