"""The Celery app that fleet tests start for real: told by its environment, with a scheduler that can be stopped at a
chosen point.

FLEET_CONFIG is JSON: Celery settings, ``jobs``: name -> seconds, and ``own_client``: the options of a redis-py client,
with retries, that the app hands to the store. FLEET_HOOK is ``point:deed:file``: the first time that beat passes the
point while *file* exists, it renames it to ``file.hit`` and does the deed to itself.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from celery_anarchon import RedisBackend, Scheduler
from celery_anarchon.dispatcher import Dispatcher

config = json.loads(os.environ["FLEET_CONFIG"])
jobs: dict[str, Any] = config.pop("jobs", {})
own_client: dict[str, Any] | None = config.pop("own_client", None)

app = Celery("fleet", set_as_current=False)
app.conf.update(config)
if own_client is not None:
    app.conf.anarchon_backend = RedisBackend(
        redis.Redis(
            port=own_client["port"],
            retry=Retry(ConstantBackoff(0.01), 10),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        ),
        prefix=own_client["prefix"],
    )
app.conf.beat_schedule = {
    name: {"task": "fleet.note", "schedule": value} if not isinstance(value, dict) else {"task": "fleet.note", **value}
    for name, value in jobs.items()
}


def _pause() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


DEEDS: dict[str, Callable[[], Any]] = {
    "pause": _pause,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "go on": lambda: None,
}


class Hooked(Dispatcher):
    """A dispatcher that can be stopped at the points where it matters."""

    def _pass(self, point: str) -> None:
        where, _, rest = os.environ.get("FLEET_HOOK", "").partition(":")
        deed, _, name = rest.partition(":")
        if where != point:
            return
        try:
            Path(name).rename(f"{name}.hit")
        except FileNotFoundError:
            return
        DEEDS[deed]()

    def _begin(self, *batch: Any) -> Any:
        self._pass("before-claim")
        return super()._begin(*batch)

    def _won(self, asked: Any) -> Any:
        won = super()._won(asked)
        if won:
            self._pass("after-claim")
        return won

    def _publish_one(self, item: Any) -> None:
        super()._publish_one(item)
        self._pass("after-publish")

    def _publish(self, won: Iterable[Any]) -> None:
        won = list(won)
        super()._publish(won)
        if won:
            self._pass("after-confirm")


class HookedScheduler(Scheduler):
    dispatcher_class = Hooked
