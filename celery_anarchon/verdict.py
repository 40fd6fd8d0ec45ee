"""What was sent against what should have been: valid, invalid, or not to be told.

Belongs here: counting, and the words for what the count says. Does not belong here: where the expected slots come from
(:mod:`celery_anarchon.oracle` works them out apart from the product's own slot code), where the events were read, and
anything that the product believes about its own claims.

*At least once* holds for the expected slots, *at most once* for every event that is handed in. So whoever began to
watch in the middle hands in the slots of that window as expected and all that was seen as events: nothing is left out
in silence.
"""

from __future__ import annotations

import enum
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from celery_anarchon.model import Millis
from celery_anarchon.wire import HEADER, parse_time, time_text

JobSlot: TypeAlias = tuple[str, Millis]


class Kind(str, enum.Enum):
    """The three verdicts."""

    VALID = "valid"
    """Each expected slot was sent exactly once, and nothing else was."""
    INVALID = "invalid"
    UNKNOWN = "unknown"
    """What there is to judge by does not decide it."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Event:
    """A message that was found, or a task body that ran."""

    job: str
    slot: Millis
    task_id: str
    beat: str = ""
    attempt: int = 1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The count. Lists are ordered by slot, then job."""

    kind: Kind
    reason: str | None
    """Why it is not valid; None when it is."""
    expected: int
    sent_once: int
    """Of the expected."""
    missing: tuple[JobSlot, ...] = ()
    duplicate: tuple[JobSlot, ...] = ()
    """Sent more than once under different task ids."""
    same_id_twice: tuple[JobSlot, ...] = ()
    """Sent more than once under one task id: what an unclear publish or a beat paused in the broker call may leave, and
    what a worker can tell apart. Counted apart from `duplicate`, and no less wrong unless the caller says so."""
    unexpected: tuple[JobSlot, ...] = ()
    outside: int = 0
    """Events before or after the window: looked at for duplicates only."""
    excluded: int = 0
    """Slots that the caller would not judge: they may be missing."""
    unreadable: int = 0
    """Entries of the event log that nobody could read."""

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "verdict": str(self.kind),
            "reason": self.reason,
            "expected": self.expected,
            "sent_once": self.sent_once,
            "missing": named(self.missing),
            "duplicate": named(self.duplicate),
            "same_id_twice": named(self.same_id_twice),
            "unexpected": named(self.unexpected),
            "outside": self.outside,
            "excluded": self.excluded,
            "unreadable": self.unreadable,
        }


def named(slots: Iterable[JobSlot]) -> list[dict[str, str]]:
    """Slots as JSON shows them."""
    return [{"job": job, "slot": time_text(slot)} for job, slot in slots]


def judge(
    expected: Iterable[JobSlot],
    events: Iterable[Event] | None,
    *,
    window: tuple[Millis, Millis] | None = None,
    excluded: Iterable[JobSlot] = (),
    allow_same_id: bool = False,
    unreadable: int = 0,
) -> Verdict:
    """Compare.

    :param events: all that was seen; None: the log could not be read.
    :param window: (after, until], which *expected* covers. Events of its jobs outside of it are not unexpected.
    :param excluded: slots too near to an edge to say whether they had to be sent. They are counted in the verdict.
    :param allow_same_id: two messages of one slot under one task id do not spoil the verdict.
    :param unreadable: how many entries of the log could not be read: each may be a missing slot, or a second message.
    """
    excused = set(excluded)
    expected = set(expected)
    owed = expected - excused
    jobs = {job for job, _ in expected}
    ids: dict[JobSlot, list[str]] = defaultdict(list)
    for event in events or ():
        ids[event.job, event.slot].append(event.task_id)

    seen = ids.keys()
    # A job that nobody expects is wrong whenever it comes.
    outside = {
        slot for slot in seen - owed if window is not None and slot[0] in jobs and not window[0] < slot[1] <= window[1]
    }
    missing = owed - seen
    unexpected = seen - owed - outside - excused
    same_id_twice = {slot for slot, given in ids.items() if len(given) > 1 and len(set(given)) == 1}
    duplicate = {slot for slot, given in ids.items() if len(set(given)) > 1}
    twice = len(duplicate) + (0 if allow_same_id else len(same_id_twice))

    wrong = [f"{number} {word}" for number, word in ((twice, "sent twice"), (len(unexpected), "unexpected")) if number]
    if missing and not unreadable:
        wrong.insert(0, f"{len(missing)} missing")
    kind, reason = Kind.VALID, None
    if events is None:
        kind, reason = Kind.UNKNOWN, "the event log could not be read"
    elif wrong:
        # What was seen is certain; only what was not seen may be among the unreadable.
        kind, reason = Kind.INVALID, ", ".join(wrong)
    elif unreadable:
        also = f", {len(missing)} slots not seen" if missing else ""
        kind, reason = Kind.UNKNOWN, f"{unreadable} entries of the event log could not be read{also}"
    elif not owed:
        kind, reason = Kind.UNKNOWN, "no slot was expected"
    return Verdict(
        kind=kind,
        reason=reason,
        expected=len(owed),
        sent_once=sum(len(ids[slot]) == 1 for slot in owed & seen),
        missing=_ordered(missing),
        duplicate=_ordered(duplicate),
        same_id_twice=_ordered(same_id_twice),
        unexpected=_ordered(unexpected),
        outside=sum(len(ids[slot]) for slot in outside),
        excluded=len(excused),
        unreadable=unreadable,
    )


def _ordered(slots: Iterable[JobSlot]) -> tuple[JobSlot, ...]:
    return tuple(sorted(slots, key=lambda slot: (slot[1], slot[0])))


# --- what witnesses write ---------------------------------------------------------------------------------------------


def event_of(headers: Mapping[str, Any]) -> Event | None:
    """What the headers of a task message say; None when it is no message of a slot."""
    run = headers.get(HEADER)
    if not isinstance(run, Mapping):
        return None
    try:
        return Event(
            job=str(run["job"]),
            slot=parse_time(run["slot"]),
            task_id=str(headers["id"]),
            beat=str(run.get("beat", "")),
            attempt=int(run.get("attempt", 1)),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def event_line(event: Event) -> str:
    """*event* as a line of an event log. Written with one call to a file opened for appending, lines of several
    processes do not mix."""
    return json.dumps({**asdict(event), "slot": time_text(event.slot)}) + "\n"


def read_events(lines: Iterable[str]) -> tuple[list[Event], int]:
    """The events of an event log, and how many of its lines are none (a torn last line is such)."""
    events: list[Event] = []
    unreadable = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            events.append(Event(**{**fields, "slot": parse_time(fields["slot"])}))
        except (KeyError, TypeError, ValueError, AttributeError):
            unreadable += 1
    return events, unreadable
