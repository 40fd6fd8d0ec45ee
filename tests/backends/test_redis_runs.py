"""Runs on their workers in Redis: what is stored, what a call costs, what is lost and found. Two clients, raw reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from support.redis_servers import Cluster, Private, Proxy, private_server, replicated
from support.waiting import wait_for

from celery_anarchon.backends.base import Hold, Keep, LapsedClaim, Takeover, Terms
from celery_anarchon.backends.redis import RedisBackend, records
from celery_anarchon.backends.redis.keys import SHARDS, Keys
from celery_anarchon.backends.runs import RELEASED, LapsedEnd, RunBackend, StartResult, Waiting, Worker
from celery_anarchon.errors import OutcomeUnknown
from celery_anarchon.model import Answer, GateAnswer, Overlap, RunState
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import LONG, abandon, give_up, raised_by, take
from celery_anarchon.testing.runforms import (
    ONCE,
    PLAIN,
    QUEUE_ONE,
    SKIP,
    TWICE,
    ask_run,
    claim_run,
    confirm_run,
    delivery,
    end_lapsed,
    give_back,
    heartbeat,
    held,
    look,
    release,
    retrying,
    send,
    settle,
    slot_of,
    start,
    state_of,
    terms,
    unstarted,
)

START, DUPLICATE = GateAnswer.START, GateAnswer.DUPLICATE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    with private_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@contextmanager
def opened(url: str, prefix: str, **options: Any) -> Iterator[RedisBackend]:
    with closing(RedisBackend(url, prefix=prefix, **options)) as backend:
        backend.open("app")
        yield backend


@pytest.fixture
def two(server: Private, prefix: str) -> Iterator[tuple[RedisBackend, RedisBackend]]:
    with opened(server.url, prefix) as one, opened(server.url, prefix) as other:
        yield one, other


@pytest.fixture
def raw(server: Private) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def base(backend: RedisBackend) -> int:
    return backend.now() - 3_600_000


def counted(server: Private, call: Callable[[], Any]) -> dict[str, int]:
    """How often the server performed each command meanwhile, those of scripts too."""
    with server.client() as client:
        client.config_resetstat()
        call()
        return {name[8:].lower(): int(stat["calls"]) for name, stat in client.info("commandstats").items()}


def lapse(client: redis.Redis, backend: RedisBackend, job: str, slot: int, ago: int = 1) -> None:
    """The lease, or the queue limit, of this run has been over for that long."""
    key = backend._keys.leases(backend._keys.shard(job.encode()))
    (member,) = (one for one in client.zrange(key, 0, -1) if one.startswith(b"%d:" % slot))
    client.zadd(key, {member: backend.now() - ago})


def kept(client: redis.Redis, prefix: str) -> set[str]:
    """The keys of the namespace, by what stands after the shard."""
    return {key.decode().partition("}")[2] for key in client.scan_iter(match=f"{prefix}*", count=1_000)}


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_the_keys_of_a_run_are_named_once() -> None:
    keys = Keys("x:")
    shard = keys.shard(b"job")
    expected = keys.leases(shard), keys.runs(b"job"), keys.slots(b"job"), keys.living(b"job"), keys.free(shard)
    assert keys.of(b"job") == expected


def test_a_run_goes_on_on_a_server_without_memory(own: Private, prefix: str) -> None:
    """What has started is renewed and ends, or each body would lose its run."""
    with opened(own.url, prefix) as backend, own.client() as client:
        slot = base(backend)
        send(backend, "job", slot)
        assert start(backend, "job", slot, "t").answer is START
        client.config_set("maxmemory", "1mb")
        assert heartbeat(backend, "job", slot, "t")
        assert settle(backend, "job", slot, "t")


def test_a_run_from_claim_to_end_as_the_keys_show_it(
    two: tuple[RedisBackend, RedisBackend], raw: redis.Redis, prefix: str
) -> None:
    beat, worker = two
    slot, keys = base(beat), beat._keys
    leases, runs, _, living, _ = keys.of(b"job")

    def record() -> Any:
        return json.loads(raw.hget(runs, str(slot)))  # type: ignore[arg-type]

    def lease() -> tuple[bytes, int]:
        ((member, end),) = raw.zrange(leases, 0, -1, withscores=True)
        return member, round(end)

    assert claim_run(beat, "job", slot, "a", TWICE) is Answer.WON
    assert lease()[0] == b"%d:1:h2:job" % slot and raw.zrange(living, 0, -1) == [b"%d" % slot]
    assert record()["terms"] == {"lease": LONG, "queue_timeout": LONG, "max_attempts": 2, "overlap": "allow"}
    before = beat.now()
    assert confirm_run(beat, "job", slot, "a", delay=5_000)
    member, end = lease()
    assert member == b"%d:1:hq2:job" % slot and before + 5_000 + LONG <= end <= beat.now() + 5_000 + LONG
    assert start(worker, "job", slot, "t", of=TWICE).answer is START
    assert lease()[0] == b"%d:1:hr2:job" % slot
    assert record()["token"] == "t" and record()["worker"] == "worker of t" and "patience" not in record()
    assert retrying(worker, "job", slot, "t")
    assert lease()[0] == b"%d:1:ht2:job" % slot
    assert start(worker, "job", slot, "u", retries=1, of=TWICE).answer is START
    assert release(worker, "job", slot, "u", retries=1)
    assert lease()[0] == b"%d:1:hs2:job" % slot
    assert take(beat, "job", slot, "b", 1) == 2
    assert lease()[0] == b"%d:2:h2:job" % slot
    assert "retries" not in record() and "token" not in record() and "reason" not in record()
    assert confirm_run(beat, "job", slot, "b", 2) and start(worker, "job", slot, "v", 2, of=TWICE).answer is START
    assert settle(worker, "job", slot, "v", 2, reason="done")
    assert record()["state"] == "succeeded" and record()["attempt"] == 2
    assert kept(raw, prefix) == {"meta", "runs:job", "slots:job"}, "an end leaves its record only"


def test_a_mark_says_what_the_list_must(two: tuple[RedisBackend, RedisBackend], raw: redis.Redis) -> None:
    beat, _ = two
    slot = base(beat)
    for number, (many, step) in enumerate(
        [
            (None, lambda at: None),
            (None, lambda at: abandon(beat, "job", at, "a")),
            (1, lambda at: confirm_run(beat, "job", at, "a")),
            (12, lambda at: start(beat, "job", at, "t", of=terms(12))),
            (3, lambda at: (start(beat, "job", at, "t", of=terms(3)), release(beat, "job", at, "t"))),
            (None, lambda at: (start(beat, "job", at, "t"), retrying(beat, "job", at, "t"))),
            (2, lambda at: start(beat, "job", at, "t", of=terms(2))),
        ]
    ):
        # Of the last one only its message is known.
        assert number == 6 or claim_run(beat, "job", slot + number, "a", terms(many)) is Answer.WON
        step(slot + number)
        lapse(raw, beat, "job", slot + number, 100 - number)
    assert beat.lapsed(10) == [
        LapsedClaim(job="job", slot=slot + number, attempt=1, abandoned=abandoned, state=state, max_attempts=many)
        if reason is None
        else LapsedClaim(
            job="job", slot=slot + number, attempt=1, abandoned=abandoned, state=state, max_attempts=many, reason=reason
        )
        for number, (abandoned, state, many, reason) in enumerate(
            [
                (False, RunState.CLAIMED, None, None),
                (True, RunState.CLAIMED, None, None),
                (False, RunState.QUEUED, 1, None),
                (False, RunState.RUNNING, 12, None),
                (False, RunState.RUNNING, 3, RELEASED),
                (False, RunState.RETRYING, None, None),
                (False, RunState.RUNNING, 2, None),
            ]
        )
    ]
    with pytest.raises(OutcomeUnknown, match="marked b'hz'"):
        records.lapsed_claim(b"5:1:hz:job")


def test_a_word_that_is_no_answer_is_neither_yes_nor_no() -> None:
    with pytest.raises(OutcomeUnknown, match=r"here: the answer was b'begin'"):
        records.answer(GateAnswer, b"begin", "here")


def test_any_text(two: tuple[RedisBackend, RedisBackend]) -> None:
    one, other = two
    slot = base(one)
    for text in ('a"b\\', "a:b:{c}", "ünï\u2028", "half \ud83d pair", "nul \0 in it", "=-"):
        of = terms(overlap=Overlap.QUEUE_ONE)
        # A job of that name would have no run id.
        job = text.replace("\ud83d", "x")
        send(one, job, slot, of, text)
        assert claim_run(one, job, slot + 1, text, of) is Answer.WAITING
        asked = delivery(job, slot, text, of=of, worker=text)
        assert one.start([asked])[0].answer is START and other.start([asked])[0].answer is START
        again = other.start([delivery(job, slot, text + "2", of=of)])[0]
        assert (again.answer, again.holder) == (DUPLICATE, text)
        assert settle(other, job, slot, text, reason=text) and settle(one, job, slot, text, reason=text)
        run = look(other, job, slot)
        assert run is not None and (run.reason, run.worker, run.beat, run.refused) == (text, text, "beat", 1)
        assert other.waiting(99)[0] == Waiting(job=job, slot=slot + 1)
        assert claim_run(other, job, slot + 1, text, of) is Answer.WON
        assert [slot_of(found) for found in one.release_job(job)] == [slot + 1]


# --- what a call costs ------------------------------------------------------------------------------------------------


def test_a_batch_is_one_call(own: Private, prefix: str) -> None:
    with opened(own.url, prefix) as backend:
        slot, jobs = base(backend), [f"job {number}" for number in range(300)]
        first = delivery("job 0", slot, "t")
        backend.claim([ask_run(job, slot, "a") for job in jobs])
        asked = [delivery(job, slot, "t") for job in jobs]
        holds = [held(job, slot, "t") for job in jobs]
        backend.start([first])
        backend.heartbeat(holds[:1])
        assert counted(own, lambda: backend.start([first]))["evalsha"] == 1
        calls = counted(own, lambda: (backend.start(asked), backend.heartbeat(holds)))
        assert calls["evalsha"] == 2 and "eval" not in calls
        assert backend.heartbeat(holds) == [True] * 300


def test_a_look_costs_neither_jobs_nor_history(own: Private, prefix: str) -> None:
    with opened(own.url, prefix) as backend:
        slot = base(backend)
        backend.lapsed(5), backend.waiting(5)

        def looks() -> dict[str, int]:
            return counted(own, lambda: (backend.lapsed(5), backend.waiting(5)))

        before = looks()
        for number in range(40):
            jobs = [f"job {job}" for job in range(50)]
            backend.start([delivery(job, slot + number, "t", of=QUEUE_ONE if number == 39 else PLAIN) for job in jobs])
            if number < 39:
                for job in jobs[:1]:
                    assert settle(backend, job, slot + number, "t")
        assert looks() == before
        assert set(before) <= {"evalsha", "time", "zrangebyscore", "zrange", "config|resetstat", "info"}
        assert before["zrange"] <= SHARDS and before["zrangebyscore"] <= SHARDS


def test_overlap_is_judged_by_the_oldest_few(own: Private, prefix: str) -> None:
    """An hour of messages that nobody takes must not make each claim slower than the one before."""
    with opened(own.url, prefix) as backend:
        slot = base(backend)
        backend.claim([ask_run("job", slot + number, "a") for number in range(1_000)])
        for number in range(1_000):
            assert confirm_run(backend, "job", slot + number, "a")
        assert claim_run(backend, "job", slot + 2_000, "a", SKIP) is Answer.SKIPPED
        claim = ask_run("job", slot + 2_001, "a", SKIP)
        calls = counted(own, lambda: backend.claim([claim]))
        assert calls["zrange"] == 1 and calls["hmget"] == 2
        found = look(backend, "job", slot + 2_001)
        assert found is not None and found.blocked_by == backend.living("job")[0].run_id


def test_reading_makes_nothing(own: Private, prefix: str) -> None:
    with closing(RedisBackend(own.url, prefix=prefix)) as backend, own.client() as client:
        backend.open("app", create=False)
        assert backend.living("job") == [] and backend.waiting(5) == [] and backend.workers(LONG) == []
        assert not backend.ever_had_workers() and backend.release_job("job") == []
        assert heartbeat(backend, "job", 5, "t") is False and settle(backend, "job", 5, "t") is False
        assert end_lapsed(backend, "job", 5, RunState.QUEUED) is False
        assert client.dbsize() == 0


@pytest.mark.parametrize("database", [0, 1])
def test_the_rights_that_the_documentation_names(own: Private, prefix: str, database: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    found = re.search(r"^ +(\+eval .*)$", page, re.MULTILINE)
    elsewhere = re.search(r"database other than 0 also `(\+select)`", page)
    assert found is not None and elsewhere is not None
    rights = [*found[1].split(), *([elsewhere[1]] if database else [])]
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">pw", f"~{prefix}*", *rights)
    with opened(f"redis://worker:pw@127.0.0.1:{own.port}/{database}", prefix) as backend:
        slot = base(backend)
        everything(backend, slot)
        backend.worker_seen(Worker(owner="w", label="w", version="1"))
        assert len(backend.workers(LONG)) == 1 and backend.ever_had_workers()
        backend.worker_left("w")


def everything(backend: RunBackend, slot: int) -> None:
    """Each operation does what it does at its best."""
    send(backend, "job", slot, QUEUE_ONE)
    assert claim_run(backend, "job", slot + 1, "a", QUEUE_ONE) is Answer.WAITING
    assert start(backend, "job", slot, "t", of=QUEUE_ONE).answer is START
    assert heartbeat(backend, "job", slot, "t") and give_back(backend, "job", slot, "t")
    assert start(backend, "job", slot, "u", of=QUEUE_ONE).answer is START and retrying(backend, "job", slot, "u")
    assert unstarted(backend, "job", slot, retries=1)
    assert backend.waiting(5) == [Waiting(job="job", slot=slot + 1)] and len(backend.living("job")) == 1
    assert claim_run(backend, "job", slot + 1, "b", QUEUE_ONE) is Answer.WON
    assert start(backend, "job", slot + 1, "v", of=QUEUE_ONE).answer is START
    assert release(backend, "job", slot + 1, "v")
    assert end_lapsed(backend, "job", slot + 1, RunState.RUNNING, reason=RELEASED)
    assert start(backend, "job", slot + 2, "t", of=QUEUE_ONE).answer is GateAnswer.UNKNOWN
    assert settle(backend, "job", slot + 2, "t")
    send(backend, "job", slot + 3)
    assert [run.reason for run in backend.release_job("job")] == ["released"]
    assert backend.tidy([Keep(job="job", decided=slot + 9, history_size=0)]) == 4
    assert start(backend, "job", slot + 2, "t2").answer is GateAnswer.TRIMMED


def test_in_a_cluster(nodes: Cluster, prefix: str) -> None:
    """Each script keeps to the node of its job's shard, and a batch reaches them all."""
    with opened(nodes.url, prefix) as one, opened(nodes.url, prefix) as other:
        slot, jobs = base(one), [f"job {number}" for number in range(150)]
        everything(one, slot)
        assert one.claim([ask_run(job, slot, "a", QUEUE_ONE) for job in jobs])[-1].answer is Answer.WON
        results = other.start([delivery(job, slot, "t", of=QUEUE_ONE) for job in jobs])
        assert {result.answer for result in results} == {START}
        later = one.claim([ask_run(job, slot + 1 + n, "a", QUEUE_ONE) for n, job in enumerate(jobs)])
        assert {result.answer for result in later} == {Answer.WAITING}
        assert one.heartbeat([held(job, slot, "t") for job in jobs]) == [True] * 150
        assert one.waiting(200) == []
        for job in jobs:
            assert [slot_of(run) for run in other.release_job(job)] == [slot]
        assert other.waiting(7) == [Waiting(job=job, slot=slot + 1 + n) for n, job in enumerate(jobs[:7])]
        assert len(other.waiting(200)) == 150


