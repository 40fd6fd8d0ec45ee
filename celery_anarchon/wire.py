"""What another version or another process reads: run ids, headers, times as text, fingerprints, the layout version.

Belongs here: every form that leaves the process. A change here is a release note. Does not belong here: behaviour.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

from celery_anarchon.model import Millis, OnUnknown, Run, Terms

LAYOUT_VERSION = 1
"""The layout of records in the stores. Additive within a major; a process refuses only a layout newer than this."""

HEADER = "anarchon"
"""The message header of a tracked run."""

UNTRACKED_HEADER = "anarchon_slot"
"""The header of canvas messages: many messages share one slot, so they cannot be one run."""

_SPECIAL = re.compile(rb"[^A-Za-z0-9_-]")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_RUN_IDS = hashlib.sha1(uuid.uuid5(uuid.NAMESPACE_URL, "celery-anarchon").bytes, usedforsecurity=False)
_quoted = json.encoder.encode_basestring


def instant(moment: datetime) -> Millis:
    """The instant of an aware datetime, floored to the millisecond.

    :raises ValueError: *moment* is naive.
    """
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def moment(at: Millis) -> datetime:
    """*at* as an aware UTC datetime."""
    return _EPOCH + timedelta(milliseconds=at)


@lru_cache(maxsize=1024)
def time_text(at: Millis) -> str:
    """*at* as ``2026-03-29T01:00:00.000Z``: the one form of a time in headers, JSON and logs."""
    return moment(at).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at % 1000:03d}Z"


@lru_cache(maxsize=1024)
def parse_time(text: str) -> Millis:
    """The instant that an ISO 8601 text with a zone names (``...Z`` or ``...+02:00``).

    :raises ValueError: no such time, or no zone.
    """
    return instant(read_datetime(text))


def read_datetime(text: str) -> datetime:
    """The datetime of an ISO 8601 text, aware where it has a zone.

    :raises ValueError: no such time.
    """
    # datetime.fromisoformat reads a trailing Z from Python 3.11 on only.
    return datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)


@lru_cache(maxsize=1024)
def run_id(namespace: str, job: str, slot: Millis) -> str:
    """The id of the run of (job, slot): also the Celery task id of every attempt and every repeated publish.

    A UUID of version 5 (RFC 9562, section 5.5), whose name is the JSON array of the three.
    """
    digest = _RUN_IDS.copy()
    digest.update(f'[{_quoted(namespace)},{_quoted(job)},"{time_text(slot)}"]'.encode())
    return uuid_text(digest.hexdigest(), 5)


def uuid_text(digits: str, version: int) -> str:
    """The text of the UUID of *version* that these hex digits make, the first 32 of them. One is needed for each slot
    and each message, and an object for each costs several times as much."""
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-{version}{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"


@lru_cache(maxsize=4096)
def fingerprint(timetable_key: str) -> str:
    """Sixteen hex digits that stand for one meaning of a schedule: equal keys, equal fingerprint, on every host."""
    return hashlib.sha256(timetable_key.encode()).hexdigest()[:16]


def store_name(text: str, limit: int) -> str:
    """*text* in letters, digits, ``_``, ``-``, ``%`` and ``~``, at most *limit* characters long: for stores whose names
    cannot be any text. Two texts never share a name.

    What is too long is cut, and carries a hash of all of it behind a ``~``, which is never a character of the rest.
    """
    data = text.encode("utf-8", "surrogatepass")
    name = _SPECIAL.sub(lambda byte: b"%%%02X" % byte[0][0], data).decode()
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(data).hexdigest()[:32]
    return f"{name[: limit - len(digest) - 1]}~{digest}"


def header(*, namespace: str, job: str, slot: Millis, attempt: int, late: Millis, beat: str) -> dict[str, Any]:
    """The ``anarchon`` header of a message. ``late`` is in seconds. Readers ignore keys they do not know.

    One of a run that is followed on its worker has the keys of :func:`terms_header` as well.
    """
    return {
        "v": 1,
        "ns": namespace,
        "job": job,
        "slot": time_text(slot),
        "attempt": attempt,
        "late": round(late / 1000, 3),
        "beat": beat,
    }


def terms_header(terms: Terms, on_unknown: OnUnknown) -> dict[str, Any]:
    """What a worker must know of a run that it is to follow, should the store have forgotten it. Spans in seconds."""
    return {
        "on_unknown": str(on_unknown),
        "max_attempts": terms.max_attempts,
        "overlap": str(terms.overlap),
        "lease": terms.lease / 1000,
        "queue_timeout": terms.queue_timeout / 1000,
    }


def run_json(run: Run) -> dict[str, Any]:
    """*run* as JSON shows it: times as in :func:`time_text` or null, the state as its word."""
    shown = run.as_dict()
    for name, value in shown.items():
        if isinstance(value, datetime):
            shown[name] = time_text(instant(value))
    shown["state"] = str(run.state)
    return shown
