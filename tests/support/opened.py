"""Backends of a test's own, opened, and closed in its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.model import Answer
from celery_anarchon.testing.contenders import at_once
from celery_anarchon.testing.harness import claim

B = TypeVar("B", bound=ClaimBackend)


@contextmanager
def opening(make: Callable[..., B]) -> Iterator[Callable[..., B]]:
    """Something that opens what *make* makes; what it opened is closed afterwards."""
    made: list[B] = []

    def opened(*what: object, app: str = "app", create: bool = True, **options: object) -> B:
        backend = make(*what, **options)
        made.append(backend)
        backend.open(app, create=create)
        return backend

    yield opened
    for backend in made:
        backend.close()


def claimed_by_threads(backend: ClaimBackend) -> None:
    """Four threads that share *backend* claim the same 20 slots: one of them has each."""
    slot = backend.now() - 60_000
    answers: list[Answer] = []

    def claims(owner: str) -> None:
        answers.extend(claim(backend, "job", slot + number, owner) for number in range(20))

    at_once([lambda owner=owner: claims(owner) for owner in "abcd"])
    assert sorted(answers) == [Answer.TAKEN] * 60 + [Answer.WON] * 20
