"""Beats that are killed at any moment, again and again, and the count of what they sent.

A beat here is Celery's own service with this project's scheduler, in a process that a server of forks makes: a real
one, and quick to begin.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import redis
from celery import Celery
from celery.beat import Service
from support.beats import until
from support.redis_servers import RESP2, Private

from celery_anarchon.model import Millis
from celery_anarchon.oracle import expected_interval
from celery_anarchon.testing.fleet import events_of, redis_messages
from celery_anarchon.verdict import Verdict, judge

JOBS = 30
EVERY: Millis = 500
PREFIX = "storm:"
QUEUE = "storm"


def beat(url: str, one_step: bool, no_templates: bool) -> None:
    """Be one, for ever."""
    logging.disable(logging.CRITICAL)
    app = Celery("storm", broker=url, set_as_current=False)
    # With a countdown each message is made anew, which takes its time.
    options: dict[str, Any] = {"queue": QUEUE, "anarchon": {"coalesce": "all"}}
    if no_templates:
        options["countdown"] = 1
    app.conf.update(
        anarchon_backend=f"{url}?prefix={PREFIX}",
        anarchon_one_step=one_step,
        anarchon_lease=1,
        anarchon_heartbeat=0.3,
        timezone="UTC",
        beat_schedule={
            f"job-{number}": {"task": "note", "schedule": EVERY / 1000, "options": options} for number in range(JOBS)
        },
    )
    Service(app, max_interval=1, scheduler_cls="celery_anarchon:Scheduler").start()


@dataclass
class Storm:
    server: Private
    one_step: bool
    seed: int = 1
    kills: int = 0
    start: Millis = 0
    _living: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["celery.beat", "celery_anarchon.scheduler", "kombu.transport.redis"])
        self._chance = random.Random(self.seed)
        self.raw = redis.Redis(port=self.server.port, **RESP2)

    def close(self) -> None:
        self.end()
        self.raw.close()

    # --- beats --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a beat, and wait until it has sent something."""
        before = self._newest()
        # By turns: with templates many are sent in no time, without them the making takes the longest.
        arguments = (self.server.url, self.one_step, self.kills % 2 == 0)
        self._living = self._context.Process(target=beat, args=arguments, daemon=True)
        self._living.start()
        until(lambda: self._newest() != before, "a message")

    def end(self) -> None:
        if self._living is not None:
            self._living.kill()
            self._living.join()
            self._living = None

    def first(self) -> None:
        """Let a beat be seen by the store; what is owed counts from when every job was sent."""
        self.begin()
        until(lambda: len({event.job for event in self.events()}) == JOBS, "every job")
        self.start = max(event.slot for event in self.events())
        self.end()

    def kill_one(self) -> None:
        """A beat begins, and is killed in the middle of what it sends, or about then."""
        self.begin()
        for _ in range(self._chance.randint(0, 1)):
            self._until_due()
        time.sleep(self._chance.uniform(0, 0.06))  # the very thing: any moment of a dispatch
        os.kill(self._living.pid, signal.SIGKILL)
        self._living.join()
        self._living = None
        self.kills += 1

    def _until_due(self) -> None:
        left = EVERY - time.time_ns() // 1_000_000 % EVERY
        time.sleep(left / 1000)

    # --- what came of it ----------------------------------------------------------------------------------------------

    def _newest(self) -> bytes | None:
        found: bytes | None = self.raw.lindex(QUEUE, 0)
        return found

    def events(self) -> list[Any]:
        return events_of(redis_messages(self.raw, QUEUE))

    def verdict(self) -> Verdict:
        """After a last beat has sent what is owed and taken over what was left."""
        end = time.time_ns() // 1_000_000
        self.begin()
        until(lambda: len({one.job for one in self.events() if one.slot > end}) == JOBS, "a slot of every job")
        until(lambda: not self._claimed(end), "no claim left")
        self.end()
        owed = [
            (f"job-{number}", slot) for number in range(JOBS) for slot in expected_interval(EVERY, 0, self.start, end)
        ]
        return judge(owed, self.events(), window=(self.start, end))

    def _claimed(self, end: Millis) -> list[bytes]:
        found = [member for key in self.raw.keys(f"{PREFIX}{{*}}leases") for member in self.raw.zrange(key, 0, -1)]
        return [member for member in found if int(member.split(b":")[0]) <= end]
