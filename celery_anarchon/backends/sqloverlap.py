"""What becomes of the open slots of jobs that may not overlap: a batch of claims, decided one after the other (W2, W3).

Belongs here: the decision, pure. Whoever calls it has read what it is told, and writes what it says, in one transaction
that keeps everybody else from making a run of these jobs alive. What others settle meanwhile changes nothing: they come
after it. Does not belong here: SQL.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from celery_anarchon.backends.base import ClaimRequest, Terms
from celery_anarchon.backends.sqltables import MADE, TERMS
from celery_anarchon.model import Answer, Millis, Overlap, RunState

_CLAIMED, _WAITING = str(RunState.CLAIMED), str(RunState.WAITING)
_SKIPPED, _SUPERSEDED = str(RunState.SKIPPED), str(RunState.SUPERSEDED)

_Key = tuple[str, Millis]


def may_not_overlap(request: ClaimRequest) -> bool:
    return request.terms is not None and request.terms.overlap is not Overlap.ALLOW


def terms_of(request: ClaimRequest) -> tuple[Any, ...]:
    return terms_row(request.terms)


def terms_row(terms: Terms | None) -> tuple[Any, ...]:
    """The values of the columns TERMS."""
    if terms is None:
        return (None,) * len(TERMS)
    return terms.lease, terms.queue_timeout, terms.max_attempts, str(terms.overlap)


class Overlaps:
    """One batch of claims at the time *now*."""

    def __init__(self, now: Millis, latest: Millis, living: dict[str, dict[Millis, str]], known: Container[_Key]):
        """
        :param latest: a later slot is too early.
        :param living: job -> slot -> state of its unsettled runs.
        :param known: the asked slots that have a record.
        """
        self._now = now
        self._latest = latest
        self._living = living
        self._known = known
        self.made: dict[_Key, dict[str, Any]] = {}
        """What the batch makes of slots without a record: all columns."""
        self.handed: dict[_Key, ClaimRequest] = {}
        """The waiting slots of the store that are claimed now."""
        self.superseded: set[_Key] = set()
        """The waiting slots of the store that a newer one replaces."""

    def has_won(self, request: ClaimRequest) -> None:
        """*request* was won already; what is asked later must see it."""
        self._living.setdefault(request.job, {})[request.slot] = _CLAIMED

    def ask(self, request: ClaimRequest) -> Answer | None:
        """The answer to the next request; None: its slot has a record, and is not waiting, or it is too early."""
        key = request.job, request.slot
        living = self._living.setdefault(request.job, {})
        if living.get(request.slot) == _WAITING:
            if any(state != _WAITING for state in living.values()):
                return Answer.WAITING
            self.handed[key] = request
            living[request.slot] = _CLAIMED
            return Answer.WON
        owner = self._owner(key)
        if owner is not None:
            return Answer.WON if owner == request.owner else Answer.TAKEN
        if key in self.made or key in self.superseded:
            return Answer.TAKEN
        if key in self._known or request.slot > self._latest:
            return None
        held_up = self._overlapping(request, living)
        if held_up is not None:
            return held_up
        self._make(request, _CLAIMED, owner=request.owner, lease_until=self._now + request.lease, claimed_at=self._now)
        return Answer.WON

    def _owner(self, key: _Key) -> str | None:
        """Who has won this slot in this batch."""
        if key in self.handed:
            return self.handed[key].owner
        owner: str | None = self.made.get(key, {}).get("owner")
        return owner

    def _overlapping(self, request: ClaimRequest, living: dict[Millis, str]) -> Answer | None:
        if not may_not_overlap(request):
            return None
        assert request.terms is not None
        skips = request.terms.overlap is Overlap.SKIP
        waiting = [] if skips else [slot for slot, state in living.items() if state == _WAITING]
        others = living.keys() - waiting
        published = [slot for slot in others if living[slot] != _CLAIMED]
        if others and not published:
            return Answer.WAIT
        if skips:
            if not others:
                return None
            self._make(request, _SKIPPED, ended_at=self._now, reason="overlap", blocked_by=min(published))
            return Answer.SKIPPED
        if any(slot > request.slot for slot in waiting):
            self._make(request, _SUPERSEDED, ended_at=self._now, reason="newer-slot")
            return Answer.SKIPPED
        for slot in waiting:
            self._supersede((request.job, slot))
        if not others:
            return None
        self._make(request, _WAITING, claimed_at=self._now, blocked_by=min(published))
        return Answer.WAITING

    def _supersede(self, key: _Key) -> None:
        del self._living[key[0]][key[1]]
        if key in self.made:
            self.made[key].update(state=_SUPERSEDED, ended_at=self._now, reason="newer-slot")
        else:
            self.superseded.add(key)

    def _make(self, request: ClaimRequest, state: str, **columns: Any) -> None:
        terms = request.terms if state in (_CLAIMED, _WAITING) else None
        self.made[request.job, request.slot] = {
            **dict.fromkeys(MADE),
            "job": request.job,
            "slot": request.slot,
            "state": state,
            "beat": request.beat,
            "attempt": 1,
            "patience": 0,
            "retries": 0,
            **dict(zip(TERMS, terms_row(terms), strict=True)),
            **columns,
        }
        if terms is not None or state == _CLAIMED:
            self._living[request.job][request.slot] = state