# --- one step ---------------------------------------------------------------------------------------------------------


def crowd(size: int, deed: Callable[[int], Any]) -> list[Any]:
    """What *deed* returns in each of *size* threads that begin together."""
    return at_once([partial(deed, number) for number in range(size)])


@pytest.mark.race
def test_of_many_deliveries_one_starts(server: Private, prefix: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(opened(server.url, prefix)) for _ in range(12)]
        slot = base(clients[0])
        for number in range(20):
            send(clients[0], "job", slot + number, ONCE)
            answers = crowd(
                12,
                lambda n, at=slot + number: start(clients[n], "job", at, f"t{n}", of=ONCE).answer,  # type: ignore[misc]
            )
            assert sorted(answers) == [DUPLICATE] * 11 + [START]


@pytest.mark.race
def test_of_slots_that_may_not_overlap_one_lives(server: Private, prefix: str) -> None:
    """Each client asks for a slot of its own: nothing is common to them but the job."""
    with ExitStack() as stack:
        clients = [stack.enter_context(opened(server.url, prefix)) for _ in range(12)]
        slot = base(clients[0])
        for number in range(0, 240, 12):
            answers = crowd(
                12,
                lambda n, at=slot + number: claim_run(clients[n], "job", at + n, f"o{n}", SKIP),  # type: ignore[misc]
            )
            assert sorted(answers) == [Answer.WAIT] * 11 + [Answer.WON]
            mine = answers.index(Answer.WON)
            assert confirm_run(clients[0], "job", slot + number + mine, f"o{mine}")
            assert start(clients[0], "job", slot + number + mine, "t", of=SKIP).answer is START
            ends = crowd(
                12,
                lambda n, at=slot + number, mine=mine: (  # type: ignore[misc]
                    settle(clients[n], "job", at + mine, "t")
                    if n == mine
                    else claim_run(clients[n], "job", at + n, f"o{n}", SKIP)
                ),
            )
            assert ends[mine] is True and ends.count(Answer.WON) <= 1
            clients[0].release_job("job")


