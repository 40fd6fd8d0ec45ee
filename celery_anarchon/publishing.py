"""What the engine asks of whoever publishes. The Celery side of it is :mod:`celery_anarchon.publish`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from celery_anarchon.backends.base import Command
from celery_anarchon.backends.onestep import OneStepBackend
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, Terms


class Dispatch(NamedTuple):
    """One message to publish."""

    job: Job
    slot: Millis
    attempt: int
    run_id: str
    """The task id: the same for every attempt and every repeated publish."""
    late: Millis
    terms: Terms | None = None
    """What its record is followed by: the message must say what the record does (see :class:`~.model.Terms`)."""


class BrokerAway(Exception):
    """The broker could not be reached and nothing was sent: sure."""


class BrokerForbids(BrokerAway):
    """It was reached, and lets this beat not in: a wrong password, a virtual host that is not there."""


class PublishUnclear(Exception):
    """The broker may or may not have the message."""


class NotOneStep(Exception):
    """The broker's queues are not in the store, or are not written as this release knows them; the text says why."""


class NothingToSend(Exception):
    """The broker's client would have written nothing for this message: no queue is bound to where it goes."""


class Publisher(Protocol):
    """Sends messages.

    Any exception of :meth:`publish` but :class:`BrokerAway` and :class:`PublishUnclear` is the message's own fault: it
    was not sent, and it would not be the next time either.
    """

    def check(self) -> None:
        """Make sure that the broker can be reached, cheaply where it was reached before.

        :raises BrokerAway: it cannot.
        """

    def publish(self, dispatch: Dispatch) -> None:
        """Send one message, without retries of its own.

        :raises BrokerAway: surely not sent.
        :raises PublishUnclear: perhaps sent.
        """

    def close(self) -> None:
        """Give the connection back. Repeatable, quick, takes no lock."""


class Builder(Protocol):
    """Makes messages as writes of the store, where the broker keeps its queues there."""

    @property
    def is_new(self) -> bool:
        """The connection to the broker is another one than :meth:`verify` last saw."""

    def why_not(self) -> str | None:
        """Why this broker never is the store, as far as that is known without asking it; None: it may be."""

    def verify(self, store: OneStepBackend) -> None:
        """Make sure that what is written into *store* is what the broker would have in its queues.

        :raises NotOneStep: it is not.
        :raises BrokerAway: the broker does not answer. The store's own errors pass.
        """

    def takes(self, job: Job) -> bool:
        """Whether messages of *job* can be made so; others are published."""

    def quick(self, job: Job, terms: Terms | None) -> Callable[[Dispatch], tuple[Command, ...]] | None:
        """What makes the next message of *job* at next to no cost, if it is of its first attempt and has these terms;
        None: there is nothing."""

    def build(self, dispatch: Dispatch) -> tuple[Command, ...]:
        """One message, not sent. Any exception but those below is the message's own fault.

        :raises BrokerAway: the broker had to be asked, and did not answer; so :class:`PublishUnclear`.
        :raises NotOneStep: this one cannot be made so, whatever :meth:`takes` said.
        :raises NothingToSend: it would go nowhere.
        """
