"""Owners that race for slots whatever happens to the store: each asks, as itself, until it has an answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from celery_anarchon.backends.base import ClaimBackend, ClaimRequest
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown
from celery_anarchon.model import Answer, Millis


@dataclass
class Race:
    """What came of it."""

    won: Counter[tuple[str, Millis]] = field(default_factory=Counter)
    """How many owners were told WON."""
    doubted: set[tuple[str, Millis]] = field(default_factory=set)
    """Somebody's answer was lost."""
    away: int = 0
    """How often the store could not be asked."""
    done: int = 0
    """Blocks that all contenders have answers for."""
    finished: threading.Event = field(default_factory=threading.Event)
    """Set by the last contender: nobody asks any more."""
    failures: list[BaseException] = field(default_factory=list)


def contend(
    connect: Callable[[], ClaimBackend], slots: Sequence[tuple[str, Millis]], contenders: int, block: int = 5
) -> tuple[Race, Callable[[], Race]]:
    """Start threads, each with a client and an owner of its own; the race so far, and what waits for its end."""
    race = Race()
    lock = threading.Lock()
    barrier = threading.Barrier(contenders, timeout=300)
    asking = contenders

    def contender(number: int) -> None:
        nonlocal asking
        try:
            client = connect()
            for start in range(0, len(slots), block):
                barrier.wait()
                _ask_until_answered(client, slots[start : start + block], f"owner {number}", race, lock)
                with lock:
                    race.done = max(race.done, start // block)
            client.close()
        except BaseException as error:
            race.failures.append(error)
            barrier.abort()
        finally:
            with lock:
                asking -= 1
                if not asking:
                    race.finished.set()

    crowd = [threading.Thread(target=contender, args=(number,), daemon=True) for number in range(contenders)]
    for thread in crowd:
        thread.start()

    def wait() -> Race:
        for thread in crowd:
            thread.join()
        if race.failures:
            raise next(one for one in race.failures if not isinstance(one, threading.BrokenBarrierError))
        return race

    return race, wait


def _ask_until_answered(
    client: ClaimBackend, slots: Sequence[tuple[str, Millis]], owner: str, race: Race, lock: threading.Lock
) -> None:
    left = list(slots)
    give_up = time.monotonic() + 180
    while left:
        assert time.monotonic() < give_up, f"{owner} has no answer for {left}"
        requests = [ClaimRequest(job=job, slot=slot, owner=owner, beat=owner, lease=30_000) for job, slot in left]
        try:
            answers = [result.answer for result in client.claim(requests)]
        except BackendUnavailable:
            with lock:
                race.away += 1
            time.sleep(0.05)
            continue
        except OutcomeUnknown:
            answers = [Answer.UNKNOWN] * len(left)
        with lock:
            for place, answer in zip(left, answers, strict=True):
                if answer is Answer.WON:
                    race.won[place] += 1
                elif answer is Answer.UNKNOWN:
                    race.doubted.add(place)
                else:
                    assert answer is Answer.TAKEN, answer
        left = [place for place, answer in zip(left, answers, strict=True) if answer is Answer.UNKNOWN]
