"""RabbitMQ beyond the clauses: killed, out of memory, slow, misconfigured; history; addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from servers import free_port
from support import appending
from support.certificates import certificate
from support.contenders import contend
from support.lines import Line
from support.planning import plans_within
from support.rabbitmq_servers import PUBLISHING, RabbitServer, lead_through, rabbitmq_server
from support.waiting import wait_for

from celery_anarchon.backends.base import Confirmation, Keep
from celery_anarchon.backends.rabbitmq import RabbitMQBackend, claims, store
from celery_anarchon.backends.rabbitmq.link import Link
from celery_anarchon.backends.registry import backend_from_url
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm

STRATEGIES = ("queue", "stream")
Connect = Callable[..., RabbitMQBackend]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as running:
        yield running


@pytest.fixture
def connect(server: RabbitServer, namespace: str) -> Iterator[Connect]:
    """A new client of this test's namespace."""
    clients: list[RabbitMQBackend] = []

    def client(url: str = server.url, app: str = "app", **options: Any) -> RabbitMQBackend:
        made = RabbitMQBackend(url, **{"prefix": f"{namespace}.", **options})
        clients.append(made)
        made.open(app)
        return made

    yield client
    for one in clients:
        one.close()


def through(client: RabbitMQBackend, server: RabbitServer) -> Line:
    line = Line(server.port, PUBLISHING)
    lead_through(client, line.port)
    client.close()
    client.open("app")
    return line


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [60, pytest.param(2_500, marks=pytest.mark.long)])
def test_eight_contenders(connect: Connect, strategy: str, count: int) -> None:
    first = connect(strategy=strategy, slot_ttl="2h")
    start = first.now() - 3_600_000
    slots = [("job", start + 1_000 * number) for number in range(count)]
    _, wait = contend(lambda: connect(strategy=strategy, slot_ttl="2h"), slots, 8)
    result = wait()
    assert len(result.won) == count and set(result.won.values()) == {1}
    assert not result.doubted


@pytest.mark.race
def test_the_first_claims_of_an_empty_log(server: RabbitServer, namespace: str) -> None:
    """A reader that begins at a time, in a log that is empty at that moment, misses what comes just then: two win."""
    for number in range(15):
        clients = [RabbitMQBackend(server.url, prefix=f"{namespace}{number}.", strategy="stream") for _ in range(6)]
        for client in clients:
            client.open("app")
        slot = clients[0].now()
        answers = at_once([partial(claim, client, "job", slot, f"owner {id(client)}") for client in clients])
        for client in clients:
            client.close()
        assert sorted(answers) == [Answer.TAKEN] * 5 + [Answer.WON]


