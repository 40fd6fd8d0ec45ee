"""NATS beyond the clauses: killed, a cluster that loses leaders, disconnected, misconfigured; history; addresses."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from servers import Server, free_port
from support import appending
from support.certificates import certificate
from support.contenders import contend
from support.lines import Line
from support.nats_servers import PUBLISHING, NatsServer, binary, nats_cluster, nats_server
from support.planning import plans_within
from support.waiting import wait_for

from celery_anarchon.backends.base import Confirmation, Keep
from celery_anarchon.backends.nats import NatsBackend, connection
from celery_anarchon.backends.registry import backend_from_url
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import ask, claim, claim_all

Connect = Callable[..., NatsBackend]
HOURS_2 = {"duplicate_window": "2h"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as running:
        yield running


@pytest.fixture
def connect(server: NatsServer, namespace: str) -> Iterator[Connect]:
    """A new client of this test's namespace."""
    clients: list[NatsBackend] = []

    def client(servers: Any = server.url, app: str = "app", **options: Any) -> NatsBackend:
        made = NatsBackend(servers, **{"stream": namespace, "prefix": f"{namespace}.", **options})
        clients.append(made)
        made.open(app)
        return made

    yield client
    for one in clients:
        one.close()


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("count", [200, pytest.param(2_500, marks=pytest.mark.long)])
def test_eight_contenders(connect: Connect, count: int) -> None:
    start = connect(**HOURS_2).now() - 3_600_000
    slots = [("job", start + 1_000 * number) for number in range(count)]
    _, wait = contend(lambda: connect(**HOURS_2), slots, 8)
    result = wait()
    assert len(result.won) == count and set(result.won.values()) == {1}
    assert not result.doubted


