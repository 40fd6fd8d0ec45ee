"""What stores share that append, and only know who was first: how long they remember it, which slots they are asked
about, and runs out of lists of entries.

Belongs here: the form of an entry, which of several about a slot is shown, and the contract as far as it follows from
that. Does not belong here: any store's words.

Such a store appends and never changes, so a run is what its entries say together. Each beat may write about a slot, and
an entry whose acknowledgement was lost is written again: the rules of :func:`runs` give every reader the same answer.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import (
    GIVEN_UP,
    NEVER_A_RUN,
    ClaimBackend,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Outcome,
    check_charter,
    check_given_up,
    check_never_a_run,
)
from celery_anarchon.clock import SystemClock
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Answer, Millis, Run, RunState

_RANKS = {RunState.DISPATCHED: 0, **dict.fromkeys(GIVEN_UP, 2), RunState.CLAIMED: 3, **dict.fromkeys(NEVER_A_RUN, 4)}
"""Of what is said about a slot the lowest is shown: a message first, and a claim before what is no run."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that was said about (job, slot)."""

    job: str
    slot: Millis
    state: RunState
    at: Millis
    """The writer's clock."""
    owner: str = ""
    beat: str = ""
    attempt: int = 1
    late: Millis | None = None
    reason: str | None = None
    claimed_at: Millis | None = None
    """Of an end: when the claim was won, as far as the writer knows."""
    held: bool = False
    """The end of a claim. MISFIRE and SUPERSEDED are also ends of slots that nobody claimed."""

    @property
    def rank(self) -> int:
        return _RANKS[RunState.NOT_SENT] if self.held and self.state in GIVEN_UP else _RANKS[self.state]


def claimed(request: ClaimRequest, at: Millis) -> Entry:
    return Entry(
        job=request.job, slot=request.slot, state=RunState.CLAIMED, at=at, owner=request.owner, beat=request.beat
    )


def ended(ending: Confirmation | GivenUp, at: Millis, claim: Entry | None) -> Entry:
    """*claim*: what the writer remembers of it."""
    entry = Entry(
        job=ending.job,
        slot=ending.slot,
        state=RunState.DISPATCHED,
        at=at,
        owner=ending.owner,
        attempt=ending.attempt,
        beat=claim.beat if claim else "",
        claimed_at=claim.at if claim else None,
        held=True,
    )
    if isinstance(ending, Confirmation):
        return replace(entry, late=ending.late)
    return replace(entry, state=ending.state, reason=ending.reason)


def recorded(outcome: Outcome, at: Millis) -> Entry:
    return Entry(
        job=outcome.job, slot=outcome.slot, state=outcome.state, at=at, beat=outcome.beat, reason=outcome.reason
    )


def encode(entry: Entry, **beside: Any) -> bytes:
    """JSON, without what is not set. *beside*: what the store says along with it; :func:`decode` passes over it."""
    shown = {name: value for name, value in vars(entry).items() if value not in (None, "", False)} | beside
    return json.dumps({"v": wire.LAYOUT_VERSION, **shown, "state": str(entry.state)}, separators=(",", ":")).encode()


def decode(data: bytes) -> Entry | None:
    """None: of a newer release, or not ours."""
    try:
        fields = json.loads(data)
        known = {name: value for name, value in fields.items() if name in Entry.__dataclass_fields__}
        return Entry(**{**known, "state": RunState(fields["state"])})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def runs(namespace: str, entries: Iterable[Entry]) -> list[Run]:
    """What *entries*, oldest first, say together: newest slot first. Of equals the first one counts."""
    by_slot: dict[Millis, list[Entry]] = {}
    for entry in entries:
        by_slot.setdefault(entry.slot, []).append(entry)
    return [_run(namespace, by_slot[slot]) for slot in sorted(by_slot, reverse=True)]


def _run(namespace: str, said: list[Entry]) -> Run:
    shown = min(said, key=lambda entry: entry.rank)
    claim = next((entry for entry in said if entry.state is RunState.CLAIMED), None)
    of_claim = shown.rank < _RANKS[RunState.SKIPPED]
    claimed_at = (claim.at if claim else shown.claimed_at) if of_claim else None
    sent = shown.state is RunState.DISPATCHED
    ended_at = None if sent or shown.state is RunState.CLAIMED else shown.at
    return Run(
        job=shown.job,
        slot=wire.moment(shown.slot),
        run_id=wire.run_id(namespace, shown.job, shown.slot),
        state=shown.state,
        reason=shown.reason,
        attempt=shown.attempt,
        claimed_at=None if claimed_at is None else wire.moment(claimed_at),
        sent_at=wire.moment(shown.at) if sent else None,
        ended_at=None if ended_at is None else wire.moment(ended_at),
        late=None if shown.late is None else shown.late / 1000,
        beat=shown.beat or (claim.beat if claim and of_claim else "") or None,
    )


