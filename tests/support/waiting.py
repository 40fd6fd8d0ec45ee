"""Waiting for what happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, patience: float = 20) -> T:
    """What *condition* returns once it is true, and no later than that."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
        time.sleep(0.01)
    return found
