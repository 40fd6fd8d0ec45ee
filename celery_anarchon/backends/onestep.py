"""The contract, continued: a store in which a claim and the message of its run are one write.

That can be where the queues of the broker are in the store itself. What a broker's client would write into them is
given along with the claim, as commands that only the store understands; whoever made them knows what they mean.

Clauses have the letter O. All of :mod:`.base` and :mod:`.runs` holds as well. Records are the same as those of a claim
that was confirmed a moment later: beats that send in one step and beats that do not share a namespace.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from celery_anarchon.backends.base import ClaimRequest, ClaimResult, Command, Takeover
from celery_anarchon.backends.runs import RunBackend
from celery_anarchon.model import Millis

__all__ = ["OneStepBackend"]


class OneStepBackend(RunBackend):
    """See the module. ``traits.one_step`` says so."""

    @abc.abstractmethod
    def why_not_one_step(self) -> str | None:
        """Why this very store cannot, whatever the broker is; None: it can. Asks nobody."""

    @abc.abstractmethod
    def claim_and_send(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        """``claim``, and the messages of what it makes.

        * O1 An open slot (or a waiting one that may go on) whose request has an `enqueue`: WON and `sent`. The record
          is at once what ``confirm`` would make of it, and the message is in its queues. No other answer writes any
          part of a message. A request without one is a ``claim``.
        * O2 Asked again by the owner that got this (its reply was lost), the answer is ALREADY_SENT, and nothing is
          written again. A slot that this owner holds as CLAIMED is WON, not `sent`: its message may be out.
        * O4 A message of which the store refuses a command leaves nothing of itself behind: the slot is WON and not
          `sent`, as by ``claim``. The others of the batch are not touched by that. A store that takes no writes at all
          raises, and has made neither claim nor message.
        * O5 The time of sending and the queue limit are those of a ``confirm`` in that moment, with the `late` and the
          `delay` of the message.
        """

    def begin_claims(self, requests: Sequence[ClaimRequest]) -> Callable[[], list[ClaimResult]]:
        """O7: ``claim_and_send``, whose answers are what this returns says when it is called, once. A store that can
        lets the caller go on meanwhile, and ask other things; so errors may come here or there."""
        results = self.claim_and_send(requests)
        return lambda: results

    @abc.abstractmethod
    def takeover_and_send(self, wishes: Sequence[Takeover]) -> list[ClaimResult | None]:
        """``takeover``, and the messages of what is taken over. None: no longer lapsed.

        O3: a wish with an `enqueue` whose `attempt` is the one that the record then has: WON and `sent`, in the same
        step. Of two sweepers one sends. With another attempt in it the message would lie: WON, not `sent`. Asked again
        by the owner that just got it, the answer is the same, and nothing is written again.
        """

    @abc.abstractmethod
    def decided(self, places: Sequence[tuple[str, Millis]], owner: str) -> list[ClaimResult | None]:
        """O6: what a claim by *owner* of each (job, slot) would be answered, where that is decided: TAKEN, ALREADY_SENT
        or TOO_OLD, none of which a claim can change. None: it is to be asked for. Writes nothing; it saves the making
        of messages that would not be sent."""

    @abc.abstractmethod
    def write(self, commands: Sequence[Command]) -> bool:
        """Write what a message is, without a claim: for whoever makes messages, to see that both mean one server.
        False: refused, nothing is written."""
