"""What the engine asks of whoever publishes. The Celery side of it is :mod:`celery_anarchon.publish`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from celery_anarchon.job import Job
from celery_anarchon.model import Millis


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One message to publish."""

    job: Job
    slot: Millis
    attempt: int
    run_id: str
    """The task id: the same for every attempt and every repeated publish."""
    late: Millis


class BrokerAway(Exception):
    """The broker could not be reached and nothing was sent: sure."""


class PublishUnclear(Exception):
    """The broker may or may not have the message."""


class Publisher(Protocol):
    """Sends messages.

    Any exception of :meth:`publish` other than the two above is the message's own fault: it was not sent, and it would
    not be the next time either.
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