@pytest.mark.race
@pytest.mark.long
def test_eight_contenders_on_a_cluster(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster:

        def client() -> NatsBackend:
            made = NatsBackend(cluster.url, replicas=3, duplicate_window="2h")
            made.open("app")
            return made

        first = client()
        start = first.now() - 3_600_000
        first.close()
        _, wait = contend(client, [("job", start + 1_000 * number) for number in range(2_500)], 8)
        result = wait()
        assert len(result.won) == 2_500 and set(result.won.values()) == {1}


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_leader_is_killed_three_times_during_claims(tmp_path: Path) -> None:
    """Every slot is won once, whatever was under way."""
    with nats_cluster(tmp_path) as cluster:

        def client() -> NatsBackend:
            made = NatsBackend(cluster.url, replicas=3, duplicate_window="2h")
            made.open("app")
            return made

        first = client()
        start = first.now() - 3_600_000
        first.close()
        # So many that none of the deaths comes after the end, however fast the machine.
        slots = [("job", start + 500 * number) for number in range(6_000)]
        running, wait = contend(client, slots, 4)
        for deaths in range(3):
            seen = running.done
            wait_for(lambda seen=seen: running.done >= seen + 3 or running.failures, "some claims", 120)
            leader = cluster.leader("CRON")
            leader.process.kill()
            seen = running.done
            wait_for(lambda seen=seen: running.done >= seen + 2 or running.failures, "claims without it", 120)
            leader.start()
            assert not running.finished.is_set(), f"all was over after {deaths + 1} deaths"
        result = wait()
        assert len(result.won) == len(slots) and set(result.won.values()) == {1}
        assert result.away or result.doubted, "nobody noticed"


@pytest.mark.parametrize("kill", [True, False])
def test_restarted_within_the_window(tmp_path: Path, kill: bool) -> None:
    """The server takes its memory of claims out of the messages it has: with a limit of messages it would forget."""
    with nats_server(tmp_path) as server:
        client = NatsBackend(server.url, duplicate_window="2h", history_size=3)
        client.open("app")
        start = client.now() - 3_600_000
        requests = [ask("job", start + number, "a") for number in range(50)]
        assert claim_all(client, requests) == [Answer.WON] * 50
        client.confirm([Confirmation(job="job", slot=one.slot, owner="a", attempt=1, late=0) for one in requests])
        server.restart(kill=kill)
        others = [ask("job", one.slot, "b") for one in requests]
        assert claim_all(client, others) == [Answer.TAKEN] * 50
        assert claim_all(client, requests) == [Answer.WON] * 50
        assert len(client.history("job", 100)) == 50, "claims are seen, although their ends are cut"
        client.close()


def test_the_horizon_holds_across_a_restart(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        client = NatsBackend(server.url, duplicate_window=5, early_tolerance=500)
        client.open("app")
        plans_within(client.traits, 4)
        slot = client.now()
        assert claim(client, "job", slot, "a") is Answer.WON
        server.restart(kill=True)
        answers: list[Answer] = []

        def over() -> bool:
            answers.append(claim(client, "job", slot, "b"))
            threading.Event().wait(0.1)
            return answers[-1] is Answer.TOO_OLD

        wait_for(over, "a slot that is too old", 60)
        assert set(answers) <= {Answer.TAKEN, Answer.TOO_OLD}
        client.close()
        # Who would plan by another window after the restart is refused.
        with pytest.raises(LayoutMismatch, match="duplicate_window is 5 s, and this beat wants 300 s"):
            NatsBackend(server.url).open("app")
        again = NatsBackend(server.url, duplicate_window=5, early_tolerance=500)
        again.open("app")
        plans_within(again.traits, 4)
        again.close()


def test_a_claim_outlives_the_window_in_its_stream(connect: Connect) -> None:
    """A beat whose clock is behind asks for a slot that the others call too old: the stored message refuses it."""
    client = connect(duplicate_window=2, early_tolerance=500)
    slot = client.now()
    assert claim(client, "job", slot, "a") is Answer.WON
    threading.Event().wait(3)
    late = connect(duplicate_window=2, early_tolerance=500)
    late._horizon = 600_000
    assert claim(late, "job", slot, "b") is Answer.TAKEN
    assert claim(late, "job", slot, "a") is Answer.WON


def test_a_publish_while_disconnected_is_never_delivered(connect: Connect, server: NatsServer, namespace: str) -> None:
    """nats-py keeps it and sends it when it is connected again: a slot claimed by somebody who believes it is not."""
    client = connect(**HOURS_2)
    line = Line(server.port, PUBLISHING)
    client._connection.servers = [f"nats://127.0.0.1:{line.port}"]  # type: ignore[attr-defined]
    client.close()
    client.open("app")
    slot = client.now() - 60_000
    line.cut()
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            claim(client, "job", slot, "a")
    line.mend()
    assert client.now()
    assert claim(connect(**HOURS_2), "job", slot, "b") is Answer.WON
    assert claim(client, "job", slot, "a") is Answer.TAKEN
    client.close()
    line.close()


def test_a_server_that_hangs_is_unknown_and_then_read(
    connect: Connect, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(**HOURS_2)
    line = Line(server.port, PUBLISHING)
    client._connection.servers = [f"nats://127.0.0.1:{line.port}"]  # type: ignore[attr-defined]
    client.close()
    client.open("app")
    slot = client.now() - 60_000
    monkeypatch.setattr("celery_anarchon.backends.nats.connection.CALL_TIMEOUT", 0.5)
    line.hold()
    with pytest.raises(OutcomeUnknown):
        claim(client, "job", slot, "a")
    line.release()
    monkeypatch.undo()
    assert claim(connect(**HOURS_2), "job", slot, "b") is Answer.TAKEN
    assert claim(client, "job", slot, "a") is Answer.WON
    client.close()
    line.close()


# --- settings that must agree -----------------------------------------------------------------------------------------


def test_another_window_prefix_or_app_is_refused(connect: Connect, namespace: str) -> None:
    connect(duplicate_window=300)
    connect(duplicate_window="5m")
    with pytest.raises(LayoutMismatch, match="duplicate_window is 300 s, and this beat wants 600 s"):
        connect(duplicate_window="10m")
    with pytest.raises(LayoutMismatch, match="subjects"):
        connect(prefix=f"{namespace}.other.")
    with pytest.raises(LayoutMismatch, match="belongs to app app, and this is app billing"):
        connect(app="billing")
    with pytest.raises(ConfigurationError, match="overlap"):
        connect(stream=f"{namespace}_2")


def test_streams_of_others_are_refused(connect: Connect, server: NatsServer, namespace: str) -> None:
    assert "error" not in server.api(f"STREAM.CREATE.{namespace}", {"name": namespace, "subjects": ["x"]})
    with pytest.raises(ConfigurationError, match="is not celery-anarchon's"):
        connect()


def test_replicas_without_a_cluster(connect: Connect) -> None:
    with pytest.raises(ConfigurationError, match="replicas"):
        connect(replicas=3)


def test_a_server_without_jetstream(tmp_path: Path) -> None:
    """It may come: the beat waits, and says what is missing."""
    port = free_port()
    process = Server([binary(), "-a", "127.0.0.1", "-p", str(port)], port, tmp_path)
    process.start()
    try:
        client = NatsBackend(f"nats://127.0.0.1:{port}")
        with pytest.raises(BackendUnavailable, match=r"nobody answers on \$JS"):
            client.open("app")
        client.close()
    finally:
        process.kill()


# --- history ----------------------------------------------------------------------------------------------------------


def test_history_with_three_readers_at_once(connect: Connect) -> None:
    appending.history_with_three_readers_at_once(partial(connect, **HOURS_2), 150)


def test_one_history_size_for_all_jobs_the_largest(connect: Connect) -> None:
    client, smaller = connect(history_size=5), connect(history_size=3)
    now = client.now()

    def send(count: int, job: str) -> list[int]:
        slots = [now - number for number in reversed(range(count))]
        client.confirm([Confirmation(job=job, slot=slot, owner="a", attempt=1, late=3) for slot in slots])
        return [now - round(run.slot.timestamp() * 1000) for run in smaller.history(job, 50)]

    assert send(9, "job") == [0, 1, 2, 3, 4]
    client.tidy([Keep(job="job", decided=now, history_size=4), Keep(job="big", decided=now, history_size=8)])
    smaller.tidy([Keep(job="job", decided=now, history_size=2)])
    assert send(20, "other") == [0, 1, 2, 3, 4, 5, 6, 7]
    connect(history_size=1)
    assert send(20, "another") == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_larger_of_two_history_sizes_that_were_raised_at_once_comes_through(
    connect: Connect, server: NatsServer, namespace: str
) -> None:
    """JetStream takes no condition: whoever has read before another's write may put a smaller one over it."""
    client = connect(history_size=8)
    found = server.api(f"STREAM.INFO.{namespace}_HISTORY")["config"]
    server.api(f"STREAM.UPDATE.{namespace}_HISTORY", {**found, "max_msgs_per_subject": 7})
    client.tidy([Keep(job="job", decided=client.now(), history_size=5)])
    assert server.api(f"STREAM.INFO.{namespace}_HISTORY")["config"]["max_msgs_per_subject"] == 8


def test_a_long_history_is_not_read_message_after_message(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(**HOURS_2)
    now = client.now()
    slots = [now - number for number in range(300)]
    for job in ("job", "other"):
        client.confirm([Confirmation(job=job, slot=slot, owner="a", attempt=1, late=3) for slot in slots])
    one_after_the_other: dict[Any, int] = {}
    ask_once = connection.Line.ask

    async def counted(line: Any, *question: Any, **more: Any) -> Any:
        task = asyncio.current_task()
        one_after_the_other[task] = one_after_the_other.get(task, 0) + 1
        return await ask_once(line, *question, **more)

    monkeypatch.setattr(connection.Line, "ask", counted)
    assert [round(run.slot.timestamp() * 1000) for run in client.history("job", 999)] == slots
    assert max(one_after_the_other.values()) < 50


def test_a_claim_without_an_end_is_in_the_history(connect: Connect) -> None:
    appending.a_claim_without_an_end_is_in_the_history(connect)


# --- opening ----------------------------------------------------------------------------------------------------------


def test_eight_open_an_empty_namespace_at_once(connect: Connect) -> None:
    appending.eight_open_an_empty_namespace_at_once(connect)


@pytest.mark.long
def test_eight_open_an_empty_cluster_at_once_again_and_again(tmp_path: Path) -> None:
    with nats_cluster(tmp_path) as cluster:
        for number in range(20):

            def opens(number: int = number) -> None:
                client = NatsBackend(cluster.url, stream=f"S{number}", prefix=f"s{number}.", replicas=3)
                try:
                    client.open("app")
                finally:
                    client.close()

            at_once([opens] * 8)


def test_a_question_about_a_stream_that_nobody_answers_is_asked_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight beats that made the streams of a cluster at once, some waited in vain for an answer, and said that the
    store was away."""
    ask, lost = connection.Line.ask, set()

    async def losing(line: connection.Line, subject: str, *rest: Any, **more: Any) -> Any:
        reply = await ask(line, subject, *rest, **more)
        if subject not in lost:
            lost.add(subject)
            raise connection.NoAnswer("nats: timeout")
        return reply

    monkeypatch.setattr(connection.Line, "ask", losing)
    client = connect(history_size=5)
    client.tidy([Keep(job="job", decided=client.now(), history_size=9)])
    assert {subject.split(".")[3] for subject in lost} == {"INFO", "CREATE", "UPDATE"}
    monkeypatch.undo()
    assert claim(client, "job", client.now(), "a") is Answer.WON


def test_a_stream_that_a_server_does_not_know_yet_is_waited_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster another server may have made it, and this one learns of it a moment later."""
    ask, made, denied = connection.Line.ask, set(), set()

    async def lagging(line: connection.Line, subject: str, *rest: Any, **more: Any) -> Any:
        verb, name = subject.split(".")[-2:]
        if verb == "INFO" and name in made and name not in denied:
            denied.add(name)
            raise connection.Refusal({"err_code": 10059, "description": "stream not found"})
        reply = await ask(line, subject, *rest, **more)
        if verb == "CREATE":
            made.add(name)
        return reply

    monkeypatch.setattr(connection.Line, "ask", lagging)
    client = connect()
    assert denied == made and len(made) == 2
    assert claim(client, "job", client.now(), "a") is Answer.WON


def test_a_reader_makes_nothing(server: NatsServer, namespace: str) -> None:
    reader = NatsBackend(server.url, stream=namespace, prefix=f"{namespace}.")
    reader.open("app", create=False)
    assert reader.history("job", 5) == [] and reader.last_run("job") is None
    reader.close()
    assert namespace not in (server.api("STREAM.NAMES")["streams"] or [])


def test_a_client_of_the_app(server: NatsServer, namespace: str) -> None:
    import nats

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    theirs = asyncio.run_coroutine_threadsafe(nats.connect(server.url), loop).result(10)
    client = NatsBackend(connection=theirs, stream=namespace, prefix=f"{namespace}.")
    client.open("app")
    now = client.now()
    assert claim(client, "job", now, "a") is Answer.WON
    assert claim(client, "job", now, "b") is Answer.TAKEN
    client.close()
    assert theirs.is_connected
    asyncio.run_coroutine_threadsafe(theirs.close(), loop).result(10)
    with pytest.raises(BackendUnavailable):
        client.now()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
    with pytest.raises(ConfigurationError, match="connected client of nats-py"):
        NatsBackend(connection=object())


def test_the_second_server_is_tried(server: NatsServer, namespace: str) -> None:
    client = NatsBackend(["nats://127.0.0.1:1", server.url], stream=namespace, prefix=f"{namespace}.")
    client.open("app")
    assert client.now()
    client.close()


def test_the_rights_that_the_documentation_names(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "nats.md").read_text()
    (block,) = re.findall(r"^```json\n(.*?)^```$", page.partition("## Rights")[2], re.MULTILINE | re.DOTALL)
    rights = json.loads(block)
    makes = {right for right in rights["publish"] if ".CREATE." in right or ".UPDATE." in right}
    assert len(makes) == 3
    fewer = {**rights, "publish": [right for right in rights["publish"] if right not in makes]}
    port = free_port()
    settings = {
        "listen": f"127.0.0.1:{port}",
        "jetstream": {"store_dir": str(tmp_path / "data")},
        "authorization": {
            "users": [
                {"user": "beat", "password": "pw", "permissions": rights},
                {"user": "less", "password": "pw", "permissions": fewer},
            ]
        },
    }
    (tmp_path / "nats.conf").write_text(json.dumps(settings))
    process = Server([binary(), "-c", str(tmp_path / "nats.conf")], port, tmp_path)
    process.start()
    try:
        for number, user in enumerate(("beat", "less")):
            client = NatsBackend(f"nats://{user}:pw@127.0.0.1:{port}")
            client.open("app")
            slot = client.now() - 10 + number
            assert claim_all(client, [ask("job", slot, "a"), ask("job", slot, "b")]) == [Answer.WON, Answer.TAKEN]
            assert claim(client, "job", slot, "a") is Answer.WON
            client.confirm([Confirmation(job="job", slot=slot, owner="a", attempt=1, late=0)])
            assert client.tidy([Keep(job="job", decided=slot, history_size=1_005)]) == 0
            assert [run.state for run in client.history("job", 5)] == [RunState.DISPATCHED] * (number + 1)
            client.close()
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nats://u:secret@h/?duplicate_window=1", "must be remembered for 10 s"),
        ("nats://u:secret@h?duplicate_window=soon", "'soon'"),
        ("nats://u:secret@h?stream=a.b", "stream"),
        ("nats://u:secret@h?prefix=a.*.", "prefix"),
        ("nats://u:secret@h?prefix=", "prefix"),
        ("nats://u:secret@h?replicas=0", "replicas"),
        ("nats://u:secret@h?history_size=many", "history_size"),
        ("nats://u:secret@h?replica=3", "did you mean 'replicas'"),
        ("tls://secret@h?tls_ca=/nowhere", "tls"),
    ],
)
def test_wrong_settings_are_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend_from_url(url)
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_a_tolerance_that_is_longer_than_the_margin() -> None:
    backend = backend_from_url("nats://localhost?duplicate_window=20")
    backend.early_tolerance = 10_000
    with pytest.raises(ConfigurationError, match="too short for an early tolerance of 10 s"):
        backend.open("app")


def test_urls() -> None:
    url = "nats://user:pass@h1:1,h2:2?replicas=3&duplicate_window=10m&prefix=billing.cron.&stream=BILL"
    backend = backend_from_url(url)
    assert isinstance(backend, NatsBackend)
    assert (backend.namespace, backend.name, backend.traits.horizon) == ("BILL/billing.cron.", "nats", 480_000)
    assert backend._connection.servers == ["nats://user:pass@h1:1", "nats://user:pass@h2:2"]  # type: ignore[attr-defined]
    assert "pass" not in backend.describe()
    assert backend_from_url("nats://localhost").namespace == "CRON/cron."
    assert "token" not in backend_from_url("tls://token@host").describe()


def test_tls(tmp_path: Path) -> None:
    (mine, key), (other, _) = certificate(tmp_path, "mine"), certificate(tmp_path, "other")
    port = free_port()
    command = [binary(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path / "data")]
    process = Server([*command, "--tls", "--tlscert", str(mine), "--tlskey", str(key)], port, tmp_path)
    process.start()
    try:
        client = backend_from_url(f"tls://127.0.0.1:{port}?tls_ca={mine}")
        client.open("app")
        now = client.now()
        assert claim(client, "job", now, "a") is Answer.WON
        assert claim(client, "job", now, "b") is Answer.TAKEN
        client.close()
        client = backend_from_url(f"tls://127.0.0.1:{port}?tls_ca={other}")
        with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
            client.open("app")
        client.close()
    finally:
        process.kill()
