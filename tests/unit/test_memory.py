"""What is the memory backend's own; the contract is in ``tests/conformance``."""

from __future__ import annotations

import pytest

from celery_anarchon.backends.base import ClaimRequest, GivenUp, Outcome
from celery_anarchon.backends.memory import MemoryBackend, MemoryStore
from celery_anarchon.model import Answer, Millis, RunState
from celery_anarchon.testing import ManualClock


def won(backend: MemoryBackend, slot: Millis = 0, owner: str = "a") -> bool:
    return (
        backend.claim([ClaimRequest(job="job", slot=slot, owner=owner, beat="", lease=1_000)])[0].answer is Answer.WON
    )


def test_backends_share_a_store_only_if_they_are_handed_it() -> None:
    store = MemoryStore(ManualClock())
    assert won(MemoryBackend(store=store))
    assert not won(MemoryBackend(store=store), owner="b")
    assert won(MemoryBackend(), owner="b")


def test_namespaces_of_a_store_are_apart() -> None:
    store = MemoryStore(ManualClock())
    one, two = MemoryBackend("one", store=store), MemoryBackend("two", store=store)
    one.open("app")
    two.open("another app")
    assert won(one) and won(two, owner="b")


def test_urls_share_a_store_by_its_name() -> None:
    name = "test_urls_share_a_store_by_its_name"
    one, two = MemoryBackend.from_url(f"memory://{name}"), MemoryBackend.from_url(f"memory://{name}")
    assert won(one) and not won(two, owner="b")
    assert won(MemoryBackend.from_url(f"memory://{name}-2"), owner="b")
    apart = MemoryBackend.from_url(f"memory://{name}?namespace=apart")
    assert apart.namespace == "apart" and won(apart, owner="b")


def test_the_clock_is_the_store_s() -> None:
    clock = ManualClock(wall=5_000)
    backend = MemoryBackend(clock=clock, early_tolerance=100)
    assert backend.now() == 5_000
    assert won(backend, 5_100) and not won(backend, 5_101)
    clock.advance(1)
    assert won(backend, 5_101)
    with pytest.raises(ValueError, match="MemoryStore"):
        MemoryBackend(store=MemoryStore(), clock=clock)


def test_a_state_that_is_none_of_the_endings_is_refused() -> None:
    """A caller that gives up a claim as `dispatched` says that a message was sent."""
    backend = MemoryBackend()
    ending = GivenUp(job="job", slot=0, owner="a", attempt=1, state=RunState.DISPATCHED)
    with pytest.raises(ValueError, match="dispatched"):
        backend.give_up([ending])
    with pytest.raises(ValueError, match="claimed"):
        backend.record([Outcome(job="job", slot=0, state=RunState.CLAIMED)])


def test_a_reader_does_not_name_the_app() -> None:
    store = MemoryStore(ManualClock())
    MemoryBackend(store=store).open("reader", create=False)
    MemoryBackend(store=store).open("app")


def test_asking_for_unknown_jobs_keeps_nothing() -> None:
    store = MemoryStore(ManualClock())
    backend = MemoryBackend(store=store)
    for number in range(10):
        assert backend.history(f"job {number}", 5) == []
        assert backend.last_run(f"job {number}") is None
    assert not store.spaces[backend.namespace].runs
