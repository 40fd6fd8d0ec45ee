"""How beats share a burst of due jobs."""

from __future__ import annotations

import pytest
from support.engine import World, job

from celery_anarchon.agenda import Watched
from celery_anarchon.sharing import Share, Side

JOBS = 2_000
BATCH = 50


def due(count: int = JOBS) -> list[Watched]:
    return [Watched(job(f"job-{number}"), 0, 0) for number in range(count)]


def names(share: Share, count: int) -> list[str]:
    return [share.take().job.name for _ in range(min(count, len(share)))]


def test_each_job_comes_once_and_in_one_order_for_all() -> None:
    one, other = names(Share(due(), 0.25), JOBS), names(Share(reversed(due()), 0.75), JOBS)
    assert sorted(one) == sorted(watched.job.name for watched in due())
    assert one != other
    begin = other.index(one[0])
    assert other[begin:] + other[:begin] == one, "one ring, and each begins at a place of its own"


def test_what_others_have_taken_is_gone_round() -> None:
    straight = names(Share(due(10), 0.25), 10)
    share = Share(due(10), 0.25)
    found = names(share, 3)
    share.was_taken(Side.FORWARD)
    found += names(share, 3)
    share.was_taken(Side.FORWARD)
    assert not share.enclosed, "two batches may be under way, and both are of that side"
    share.was_open(Side.BACKWARD)
    share.was_taken(Side.BACKWARD)
    assert share.enclosed
    assert [watched.job.name for watched in share] == straight[3:7]
    share.was_open(Side.FORWARD)
    assert not share.enclosed
    found += names(share, 10)
    assert found == [*straight[:3], *reversed(straight[7:]), *straight[3:7]]
    assert not share


def test_where_the_store_knows_of_no_beats_each_begins_somewhere_else() -> None:
    world = World(claim_only={})
    places = {world.beat(name)._roster.place for name in "abcdefgh"}
    assert len(places) == 8 and all(0 <= place < 1 for place in places)


@pytest.mark.parametrize("beats", [1, 2, 3, 8])
def test_the_parts_of_all_beats_are_the_whole(beats: int) -> None:
    found: list[str] = []
    for number in range(beats):
        share = Share(due(), number / beats, 1 / beats)
        while share and not share.abroad:
            found += names(share, 1)
        assert (not share) is (beats == 1)
    assert sorted(found) == sorted(watched.job.name for watched in due())


def test_backward_all_is_of_others() -> None:
    share = Share(due(), 0.5, 0.5)
    assert not share.abroad
    share.was_taken(Side.FORWARD)
    assert share.abroad
    share.was_taken(Side.BACKWARD)
    assert not share.abroad, "its own part was not finished"


@pytest.mark.parametrize("beats", [2, 3, 4, 8])
def test_beats_meet_at_the_edges_only(beats: int) -> None:
    """All at one speed, a batch each in turn, until each has met others on both sides."""
    shares = [Share(due(), number / beats) for number in range(beats)]
    done: set[str] = set()
    mixed = 0
    while working := [share for share in shares if share and not share.enclosed]:
        for share in working:
            side, batch = share.side, names(share, BATCH)
            taken = len(done.intersection(batch))
            # Batches of which a part was done: there messages are made in vain.
            mixed += 0 < taken < len(batch)
            done.update(batch)
            share.was_taken(side) if taken * 4 >= len(batch) else share.was_open(side)
    assert mixed <= 2 * beats
    assert len(done) == JOBS
    assert sum(JOBS - len(share) for share in shares) <= JOBS + 4 * beats * BATCH, "little was looked at twice"