@pytest.mark.race
def test_settle_sweep_and_copy_at_once(server: Private, prefix: str) -> None:
    """A settle, a takeover and the start of a copy want the same lapsed run: the fence lets one have it."""
    with opened(server.url, prefix) as worker, opened(server.url, prefix) as beat, opened(server.url, prefix) as copy:
        slot = base(beat)
        with server.client() as client:
            for number in range(30):
                at = slot + number
                send(beat, "job", at, TWICE)
                assert start(worker, "job", at, "t", of=TWICE).answer is START
                lapse(client, beat, "job", at)
                calls = (
                    lambda at=at: settle(worker, "job", at, "t"),
                    lambda at=at: take(beat, "job", at, "b", 1) == 2,
                    lambda at=at: start(copy, "job", at, "u", of=TWICE) == StartResult(START, 2),
                )
                done = at_once(calls)
                run = look(beat, "job", at)
                assert run is not None
                if done[0]:
                    assert done == [True, False, False] and run.state is RunState.SUCCEEDED and run.attempt == 1
                else:
                    assert done.count(True) == 1 and run.attempt == 2


def test_a_start_whose_reply_was_lost(server: Private, prefix: str) -> None:
    with closing(Proxy(server.port)) as line, opened(f"redis://127.0.0.1:{line.port}/0", prefix) as backend:
        slot = base(backend)
        send(backend, "job", slot, ONCE)
        line.losing = True
        assert isinstance(raised_by(lambda: start(backend, "job", slot, "t", of=ONCE)), OutcomeUnknown)
        line.losing = False
        assert state_of(backend, "job", slot) is RunState.RUNNING
        assert start(backend, "job", slot, "copy", of=ONCE).answer is DUPLICATE
        again = start(backend, "job", slot, "t", of=ONCE)
        assert (again.answer, again.attempt) == (START, 1)
        line.losing = True
        assert isinstance(raised_by(lambda: settle(backend, "job", slot, "t")), OutcomeUnknown)
        line.losing = False
        assert settle(backend, "job", slot, "t") and not settle(backend, "job", slot, "copy")


