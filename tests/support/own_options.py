"""What a backend can be told, by name, as users find it: in its constructor's signature, and in its URL's refusal.

And a register of cases, so that an option without one is found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest

from celery_anarchon.backends.registry import backend_from_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.testing.harness import ask


def of_constructor(kind: type[Any]) -> set[str]:
    return {name for name in inspect.signature(kind.__init__).parameters if name != "self"}


def of_url(url: str) -> set[str]:
    """Asked of the URL itself: it names what it knows, when it is given what it does not."""
    with pytest.raises(ConfigurationError) as caught:
        backend_from_url(f"{url}?there_is_no_such_option=1")
    return set(re.findall(r"'(\w+)'", str(caught.value).partition("known are")[2]))


class Cases:
    """Cases by (store, option)."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Callable[..., None]] = {}

    def add(self, store: str, *options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def note(case: Callable[..., None]) -> Callable[..., None]:
            for option in options:
                assert (store, option) not in self.found, (store, option)
                self.found[store, option] = case
            return case

        return note

    def options(self, store: str) -> set[str]:
        return {option for name, option in self.found if name == store}

    def parameters(self) -> list[Any]:
        """One for each case: one that is about several options is run once."""
        named: dict[Callable[..., None], list[str]] = {}
        for (store, option), case in self.found.items():
            named.setdefault(case, []).append(f"{store}.{option}")
        return [pytest.param(case, id="+".join(names)) for case, names in named.items()]


def query(options: Mapping[str, Any]) -> str:
    return "&".join(f"{name}={value}" for name, value in options.items())


@contextmanager
def opened(backend: Any) -> Iterator[Any]:
    """The same backend, opened, and closed in the end."""
    with closing(backend):
        backend.open("app")
        yield backend


def claim(backend: Any, ahead: int = 0, job: str = "job", owner: str = "a") -> Any:
    """The answer to a claim of a slot so many milliseconds after the store's now; and the slot."""
    slot = backend.now() + ahead
    return backend.claim([ask(job, slot, owner)])[0].answer, slot
