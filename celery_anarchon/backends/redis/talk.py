"""Commands and replies over one connection of the driver.

Calls go over the driver's *connections*, not its clients, because a client hides what decides here: whether it failed
to connect (nothing was applied) or lost the reply (it may have been), and whether it sent a write twice.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from types import ModuleType
from typing import Any

from celery_anarchon.backends.redis.replies import Unusable, refusal, sign_of, words_of
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown

__all__ = ["Commands", "Driver", "Wait", "ask", "disconnect", "exchange", "replies_to", "send"]

Commands = Sequence[Sequence[Argument]]


class Wait:
    """How many replicas must have a write before it counts, and for how many milliseconds to wait for them."""

    def __init__(self, replicas: int, millis: int) -> None:
        self.replicas = replicas
        self.millis = millis


class Driver:
    """What we use of redis-py or valkey-py, whose names are the same."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        errors = importlib.import_module(f"{module.__name__}.exceptions")
        self.error: type[Exception] = errors.RedisError if hasattr(errors, "RedisError") else errors.ValkeyError
        self.reply_error: type[Exception] = errors.ResponseError
        self.failures: tuple[type[Exception], ...] = (self.error, OSError)


def exchange(link: Any, driver: Driver, commands: Commands) -> list[Any]:
    """Send *commands* at once and read all replies; one that is an error stands in its place."""
    link.send_packed_command([b"".join(map(_packed, commands))])
    return _read(link, driver, len(commands))


def _read(link: Any, driver: Driver, count: int) -> list[Any]:
    replies: list[Any] = []
    for _ in range(count):
        try:
            replies.append(link.read_response(disable_decoding=True))
        except driver.error as error:
            if isinstance(error, driver.reply_error):
                replies.append(error)
            elif sign_of(error):
                # It closes the connection itself after these, and they are said to all commands alike.
                return replies + [error] * (count - len(replies))
            else:
                raise
    return replies


def _packed(command: Sequence[Argument]) -> bytes:
    """As the protocol wants it. The driver's own way costs more than all else of a large batch: it asks of each word
    what it is in five steps, and sends in pieces of some words each."""
    try:
        return _joined(command)
    except TypeError:
        return _joined([word if isinstance(word, bytes) else str(word).encode() for word in command])


def _joined(words: Sequence[Any]) -> bytes:
    """
    :raises TypeError: not all of them are bytes.
    """
    lengths_and_words = chain.from_iterable(zip(map(len, words), words, strict=True))
    return (b"*%d\r\n" + b"$%d\r\n%b\r\n" * len(words)) % (len(words), *lengths_and_words)


def ask(link: Any, driver: Driver, where: str, *command: Argument) -> Any:
    """One command that changes nothing. Raises only ours."""
    try:
        reply = exchange(link, driver, [command])[0]
    except driver.failures as error:
        raise BackendUnavailable(f"{where}: {words_of(error)}") from error
    if isinstance(reply, Exception):
        meant = refusal(where, reply)
        if isinstance(meant, OutcomeUnknown):
            raise Unusable(f"{where}: {words_of(reply)}") from reply
        raise meant from reply
    return reply


def send(link: Any, calls: Sequence[Call], wait: Wait | None) -> None:
    """Ask; :func:`replies_to` has the answers."""
    if len(calls) == 1 and wait is None:
        # What a worker asks before each run.
        link.send_packed_command([_packed(calls[0].by_digest())])
        return
    commands = [*(call.by_digest() for call in calls), *_fence(calls, wait)]
    link.send_packed_command([b"".join(map(_packed, commands))])


def replies_to(link: Any, driver: Driver, calls: Sequence[Call], wait: Wait | None) -> tuple[list[Any], int | None]:
    """The replies to *calls* that were sent, and how many replicas have them."""
    replies = _read(link, driver, len(calls) if wait is None else len(calls) + len(_fence(calls, wait)))
    for reply in replies:
        if isinstance(reply, Exception):
            break
    else:
        return replies[: len(calls)], None if wait is None else replies[-1]
    unknown = [
        number
        for number, reply in enumerate(replies[: len(calls)])
        if isinstance(reply, Exception) and sign_of(reply) == "NOSCRIPT"
    ]
    if unknown:
        # It has been restarted, or never saw them. It ran none of these.
        again = [calls[number] for number in unknown]
        second = exchange(link, driver, [*(call.by_source() for call in again), *_fence(again, wait)])
        for number, reply in zip(unknown, second, strict=False):
            replies[number] = reply
        replies[len(calls) :] = second[len(again) :]
    acknowledged = replies[-1] if wait is not None else None
    return replies[: len(calls)], acknowledged


def _fence(calls: Sequence[Call], wait: Wait | None) -> list[Sequence[Argument]]:
    if wait is None:
        return []
    # WAIT waits for the writes of its own connection. A call that found everything done already wrote nothing, and the
    # write that it found may have come over another connection: this one is behind it in any case.
    tag = calls[0].keys[0].partition(b"}")[0] + b"}fence"
    return [("SET", tag, "1"), ("WAIT", wait.replicas, wait.millis)]


def disconnect(link: Any) -> None:
    with suppress(Exception):
        link.disconnect()
