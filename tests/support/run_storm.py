"""Beats and workers that say anything to one store at once, for stores whose calls run side by side."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

from celery_anarchon.backends.base import Confirmation, Takeover
from celery_anarchon.backends.runs import LapsedEnd, RunBackend, RunHold, Settlement, Start, Worker
from celery_anarchon.model import GateAnswer, Millis, RunState
from celery_anarchon.testing.harness import LONG
from celery_anarchon.testing.runforms import SKIP, ask_run, delivery, held


def storm(harness: Any, threads: int, rounds: int) -> None:
    """Beats and workers that say anything, in batches of any order, each over a client of its own. Nobody is told that
    the store is unavailable (a deadlock would be), no body is licensed twice, and no job that may not overlap has two
    unsettled runs at any moment."""
    clients = [harness.connect_run() for _ in range(threads)]
    watcher: RunBackend = harness.connect_run()
    base = watcher.now() - 3_600_000
    jobs = [f"job {number}" for number in range(4)]
    licensed: dict[tuple[str, Millis, int, int], set[str]] = {}
    guard = threading.Lock()
    failures: list[BaseException] = []
    over = threading.Event()
    start_line = threading.Barrier(threads)

    def act(number: int) -> None:
        client, dice, me = clients[number], random.Random(number), f"owner {number}"
        grips: list[RunHold] = []
        start_line.wait(60)
        for turn in range(rounds):
            slots = [(job, base + dice.randrange(turn + 1)) for job in dice.sample(jobs, len(jobs))]
            client.claim([ask_run(job, slot, me, SKIP) for job, slot in slots])
            client.confirm([Confirmation(job=job, slot=slot, owner=me, attempt=1, late=0) for job, slot in slots])
            asked: list[Start] = [
                delivery(job, slot, f"{me} {turn} {copy}", of=replace(SKIP, max_attempts=2, lease=20))
                for job, slot in slots
                for copy in range(2)
            ]
            dice.shuffle(asked)
            for one, result in zip(asked, client.start(asked), strict=True):
                if result.answer in (GateAnswer.START, GateAnswer.UNKNOWN):
                    grips.append(held(one.job, one.slot, one.token, result.attempt))
                    with guard:
                        licensed.setdefault((one.job, one.slot, result.attempt, one.retries), set()).add(one.token)
            dice.shuffle(grips)
            client.heartbeat(grips)
            found = client.lapsed(8)
            client.takeover(
                [
                    Takeover(
                        job=run.job,
                        slot=run.slot,
                        from_attempt=run.attempt,
                        owner=me,
                        beat=me,
                        lease=dice.choice([1, LONG]),
                    )
                    for run in found
                ]
            )
            client.end_lapsed(
                [
                    LapsedEnd(
                        job=run.job,
                        slot=run.slot,
                        attempt=run.attempt,
                        was=run.state,
                        state=RunState.LOST,
                        reason="worker-lost",
                    )
                    for run in found
                ]
            )
            client.settle([Settlement(**vars(grip), state=RunState.SUCCEEDED) for grip in grips[::2]])
            client.release(grips[1::2])
            if dice.random() < 0.2:
                client.release_job(dice.choice(jobs))
            client.worker_seen(Worker(owner=me, label=me, version="1"))

    def run(number: int) -> None:
        try:
            act(number)
        except BaseException as error:
            failures.append(error)

    def watch() -> None:
        while not over.is_set():
            for job in jobs:
                unsettled = watcher.living(job)
                if len(unsettled) > 1:
                    failures.append(AssertionError(f"two of {job}: {unsettled}"))
                    return

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    onlooker = threading.Thread(target=watch)
    for thread in [*workers, onlooker]:
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    onlooker.join()
    assert failures == []
    assert licensed and {key: tokens for key, tokens in licensed.items() if len(tokens) > 1} == {}