def test_replicas_that_lag(tmp_path: Path, prefix: str) -> None:
    """A start that a failover could forget is not granted."""
    with (
        replicated(tmp_path) as (master, replica),
        opened(master.url, prefix, wait_replicas=1, wait_timeout="150ms") as backend,
        opened(master.url, prefix) as plain,
    ):
        slot = base(plain)
        for number in range(2):
            send(plain, "job", slot + number)
        calls: list[Callable[[], Any]] = [
            lambda: start(backend, "job", slot, "t"),
            lambda: heartbeat(backend, "job", slot, "t"),
            lambda: give_back(backend, "job", slot, "t"),
            lambda: start(backend, "job", slot, "t"),
            lambda: retrying(backend, "job", slot, "t"),
            lambda: start(backend, "job", slot, "u", retries=1),
            lambda: release(backend, "job", slot, "u", retries=1),
            lambda: end_lapsed(backend, "job", slot, RunState.RUNNING),
            lambda: unstarted(backend, "job", slot + 1),
            lambda: backend.release_job("job"),
        ]
        replica.process.pause()
        for call in calls:
            with pytest.raises(OutcomeUnknown, match="0 of 1 replicas have it after 150 ms"):
                call()
        # All of it was done here, and reading waits for nobody.
        assert [run.state for run in backend.history("job", 5)] == [RunState.LOST_IN_QUEUE, RunState.LOST]
        assert backend.waiting(5) == [] and backend.living("job") == []
        replica.process.resume()
        wait_for(lambda: raised_by(lambda: end_lapsed(backend, "job", slot, RunState.RUNNING)) is None, "a replica")


