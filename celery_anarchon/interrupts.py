"""The signals that stop a process, held back while something must not be cut in two, or held up."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

STOPS_BEAT = (signal.SIGTERM, signal.SIGINT)
STOPS_WORKER = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
HEARD_WITHIN = 0.5
"""Seconds after which they are heard while the main thread waits for a lock."""

# The public functions make enums of what these return, at ten times their cost: a worker's gate would notice.
_calls: Any = importlib.import_module("_signal") if "_signal" in sys.builtin_module_names else signal


class held_back:
    """Within: the signals that came are only listed. Afterwards they are raised again, each kind once.

    Celery's handler in a beat closes the scheduler and raises SystemExit at whatever line it finds: in mid-claim that
    would leave a won slot to its lease. That of a worker sleeps there, for as long as a soft shutdown lasts. Outside
    the main thread there is nothing to hold back: signals never arrive there.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = STOPS_BEAT) -> None:
        self._numbers = numbers

    def __enter__(self) -> list[int]:
        self._came: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            came = self._came

            def note(number: int, _frame: Any) -> None:
                came.append(number)

            self._note = note
            try:
                for number in self._numbers:
                    handler = _calls.getsignal(number)
                    # SIG_DFL (None: set by C code) would end the process at once; nobody asked for an orderly stop.
                    if callable(handler):
                        self._handlers[number] = handler
                        _calls.signal(number, note)
            except BaseException:
                # One that was still to be replaced has run, and raised.
                self.__exit__()
                raise
        return self._came

    def __exit__(self, *_: object) -> None:
        note = self._note if self._handlers else None
        for number, handler in self._handlers.items():
            now = _calls.signal(number, handler)
            if now is not note:
                # A handler that ran meanwhile has set another: Celery's do, for the next step of a shutdown.
                _calls.signal(number, now)
        for came_in in dict.fromkeys(self._came):
            signal.raise_signal(came_in)


class _Ear:
    """Stands before the handler of a signal for good."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        if _stops.holding:
            _stops.came.append(number)
        else:
            self._handler(number, frame)


class _Stops:
    """As :class:`held_back`, for what comes with each task: a worker's main process has no time to spare. So handlers
    are not exchanged each time, but stay behind an ear. Another handler that was set meanwhile is found the next time.
    """

    def __init__(self) -> None:
        self.holding = 0
        """How many hold them back. Greenlets may be several."""
        self.came: list[int] = []
        self._ears: list[tuple[signal.Signals, Any]] = [(number, None) for number in STOPS_WORKER]

    def hold(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, ear in self._ears:
                if _calls.getsignal(number) is not ear:
                    self._listen(number)
            self.holding += 1

    def let_go(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # None in a child whose parent held: it leaves what it never entered.
            if self.holding:
                self.holding -= 1
            if self.came and not self.holding:
                came, self.came = dict.fromkeys(self.came), []
                for number in came:
                    signal.raise_signal(number)

    def _listen(self, number: signal.Signals) -> None:
        handler = _calls.getsignal(number)
        # As above. And an ear that somebody had put aside hears as well as a new one.
        if not callable(handler):
            return
        ear = handler if isinstance(handler, _Ear) else _Ear(handler)
        self._ears = [(one, ear if one == number else known) for one, known in self._ears]
        if ear is not handler:
            found = _calls.signal(number, ear)
            if found is not handler:
                # It ran just now, and has set another: Celery's do, for the next step of a shutdown.
                _calls.signal(number, found)

    def forget(self) -> None:
        """In a child that was forked in the middle of a question, which goes on in its parent."""
        self.holding, self.came = 0, []


_stops = _Stops()
"""Of this process, as the handlers are."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stops.forget)


class _Lock(Protocol):
    def acquire(self, *, timeout: float) -> bool: ...

    def release(self) -> None: ...


class Undisturbed:
    """With *lock*, and no handler of a worker's stop runs before it is released. While it is waited for they do run:
    whoever has it may have it for long."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        while True:
            _stops.hold()
            try:
                if self._lock.acquire(timeout=HEARD_WITHIN):
                    return
            except BaseException:
                _stops.let_go()
                raise
            _stops.let_go()

    def __exit__(self, *_: object) -> None:
        try:
            self._lock.release()
        finally:
            _stops.let_go()


class Bell:
    """What a thread waits for. Not a :class:`threading.Event`: its `set` waits for itself where a signal's handler that
    calls it has found its thread just there."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def set(self) -> None:
        # Rings already, or another thread's call came between the two lines.
        if self._silence.locked():
            with suppress(RuntimeError):
                self._silence.release()

    def is_set(self) -> bool:
        return not self._silence.locked()

    def wait(self, timeout: float) -> bool:
        """Whether it rang, and it is silent again."""
        return self._silence.acquire(timeout=timeout)

    def clear(self) -> None:
        self._silence.acquire(blocking=False)
