"""A namespace on a RabbitMQ: how it is opened and checked, its history, and the operations of the contract.

Belongs here: what is kept, and where. Does not belong here: who was first (:mod:`.claims`).

History is a stream for each job: it is read without being changed, by any number of readers. A stream is bounded by
bytes, so how many runs are kept is decided when it is read: beats write the job's ``history_size`` into it, again with
each entry, because the oldest ones are dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest, Keep, Traits
from celery_anarchon.backends.claimonly import AppendingStore, Entry, decode, encode, runs
from celery_anarchon.backends.rabbitmq.address import Address
from celery_anarchon.backends.rabbitmq.claims import Claims, Names, QueueClaims, StreamClaims
from celery_anarchon.backends.rabbitmq.link import Arguments, Fate, Link, Post, Source
from celery_anarchon.errors import AnarchonError, BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, Run

logger = logging.getLogger("celery_anarchon.backend")

STRATEGIES: dict[str, type[Claims]] = {"queue": QueueClaims, "stream": StreamClaims}

HISTORY = {
    "x-queue-type": "stream",
    "x-max-length-bytes": 1_000_000,
    # Old entries go by segments: three quarters of the length are always there.
    "x-stream-max-segment-size-bytes": 250_000,
}

_MADE_AT_ONCE = 50
"""Streams. Some milliseconds each, in which the server says nothing, and its silence has a limit."""

META = {"x-queue-type": "stream"}


class RabbitMQStore(AppendingStore):
    """Everything but the constructor that people see."""

    name = "rabbitmq"
    window_option = "slot_ttl"
    own_namespace = "prefix=..."
    traits = Traits(
        leases=False,
        horizon=240_000,
        server_time=False,
        durable=True,
        any_job_name=True,
        history_by_age=False,
        max_key_length=255,
        knows_owner=False,
        exact_history=False,
    )

    def __init__(self, address: Address, *, prefix: str, slot_ttl: Any, strategy: Any, early_tolerance: Millis) -> None:
        if strategy not in STRATEGIES:
            offered = " or ".join(repr(one) for one in STRATEGIES)
            raise ConfigurationError(f"strategy={strategy!r}: there is no such strategy for rabbitmq; choose {offered}")
        if not isinstance(prefix, str) or not prefix:
            raise ConfigurationError(f'prefix={prefix!r}: give a text such as "billing.cron."; it keeps services apart')
        self._names = Names(prefix)
        if prefix.startswith("amq.") or "\n" in prefix or "\r" in prefix or not self._names.fits():
            raise ConfigurationError(f"prefix={prefix!r}: names of queues cannot begin like this, or become too long")
        super().__init__(slot_ttl, early_tolerance)
        self.namespace = prefix
        self._strategy = str(strategy)
        self._claims = STRATEGIES[strategy](self._names, self._window)
        self.traits = replace(self.traits, knows_owner=self._claims.knows_owner)
        self._source = Source(address)
        self._made: set[str] = set()
        """Streams that are known to be there."""
        self._sizes: dict[str, int] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"rabbitmq {self._source.address.text}, prefix {self.namespace}, strategy {self._strategy}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        self._check_tolerance()
        self._source.closed = False
        try:
            self._open(app_name, create)
        except BaseException:
            # Whoever is refused may never call close().
            self._source.close()
            raise

    def _open(self, app_name: str, create: bool) -> None:
        if not self._source.call(lambda link: link.exists(self._names.meta), writes=False):
            if not create:
                return
            self._declare(self._names.meta, META)
        charter = self._source.call(lambda link: self._charter(link, app_name, create), writes=False)
        if charter is not None:
            self._check(charter, app_name)
        for stream, arguments in self._claims.streams().items() if create else ():
            self._declare(stream, arguments)

    def _declare(self, stream: str, arguments: Arguments) -> None:
        self._source.call(lambda link: link.declare(stream, arguments), writes=False)

    def _charter(self, link: Link, app_name: str, create: bool) -> dict[str, Any] | None:
        """What the first beat of this namespace has written. Several may write at once: what came first counts."""
        found = link.read(self._names.meta)
        if not found:
            if not create:
                return None
            charter = {
                "layout": wire.LAYOUT_VERSION,
                "app": app_name,
                "strategy": self._strategy,
                "slot_ttl": self._window,
            }
            self._store(link, [Post(self._names.meta, json.dumps(charter).encode())])
            found = link.read(self._names.meta)
        try:
            return dict(json.loads(found[0]))
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigurationError(
                f"{self.describe()}: the stream {self._names.meta} is not celery-anarchon's; set prefix=..."
            ) from error

    def _check(self, charter: dict[str, Any], app_name: str) -> None:
        self._check_charter(charter, app_name)
        for name, mine, shown in (
            ("strategy", self._strategy, "strategy={}"),
            ("slot_ttl", self._window, "slot_ttl={}ms"),
        ):
            theirs = charter.get(name)
            if theirs != mine:
                raise LayoutMismatch(
                    f"namespace {self.namespace!r}: its beats use {shown.format(theirs)}, and this one "
                    f"{shown.format(mine)}: beats that differ in it would both win. Use theirs, or set prefix=... and "
                    f"stop all beats of {self.namespace} first"
                )

    def close(self) -> None:
        self._source.close()

    def now(self) -> Millis:
        """This host's clock: RabbitMQ tells nobody its own. The server must be there."""
        with self._source.use(writes=False):
            return self._clock.wall()

    # --- claims -------------------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[ClaimRequest], now: Millis) -> list[Answer]:
        answers = [Answer.UNKNOWN] * len(requests)
        try:
            self._source.call(lambda link: self._claims.ask(link, requests, answers, now), writes=True)
        except (OutcomeUnknown, ConfigurationError) as error:
            if all(answer is Answer.UNKNOWN for answer in answers):
                raise
            logger.warning("%s: some claims were answered before it failed", error)
        won = self._remember(requests, answers, now)
        try:
            self._append(won)
        except AnarchonError as error:
            # The claims stand; only that nobody sees them before they are confirmed.
            logger.info("claims are not in the history: %s", error)
        return answers

    # --- history ------------------------------------------------------------------------------------------------------

    def tidy(self, keeps: Sequence[Keep]) -> int:
        """Write down how many runs of each job are to be shown. The stream drops old entries by itself."""
        news = [keep for keep in keeps if self._sizes.get(keep.job) != keep.history_size]
        posts = [
            (keep.job, json.dumps({"v": wire.LAYOUT_VERSION, "keep": keep.history_size}).encode()) for keep in news
        ]
        self._write(posts)
        self._sizes.update({keep.job: keep.history_size for keep in news})
        return 0

    def _append(self, entries: Sequence[Entry]) -> None:
        self._write([(entry.job, encode(entry, **self._keep(entry.job))) for entry in entries])

    def _keep(self, job: str) -> dict[str, int]:
        return {"keep": self._sizes[job]} if job in self._sizes else {}

    def _write(self, items: Sequence[tuple[str, bytes]]) -> None:
        if not items:
            return
        try:
            wanted = dict.fromkeys(self._names.history(job) for job, _ in items)
            missing = [stream for stream in wanted if stream not in self._made]
            for start in range(0, len(missing), _MADE_AT_ONCE):
                some = missing[start : start + _MADE_AT_ONCE]
                self._source.call(partial(_make, streams=some), writes=False)
                self._made.update(some)
            posts = [Post(self._names.history(job), body) for job, body in items]
            self._source.call(lambda link: self._store(link, posts), writes=True)
        except AnarchonError:
            # One may be gone, or down until somebody declares it.
            self._made.clear()
            raise

    def _store(self, link: Link, posts: Sequence[Post]) -> None:
        link.publish(posts)
        homeless = [post.queue for post in posts if post.fate is Fate.HOMELESS]
        if homeless:
            raise BackendUnavailable(f"{self.describe()}: the stream {homeless[0]} is gone; it is made again")
        if any(post.fate is not Fate.STORED for post in posts):
            raise OutcomeUnknown(f"{self.describe()}: a stream took no entry")

    def _read(self, job: str) -> list[Run]:
        found = self._source.call(lambda link: link.read(self._names.history(job)), writes=False)
        entries = [entry for data in found if (entry := decode(data)) is not None and entry.job == job]
        return runs(self.namespace, entries)[: _size(found)]


def _make(link: Link, streams: Sequence[str]) -> None:
    for number, stream in enumerate(streams, 1):
        # They are made in this order: when the last one is there, all are.
        link.declare(stream, HISTORY, wait=number == len(streams))


def _size(found: Sequence[bytes]) -> int | None:
    """The ``history_size`` that was written last."""
    for data in reversed(found):
        if b'"keep"' in data:
            try:
                return max(int(json.loads(data)["keep"]), 0)
            except (ValueError, TypeError, KeyError):
                continue
    return None
