"""Redelivered messages of runs that another delivery has: held in this worker until the store has decided.

A run of a task that acknowledges late, without ``max_attempts``, is left to the broker's redelivery: nobody else goes
on with it. That redelivery may come before the store knows that the run is free (its worker was killed, and the lease
is not over yet), and to drop it then is to lose the run.

Belongs here: which messages these are, when each asks again, and what Celery's own lists of requests say of those that
do not run. Does not belong here: the question and its answers (:mod:`celery_anarchon.gate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery.worker import state

from celery_anarchon.model import Terms

FIRST_WAIT = 0.5
"""Seconds until the first look. A body that puts its own message back tells the store so a moment after the broker."""

LOOKS = 100


def is_waited_for(request: Any, terms: Terms) -> bool:
    """The store waits for just this kind of message, should the delivery that has the run come to nothing."""
    if terms.max_attempts is not None or not request.task.acks_late:
        return False
    return bool((request.delivery_info or {}).get("redelivered"))


@dataclass(eq=False)
class _Copy:
    request: Any
    wait: float
    room_back: Callable[[], Any]


class Copies:
    """The redelivered messages that this worker holds, one for each task.

    :param longest: seconds between two questions of one of them, at most; the first ones are closer together.
    :param room: makes room for one more message beside those that the broker may send at once, for those that are held
        would keep others away; returns what takes the room back.
    """

    def __init__(self, longest: float, room: Callable[[], Callable[[], Any]]) -> None:
        self._longest = longest
        self._room = room
        self._copies: dict[str, _Copy] = {}

    def hold(self, request: Any) -> float | None:
        """Seconds until it asks again; None: another one of its task is held already."""
        copy = self._copies.get(request.id)
        if copy is None or copy.request is not request:
            if copy is not None:
                if not is_of_lost_connection(copy.request):
                    return None
                copy.room_back()
            copy = self._copies[request.id] = _Copy(request, min(FIRST_WAIT, self._longest), self._room())
            return copy.wait
        copy.wait = min(copy.wait * 2, self._longest)
        return copy.wait

    def leave(self, request: Any) -> None:
        """It is held no more, whatever becomes of it."""
        copy = self._copies.get(request.id)
        if copy is not None and copy.request is request:
            del self._copies[request.id]
            copy.room_back()
            # What ran on this worker has taken the entry of its id along.
            state.requests[request.id] = request


def is_of_lost_connection(request: Any) -> bool:
    """Celery clears what is reserved with its connection, for nothing of it can be acknowledged any more."""
    return request not in state.reserved_requests


def forget(request: Any) -> None:
    """Take it out of Celery's lists."""
    state.reserved_requests.discard(request)
    state.active_requests.discard(request)
    if not show_running(request) and state.requests.get(request.id) is request:
        state.requests.pop(request.id, None)


def show_running(request: Any) -> bool:
    """Revoking and querying the task must find the one that runs, not this one. False: no other is on this worker."""
    for requests in (state.active_requests, state.reserved_requests):
        for other in _snapshot(requests):
            if other.id == request.id and other is not request:
                state.requests[request.id] = other
                return True
    return False


def _snapshot(requests: Iterable[Any]) -> list[Any]:
    """The threads of a pool change these sets at any time. An error would end the worker, and what is missed without
    one is that a command finds the run."""
    for _ in range(LOOKS):
        try:
            return list(requests)
        except RuntimeError:
            continue
    return []
