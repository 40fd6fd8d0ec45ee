"""Something that calls can be sent to, whoever opened it: the words that all sources share.

Belongs here: what a batch's replies mean together. Does not belong here: how a connection comes to be (:mod:`.links`,
:mod:`.handed`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from celery_anarchon.backends.redis.replies import refusal, sign_of, words_of
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.backends.redis.talk import Driver, Wait, ask, replies_to, send
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown

__all__ = ["REDIRECTIONS", "OneServer", "Source", "check_timeout"]

REDIRECTIONS = 5
"""How often a call follows the cluster's word that its keys have moved. Each error reply means: not applied."""


class Source(abc.ABC):
    """Something that calls can be sent to."""

    where: str
    """For logs and errors."""
    sharded = False
    """Calls must keep to one shard each."""

    def __init__(self, driver: Driver, where: str) -> None:
        self._driver = driver
        self.where = where

    @abc.abstractmethod
    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        """The replies to *calls*, in a number of round trips that does not grow with them.

        Raises BackendUnavailable when surely none was applied, else OutcomeUnknown; where nothing is written, only the
        former.
        """

    def begin(self, calls: Sequence[Call], *, writes: bool) -> Callable[[], list[Any]]:
        """As :meth:`perform`, and what this answers has the replies: where it can be, they are under way meanwhile.
        It is to be called, once."""
        replies = self.perform(calls, writes=writes)
        return lambda: replies

    @abc.abstractmethod
    def ask(self, *command: Argument) -> Any:
        """The reply of any one server to a command that changes nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what we opened."""

    def check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse settings that would break a claim. Opens nothing."""

    def reopen(self) -> None:  # noqa: B027 - what was handed over was never closed
        """It is wanted again after a close."""

    def _perform_on(
        self, link: Any, calls: Sequence[Call], writes: bool, wait: Wait | None, sent: bool = False
    ) -> list[Any]:
        """The replies of one server; an error among them stands in its place. *sent*: they were asked already."""
        if not writes:
            wait = None
        try:
            if not sent:
                send(link, calls, wait)
            replies, acknowledged = replies_to(link, self._driver, calls, wait)
        except self._driver.failures as error:
            raise self._lost(error, writes=writes) from error
        if wait is not None and not all(isinstance(reply, Exception) for reply in replies):
            # Of what was refused there is nothing that a replica could have, and who refused it may be one itself.
            self._check_wait(acknowledged, wait)
        return replies

    def _lost(self, error: Exception, *, writes: bool) -> Exception:
        """A call that was sent, even a part of it, may have been applied."""
        words = f"{self.where}: the reply did not come ({words_of(error)})"
        return (OutcomeUnknown if writes else BackendUnavailable)(words)

    def _check_wait(self, acknowledged: Any, wait: Wait) -> None:
        if isinstance(acknowledged, Exception):
            raise OutcomeUnknown(f"{self.where}: WAIT: {words_of(acknowledged)}") from acknowledged
        if int(acknowledged) < wait.replicas:
            raise OutcomeUnknown(
                f"{self.where}: {int(acknowledged)} of {wait.replicas} replicas have it after {wait.millis} ms; "
                "nothing is sent until they do"
            )

    def _settle(self, replies: Sequence[Any], *, writes: bool, applied: bool = False) -> None:
        """Raise for the first reply that is an error. *applied*: other servers have applied their part."""
        for reply in replies:
            if isinstance(reply, Exception):
                break
        else:
            return
        bad = [reply for reply in replies if isinstance(reply, Exception)]
        meant = refusal(self.where, bad[0])
        if not writes and isinstance(meant, OutcomeUnknown):
            meant = BackendUnavailable(str(meant))
        if writes and (applied or len(bad) < len(replies)) and not isinstance(meant, OutcomeUnknown):
            meant = OutcomeUnknown(f"{meant} (a part of the batch was applied)")
        raise meant from bad[0]

    def _sort(self, numbers: Sequence[int], some: Sequence[Any], replies: dict[int, Any], *, writes: bool) -> list[int]:
        """Put what a node of a cluster answered into *replies*; the calls whose keys have moved to another node."""
        moved: list[int] = []
        bad: list[Any] = []
        for number, reply in zip(numbers, some, strict=True):
            if not isinstance(reply, Exception):
                replies[number] = reply
            elif sign_of(reply) == "MOVED":
                moved.append(number)
            else:
                bad.append(reply)
        self._settle(bad, writes=writes, applied=bool(replies))
        return moved

    def _still_moving(self, applied: bool) -> BackendUnavailable | OutcomeUnknown:
        words = f"{self.where}: the cluster is moving keys"
        if applied:
            return OutcomeUnknown(f"{words} (a part of the batch was applied)")
        return BackendUnavailable(f"{words}; this passes")


class OneServer(Source):
    """A source of which all calls go to one server at a time."""

    @abc.abstractmethod
    def _use(self) -> AbstractContextManager[Any]:
        """A connection for one call; an error within closes it. Raises only ours."""

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        with self._use() as link:
            return self._settled(link, calls, writes, wait)

    def begin(self, calls: Sequence[Call], *, writes: bool) -> Callable[[], list[Any]]:
        with ExitStack() as stack:
            link = stack.enter_context(self._use())
            try:
                send(link, calls, None)
            except self._driver.failures as error:
                raise self._lost(error, writes=writes) from error
            left_open = stack.pop_all()

        def replies() -> list[Any]:
            with left_open:
                return self._settled(link, calls, writes, None, sent=True)

        return replies

    def _settled(
        self, link: Any, calls: Sequence[Call], writes: bool, wait: Wait | None, sent: bool = False
    ) -> list[Any]:
        try:
            replies = self._perform_on(link, calls, writes, wait, sent)
            self._settle(replies, writes=writes)
        except (BackendUnavailable, OutcomeUnknown):
            self._doubt()
            raise
        return replies

    def _doubt(self) -> None:
        """A call went wrong: the next one looks for the server anew. What was handed over does so by itself."""

    def ask(self, *command: Argument) -> Any:
        with self._use() as link:
            return ask(link, self._driver, self.where, *command)


def check_timeout(where: str, options: Mapping[str, Any], wait: Wait | None) -> None:
    timeout = options.get("socket_timeout")
    if wait is not None and timeout is not None and timeout <= wait.millis / 1000:
        raise ConfigurationError(
            f"{where}: its socket_timeout ({timeout} s) is not longer than wait_timeout; raise the one or lower the "
            "other"
        )