# --- the slot that waits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        lambda one, at, raw: settle(one, "job", at, "t"),
        lambda one, at, raw: release(one, "job", at, "t") and end_lapsed(one, "job", at, RunState.RUNNING),
        lambda one, at, raw: give_back(one, "job", at, "t") and unstarted(one, "job", at),
        lambda one, at, raw: one.release_job("job"),
        lambda one, at, raw: (
            lapse(raw, one, "job", at) or start(one, "job", at, "u", of=QUEUE_ONE).answer is GateAnswer.USED_UP
        ),
    ],
)
def test_it_is_listed_once_the_other_has_ended(
    two: tuple[RedisBackend, RedisBackend], raw: redis.Redis, prefix: str, end: Callable[..., Any]
) -> None:
    one, other = two
    slot = base(one)
    of = terms(1, Overlap.QUEUE_ONE)
    send(one, "job", slot, of)
    assert start(one, "job", slot, "t", of=of).answer is START
    assert claim_run(other, "job", slot + 5, "a", of) is Answer.WAITING
    assert other.waiting(5) == [] and "free" not in kept(raw, prefix)
    assert end(one, slot, raw)
    assert other.waiting(5) == [Waiting(job="job", slot=slot + 5)]
    assert claim_run(other, "job", slot + 5, "b", of) is Answer.WON
    assert one.waiting(5) == [] and "free" not in kept(raw, prefix)
    assert give_up(other, "job", slot + 5, "b", 1, RunState.MISFIRE)
    assert kept(raw, prefix) == {"meta", "runs:job", "slots:job"}


