"""Something that calls can be sent to, whoever opened it: the words that all sources share.

Belongs here: what a batch's replies mean together. Does not belong here: how a connection comes to be (:mod:`.links`,
:mod:`.handed`).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from celery_anarchon.backends.redis.replies import refusal, sign_of, words_of
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.backends.redis.talk import Driver, Wait, run
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown

__all__ = ["REDIRECTIONS", "Source", "check_timeout"]

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

    def _perform_on(self, link: Any, calls: Sequence[Call], *, writes: bool, wait: Wait | None) -> list[Any]:
        """The replies of one server; an error among them stands in its place."""
        try:
            replies, acknowledged = run(link, self._driver, calls, wait if writes else None)
        except self._driver.failures as error:
            words = f"{self.where}: the reply did not come ({words_of(error)})"
            raise (OutcomeUnknown if writes else BackendUnavailable)(words) from error
        if wait is not None and writes and not all(isinstance(reply, Exception) for reply in replies):
            # Of what was refused there is nothing that a replica could have, and who refused it may be one itself.
            self._check_wait(acknowledged, wait)
        return replies

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
        bad = [reply for reply in replies if isinstance(reply, Exception)]
        if not bad:
            return
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


def check_timeout(where: str, options: Mapping[str, Any], wait: Wait | None) -> None:
    timeout = options.get("socket_timeout")
    if wait is not None and timeout is not None and timeout <= wait.millis / 1000:
        raise ConfigurationError(
            f"{where}: its socket_timeout ({timeout} s) is not longer than wait_timeout; raise the one or lower the "
            "other"
        )
