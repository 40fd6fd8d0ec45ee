"""A namespace on NATS JetStream: its two streams, claims and history.

Belongs here: what is asked of JetStream and what its answers mean. Does not belong here: how questions get there
(:mod:`.connection`).

**Claims.** A claim is a message whose id is (job, slot): the stream keeps the first message with an id, and tells all
later ones that they are duplicates, and of which message. That one names its owner, so an owner whose answer was lost
learns that it has won. Ids are remembered for the duplicate window; after a restart the server takes them out of the
messages that it has, so these are kept for longer than the window, however many there are. Each (job, slot) has a
subject of its own, and a claim says that it expects nothing there: should an id be forgotten early, the message
refuses.

**History** is in a second stream, because there a new message drops an old one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimRequest, Keep, Traits
from celery_anarchon.backends.claimonly import AppendingStore, Entry, claimed, decode, encode, runs
from celery_anarchon.backends.nats.connection import (
    CALL_TIMEOUT,
    Away,
    Connection,
    Line,
    NoAnswer,
    Refusal,
)
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, Run

logger = logging.getLogger("celery_anarchon.backend")

API = "$JS.API"

IN_PROCESS = frozenset({10158, 10164})
"""Another message with this id, or for this subject, is just being stored: neither yes nor no."""
NOT_EMPTY = 10071
"""There is a message on this subject already."""
NO_MESSAGE_FOUND = 10037
NO_STREAM = 10059
NAME_IN_USE = 10058
HOPELESS = frozenset({10039, 10052, 10065, 10074, 10076})
"""What no waiting changes: JetStream is not enabled, settings contradict each other, subjects belong to another stream,
replicas without a cluster."""

NAME_LIMIT = 200
KEPT_AT_LEAST: Millis = 3_600_000
"""How long claims stay in the stream, whatever the window: so long an unfinished one is seen in the history."""

_AT_ONCE = 200
"""Questions that are under way together."""

_PARTS = 50
"""In which a stream is read at the same time."""


class NatsStore(AppendingStore):
    """Everything but the constructor that people see."""

    name = "nats"
    window_option = "duplicate_window"
    own_namespace = "stream=... and prefix=..."
    traits = Traits(
        leases=False,
        horizon=240_000,
        server_time=False,
        durable=True,
        any_job_name=True,
        history_by_age=False,
        knows_owner=True,
        exact_history=False,
        one_history_size=True,
    )

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        prefix: str,
        duplicate_window: Any,
        history_size: int,
        replicas: int,
        early_tolerance: Millis,
    ) -> None:
        if not isinstance(stream, str) or not stream or set(stream) & set(" .*>/\\\t\r\n"):
            raise ConfigurationError(f"stream={stream!r}: give a name without spaces, dots, slashes and wildcards")
        if not isinstance(prefix, str) or not _is_subject(prefix):
            raise ConfigurationError(
                f'prefix={prefix!r}: give the beginning of a subject, such as "billing.cron.", without wildcards'
            )
        for name, number, least in (("history_size", history_size, 1), ("replicas", replicas, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ConfigurationError(f"{name}={number!r}: give a number, {least} or more")
        super().__init__(duplicate_window, early_tolerance)
        self.namespace = f"{stream}/{prefix}"
        self._stream, self._history = stream, f"{stream}_HISTORY"
        self._prefix = prefix
        self._size = history_size
        self._replicas = replicas
        self._connection = connection

    # --- life ---------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"nats {self._connection.text}, stream {self._stream}, prefix {self._prefix}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        self._check_tolerance()
        self._connection.reopen()

        async def work(line: Line) -> None:
            for config in self._configs(app_name):
                await self._open_stream(line, config, app_name, create)

        try:
            self._run(work, writes=False)
        except BaseException:
            # Whoever is refused may never call close().
            self._connection.close()
            raise

    def _configs(self, app_name: str) -> list[dict[str, Any]]:
        charter = json.dumps({"layout": wire.LAYOUT_VERSION, "app": app_name})
        common = {
            "description": f"celery-anarchon {charter}",
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "num_replicas": self._replicas,
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
        }
        claims = {
            "name": self._stream,
            "subjects": [f"{self._prefix}claim.>"],
            "duplicate_window": self._window * 1_000_000,
            "max_age": max(2 * self._window, KEPT_AT_LEAST) * 1_000_000,
            "max_msgs_per_subject": -1,
        }
        history = {
            "name": self._history,
            "subjects": [f"{self._prefix}history.>"],
            "duplicate_window": self._window * 1_000_000,
            "max_age": 0,
            "max_msgs_per_subject": self._size,
        }
        return [{**common, **claims}, {**common, **history}]

    async def _open_stream(self, line: Line, wanted: Mapping[str, Any], app_name: str, create: bool) -> None:
        name = wanted["name"]
        found = await self._config_of(line, name)
        if found is None:
            if not create:
                return
            try:
                # Several beats may do this at once: with the same settings all of them succeed.
                await line.insist(f"{API}.STREAM.CREATE.{name}", json.dumps(wanted).encode())
            except Refusal as error:
                if error.number != NAME_IN_USE:
                    raise
            found = await self._made(line, name)
        self._check(found, wanted, app_name)
        if create and name == self._history:
            await self._raise_size(line, self._size)

    async def _made(self, line: Line, name: str) -> dict[str, Any]:
        """What a stream is that was just made: a server of a cluster may learn of it a moment later."""
        deadline = self._clock.monotonic() + CALL_TIMEOUT
        while (found := await self._config_of(line, name)) is None:
            if self._clock.monotonic() >= deadline:
                raise Away(f"stream {name} is not there yet")
            await asyncio.sleep(0.05)
        return found

    async def _config_of(self, line: Line, name: str) -> dict[str, Any] | None:
        return (await self._info_of(line, name)).get("config")

    async def _info_of(self, line: Line, name: str) -> dict[str, Any]:
        """Empty: there is no such stream."""
        try:
            return await line.insist(f"{API}.STREAM.INFO.{name}")
        except Refusal as error:
            if error.number == NO_STREAM:
                return {}
            raise

    def _check(self, found: Mapping[str, Any], wanted: Mapping[str, Any], app_name: str) -> None:
        name = wanted["name"]
        lead, _, text = str(found.get("description", "")).partition(" ")
        try:
            charter = dict(json.loads(text)) if lead == "celery-anarchon" else {}
        except (ValueError, TypeError):
            charter = {}
        if "layout" not in charter:
            raise ConfigurationError(f"stream {name} is not celery-anarchon's; set stream=... to give it another name")
        self._check_charter(charter, app_name)
        theirs, mine = ((one.get("duplicate_window") or 0) / 1e9 for one in (found, wanted))
        for what, one, other in (
            ("duplicate_window", f"{theirs:g} s", f"{mine:g} s"),
            ("subjects", found.get("subjects"), wanted["subjects"]),
        ):
            if one != other:
                raise LayoutMismatch(
                    f"stream {name}: its {what} is {one}, and this beat wants {other}: beats must agree in it. "
                    f"Use the same, or set stream=... and prefix=... and stop all beats of {self._stream} first"
                )
        if found.get("storage") != "file":
            raise ConfigurationError(f"stream {name} is in memory, and a restart of the server forgets its claims")
        if int(found.get("num_replicas", 1)) < self._replicas:
            raise ConfigurationError(
                f"stream {name} has {found.get('num_replicas', 1)} replicas, and replicas={self._replicas}: "
                f"nats stream edit {name} --replicas {self._replicas}"
            )

    async def _raise_size(self, line: Line, size: int) -> None:
        """One size for all jobs: the largest that any beat asks for. Of two that raise it together the smaller one may
        come last, for JetStream takes no condition: so it is looked at with every tidy."""
        found = await self._config_of(line, self._history)
        if found is not None and 0 < found.get("max_msgs_per_subject", -1) < size:
            wanted = {**found, "max_msgs_per_subject": size}
            await line.insist(f"{API}.STREAM.UPDATE.{self._history}", json.dumps(wanted).encode())

    def close(self) -> None:
        self._connection.close()

    def now(self) -> Millis:
        """This host's clock: NATS tells nobody its own. The server must be there."""

        async def work(line: Line) -> None:
            return None

        self._run(work, writes=False)
        return self._clock.wall()

    # --- claims -------------------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[ClaimRequest], now: Millis) -> list[Answer]:
        async def work(line: Line) -> list[Any]:
            return await _gather([self._claim(line, request, now) for request in requests])

        replies = self._run(work, writes=True)
        self._raise_if_all_failed(replies)
        answers = [reply if isinstance(reply, Answer) else Answer.UNKNOWN for reply in replies]
        # The claims are in the history as they are.
        self._remember(requests, answers, now)
        return answers

    async def _claim(self, line: Line, request: ClaimRequest, now: Millis) -> Answer:
        name = wire.store_name(request.job, NAME_LIMIT)
        subject = f"{self._prefix}claim.{name}.{request.slot}"
        headers = {
            "Nats-Msg-Id": f"{name}:{request.slot}",
            "Nats-Expected-Stream": self._stream,
            "Nats-Expected-Last-Subject-Sequence": "0",
        }
        data = encode(claimed(request, now))
        deadline = self._clock.monotonic() + CALL_TIMEOUT
        while True:
            holder: Entry | None = None
            try:
                reply = await line.ask(subject, data, headers)
                if not reply.get("duplicate"):
                    return Answer.WON
                holder = await self._message(line, self._stream, {"seq": reply["seq"]})
            except Refusal as error:
                if error.number == NOT_EMPTY:
                    holder = await self._message(line, self._stream, {"last_by_subj": subject})
                elif error.number not in IN_PROCESS:
                    raise
            if holder is not None and (holder.job, holder.slot) == (request.job, request.slot):
                return Answer.WON if holder.owner == request.owner else Answer.TAKEN
            if self._clock.monotonic() >= deadline:
                raise NoAnswer("another claim of this slot was not finished in time")
            await asyncio.sleep(0.02)

    async def _message(self, line: Line, stream: str, which: Mapping[str, Any]) -> Entry | None:
        try:
            reply = await line.ask(f"{API}.STREAM.MSG.GET.{stream}", json.dumps(which).encode())
        except Refusal as error:
            if error.number == NO_MESSAGE_FOUND:
                return None
            raise
        return decode(base64.b64decode(reply["message"].get("data", "")))

    # --- history ------------------------------------------------------------------------------------------------------

    def tidy(self, keeps: Sequence[Keep]) -> int:
        """The stream drops what is too much by itself; here it learns of a job that wants more."""
        self._size = max([self._size, *(keep.history_size for keep in keeps)])

        async def work(line: Line) -> None:
            await self._raise_size(line, self._size)

        self._run(work, writes=True)
        return 0

    def _append(self, entries: Sequence[Entry]) -> None:
        async def append(line: Line, entry: Entry) -> None:
            name = wire.store_name(entry.job, NAME_LIMIT)
            # Written again for want of an answer, it is not stored twice.
            headers = {
                "Nats-Msg-Id": f"{name}:{entry.slot}:{entry.state}:{entry.held:d}",
                "Nats-Expected-Stream": self._history,
            }
            deadline = self._clock.monotonic() + CALL_TIMEOUT
            while True:
                try:
                    await line.ask(f"{self._prefix}history.{name}", encode(entry), headers)
                    return
                except Refusal as error:
                    if error.number not in IN_PROCESS or self._clock.monotonic() >= deadline:
                        raise
                await asyncio.sleep(0.02)

        if entries:

            async def work(line: Line) -> list[Any]:
                return await _gather([append(line, entry) for entry in entries])

            replies = self._run(work, writes=True)
            failed = [reply for reply in replies if isinstance(reply, Exception)]
            if failed and len(failed) < len(replies):
                raise OutcomeUnknown(f"{self.describe()}: {failed[0]} (a part of the batch was applied)")
            self._raise_if_all_failed(replies)

    def _read(self, job: str) -> list[Run]:
        name = wire.store_name(job, NAME_LIMIT)

        async def work(line: Line) -> list[Entry]:
            return [
                *await self._all(line, self._stream, f"{self._prefix}claim.{name}.*"),
                *await self._all(line, self._history, f"{self._prefix}history.{name}"),
            ]

        return runs(self.namespace, self._run(work, writes=False))

    async def _all(self, line: Line, stream: str, subject: str) -> list[Entry]:
        """All messages of a subject, oldest first, from the stream's leader: a consumer might live on a replica that is
        not in step. Each tells where to look for the next, so the stream is read in parts, at the same time."""
        state = (await self._info_of(line, stream)).get("state", {})
        first, last = int(state.get("first_seq", 1)), int(state.get("last_seq", 0))
        length = max(last - first, 0) // _PARTS + 1
        starts = range(first, last + 1, length)
        parts = await _gather([self._part(line, stream, subject, start, start + length) for start in starts])
        for part in parts:
            if isinstance(part, Exception):
                raise part
        return [entry for part in parts for entry in part]

    async def _part(self, line: Line, stream: str, subject: str, sequence: int, end: int) -> list[Entry]:
        entries: list[Entry] = []
        while sequence < end:
            which = json.dumps({"seq": sequence, "next_by_subj": subject}).encode()
            try:
                message = (await line.ask(f"{API}.STREAM.MSG.GET.{stream}", which))["message"]
            except Refusal as error:
                if error.number in (NO_MESSAGE_FOUND, NO_STREAM):
                    return entries
                raise
            sequence = int(message["seq"]) + 1
            entry = decode(base64.b64decode(message.get("data", "")))
            if entry is not None and sequence <= end:
                entries.append(entry)
        return entries

    # --- errors -------------------------------------------------------------------------------------------------------

    def _run(self, work: Any, *, writes: bool) -> Any:
        try:
            return self._connection.run(work)
        except (Away, NoAnswer, Refusal) as error:
            raise self._meaning(error, writes=writes) from error

    def _raise_if_all_failed(self, replies: Sequence[Any]) -> None:
        failed = [reply for reply in replies if isinstance(reply, Exception)]
        if failed and len(failed) == len(replies):
            unknown = next((error for error in failed if isinstance(error, NoAnswer)), failed[0])
            raise self._meaning(unknown, writes=True) from unknown
        for error in failed[:1]:
            logger.warning("%s: %d of %d have no answer: %s", self.describe(), len(failed), len(replies), error)

    def _meaning(self, error: Exception, *, writes: bool) -> Exception:
        if isinstance(error, Refusal) and error.number in HOPELESS:
            return ConfigurationError(f"{self.describe()}: {error}")
        if isinstance(error, (Away, NoAnswer, Refusal)):
            unknown = isinstance(error, NoAnswer) and writes
            return (OutcomeUnknown if unknown else BackendUnavailable)(f"{self.describe()}: {error}")
        return error


async def _gather(questions: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their answers or errors, in order, so many at a time."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(question: Coroutine[Any, Any, Any]) -> Any:
        async with room:
            try:
                return await question
            except (Away, NoAnswer, Refusal) as error:
                return error

    return list(await asyncio.gather(*(one(question) for question in questions)))


def _is_subject(prefix: str) -> bool:
    tokens = prefix.split(".")
    plain = not any(sign in prefix for sign in " *>\t\r\n\0")
    return plain and bool(tokens[0]) and not prefix.startswith("$") and all(tokens[:-1])