def test_it_is_not_listed_while_another_lives_again(two: tuple[RedisBackend, RedisBackend]) -> None:
    one, other = two
    slot = base(one)
    send(one, "job", slot, QUEUE_ONE)
    assert claim_run(one, "job", slot + 5, "a", QUEUE_ONE) is Answer.WAITING
    assert unstarted(one, "job", slot) and len(one.waiting(5)) == 1
    # Somebody whose definition lets it overlap, then a message that the store forgot.
    assert claim_run(other, "job", slot + 1, "a", PLAIN) is Answer.WON and one.waiting(5) == []
    assert give_up(other, "job", slot + 1, "a", 1, RunState.NOT_SENT) and len(one.waiting(5)) == 1
    assert start(other, "job", slot + 2, "t", of=PLAIN).answer is GateAnswer.UNKNOWN and one.waiting(5) == []
    assert claim_run(one, "job", slot + 5, "a", QUEUE_ONE) is Answer.WAITING
    assert settle(other, "job", slot + 2, "t") and len(one.waiting(5)) == 1
    # A newer one that is won takes its place.
    assert claim_run(other, "job", slot + 9, "a", QUEUE_ONE) is Answer.WON
    assert state_of(one, "job", slot + 5) is RunState.SUPERSEDED and one.waiting(5) == []


