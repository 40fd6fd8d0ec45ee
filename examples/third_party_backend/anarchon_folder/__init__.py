"""A celery-anarchon backend on a folder of files, for the beats of one machine.

It takes claims and holds no leases, so it is a ``ClaimBackend``: it answers one question, "was I first?". What makes it
right is one system call, ``link``: it makes a name that is not there yet, or fails. The whole content is in place at
that moment, because the name leads to a file that was written before.

    <folder>/<namespace>/meta.json
    <folder>/<namespace>/<hash of the job>.<slot>.claim     who was first, for good
    <folder>/<namespace>/<hash of the job>.<slot>.end       what became of it, for good

No file is ever changed, so nobody can read half of one, and no lock is needed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from celery_anarchon import wire
from celery_anarchon.backends import ClaimBackend, Traits
from celery_anarchon.backends.base import (
    GIVEN_UP,
    NEVER_A_RUN,
    ClaimRequest,
    ClaimResult,
    Confirmation,
    GivenUp,
    Hold,
    Outcome,
)
from celery_anarchon.backends.registry import read_url
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Answer, Millis, Run, RunState

DAY: Millis = 86_400_000
HORIZON: Millis = 7 * DAY
"""How long a claim is remembered, unless told otherwise. Older slots are refused, so their files can go."""

LAYOUT = 1


class FolderBackend(ClaimBackend):
    """Beats that share a folder of one machine.

    :param folder: made if it is not there.
    :param namespace: keeps services in one folder apart.
    :param horizon: how long a claim is remembered: seconds, a timedelta or text such as ``"7d"``.
    """

    name = "folder"
    traits = Traits(
        leases=False,
        horizon=HORIZON,
        server_time=True,  # one machine, one clock
        durable=True,
        any_job_name=True,
        history_by_age=False,
    )

    def __init__(self, folder: str | Path, namespace: str = "cron", horizon: Any = HORIZON / 1000) -> None:
        if not namespace:
            raise ConfigurationError("namespace='': give a name; it keeps services apart")
        self.namespace = namespace
        self._horizon = parse_duration(horizon, "horizon")
        # What this very client can do: the options of jobs are checked against it.
        self.traits = replace(type(self).traits, horizon=self._horizon)
        # Absolute now: a daemon changes its directory later.
        self.folder = Path(folder).absolute() / quote(namespace, safe="")
        self._pruned_at = 0

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FolderBackend:
        """``folder:///var/lib/proj/claims?namespace=billing&horizon=7d``."""
        path, given = read_url(url, {"namespace": str, "horizon": str}, options)
        if not path:
            raise ConfigurationError(f"{url} names no folder: write folder:///var/lib/proj/claims")
        return cls(path, **given)

    # --- life: X1 to X4 -----------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"folder {self.folder.parent}, namespace {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        if create:
            with self._errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._make("meta.json", {"layout": LAYOUT, "app": app_name})
        elif not self.folder.exists():
            return
        meta = self._read("meta.json") or {}
        if meta.get("layout", LAYOUT) > LAYOUT:
            raise LayoutMismatch(
                f"{self.describe()}: layout {meta['layout']} was written by a newer anarchon-folder; this one knows "
                f"{LAYOUT}: upgrade this process"
            )
        if meta.get("app", app_name) != app_name:
            raise LayoutMismatch(
                f"namespace {self.namespace!r} belongs to app {meta['app']}, and this is app {app_name}; set "
                "namespace=... to give this app its own"
            )

    def close(self) -> None:
        """Nothing is open between two calls: no file, no thread, no lock."""

    def now(self) -> Millis:
        with self._errors():
            os.stat(self.folder / "meta.json")
        return time.time_ns() // 1_000_000

    # --- claims: C1 to C19 --------------------------------------------------------------------------------------------

    def claim(self, requests: Sequence[ClaimRequest]) -> list[ClaimResult]:
        now = self.now()
        with self._errors() as applied:
            self._prune(now)
            return [ClaimResult(self._claim(request, now, applied)) for request in requests]

    def _claim(self, request: ClaimRequest, now: Millis, applied: Callable[[], None]) -> Answer:
        if request.slot < now - self._horizon:
            return Answer.TOO_OLD
        if request.slot > now + self.early_tolerance:
            return Answer.TOO_EARLY
        name = _name(request.job, request.slot)
        claim = {"job": request.job, "owner": request.owner, "beat": request.beat, "claimed_at": now}
        # The one atomic step. Whoever makes the name has won; nobody looks first.
        if self._make(f"{name}.claim", claim):
            applied()
            return Answer.WON
        known = self._read(f"{name}.claim") or {}
        if known.get("owner") != request.owner:
            return Answer.TAKEN
        return Answer.ALREADY_SENT if self._read(f"{name}.end") else Answer.WON

    def confirm(self, confirmations: Sequence[Confirmation]) -> list[bool]:
        now = self.now()
        with self._errors() as applied:
            return [
                self._end(one, {"state": RunState.DISPATCHED, "sent_at": now, "late": one.late}, applied)
                for one in confirmations
            ]

    def abandon(self, holds: Sequence[Hold]) -> list[bool]:
        """Without leases there is no takeover, so a slot that its winner cannot publish is open to nobody else."""
        self.now()
        return [False for _ in holds]

    def give_up(self, endings: Sequence[GivenUp]) -> list[bool]:
        now = self.now()
        with self._errors() as applied:
            return [
                self._end(one, {"state": one.state, "ended_at": now, "reason": one.reason}, applied) for one in endings
            ]

    def _end(self, hold: Hold, end: dict[str, Any], applied: Callable[[], None]) -> bool:
        name = _name(hold.job, hold.slot)
        known = self._read(f"{name}.claim")
        if known is None or known.get("owner") != hold.owner or hold.attempt != 1:
            return False
        if self._make(f"{name}.end", end):
            applied()
            return True
        # Asked again, it is still true; another end is not.
        return (self._read(f"{name}.end") or {}).get("state") == end["state"]

    def record(self, outcomes: Sequence[Outcome]) -> None:
        now = self.now()
        with self._errors() as applied:
            for one in outcomes:
                outcome = {"job": one.job, "state": one.state, "reason": one.reason, "beat": one.beat, "ended_at": now}
                if one.slot >= now - self._horizon and self._make(f"{_name(one.job, one.slot)}.claim", outcome):
                    applied()

    def history(self, job: str, limit: int) -> list[Run]:
        runs = self._runs(job)
        return [run for _, run in zip(range(limit), runs, strict=False)]

    def last_run(self, job: str) -> Run | None:
        without = NEVER_A_RUN | GIVEN_UP
        return next((run for run in self._runs(job) if run.state not in without), None)

    def _runs(self, job: str) -> Iterator[Run]:
        """Newest slot first."""
        start = _name(job, "")
        with self._errors():
            names = [name for name in os.listdir(self.folder) if name.startswith(start) and name.endswith(".claim")]
        slots = sorted((int(name[len(start) :].partition(".")[0]) for name in names), reverse=True)
        for slot in slots:
            name = _name(job, slot)
            known = self._read(f"{name}.claim")
            if known is not None:
                yield self._run(job, slot, {**known, **(self._read(f"{name}.end") or {})})

    def _run(self, job: str, slot: Millis, known: dict[str, Any]) -> Run:
        def moment(name: str) -> Any:
            return wire.moment(known[name]) if name in known else None

        return Run(
            job=job,
            slot=wire.moment(slot),
            run_id=wire.run_id(self.namespace, job, slot),
            state=RunState(known.get("state", RunState.CLAIMED)),
            reason=known.get("reason"),
            claimed_at=moment("claimed_at"),
            sent_at=moment("sent_at"),
            ended_at=moment("ended_at"),
            late=known["late"] / 1000 if "late" in known else None,
            beat=known.get("beat") or None,
        )

    # --- files --------------------------------------------------------------------------------------------------------

    def _make(self, name: str, content: dict[str, Any]) -> bool:
        """Make this file unless it is there; whether it was made. All of it, or nothing."""
        written = self.folder / f".{uuid.uuid4().hex}"
        written.write_text(json.dumps(content))
        try:
            os.link(written, self.folder / name)
        except FileExistsError:
            return False
        finally:
            written.unlink()
        return True

    def _read(self, name: str) -> dict[str, Any] | None:
        """None: there is no such file. One that a crash of the machine left empty is there, and says nothing."""
        try:
            text = (self.folder / name).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BackendUnavailable(f"{self.describe()}: {error.strerror}") from error
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            return {}
        return found

    @contextmanager
    def _errors(self) -> Iterator[Callable[[], None]]:
        """No driver's error passes (C12). Within, ``applied()`` notes that something was written: from then on a
        failure is an unknown outcome, and no longer "nothing was applied"."""
        written: list[int] = []
        try:
            yield lambda: written.append(1)
            if written:
                self._sync()
        except OSError as error:
            kind = OutcomeUnknown if written else BackendUnavailable
            raise kind(f"{self.describe()}: {error.strerror or error}") from error

    def _sync(self) -> None:
        """Names survive a crash of the machine from here on."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            # Some file systems know no such call for folders.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(folder)

    def _prune(self, now: Millis) -> None:
        """Once an hour: delete what no claim can ask for any more."""
        if now - self._pruned_at < DAY // 24:
            return
        self._pruned_at = now
        for name in os.listdir(self.folder):
            slot = name.partition(".")[2].partition(".")[0]
            # A day more than the horizon: another beat's clock may be a little behind.
            if name.endswith((".claim", ".end")) and int(slot) < now - self._horizon - DAY:
                (self.folder / name).unlink(missing_ok=True)


def _name(job: str, slot: object) -> str:
    """Any text as a job's name, on any file system: two names never meet."""
    return f"{hashlib.sha256(job.encode('utf-8', 'surrogatepass')).hexdigest()[:40]}.{slot}"