class Memory:
    """What this process won a while ago, for its own later entries. Never an answer to a claim."""

    def __init__(self, span: Millis) -> None:
        self._span = span
        self._claims: dict[tuple[str, Millis], Entry] = {}

    def add(self, entry: Entry) -> None:
        self._claims[entry.job, entry.slot] = entry
        while len(self._claims) > 1_000:
            first = next(iter(self._claims))
            if self._claims[first].at > entry.at - self._span:
                return
            del self._claims[first]

    def find(self, job: str, slot: Millis, owner: str) -> Entry | None:
        found = self._claims.get((job, slot))
        return found if found is not None and found.owner == owner else None


def remembered(value: Any, name: str, tolerance: Millis) -> tuple[Millis, Millis]:
    """A window in which a store remembers claims: in milliseconds, and the horizon: how far back from now slots may lie
    that are still claimed. Clocks differ, and a claim may come before its slot.

    :raises ConfigurationError: it is too short to be of use.
    """
    window = parse_duration(value, name)
    if window < 2 * tolerance or window < 2_000:
        raise ConfigurationError(
            f"{name}={value!r}: claims must be remembered for {max(2 * tolerance, 2_000) / 1000:g} s at least; "
            "300 is the default"
        )
    return window, min(window * 4 // 5, window - tolerance)


class AppendingStore(ClaimBackend):
    """A store whose claims and history are appended, by this host's clock. Subclasses ask, append and read."""

    window_option: str
    """What its users call the window."""
    own_namespace: str
    """The options that give an app a namespace of its own, for words: ``prefix=...``."""

    def __init__(self, window: Any, early_tolerance: Millis) -> None:
        self.early_tolerance = early_tolerance
        self._window, self._horizon = remembered(window, self.window_option, early_tolerance)
        self.traits = replace(type(self).traits, horizon=self._horizon)
        self._clock = SystemClock()
        self._memory = Memory(self._window)

    @abc.abstractmethod
    def _ask(self, requests: Sequence[ClaimRequest], now: Millis) -> list[Answer]:
        """Claim slots that are neither too early nor too old; UNKNOWN where there is no answer.

        :raises BackendUnavailable, OutcomeUnknown: there is none to any of them.
        """

    @abc.abstractmethod
    def _append(self, entries: Sequence[Entry]) -> None:
        """Add to the history."""

    @abc.abstractmethod
    def _read(self, job: str) -> list[Run]:
        """The history of *job*, newest slot first."""

    # --- opening ------------------------------------------------------------------------------------------------------

    def _check_tolerance(self) -> None:
        """:raises ConfigurationError: a claim that came early could be forgotten before its slot is too old."""
        if self.early_tolerance > self._window - self._horizon:
            raise ConfigurationError(
                f"{self.window_option} ({self._window / 1000:g} s) is too short for an early tolerance of "
                f"{self.early_tolerance / 1000:g} s: raise the one or lower anarchon_early_tolerance"
            )

    def _check_charter(self, charter: Mapping[str, Any], app_name: str) -> None:
        """What a namespace says of itself: ``layout`` and ``app``.

        :raises LayoutMismatch: it is a newer release's, or another app's.
        """
        layout, app = charter.get("layout", 0), str(charter.get("app"))
        check_charter(self, app_name, layout=layout, app=app, own=self.own_namespace)

    # --- claims -------------------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        now = self._clock.wall()
        answers = [self._by_clock(request, now) for request in requests]
        asked = [number for number, answer in enumerate(answers) if answer is Answer.UNKNOWN]
        if asked:
            for number, answer in zip(asked, self._ask([requests[number] for number in asked], now), strict=True):
                answers[number] = answer
        return [ClaimResult(answer) for answer in answers]

    def _by_clock(self, request: ClaimRequest, now: Millis) -> Answer:
        if request.slot > now + self.early_tolerance:
            return Answer.TOO_EARLY
        return Answer.TOO_OLD if request.slot <= now - self._horizon else Answer.UNKNOWN

    def _remember(self, requests: Sequence[ClaimRequest], answers: Sequence[Answer], now: Millis) -> list[Entry]:
        """Entries of the claims that were won just now, and not known to be before."""
        won = [
            claimed(request, now)
            for request, answer in zip(requests, answers, strict=True)
            if answer is Answer.WON and self._memory.find(request.job, request.slot, request.owner) is None
        ]
        for entry in won:
            self._memory.add(entry)
        return won

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        return self._end(confirmations)

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        check_given_up(endings)
        return self._end(endings)

    def _end(self, endings: Sequence[Confirmation | GivenUp]) -> list[bool]:
        now = self._clock.wall()
        self._append([ended(one, now, self._memory.find(one.job, one.slot, one.owner)) for one in endings])
        return [True] * len(endings)

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        """A claim cannot be given to others."""
        return [False] * len(holds)

    # --- history ------------------------------------------------------------------------------------------------------

    def record(self, outcomes: Sequence[Outcome]) -> None:
        check_never_a_run(outcomes)
        now = self._clock.wall()
        self._append([recorded(outcome, now) for outcome in outcomes])

    def history(self, job: str, limit: int) -> list[Run]:
        return self._read(job)[: max(limit, 0)]

    def last_run(self, job: str) -> Run | None:
        return next((run for run in self._read(job) if run.state is RunState.DISPATCHED), None)
