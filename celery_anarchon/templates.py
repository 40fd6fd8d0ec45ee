"""Messages out of templates: of most jobs one message differs from the next in its ids and times only.

A template is made from a message that Celery made, and only where nothing in it can change from one slot to the next
but what is known to: the id of the task, the slot, the lateness, and the broker's tag.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Any

from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute, Router
from celery.beat import ScheduleEntry
from kombu.utils.json import dumps, loads

from celery_anarchon import wire
from celery_anarchon.backends.base import Command
from celery_anarchon.job import Job
from celery_anarchon.model import Terms
from celery_anarchon.publishing import Dispatch

KEPT = 20_000
"""Templates of one beat; some 2 kB each."""

DISUSED = 600.0
"""Seconds after which a template makes room for another."""

_LISTENED_TO = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)
_PLAIN = (type(None), bool, int, float, str, bytes, date, datetime, timedelta, Decimal, uuid.UUID)


class _Template:
    """One job's. What varies stands between the pieces."""

    def __init__(
        self, job: Job, terms: Terms | None, key: str | bytes | int, pieces: list[bytes], rest: tuple[Command, ...]
    ) -> None:
        self.job = job
        self.terms = terms
        self.given = copy.deepcopy(_given(job))
        self.used = time.monotonic()
        self._key = key
        self._text = b"".join(b"%b" if piece in _MARKS else piece.replace(b"%", b"%%") for piece in pieces)
        self._values = itemgetter(*(_MARKS[piece] for piece in pieces if piece in _MARKS))
        self._rest = rest

    def message(self, dispatch: Dispatch) -> tuple[Command, ...]:
        values = {
            "id": dispatch.run_id.encode(),
            "slot": wire.time_text(dispatch.slot).encode(),
            "late": b"%r" % round(dispatch.late / 1000, 3),
            # Of version 4, as kombu's.
            "tag": wire.uuid_text(os.urandom(16).hex(), 4).encode(),
        }
        return (("LPUSH", self._key, self._text % self._values(values)), *self._rest)


_TEXT_MARKS = {name: f"{name}-{secrets.token_hex(8)}" for name in ("id", "slot", "late", "tag")}
_MARKS = {(f'"{mark}"' if name == "late" else mark).encode(): name for name, mark in _TEXT_MARKS.items()}
"""What stands in a template where a value goes -> which one. The lateness is a number, so its quotes go too."""
_SPLIT = re.compile(b"(%s)" % b"|".join(map(re.escape, _MARKS)))


class Templates:
    """Of the jobs of one app."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._known: OrderedDict[str, _Template] = OrderedDict()

    def find(self, job: Job, terms: Terms | None) -> Callable[[Dispatch], tuple[Command, ...]] | None:
        """What makes messages of *job* as it is now, with those terms, where there is a template. For the first attempt
        only: later ones have their own rules."""
        found = self._known.get(job.name)
        if found is None or _is_listened_to():
            return None
        if found.job is not job or found.given != _given(job):
            del self._known[job.name]
            return None
        if found.terms is not terms:
            # The first worker was seen since: from now on runs are followed.
            return None
        found.used = time.monotonic()
        self._known.move_to_end(job.name)
        return found.message

    def learn(self, dispatch: Dispatch, commands: tuple[Command, ...]) -> None:
        """Make a template of what Celery made for *dispatch*, if that can be one."""
        if dispatch.attempt != 1 or not self._is_static(dispatch.job) or not self._has_room():
            return
        first, *rest = commands
        if first[0] != "LPUSH" or any(command[0] != "PEXPIRE" for command in rest):
            return
        pieces = _pieces(dispatch, str(first[2]))
        if pieces is not None:
            self._known[dispatch.job.name] = _Template(dispatch.job, dispatch.terms, first[1], pieces, tuple(rest))

    def _has_room(self) -> bool:
        if len(self._known) < KEPT:
            return True
        name, oldest = next(iter(self._known.items()))
        if time.monotonic() - oldest.used < DISUSED:
            return False
        del self._known[name]
        return True

    def _is_static(self, job: Job) -> bool:
        """Whether nothing of the app has a say in each single message."""
        amqp, entry = self._app.amqp, job.payload
        task = self._app.tasks.get(entry.task)
        return (
            not _is_listened_to()
            and type(amqp) is AMQP
            and type(amqp.router) is Router
            and all(type(route) is MapRoute for route in amqp.router.routes)
            and "router" not in (entry.options or {})
            and (task is None or type(task).shadow_name is Task.shadow_name)
            and (task is None or type(task)._get_exec_options is Task._get_exec_options)
            and all(map(_is_plain, _given(job)))
        )


def _is_listened_to() -> bool:
    before, after, sent = _LISTENED_TO
    return bool(before.receivers or after.receivers or sent.receivers)


def _given(job: Job) -> tuple[Any, Any, Any]:
    """What the user gave; a list in it may be changed in place."""
    entry: ScheduleEntry = job.payload
    return entry.args, entry.kwargs, entry.options


def _is_plain(value: Any) -> bool:
    """Whether it becomes the same text each time."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    return type(value) in _PLAIN


def _pieces(dispatch: Dispatch, payload: str) -> list[bytes] | None:
    """The message in pieces, marks between them; None: something in it is of this one message, and not known here."""
    message = loads(payload)
    headers, properties = message["headers"], message["properties"]
    own = headers.get(wire.HEADER)
    ids = (headers.get("id"), headers.get("root_id"), properties.get("correlation_id"))
    if (
        dumps(message) != payload
        or not isinstance(own, dict)
        or ids != (dispatch.run_id,) * 3
        or payload.count(dispatch.run_id) != len(ids)
        or headers.get("eta") is not None
        or headers.get("expires") is not None
        or headers.get("parent_id") is not None
        # To an exchange: which queues are bound to it is asked each time.
        or properties["delivery_info"].get("exchange")
        or "expiration" in properties
    ):
        return None
    headers["id"] = headers["root_id"] = properties["correlation_id"] = _TEXT_MARKS["id"]
    own["slot"], own["late"] = _TEXT_MARKS["slot"], _TEXT_MARKS["late"]
    properties["delivery_tag"] = _TEXT_MARKS["tag"]
    return _SPLIT.split(dumps(message).encode())