# --- what was lost by eviction or by hand -----------------------------------------------------------------------------


def test_a_record_that_is_gone_is_in_nobody_s_way(two: tuple[RedisBackend, RedisBackend], raw: redis.Redis) -> None:
    one, other = two
    slot = base(one)
    leases, runs, _, living, _ = one._keys.of(b"job")
    for number in range(60):
        assert claim_run(one, "job", slot + number, "a") is Answer.WON
        assert confirm_run(one, "job", slot + number, "a")
    raw.hdel(runs, *(str(slot + number) for number in range(60)))
    assert raw.zcard(living) == 60 and one.living("job") == []
    assert claim_run(other, "job", slot + 100, "a", SKIP) is Answer.WON
    assert raw.zrange(living, 0, -1) == [b"%d" % (slot + 100)]
    for member in raw.zrange(leases, 0, -1):
        raw.zadd(leases, {member: 1})
    assert len(one.lapsed(100)) == 61
    ends = [
        LapsedEnd(job="job", slot=slot + n, attempt=1, was=RunState.QUEUED, state=RunState.LOST, reason="x")
        for n in range(30)
    ]
    wishes = [
        Takeover(job="job", slot=slot + n, from_attempt=1, owner="b", beat="b", lease=LONG) for n in range(30, 60)
    ]
    assert one.end_lapsed(ends) == [False] * 30 and one.takeover(wishes) == [None] * 30
    assert [found.slot for found in one.lapsed(100)] == [slot + 100]


