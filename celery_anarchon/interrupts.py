"""SIGTERM and SIGINT, held back while something must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HELD = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Within: the signals that came are only listed. Afterwards their handlers run as if they came just then.

    Celery's handler closes the scheduler and raises SystemExit at whatever line it finds: in mid-claim that would leave
    a won slot to its lease. Outside the main thread there is nothing to hold back: signals never arrive there.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    handlers: dict[int, Any] = {}
    for held in HELD:
        handler = signal.getsignal(held)
        # SIG_DFL (None: set by C code) would end the process at once; nobody asked for an orderly stop then.
        if callable(handler):
            handlers[held] = handler
            signal.signal(held, lambda came_in, _frame: came.append(came_in))
    try:
        yield came
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            handlers[came[0]](came[0], None)
