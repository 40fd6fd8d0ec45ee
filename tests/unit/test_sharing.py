"""How beats share a burst of due jobs."""

from __future__ import annotations

import pytest
from support.engine import job

from celery_anarchon.agenda import Watched
from celery_anarchon.sharing import Share

JOBS = 2_000
BATCH = 50


def due(count: int = JOBS) -> list[Watched]:
    return [Watched(job(f"job-{number}"), 0, 0) for number in range(count)]


def names(share: Share, count: int) -> list[str]:
    return [share.take().job.name for _ in range(min(count, len(share)))]


def test_each_job_comes_once_and_in_one_order_for_all() -> None:
    one, other = names(Share(due(), "a"), JOBS), names(Share(reversed(due()), "b"), JOBS)
    assert sorted(one) == sorted(watched.job.name for watched in due())
    assert one != other
    begin = other.index(one[0])
    assert other[begin:] + other[:begin] == one, "one ring, and each begins at a place of its own"


def test_a_turn_goes_on_from_the_other_end() -> None:
    straight = names(Share(due(10), "a"), 10)
    share = Share(due(10), "a")
    found = names(share, 3)
    share.turn()
    found += names(share, 3)
    share.turn()
    found += names(share, 10)
    assert found == [*straight[:3], *reversed(straight[7:]), *straight[3:7]]
    assert not share


@pytest.mark.parametrize("beats", [2, 3, 4, 8])
def test_beats_meet_at_the_edges_only(beats: int) -> None:
    """All at one speed, a batch each in turn; whoever finds its batch done by others turns."""
    shares = [Share(due(), f"owner {number}") for number in range(beats)]
    done: set[str] = set()
    mixed = 0
    while len(done) < JOBS:
        for share in shares:
            batch = names(share, BATCH)
            taken = len(done.intersection(batch))
            # Batches of which a part was done: there messages are made in vain.
            mixed += 0 < taken < len(batch)
            done.update(batch)
            if taken * 4 >= len(batch):
                share.turn()
    assert mixed <= 3 * beats