def test_a_run_without_its_lease_is_nobody_else_s(two: tuple[RedisBackend, RedisBackend], raw: redis.Redis) -> None:
    """Its holder lives, as far as anybody knows; the next heartbeat brings the lease back."""
    one, other = two
    slot = base(one)
    send(one, "job", slot, TWICE)
    assert start(one, "job", slot, "t", of=TWICE).answer is START
    raw.delete(one._keys.leases(one._keys.shard(b"job")))
    assert start(other, "job", slot, "u", of=TWICE).answer is DUPLICATE and take(other, "job", slot, "b", 1) is None
    assert not end_lapsed(other, "job", slot, RunState.RUNNING, reason="job-removed")
    assert heartbeat(one, "job", slot, "t")
    lapse(raw, one, "job", slot)
    assert take(other, "job", slot, "b", 1) == 2


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_late_acknowledgement_gives_the_broker_time(two: tuple[RedisBackend, RedisBackend], raw: redis.Redis) -> None:
    """The lease is over for a redelivered message long before it is over for a sweeper."""
    one, other = two
    slot = base(one)
    of = Terms(lease=1_000, queue_timeout=LONG)
    for number in range(2):
        send(one, "job", slot + number, of)
        assert start(one, "job", slot + number, "t", of=of, acks_late=True).answer is START
        lapse(raw, one, "job", slot + number, -LONG + 1)
        assert one.lapsed(5) == [] and not end_lapsed(one, "job", slot + number, RunState.RUNNING)
    copy = start(other, "job", slot, "u", of=of, acks_late=True)
    assert (copy.answer, copy.attempt) == (START, 2)
    assert heartbeat(one, "job", slot + 1, "t"), "it was not taken over"
    assert start(other, "job", slot + 1, "u", of=of, acks_late=True).answer is DUPLICATE
    lapse(raw, one, "job", slot + 1)
    assert [found.slot for found in one.lapsed(5)] == [slot + 1]
    assert end_lapsed(one, "job", slot + 1, RunState.RUNNING)
    # A worker that stops leaves it to the broker too.
    send(one, "job", slot + 2, of)
    before = one.now()
    assert start(one, "job", slot + 2, "t", of=of, acks_late=True).answer is START
    leases = one._keys.leases(one._keys.shard(b"job"))
    assert (raw.zscore(leases, b"%d:1:hr:job" % (slot + 2)) or 0) >= before + 1_000 + LONG
    assert release(one, "job", slot + 2, "t") and one.lapsed(5) == []
    again = start(other, "job", slot + 2, "u", of=of, acks_late=True)
    assert (again.answer, again.attempt) == (START, 2)


def test_workers_are_remembered_and_forgotten(
    two: tuple[RedisBackend, RedisBackend], raw: redis.Redis, prefix: str
) -> None:
    one, other = two
    assert not one.ever_had_workers()
    before = one.now()
    label = "wörker \ud83d"
    seen = one.worker_seen(Worker(owner="b", label=label, version="1", queues=("celery", "häufig")))
    one.worker_seen(Worker(owner="a", label=label, version="1"))
    assert before <= seen <= one.now()
    found = other.workers(LONG)
    assert [(worker.owner, worker.label, worker.queues) for worker in found] == [
        ("a", label, ()),
        ("b", label, ("celery", "häufig")),
    ]
    assert found[1].seen == seen and one.beats(LONG) == []
    # A newer release says more of itself.
    raw.hset(one._keys.workers, "c", json.dumps({"label": "c", "version": "9", "queues": [], "pool": "prefork"}))
    raw.zadd(one._keys.workers_seen, {"c": seen, "a": seen - 2 * LONG, "b": seen - 48 * 3_600_000})
    assert [worker.owner for worker in other.workers(LONG)] == ["c"]
    other.worker_seen(Worker(owner="c", label="c", version="9"))
    assert set(raw.hkeys(one._keys.workers)) == {b"a", b"c"}, "two days ago is long ago"
    for owner in ("a", "c", "never seen"):
        other.worker_left(owner)
    assert one.workers(72 * 3_600_000) == [] and one.ever_had_workers()
    assert kept(raw, prefix) == {"meta", "workers-since"}


def test_a_hold_that_was_abandoned_is_started_by_its_message(two: tuple[RedisBackend, RedisBackend]) -> None:
    """Publish unknown, it was sent; the beat gives up its claim, and the worker has the message."""
    one, other = two
    slot = base(one)
    assert claim_run(one, "job", slot, "a", TWICE) is Answer.WON
    assert one.abandon([Hold(job="job", slot=slot, owner="a", attempt=1)]) == [True]
    assert start(other, "job", slot, "t", of=TWICE).answer is START
    assert take(one, "job", slot, "b", 1) is None and not confirm_run(one, "job", slot, "a")
    assert settle(other, "job", slot, "t")
