"""What a Redis store holds does not grow with time."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import redis as client
from servers import RedisServer, redis_server
from support.beats import Beats, until
from support.redis_servers import RESP2
from support.sites import RedisBroker, RedisStore
from support.stage import all_sent_once, settle, wall

pytestmark = [pytest.mark.fleet, pytest.mark.long]

JOBS, RETENTION, LENGTH = 100, 60, 300


def test_a_hundred_jobs_a_second_for_five_minutes(own_redis: RedisServer, tmp_path: Path) -> None:
    """Keys and memory are flat once the first runs are old enough to go."""
    samples: list[tuple[float, int, int]] = []
    jobs = {f"job-{number}": 1 for number in range(JOBS)}
    elsewhere = tmp_path / "broker"
    elsewhere.mkdir()
    with (
        redis_server(elsewhere, private=True) as broker,
        client.Redis.from_url(own_redis.url, **RESP2) as raw,
    ):
        settings = {"anarchon_history_ttl": RETENTION}
        fleet = Beats(tmp_path, jobs, settings, RedisStore(own_redis.url), RedisBroker(broker.url))
        with fleet.fleet:
            beats = fleet.beats("one", "two")
            start = wall()

            def sampled() -> bool:
                passed = (wall() - start) / 1000
                if passed >= 5 * len(samples):
                    samples.append((passed, raw.dbsize(), raw.info("memory")["used_memory"]))
                return passed > LENGTH

            until(sampled, "five minutes", LENGTH + 60)
            end = wall()
            settle(fleet, end)
            sent = all_sent_once(fleet, start, end)
            for beat in beats:
                assert beat.stop(60) == 0
    print(f"\n{sent} slots in {LENGTH} s, each sent once; every 30 s: time, keys, bytes")
    for passed, keys, memory in samples[::6]:
        print(f"{passed:6.0f} s {keys:6d} {memory:10d}")
    # Twice the retention: until then the sweeps begin to drop.
    settled = [(keys, memory) for passed, keys, memory in samples if passed >= 2 * RETENTION]
    half = len(settled) // 2
    assert max(keys for keys, _ in settled) <= 3 * JOBS + 64 + 3, (
        "three keys for each job, one of them while a run lives; the leases, the namespace's own"
    )
    assert mean(memory for _, memory in settled[half:]) < 1.1 * mean(memory for _, memory in settled[:half])
