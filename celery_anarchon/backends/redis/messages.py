"""Messages on their way into a script: what many of them share goes there once for all rows of a call.

Counterpart: ``lua/sending.lua``.
"""

from __future__ import annotations

from celery_anarchon.backends.base import Command, Enqueue
from celery_anarchon.backends.redis.scripts import Argument
from celery_anarchon.model import Millis

_NONE: tuple[Argument, ...] = (0,)
_WITH_PAYLOAD = frozenset({"LPUSH", "PUBLISH"})
"""Commands whose last word is a message; all others are the same for each message of their queue."""


class Forms:
    """The forms of one call's messages: attempt, delay, and their commands without the payloads."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Millis, tuple[Command, ...]], int] = {}

    def row(self, message: Enqueue | None) -> tuple[Argument, ...]:
        """What a row says of its message."""
        if message is None:
            return _NONE
        commands: list[Command] = []
        payloads: list[Argument] = []
        for command in message.commands:
            if command[0] in _WITH_PAYLOAD:
                commands.append(command[:-1])
                payloads.append(command[-1])
            else:
                commands.append(command)
        form = (message.attempt, message.delay, tuple(commands))
        return (self._numbers.setdefault(form, len(self._numbers) + 1), message.late, *payloads)

    def all(self) -> list[Argument]:
        """What stands before the rows, once all of them are known."""
        words: list[Argument] = [len(self._numbers)]
        for attempt, delay, commands in self._numbers:
            words += (attempt, delay, len(commands))
            for command in commands:
                words += (len(command), int(command[0] in _WITH_PAYLOAD), *command)
        return words
