"""Who was first: the two ways to ask a RabbitMQ, ``queue`` and ``stream``.

Belongs here: claims. Does not belong here: history (:mod:`.store`), and how messages travel (:mod:`.link`).

``queue``: a queue for each (job, slot) that takes one message and refuses all others. It is a classic queue, and that
is said: a quorum queue applies its limit too late, and several win. Nobody may look at the message, for a message that
is being looked at does not count and makes room: so the store cannot tell whose a claim is.

``stream``: all beats append to one log, and the first entry about a (job, slot) has it. Everybody reads the same order,
so everybody knows whose a claim is; a beat whose appends went unanswered reads them there.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest
from celery_anarchon.backends.claimonly import claimed, decode, encode
from celery_anarchon.backends.rabbitmq.link import Arguments, Fate, Link, Post, Tail
from celery_anarchon.model import Answer, Millis

NAME_LIMIT = 200
"""Bytes in a name. A queue takes 255, but a stream is also a folder, called by its name and more."""

_SLOT_DIGITS = 16
"""Of a slot, with room for what is far away."""

_FEW = 1_000

_SEGMENT = 1_000_000
"""Bytes after which a stream begins a new file. Old ones are dropped whole."""


class Names:
    """The queues of a namespace."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._room = NAME_LIMIT - len(prefix.encode()) - len(".history") - _SLOT_DIGITS

    @property
    def meta(self) -> str:
        """Stream: its first entry says whose the namespace is."""
        return f"{self.prefix}meta"

    @property
    def claims(self) -> str:
        """Stream: the log of strategy ``stream``."""
        return f"{self.prefix}claims"

    def slot(self, job: str, slot: Millis) -> str:
        """Classic queue: the claim of strategy ``queue``."""
        return f"{self.prefix}{wire.store_name(job, self._room)}.{slot}"

    def history(self, job: str) -> str:
        """Stream: what became of the slots of a job."""
        return f"{self.prefix}{wire.store_name(job, self._room)}.history"

    def fits(self) -> bool:
        return self._room >= 40


class Claims(abc.ABC):
    """One way to be first. Rows that are not asked about here: too old and too early ones."""

    knows_owner: bool

    def __init__(self, names: Names, window: Millis) -> None:
        self._names = names
        self._window = window

    def streams(self) -> dict[str, Arguments]:
        """What claims need beforehand."""
        return {}

    @abc.abstractmethod
    def ask(self, link: Link, requests: Sequence[ClaimRequest], answers: list[Answer], now: Millis) -> None:
        """Fill *answers*, which are UNKNOWN beforehand. An error leaves those that are not known so."""


class QueueClaims(Claims):
    """See the module."""

    knows_owner = False

    def ask(self, link: Link, requests: Sequence[ClaimRequest], answers: list[Answer], now: Millis) -> None:
        arguments = {
            "x-queue-type": "classic",
            "x-max-length": 1,
            "x-overflow": "reject-publish",
            # The queue goes, and its message with it. It counts from the last declaration, so from the last claim.
            "x-expires": self._window,
        }
        posts = [
            Post(self._names.slot(request.job, request.slot), encode(claimed(request, now)), arguments)
            for request in requests
        ]
        try:
            link.publish(posts)
        finally:
            refused = []
            for number, post in enumerate(posts):
                if post.fate is Fate.STORED:
                    answers[number] = Answer.WON
                elif post.fate is Fate.REFUSED:
                    refused.append(number)
        # Also what died with its queue, or its node, is refused, and then nobody may have been first.
        for number, count in zip(refused, link.counts([posts[number].queue for number in refused]), strict=True):
            if count:
                answers[number] = Answer.TAKEN


class StreamClaims(Claims):
    """See the module."""

    knows_owner = True

    def streams(self) -> dict[str, Arguments]:
        arguments = {
            "x-queue-type": "stream",
            "x-max-age": f"{-(-2 * self._window // 1000)}s",
            "x-stream-max-segment-size-bytes": _SEGMENT,
        }
        return {self._names.claims: arguments}

    def ask(self, link: Link, requests: Sequence[ClaimRequest], answers: list[Answer], now: Millis) -> None:
        log = self._log(link)
        log.read()
        places = [(request.job, request.slot) for request in requests]
        # Who was first never changes, so what is known needs no entry.
        open_places: dict[tuple[str, Millis], int] = {}
        for number, place in enumerate(places):
            if place not in log.holders:
                open_places.setdefault(place, number)
        posts = [Post(self._names.claims, encode(claimed(requests[number], now))) for number in open_places.values()]
        try:
            link.publish(posts)
            link.wait_for(lambda: log.knows(open_places))
        finally:
            for number, place in enumerate(places):
                holder = log.holders.get(place)
                if holder is not None:
                    answers[number] = Answer.WON if holder == requests[number].owner else Answer.TAKEN
            log.forget(now - self._window)

    def _log(self, link: Link) -> _Log:
        log: _Log | None = link.state.get("log")
        if log is None:
            # After a crash of the server a stream may stay down until somebody declares it.
            for stream, arguments in self.streams().items():
                link.declare(stream, arguments)
            # From the first entry on, and from no time: one that begins at a time, in a log that is empty at that
            # moment, misses what comes just then.
            log = link.state["log"] = _Log(link.tail(self._names.claims, "first"))
            log.catch_up()
        return log


class _Log:
    """The log of claims as this connection has read it."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self.holders: dict[tuple[str, Millis], str] = {}
        """(job, slot) -> owner of its first entry."""
        self._kept = _FEW
        """How many there were when all were looked at."""

    def catch_up(self) -> None:
        self._tail.follow()
        self.read()

    def read(self) -> None:
        for data in self._tail.take():
            entry = decode(data)
            if entry is not None:
                self.holders.setdefault((entry.job, entry.slot), entry.owner)

    def knows(self, places: Any) -> bool:
        self.read()
        return all(place in self.holders for place in places)

    def forget(self, before: Millis) -> None:
        """Slots that nobody may ask for any more. In the order in which they were claimed, which is nearly theirs."""
        if len(self.holders) >= 2 * self._kept:
            # A beat whose clock is ahead has put one before them that stays.
            self.holders = {place: owner for place, owner in self.holders.items() if place[1] >= before}
            self._kept = max(_FEW, len(self.holders))
        while self.holders:
            place = next(iter(self.holders))
            if place[1] >= before:
                return
            del self.holders[place]
