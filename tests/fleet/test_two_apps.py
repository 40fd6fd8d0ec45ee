"""Two services on one Redis, with a job of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer
from support.beats import Beats, until
from support.sites import RedisBroker, RedisStore
from support.stage import all_sent_once, settle, wall

pytestmark = pytest.mark.fleet


def service(server: RedisServer, folder: Path, name: str, namespace: str = "", **settings: Any) -> Beats:
    """A service of that name, its broker on the server, its store in that namespace there."""
    folder.mkdir()
    told = {"anarchon_app_name": name, **settings}
    return Beats(
        folder, {"report": 1}, told, RedisStore(server.url, namespace=namespace or "cron:"), RedisBroker(server.url)
    )


def test_with_defaults_the_second_is_refused_with_words(own_redis: RedisServer, tmp_path: Path) -> None:
    first, second = (service(own_redis, tmp_path / name, name, anarchon_backend=None) for name in ("billing", "shop"))
    with first.fleet, second.fleet:
        beat = first.beat("one")
        assert "store: redis redis://127.0.0.1:" in beat.output
        assert "prefix cron: (setting broker_url)" in beat.output
        start = wall()
        refused = second.fleet.beat("refused")
        assert refused.wait(60) == 2
        (line,) = [line for line in refused.lines() if "CRITICAL" in line]
        assert "namespace 'cron:' belongs to app billing, and this is app shop; set prefix=" in line
        assert "Traceback" not in refused.output
        until(lambda: any(slot > start + 2_000 for _, slot in first.count()), "messages of the first")
        end = wall()
        settle(first, end)
        all_sent_once(first, start, end)
        assert second.count() == {}


def test_with_prefixes_they_never_meet(own_redis: RedisServer, tmp_path: Path) -> None:
    fleets = [service(own_redis, tmp_path / name, name, f"{name}:cron:") for name in ("billing", "shop")]
    with fleets[0].fleet, fleets[1].fleet:
        started = [fleet.start(name) for fleet in fleets for name in ("one", "two")]
        for beat in started:
            beat.wait_for_log("beat: Waking up", 60)
        start = wall()
        until(
            lambda: all(any(slot > start + 3_000 for _, slot in fleet.count()) for fleet in fleets), "messages of both"
        )
        end = wall()
        ids = []
        for fleet in fleets:
            settle(fleet, end)
            assert all_sent_once(fleet, start, end) > 0
            ids.append({event.task_id for event in fleet.events()})
        assert not ids[0] & ids[1], "each has run ids of its own"
