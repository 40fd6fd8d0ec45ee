"""A lock that forks wait for, so that no child begins in the middle of what it guards.

A child has only the thread that forked. What another thread was in the middle of stays so in the child for ever: a lock
of a library or of C code that nobody is there to release, such as SQLite's table of the locks of this process, or that
of the buffer behind ``sys.stderr``. They cannot be found and renewed one by one; to fork at another moment avoids all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from weakref import WeakSet

PATIENCE = 1.0
"""Seconds that a fork waits, once for each hold of the lock: a worker whose store hangs still replaces its children."""


class ForkLock:
    """As :class:`threading.Lock`. A thread that forks while it holds the lock itself, for instance in a receiver of a
    signal, does not wait, and its child holds it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._forking = False
        """Held by a fork."""
        self._holds = 0
        self._hopeless = 0
        """That hold, by its number, outlasted the patience of a fork."""
        _locks.add(self)
        _register()

    def acquire(self, timeout: float = -1) -> bool:
        if not self._lock.acquire(timeout=timeout):
            return False
        self._owner = threading.get_ident()
        self._holds += 1
        return True

    def release(self) -> None:
        # A greenlet lives on in a child of a fork that did not wait for it, and what it held is no more.
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- around a fork, in the thread that forks ----------------------------------------------------------------------

    def before_fork(self) -> None:
        if self._is_mine():
            return
        hold = self._holds
        if self._lock.acquire(timeout=0 if hold == self._hopeless else PATIENCE):
            self._owner, self._forking = threading.get_ident(), True
        else:
            self._hopeless = hold

    def after_fork_in_parent(self) -> None:
        # Two threads may fork at once, and one of them did not wait for the other's end.
        if self._forking and self._is_mine():
            self._forking = False
            self.release()

    def after_fork_in_child(self) -> None:
        if self._forking or not self._is_mine():
            # A new one: whoever held the old one, or waits for it, is not here.
            self._lock = threading.Lock()
            self._owner, self._forking = None, False

    def _is_mine(self) -> bool:
        return self._owner == threading.get_ident()


_locks: WeakSet[ForkLock] = WeakSet()
"""Of this process: what is registered for forks cannot be taken back, and a lock can go."""


def _each(step: Callable[[ForkLock], None]) -> Callable[[], None]:
    def steps() -> None:
        for lock in list(_locks):
            step(lock)

    return steps


@cache
def _register() -> None:
    os.register_at_fork(
        before=_each(ForkLock.before_fork),
        after_in_parent=_each(ForkLock.after_fork_in_parent),
        after_in_child=_each(ForkLock.after_fork_in_child),
    )
