"""Redis and Valkey, the strategies that only take claims: what each promises beyond the kit, read past the backend."""

from __future__ import annotations

import random
import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.planning import planned
from support.redis_servers import Cluster, Private, cluster, private_server, wanted

from celery_anarchon.backends.base import Keep, LeaseBackend
from celery_anarchon.backends.redis import RedisBackend, ValkeyBackend
from celery_anarchon.backends.redis.cluster import hash_slot
from celery_anarchon.backends.redis.keys import Keys, encoded
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.errors import ConfigurationError, LayoutMismatch, OptionError
from celery_anarchon.model import Answer, RunState
from celery_anarchon.testing.harness import ask, claim, claim_all, confirm, raised_by, record

WON, TAKEN, TOO_OLD, TOO_EARLY = Answer.WON, Answer.TAKEN, Answer.TOO_OLD, Answer.TOO_EARLY

SCRIPT = {"name": "script", "window": "3h"}
IDMP = {"name": "idmp", "duration": "3h", "max_size": 500}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def newest_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Redis 8.6."""
    with cluster(tmp_path_factory.mktemp("cluster86"), "redis86") as running:
        yield running


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    """Redis 8.6."""
    with private_server(tmp_path_factory.mktemp("redis86"), "redis86") as running:
        yield running


@contextmanager
def opened(server: Private | Cluster, prefix: str, strategy: Any, **options: Any) -> Iterator[Any]:
    backend: Any = RedisBackend(server.url, strategy, prefix, **options)
    try:
        backend.open("app")
        yield backend
    finally:
        backend.close()


def base(backend: Any) -> int:
    return int(backend.now()) - 3_600_000


def states(backend: Any, job: str = "job") -> dict[int, tuple[str, str | None]]:
    return {round(run.slot.timestamp() * 1000): (str(run.state), run.reason) for run in backend.history(job, 100)}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name", "horizon"),
    [
        ({"strategy": "stream-id"}, "redis:stream-id", None),
        ({"strategy": "script"}, "redis:script", 240_000),
        ({"strategy": {"name": "script", "window": "10m"}}, "redis:script", 480_000),
        ({"strategy": "idmp"}, "redis:idmp", 240_000),
        ({"strategy": {"name": "idmp", "duration": 600, "max_size": 10}}, "redis:idmp", 480_000),
        ({"strategy": "lease"}, "redis:lease", None),
    ],
)
def test_names_mappings_and_urls(given: dict[str, Any], name: str, horizon: int | None) -> None:
    backend: Any = RedisBackend(**given)
    assert (backend.name, backend.traits.horizon) == (name, horizon)
    assert isinstance(backend, LeaseBackend) == backend.traits.leases == (name == "redis:lease")
    same = backend_from({"url": "redis://cache", **given})
    assert (same.name, same.traits) == (name, backend.traits)
    strategy = given["strategy"]
    query = {"strategy": strategy} if isinstance(strategy, str) else {"strategy": strategy["name"], **strategy}
    text = "&".join(f"{key}={value}" for key, value in query.items() if key != "name")
    from_url = backend_from(f"redis://cache?{text}&prefix=billing:cron:")
    assert (from_url.name, from_url.traits, from_url.namespace) == (name, backend.traits, "billing:cron:")


def test_names_on_valkey() -> None:
    pytest.importorskip("valkey") if not wanted("valkey8") else None
    for strategy in ("stream-id", "script"):
        assert backend_from(f"valkey://cache?strategy={strategy}").name == f"valkey:{strategy}"
    with pytest.raises(ConfigurationError, match=r"needs Redis 8\.6 or newer, and Valkey has nothing like it"):
        ValkeyBackend(strategy="idmp")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "script", "duration": 3}, "strategy 'script' takes window, and was given duration"),
        ({"name": "stream-id", "window": 3}, "strategy 'stream-id' takes no options, and was given window"),
        ({"name": "script", "window": 0.5}, "window=0.5: give at least a second"),
        ({"name": "idmp", "duration": 1.5}, "duration=1.5: the server takes whole seconds, a day at most"),
        ({"name": "idmp", "duration": "25h"}, "a day at most"),
        ({"name": "idmp", "max_size": 10_001}, "max_size=10001: give a number of claims from 1 to 10000"),
        ({"name": "idmp", "max_size": 0}, "max_size=0"),
        ({"window": 3}, "choose 'lease', 'stream-id', 'idmp', 'script'"),
    ],
)
def test_wrong_options_of_a_strategy(strategy: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        RedisBackend(strategy=strategy)


def test_options_of_a_strategy_in_a_url_that_does_not_name_it() -> None:
    with pytest.raises(ConfigurationError, match="'lease' takes no options, and was given window"):
        backend_from("redis://cache?window=10m")
    with pytest.raises(ConfigurationError, match="'window' is given twice"):
        backend_from({"url": "redis://cache?window=10m", "strategy": {"name": "script", "window": 3}})


# --- what a job may ask for -------------------------------------------------------------------------------------------


def job(strategy: Any, every: float = 60, **options: Any) -> Any:
    return planned(RedisBackend(strategy=strategy).traits, every, **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({"name": "script", "window": 300}, {"max_late": 240}),
        ({"name": "script", "window": 300}, {"max_late": 200, "jitter": 40}),
        ({"name": "idmp", "duration": 300}, {"max_late": 240}),
        ({"name": "script", "window": 75}, {}),
    ],
)
def test_nothing_is_planned_beyond_four_fifths_of_the_memory(strategy: Any, options: Any) -> None:
    with pytest.raises(OptionError, match=r"'export'.*must be shorter than .+ remembers a claim \((240|60) s\)"):
        job(strategy, 3_600, **options)
    job({"name": "script", "window": 400}, 3_600, **options)


def test_how_late_a_slot_may_be_has_a_default() -> None:
    assert job("script").options.max_late == job("stream-id").options.max_late == 60_000
    assert job("stream-id", 86_400, max_late="12h").options.max_late == 43_200_000


@pytest.mark.parametrize("strategy", ["script", "idmp", "stream-id"])
@pytest.mark.parametrize("option", ["catch_up", "coalesce", "max_attempts", "overlap"])
def test_what_needs_leases_is_refused(strategy: str, option: str) -> None:
    value = {"catch_up": "1h", "coalesce": "all", "max_attempts": 2, "overlap": "skip"}[option]
    with pytest.raises(OptionError, match=f"'export'.*'{option}'"):
        job(strategy, **{option: value})


def test_stream_id_needs_jitter_shorter_than_the_interval() -> None:
    with pytest.raises(OptionError, match=r"'export'.*'jitter' \(60 s\) must be shorter.*\(60 s\)"):
        job("stream-id", 60, jitter=60)
    job("stream-id", 60, jitter=59.9)
    job("script", 60, jitter=60)


def test_script_needs_a_history_longer_than_its_window() -> None:
    with pytest.raises(OptionError, match=r"'history_ttl' \(300 s\) must be longer than the window.*\(300 s\)"):
        job("script", history_ttl=300)
    assert job("script", history_ttl=301).options.history_ttl == 301_000
    assert job("stream-id", history_ttl=10).options.history_ttl == 10_000


def test_idmp_needs_a_size_that_holds_the_claims_of_its_duration() -> None:
    with pytest.raises(OptionError, match=r"'export'.*300 slots in 300 s.*remembers 299 claims.*raise its max_size"):
        job({"name": "idmp", "max_size": 299}, 1)
    job({"name": "idmp", "max_size": 300}, 1)


# --- opening ----------------------------------------------------------------------------------------------------------


def test_two_ways_of_claiming_do_not_share_a_namespace(server: Private, prefix: str) -> None:
    def refused(strategy: Any) -> str:
        error = raised_by(lambda: RedisBackend(server.url, strategy, prefix).open("app"))
        assert isinstance(error, LayoutMismatch), error
        return str(error)

    with opened(server, prefix, {"name": "script", "window": 600}):
        assert "'script' (window 600 s), and this one would by 'lease' and not" in refused("lease")
        assert "'script' (window 600 s)" in refused("stream-id")
        words = refused({"name": "script", "window": 300})
        assert prefix in words and "(window 600 s)" in words and "(window 300 s)" in words and "prefix=" in words
    with opened(server, prefix, {"name": "script", "window": "10m"}):
        pass


def test_a_namespace_of_an_older_release_is_one_of_leases(server: Private, prefix: str) -> None:
    with server.client() as client:
        client.hset(Keys(prefix).meta, mapping={"layout": 1, "app": "app"})
    with opened(server, prefix, "lease"):
        error = raised_by(lambda: RedisBackend(server.url, "script", prefix).open("app"))
        assert isinstance(error, LayoutMismatch) and "'lease'" in str(error)


def test_a_memory_that_the_tolerance_eats_up_is_refused(server: Private, prefix: str) -> None:
    with pytest.raises(ConfigurationError, match=r"window \(24 s\) must be at least five times.*tolerance \(5 s\)"):
        RedisBackend(server.url, {"name": "script", "window": 24}, prefix).open("app")
    with opened(server, prefix, {"name": "script", "window": 25}):
        pass


@pytest.mark.parametrize("flavour", ["redis6", "redis7", "redis8", "valkey8", "valkey9"])
def test_idmp_is_refused_where_the_server_lacks_it(
    flavour: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not wanted(flavour):
        pytest.skip("only where all servers are")
    with private_server(tmp_path, flavour) as running:
        words = "Valkey" if "valkey" in flavour else "this is"
        for facts in (None, {}):
            backend: Any = RedisBackend(running.url, "idmp", prefix)
            if facts is not None:
                # A server that does not say what it is.
                monkeypatch.setattr(type(backend), "_facts", lambda self: {})
                words = "lacks XCFGSET"
            error = raised_by(lambda backend=backend: backend.open("app"))
            assert isinstance(error, ConfigurationError), error
            assert "'idmp' needs Redis 8.6 or newer" in str(error) and words in str(error)
            backend.close()
        with running.client() as client:
            assert client.dbsize() == 0


def test_what_evicts_claims_is_warned_of(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    with private_server(tmp_path) as running:
        for policy, strategy, warned in (
            ("volatile-lru", SCRIPT, True),
            ("volatile-lru", "stream-id", False),
            ("allkeys-lru", "stream-id", True),
            ("noeviction", SCRIPT, False),
        ):
            with running.client() as client:
                client.config_set("maxmemory-policy", policy)
            caplog.clear()
            with opened(running, prefix + str(strategy), strategy):
                assert any(f"maxmemory-policy is {policy}" in line.getMessage() for line in caplog.records) == warned


RIGHTS = {
    "stream-id": "+xadd +xrange",
    "script": "+set +get",
    "idmp": "+xadd +xrange +xgroup|create +xgroup|destroy +xinfo|stream +xcfgset",
}
"""As the documentation has them, beside those of `lease`."""


@pytest.mark.parametrize("strategy", RIGHTS)
def test_the_rights_that_it_needs(strategy: str, prefix: str, request: Any) -> None:
    running = server_for(IDMP if strategy == "idmp" else strategy, request)
    user = f"beat-{uuid.uuid4().hex[:6]}"
    needs = "+eval +evalsha +time +hget +hmget +hset +hdel +exists +zadd +zrem +zcard +zrange +zrevrange"
    with running.client() as client:
        rights = [*needs.split(), *RIGHTS[strategy].split()]
        client.execute_command("ACL", "SETUSER", user, "on", ">pw", f"~{prefix}*", *rights, "+info", "+config|get")
    url = f"redis://{user}:pw@127.0.0.1:{running.port}/0"
    backend: Any = RedisBackend(url, strategy, prefix)
    backend.open("app")
    slot = backend.now() - 1_000
    assert claim(backend, "job", slot, "a") is WON
    assert claim(backend, "job", slot, "b") is TAKEN
    assert confirm(backend, "job", slot, "a")
    record(backend, "job", slot + 1)
    assert backend.tidy([Keep(job="job", decided=0, history_size=0)]) == 2
    assert backend.history("job", 1) == []
    backend.close()


# --- all of them ------------------------------------------------------------------------------------------------------

EACH = pytest.mark.parametrize("strategy", ["stream-id", SCRIPT, IDMP], ids=["stream-id", "script", "idmp"])


def server_for(strategy: Any, request: pytest.FixtureRequest) -> Private:
    found: Private = request.getfixturevalue("newest" if strategy is IDMP else "server")
    return found


@EACH
def test_a_command_that_is_sent_twice_wins_twice(strategy: Any, prefix: str, request: Any) -> None:
    """As a driver that resends does it: the second answer is the one that is read."""
    with opened(server_for(strategy, request), prefix, strategy) as backend:
        slot = base(backend)
        call = backend._claim_call([ask("job", slot, "a")])
        assert backend._source.perform([call, call], writes=True) == [[b"won"], [b"won"]]
        assert claim(backend, "job", slot, "b") is TAKEN


@EACH
def test_a_batch_is_one_call(strategy: Any, prefix: str, request: Any) -> None:
    running = server_for(strategy, request)
    with opened(running, prefix, strategy) as backend, running.client() as client:

        def calls() -> int:
            found = client.info("commandstats")
            return sum(found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))

        assert claim(backend, "warm", base(backend), "a") is WON
        before = calls()
        requests = [ask(f"job {number % 10}", base(backend) + number, "a") for number in range(500)]
        assert claim_all(backend, requests) == [WON] * 500
        assert calls() == before + 1


@EACH
def test_the_history_goes_and_the_claims_stay(strategy: Any, prefix: str, request: Any) -> None:
    with opened(server_for(strategy, request), prefix, strategy) as backend:
        start = base(backend)
        for number in range(20):
            assert claim(backend, "job", start + number, "a") is WON
            assert confirm(backend, "job", start + number, "a")
        record(backend, "job", start + 20)
        assert backend.tidy([Keep(job="job", decided=0, history_size=3)]) == 18
        assert sorted(states(backend)) == [start + 18, start + 19, start + 20]
        assert claim_all(backend, [ask("job", start + number, "b") for number in range(20)]) == [TAKEN] * 20
        assert backend.tidy([Keep(job="job", decided=0, history_size=3)]) == 0
        assert backend.tidy([Keep(job="job", decided=0, history_size=0), Keep(job="x", decided=0, history_size=0)]) == 3
        assert backend.last_run("job") is None


@EACH
def test_a_claim_that_a_beat_is_busy_with_stays_in_the_history(strategy: Any, prefix: str, request: Any) -> None:
    with opened(server_for(strategy, request), prefix, strategy) as backend:
        start = base(backend)
        assert claim(backend, "job", start, "a") is WON
        for number in range(1, 5):
            assert claim(backend, "job", start + number, "b") is WON
            assert confirm(backend, "job", start + number, "b")
        assert backend.tidy([Keep(job="job", decided=0, history_size=1)]) == 3
        assert sorted(states(backend)) == [start, start + 4]
        assert confirm(backend, "job", start, "a")


@EACH
def test_history_by_age(strategy: Any, prefix: str, request: Any) -> None:
    running = server_for(strategy, request)
    with opened(running, prefix, strategy) as backend, running.client() as client:
        start = base(backend)
        for number in range(3):
            assert claim(backend, "job", start + number, "a") is WON
            assert confirm(backend, "job", start + number, "a")
        name = Keys(prefix).runs(b"job")
        old = client.hget(name, str(start)).replace(b"1", b"0")  # some time ago
        client.hset(name, str(start), old)
        assert backend.tidy([Keep(job="job", decided=0, history_size=100, history_ttl=3_600_000)]) == 1
        assert sorted(states(backend)) == [start + 1, start + 2]


@EACH
def test_a_claim_replaces_what_was_only_noted(strategy: Any, prefix: str, request: Any) -> None:
    with opened(server_for(strategy, request), prefix, strategy) as backend:
        start = base(backend)
        record(backend, "job", start, RunState.SUPERSEDED)
        assert claim(backend, "job", start, "a") is WON
        assert states(backend) == {start: ("claimed", None)}


@EACH
def test_an_emptied_store_is_claimed_anew_and_set_up_anew(strategy: Any, prefix: str, request: Any) -> None:
    """It has forgotten; what it must not do is to remember less from then on."""
    running = server_for(strategy, request)
    with opened(running, prefix, strategy) as backend, running.client() as client:
        start = base(backend)
        assert claim(backend, "job", start, "a") is WON
        for key in client.keys(f"{prefix}*"):
            client.delete(key)
        assert claim(backend, "job", start, "b") is WON
        assert claim(backend, "job", start, "a") is TAKEN
        if strategy is IDMP:
            assert settings_of(client, Keys(prefix).claims(b"job")) == (10_800, 500)


# --- stream-id --------------------------------------------------------------------------------------------------------


def test_a_slot_after_a_newer_one_is_too_old_and_recorded(server: Private, prefix: str) -> None:
    with opened(server, prefix, "stream-id") as backend, opened(server, prefix, "stream-id") as other:
        start = base(backend)
        assert claim(backend, "job", start, "a") is WON
        assert claim(backend, "job", start + 20, "a") is WON
        assert claim(other, "job", start + 10, "b") is TOO_OLD
        assert states(backend)[start + 10] == ("misfire", "too-old")
        assert claim(other, "job", start + 10, "b") is TOO_OLD
        assert claim(other, "job", start, "b") is TAKEN
        assert states(backend) == {
            start: ("claimed", None),
            start + 10: ("misfire", "too-old"),
            start + 20: ("claimed", None),
        }


def test_a_slot_whose_entry_may_have_been_trimmed_is_too_old_and_not_recorded(server: Private, prefix: str) -> None:
    """Nobody can tell whether it was sent: "misfire" might be a lie."""
    with opened(server, prefix, "stream-id") as backend, server.client() as client:
        start = base(backend)
        for number in range(3):
            assert claim(backend, "job", start + 10 * number, "a") is WON
        client.xtrim(Keys(prefix).claims(b"job"), maxlen=0, approximate=False)
        client.delete(Keys(prefix).runs(b"job"), Keys(prefix).slots(b"job"))
        assert claim(backend, "job", start + 10, "b") is TOO_OLD
        assert claim(backend, "job", start + 15, "b") is TOO_OLD
        assert states(backend) == {}
        assert claim(backend, "job", start + 30, "b") is WON


def test_a_far_future_slot_is_refused_whatever_the_tolerance(server: Private, prefix: str) -> None:
    """One such entry would close the job for ever."""
    with opened(server, prefix, "stream-id", early_tolerance=10**12) as backend, server.client() as client:
        assert claim(backend, "job", backend.now() + 2 * 86_400_000, "a") is TOO_EARLY
        assert not client.exists(Keys(prefix).claims(b"job"))
        assert claim(backend, "job", backend.now() + 60_000, "a") is WON


def test_shuffled_slots_never_have_two_winners(server: Private, prefix: str) -> None:
    winners = contend(server, prefix, "stream-id", {"job": range(200)}, contenders=6, shuffled=True)
    assert all(len(owners) <= 1 for owners in winners.values())
    assert sum(len(owners) for owners in winners.values()) > 0


def test_the_server_refuses_for_ever_what_it_has_taken(server: Private, prefix: str) -> None:
    with opened(server, prefix, "stream-id") as backend, server.client() as client:
        start = base(backend)
        assert claim(backend, "job", start, "a") is WON
        stream = Keys(prefix).claims(b"job")
        assert client.xrange(stream) == [(b"%d-0" % start, {b"o": b"a"})]
        client.xdel(stream, f"{start}-0")
        assert claim(backend, "job", start, "b") is TOO_OLD


# --- script -----------------------------------------------------------------------------------------------------------


def test_a_marker_lives_for_the_window_from_its_slot_on(server: Private, prefix: str) -> None:
    with opened(server, prefix, {"name": "script", "window": 100}) as backend, server.client() as client:
        now = backend.now()
        for slot in (now - 60_000, now + 4_000):
            assert claim(backend, "job", slot, "a") is WON
            left = client.pttl(Keys(prefix).marker(b"job", slot))
            assert max(slot, now) + 100_000 <= backend.now() + left <= max(slot, backend.now()) + 100_100
        assert claim(backend, "job", now - 80_001, "a") is TOO_OLD


# --- idmp -------------------------------------------------------------------------------------------------------------


def settings_of(client: Any, stream: bytes) -> tuple[int, int]:
    found = client.execute_command("XINFO", "STREAM", stream)
    facts = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
    facts = {key.decode() if isinstance(key, bytes) else key: value for key, value in facts.items()}
    return int(facts["idmp-duration"]), int(facts["idmp-maxsize"])


def contend(
    server: Private | Cluster,
    prefix: str,
    strategy: Any,
    jobs: dict[str, Any],
    *,
    contenders: int,
    shuffled: bool = False,
) -> dict[tuple[str, int], list[str]]:
    """Let so many clients claim the same slots at the same moment; who was told WON."""
    winners: dict[tuple[str, int], list[str]] = defaultdict(list)
    barrier = threading.Barrier(contenders, timeout=60)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        owner = f"{number}-{uuid.uuid4().hex}"
        order = random.Random(number)
        try:
            with opened(server, prefix, strategy) as backend:
                start = base(backend) // 60_000 * 60_000
                for name, numbers in jobs.items():
                    slots = [start + 10 * n for n in numbers]
                    if shuffled:
                        order.shuffle(slots)
                    barrier.wait()
                    for slot in slots:
                        if claim(backend, name, slot, owner) is WON:
                            winners[name, slot].append(owner)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    crowd = [threading.Thread(target=run, args=(number,)) for number in range(contenders)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert not errors, errors
    return winners


@pytest.mark.parametrize("servers", ["newest", "newest_nodes"])
def test_forty_fresh_streams_and_eight_contenders(servers: str, prefix: str, request: Any) -> None:
    """Set up after its first entry, a stream forgets it: 30 of 90 slots were won twice."""
    server = request.getfixturevalue(servers)
    names = [f"job {number}" for number in range(40)]
    winners = contend(server, prefix, IDMP, {name: range(3) for name in names}, contenders=8)
    assert len(winners) == 120
    assert {slot: owners for slot, owners in winners.items() if len(owners) != 1} == {}
    nodes = set()
    for name in names:
        stream = Keys(prefix).claims(encoded(name))
        node = server.node_of(hash_slot(stream)) if isinstance(server, Cluster) else server
        nodes.add(node.port)
        with node.client() as client:
            assert settings_of(client, stream) == (10_800, 500)
    assert len(nodes) == (3 if isinstance(server, Cluster) else 1)


def test_a_stream_that_is_set_otherwise_is_refused_and_left_as_it_is(newest: Private, prefix: str) -> None:
    stream = Keys(prefix).claims(b"job")
    with opened(newest, prefix, IDMP) as backend, newest.client() as client:
        start = base(backend)
        client.execute_command("XADD", stream, "IDMP", "cron", str(start), "*", "o", "somebody")
        client.execute_command("XCFGSET", stream, "IDMP-DURATION", 200, "IDMP-MAXSIZE", 500)
        client.execute_command("XADD", stream, "IDMP", "cron", str(start), "*", "o", "somebody")
        length = client.xlen(stream)
        error = raised_by(lambda: claim_all(backend, [ask("other", start, "a"), ask("job", start, "a")]))
        assert isinstance(error, LayoutMismatch), error
        for word in (stream.decode(), "IDMP-DURATION 200", "IDMP-MAXSIZE 500", "wants 10800 and 500"):
            assert word in str(error)
        assert settings_of(client, stream) == (200, 500)
        assert client.xlen(stream) == length
        assert not client.exists(Keys(prefix).claims(b"other")), "a part of the batch was applied"
        assert states(backend) == {}
        # What it remembers is still there: the same id gives no new entry.
        client.execute_command("XADD", stream, "IDMP", "cron", str(start), "*", "o", "again")
        assert client.xlen(stream) == length


def test_another_duration_for_the_namespace_is_refused_at_the_start(newest: Private, prefix: str) -> None:
    with opened(newest, prefix, IDMP) as backend:
        assert claim(backend, "job", base(backend), "a") is WON
        other: Any = RedisBackend(newest.url, {**IDMP, "duration": "2h"}, prefix)
        error = raised_by(lambda: other.open("app"))
        assert isinstance(error, LayoutMismatch), error
        assert "(duration 10800 s, max_size 500)" in str(error) and "(duration 7200 s, max_size 500)" in str(error)


def test_claims_of_idmp_survive_a_kill(tmp_path: Path, prefix: str) -> None:
    options = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
    with private_server(tmp_path, "redis86", options) as running:
        with opened(running, prefix, IDMP) as backend:
            start = base(backend)
            assert claim_all(backend, [ask("job", start + n, "a") for n in range(20)]) == [WON] * 20
        running.process.kill()
        running.process.start()
        running.wait_until_ready()
        with opened(running, prefix, IDMP) as backend:
            assert claim_all(backend, [ask("job", start + n, "b") for n in range(20)]) == [TAKEN] * 20


def test_an_entry_that_somebody_has_trimmed_is_no_answer(newest: Private, prefix: str) -> None:
    with opened(newest, prefix, IDMP) as backend, newest.client() as client:
        start = base(backend)
        assert claim(backend, "job", start, "a") is WON
        client.xtrim(Keys(prefix).claims(b"job"), maxlen=0, approximate=False)
        for owner in "ab":
            assert claim(backend, "job", start, owner) is Answer.UNKNOWN


def test_as_many_claims_as_are_kept_can_be_read_back(newest: Private, prefix: str) -> None:
    with opened(newest, prefix, {**IDMP, "max_size": 100}) as backend:
        start = base(backend)
        asked = [ask("job", start + number, "a") for number in range(100)]
        assert claim_all(backend, asked) == [WON] * 100
        assert claim_all(backend, asked) == [WON] * 100
        assert claim_all(backend, [ask("job", start + number, "b") for number in range(100)]) == [TAKEN] * 100