def test_a_vhost_whose_queues_are_quorum_queues_does_no_harm(server: RabbitServer, namespace: str) -> None:
    """A quorum queue applies its limit late: 2 to 8 beats would win."""
    server.control("add_vhost", namespace, "--default-queue-type", "quorum")
    server.control("set_permissions", "-p", namespace, "guest", ".*", ".*", ".*")
    url = f"amqp://guest:guest@127.0.0.1:{server.port}/{namespace}"
    with server.client(namespace) as link:
        link.channel().queue_declare("plain", durable=True, auto_delete=False)
    assert "plain\tquorum" in server.control("list_queues", "-p", namespace, "-q", "name", "type")
    clients = []

    def client() -> RabbitMQBackend:
        clients.append(RabbitMQBackend(url, slot_ttl="2h"))
        clients[-1].open("app")
        return clients[-1]

    start = client().now() - 3_600_000
    _, wait = contend(client, [("job", start + number) for number in range(20)], 4)
    assert set(wait().won.values()) == {1}
    listed = server.control("list_queues", "-p", namespace, "-q", "name", "type")
    assert listed.count("\tclassic") == 20 and listed.count("quorum") == 1
    for one in clients:
        one.close()


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_and_started_again_in_the_middle(tmp_path: Path, strategy: str) -> None:
    """No slot is won twice. One that nobody won is one whose answer was lost, and only where that cannot be read."""
    with rabbitmq_server(tmp_path) as server:

        def client() -> RabbitMQBackend:
            made = RabbitMQBackend(server.url, strategy=strategy, slot_ttl="2h")
            made.open("app")
            return made

        first = client()
        start = first.now() - 3_600_000
        first.close()
        server.write_down_streams()
        slots = [("job", start + 1_000 * number) for number in range(100)]
        running, wait = contend(client, slots, 4)
        wait_for(lambda: running.done >= 5 or running.failures, "some claims", 120)
        server.restart(kill=True)
        result = wait()
        assert max(result.won.values()) == 1
        nobody = set(slots) - set(result.won)
        assert nobody <= (result.doubted if strategy == "queue" else set())
        assert result.away or result.doubted, "nobody noticed"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_confirm_that_comes_late_confirms_nothing_else(
    connect: Connect, server: RabbitServer, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-amqp takes the next acknowledgement for that of the last message: a slot of somebody else looks won."""
    monkeypatch.setattr("celery_anarchon.backends.rabbitmq.link.CALL_TIMEOUT", 0.5)
    client, other = (connect(strategy=strategy, slot_ttl="2h") for _ in range(2))
    slot = client.now() - 60_000
    assert claim(other, "job", slot + 1, "b") is Answer.WON
    line = through(client, server)
    assert claim(client, "another", slot, "a") is Answer.WON
    line.hold()
    with pytest.raises(OutcomeUnknown):
        claim(client, "job", slot, "a")
    line.release()
    assert claim(client, "job", slot + 1, "a") is Answer.TAKEN
    # It was applied; only a store that says whose it is can tell.
    assert claim(client, "job", slot, "a") is (Answer.WON if strategy == "stream" else Answer.TAKEN)
    assert claim(other, "job", slot, "b") is Answer.TAKEN
    client.close()
    line.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_memory_alarm(connect: Connect, server: RabbitServer, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads nothing from who publishes: no answer, for as long as it lasts. Nobody wins twice."""
    clients = {name: connect(strategy=strategy, slot_ttl="2h") for name in "ab"}
    base = clients["a"].now() - 60_000
    for name, client in clients.items():
        assert claim(client, f"before {name}", base, name) is Answer.WON
    monkeypatch.setattr("celery_anarchon.backends.rabbitmq.link.CALL_TIMEOUT", 0.5)
    slots = [base + number for number in range(5)]
    said: dict[tuple[str, Millis], list[Answer]] = {}
    with server.memory_alarm():
        for name, client in clients.items():
            for slot in slots:
                try:
                    said[name, slot] = [claim(client, "job", slot, name)]
                except (OutcomeUnknown, BackendUnavailable):
                    said[name, slot] = [Answer.UNKNOWN]
    assert Answer.UNKNOWN in {answers[0] for answers in said.values()}, "it had no alarm"
    monkeypatch.undo()
    for name, client in clients.items():
        for slot in slots:
            if said[name, slot][0] is Answer.UNKNOWN:
                said[name, slot].append(claim(client, "job", slot, name))
    for slot in slots:
        won = [name for name in clients if Answer.WON in said[name, slot]]
        assert len(won) == 1 or (not won and strategy == "queue"), (slot, said)


def test_a_refusal_by_a_queue_that_holds_nothing_is_no_answer(
    connect: Connect, server: RabbitServer, namespace: str
) -> None:
    """So RabbitMQ also says that a queue died, or its node was stopped, before the message was stored."""
    client, other = connect(strategy="queue"), connect(strategy="queue")
    slot = client.now()
    requests = [ask("job", slot, "a"), ask("another", slot, "a")]
    pattern = rf"^{namespace}\.job\.[0-9]"
    server.control("set_policy", "holds-nothing", pattern, '{"max-length":0}', "--apply-to", "queues")
    try:
        assert claim_all(client, requests) == [Answer.UNKNOWN, Answer.WON]
    finally:
        server.control("clear_policy", "holds-nothing")
    assert claim_all(other, requests) == [Answer.WON, Answer.TAKEN]
    assert claim(client, "job", slot, "a") is Answer.TAKEN


def test_what_a_beat_ahead_of_time_claimed_keeps_nothing_in_memory() -> None:
    log = claims._Log(None)  # type: ignore[arg-type]
    log.holders = {("ahead", 2_000_000): "a"} | {("job", slot): "a" for slot in range(5_000)}
    log.forget(1_000_000)
    assert log.holders == {("ahead", 2_000_000): "a"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_server_closes_connections_and_channels(connect: Connect, server: RabbitServer, strategy: str) -> None:
    client = connect(strategy=strategy, slot_ttl="2h")
    base = client.now() - 60_000
    assert claim(client, "job", base, "a") is Answer.WON
    server.control("close_all_connections", "maintenance")
    assert claim(client, "job", base + 1, "a") is Answer.WON
    # A queue of that name that is none of ours: the server closes the channel.
    foreign = client._names.slot("job", base + 2) if strategy == "queue" else client._names.history("foreign")
    with server.client() as link:
        link.channel().queue_declare(foreign, durable=True, auto_delete=False)
    on_queue, on_stream = partial(claim, client, "job", base + 2, "a"), partial(confirm, client, "foreign", base, "a")
    wrong: Callable[[], Any] = on_queue if strategy == "queue" else on_stream
    with pytest.raises(ConfigurationError, match="inequivalent"):
        wrong()
    assert claim(client, "job", base + 3, "a") is Answer.WON
    assert claim(connect(strategy=strategy, slot_ttl="2h"), "job", base + 1, "b") is Answer.TAKEN


def test_a_history_that_was_deleted_is_made_again(connect: Connect, server: RabbitServer) -> None:
    client = connect()
    now = client.now()
    assert claim(client, "job", now, "a") is Answer.WON
    server.delete(client._names.history("job"))
    with pytest.raises(BackendUnavailable, match="is gone"):
        confirm(client, "job", now, "a")
    assert confirm(client, "job", now, "a")
    assert [run.state for run in client.history("job", 5)] == [RunState.DISPATCHED]


# --- for how long -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_horizon_holds_across_a_restart(tmp_path: Path, strategy: str) -> None:
    with rabbitmq_server(tmp_path) as server:
        options: dict[str, Any] = {"strategy": strategy, "slot_ttl": 15, "early_tolerance": 500}
        client = RabbitMQBackend(server.url, **options)
        client.open("app")
        plans_within(client.traits, 12)
        slot = client.now()
        assert claim(client, "job", slot, "a") is Answer.WON
        client.close()
        server.write_down_streams()
        server.restart(kill=True)
        other = RabbitMQBackend(server.url, **options)
        answers: list[Answer] = []

        def over() -> bool:
            try:
                other.open("app")
                answers.append(claim(other, "job", slot, "b"))
            except (BackendUnavailable, OutcomeUnknown):
                return False
            threading.Event().wait(0.3)
            return answers[-1] is Answer.TOO_OLD

        wait_for(over, "a slot that is too old", 120)
        assert set(answers) <= {Answer.TAKEN, Answer.TOO_OLD}
        plans_within(other.traits, 12)
        other.close()
        # Who would plan by another window after the restart is refused.
        with pytest.raises(LayoutMismatch, match="slot_ttl=15000ms, and this one slot_ttl=300000ms"):
            RabbitMQBackend(server.url, strategy=strategy).open("app")


def test_another_slot_ttl_or_strategy_or_app_is_refused(connect: Connect) -> None:
    connect(slot_ttl=300)
    connect(slot_ttl="5m")
    with pytest.raises(LayoutMismatch, match="slot_ttl=300000ms, and this one slot_ttl=600000ms"):
        connect(slot_ttl="10m")
    with pytest.raises(LayoutMismatch, match="strategy=queue, and this one strategy=stream"):
        connect(strategy="stream")
    with pytest.raises(LayoutMismatch, match="belongs to app app, and this is app billing"):
        connect(app="billing")


# --- history ----------------------------------------------------------------------------------------------------------


def test_history_with_three_readers_at_once(connect: Connect) -> None:
    appending.history_with_three_readers_at_once(partial(connect, slot_ttl="2h"), 600)


def test_history_size_is_kept(connect: Connect) -> None:
    client, reader = connect(), connect()
    now = client.now()
    client.confirm([Confirmation(job="job", slot=now - n, owner="a", attempt=1, late=3) for n in range(20)])
    assert len(reader.history("job", 50)) == 20
    client.tidy([Keep(job="job", decided=now, history_size=7)])
    assert [round(run.slot.timestamp() * 1000) for run in reader.history("job", 50)] == [now - n for n in range(7)]
    assert len(reader.history("job", 5)) == 5
    client.tidy([Keep(job="job", decided=now, history_size=9)])
    assert len(reader.history("job", 50)) == 9
    assert len(reader.history("other", 50)) == 0


def test_history_size_outlives_the_entry_that_said_it_first(
    connect: Connect, server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream drops its oldest segments: a beat that runs for weeks must say it again."""
    small = {**store.HISTORY, "x-max-length-bytes": 8_000, "x-stream-max-segment-size-bytes": 2_000}
    monkeypatch.setattr(store, "HISTORY", small)
    client, reader = connect(), connect()
    now = client.now()
    client.tidy([Keep(job="job", decided=now, history_size=7)])

    slots = [now - n for n in reversed(range(20))]
    history = client._names.history("job")

    def keeps_on() -> bool:
        client.confirm([Confirmation(job="job", slot=slot, owner="a", attempt=1, late=3) for slot in slots])
        return all(b'"job"' in data for data in server.stream(history))

    wait_for(keeps_on, "a segment to be dropped")
    assert [round(run.slot.timestamp() * 1000) for run in reader.history("job", 50)] == [now - n for n in range(7)]
    client.tidy([Keep(job="job", decided=now, history_size=9)])
    assert len(reader.history("job", 50)) == 9


def test_a_claim_without_an_end_is_in_the_history(connect: Connect) -> None:
    appending.a_claim_without_an_end_is_in_the_history(connect)


def test_the_number_of_round_trips_does_not_grow_with_the_batch(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    now = client.now()
    declare, waits = Link.declare, []

    def counted(link: Link, queue: str, arguments: Any, *, wait: bool = True) -> None:
        if wait:
            waits.append(queue)
        declare(link, queue, arguments, wait=wait)

    monkeypatch.setattr(Link, "declare", counted)

    def claimed(count: int, first: int, slot: Millis = now) -> int:
        waits.clear()
        jobs = [f"job {number}" for number in range(first, first + count)]
        assert claim_all(client, [ask(job, slot, "a") for job in jobs]) == [Answer.WON] * count
        assert [client.history(job, 1)[0].state for job in jobs] == [RunState.CLAIMED] * count
        return len(waits)

    assert claimed(1, 0) == claimed(30, 1) == 1
    assert claimed(30, 1, now + 1) == 0


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eight_open_an_empty_namespace_at_once(connect: Connect, strategy: str) -> None:
    appending.eight_open_an_empty_namespace_at_once(partial(connect, strategy=strategy))


def test_a_reader_makes_nothing(server: RabbitServer, namespace: str) -> None:
    reader = RabbitMQBackend(server.url, prefix=f"{namespace}.")
    reader.open("app", create=False)
    assert reader.history("job", 5) == [] and reader.last_run("job") is None
    assert namespace not in server.control("list_queues", "-q", "name")
    # A beat has made the stream, and has yet to say whose the namespace is.
    meta = reader._names.meta
    with server.client() as link:
        link.channel().queue_declare(meta, durable=True, auto_delete=False, arguments=store.META)
    reader.open("app", create=False)
    reader.close()
    assert server.stream(meta) == []


def test_a_connection_of_the_app(server: RabbitServer, namespace: str) -> None:
    with Connection(server.url) as app_connection:
        channel = app_connection.channel()
        client = RabbitMQBackend(connection=app_connection, prefix=f"{namespace}.")
        client.open("app")
        now = client.now()
        assert claim(client, "job", now, "a") is Answer.WON
        assert claim(client, "job", now, "b") is Answer.TAKEN
        client.close()
        channel.queue_declare(f"{namespace}.mine")
        assert app_connection.connected
    with pytest.raises(ConfigurationError, match="publisher confirms"):
        RabbitMQBackend(connection=Connection("memory://"))
    with pytest.raises(ConfigurationError, match=r"give a kombu\.Connection"):
        RabbitMQBackend(connection=object())


def test_the_second_host_is_tried(server: RabbitServer, namespace: str) -> None:
    url = f"amqp://guest:guest@127.0.0.1:1//;{server.url}"
    client = RabbitMQBackend(url, prefix=f"{namespace}.")
    client.open("app")
    assert client.now() and "guest:guest" not in client.describe()
    client.close()


def test_a_wrong_password_is_said_at_once(server: RabbitServer) -> None:
    client = RabbitMQBackend(f"amqp://guest:secret@127.0.0.1:{server.port}//")
    with pytest.raises(ConfigurationError) as caught:
        client.open("app")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://u:secret@h//?slot_ttl=1", "must be remembered for 10 s"),
        ("amqp://u:secret@h//?slot_ttl=soon", "'soon'"),
        ("amqp://u:secret@h//?strategy=quorum", "choose 'queue' or 'stream'"),
        ("amqp://u:secret@h//?prefix=", "prefix"),
        ("amqp://u:secret@h//?prefix=amq.x", "prefix"),
        ("amqp://u:secret@h//?slot_tl=1", "did you mean 'slot_ttl'"),
        ("amqps://u:secret@h//?ssl_cert_reqs=maybe", "required, optional or none"),
    ],
)
def test_wrong_settings_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend_from_url(url)
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_urls() -> None:
    backend = backend_from_url("amqp://user:pa%40ss@host:1234/vhost?slot_ttl=10m&prefix=billing.cron.&strategy=stream")
    assert isinstance(backend, RabbitMQBackend)
    assert (backend.namespace, backend.name, backend.traits.horizon) == ("billing.cron.", "rabbitmq", 480_000)
    assert backend.traits.knows_owner
    template = backend._source.address._templates[0]
    assert (template.password, template.virtual_host, template.port) == ("pa@ss", "vhost", 1234)
    assert "user:***@host" in backend.describe()
    secure = backend_from_url("amqps://host")
    assert isinstance(secure, RabbitMQBackend)
    assert secure._source.address._templates[0].ssl["cert_reqs"].name == "CERT_REQUIRED"
    assert backend_from_url("amqp://localhost").traits.horizon == 240_000


def test_tls(tmp_path: Path, namespace: str) -> None:
    (mine, key), (other, _) = certificate(tmp_path, "mine"), certificate(tmp_path, "other")
    port = free_port()
    options = (
        f"listeners.ssl.1 = 127.0.0.1:{port}",
        f"ssl_options.cacertfile = {mine}",
        f"ssl_options.certfile = {mine}",
        f"ssl_options.keyfile = {key}",
        "ssl_options.verify = verify_none",
    )
    with rabbitmq_server(tmp_path / "server", options):
        url = f"amqps://guest:guest@127.0.0.1:{port}//"
        client = backend_from_url(f"{url}?ssl_ca_certs={mine}&prefix={namespace}.&strategy=stream")
        client.open("app")
        now = client.now()
        assert claim(client, "job", now, "a") is Answer.WON
        assert claim(client, "job", now, "b") is Answer.TAKEN
        client.close()
        unchecked = backend_from_url(f"{url}?ssl_cert_reqs=none&prefix={namespace}.&strategy=stream")
        unchecked.open("app")
        unchecked.close()
        for wrong in (f"{url}?ssl_ca_certs={other}", url):
            with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
                backend_from_url(wrong).open("app")
