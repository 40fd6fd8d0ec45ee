"""Job options and scheduler-wide settings: parsing, relations, refusals.

Belongs here: what a user may write, what it means in milliseconds, and the sentence that tells what is wrong with it.
Never sees a Celery app: callers hand in plain mappings. Does not belong here: what the options do.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import AnarchonError, ConfigurationError, OptionError
from celery_anarchon.model import Coalesce, Millis, OnUnknown, Overlap, Traits

_T = TypeVar("_T")

DEFAULT_HISTORY_SIZE = 100

CLAIM_ONLY_MAX_LATE: Millis = 60_000
"""``max_late`` on a store that only takes claims, unless the job says otherwise: how far a beat looks back when it
starts, and how long a winner keeps what it cannot publish."""

DEADLINE = "beat_cron_starting_deadline"
"""Celery's own setting that is `max_late` for its crontabs."""

WORKER_SIDE = frozenset({"overlap", "max_attempts", "queue_timeout", "on_unknown"})
"""Options that only a worker which asks the store can honour."""

LEASE_ONLY = frozenset({"catch_up", "coalesce"}) | WORKER_SIDE
"""Options that a claim-only store cannot honour."""

SLOTS_ONLY = frozenset({"jitter", "max_late", "catch_up", "coalesce", "history_ttl"})
"""Options that mean nothing without slots that are known beforehand; and the last run must stay in the history."""

LATER_SETTINGS = frozenset({"shadow", "http_port"})
"""Settings whose names are reserved for features that this release does not have."""

OWN_SETTINGS = frozenset(
    {
        *("backend", "app_name", "jobs", "lease", "heartbeat", "batch", "max_skew", "early_tolerance"),
        *("packaged_tzdata", "gate_wait", "one_step"),
    }
)


class Kind(str, enum.Enum):
    """What a job's timetable is, as far as options care."""

    INTERVAL = "interval"
    CRON = "cron"
    AT = "at"
    SOLAR = "solar"
    CUSTOM = "of a class of its own"
    CHAIN = "of a class that names no slots beforehand"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job asks for, resolved. Durations in milliseconds."""

    jitter: Millis = 0
    timeout: Millis | None = None
    offset: Millis | Literal["auto"] | None = None
    timezone: str | None = None
    max_late: Millis | None = None
    history_size: int = DEFAULT_HISTORY_SIZE
    history_ttl: Millis | None = None
    catch_up: Millis | None = None
    """How far back missed slots are sent; 0: not at all; None: the latest missed one, however old."""
    coalesce: Coalesce = Coalesce.LATEST
    overlap: Overlap = Overlap.ALLOW
    max_attempts: int | None = None
    """Bodies started at most; None: the task's own acknowledgement decides, as in stock Celery."""
    queue_timeout: Millis | None = None
    """None: the entry's ``expires``, else an hour where runs may not overlap, else a day."""
    on_unknown: OnUnknown | None = None
    """None: `skip` where runs may not overlap or attempts are counted, else `repeat`."""

    @property
    def needs_workers(self) -> bool:
        """Whether this job relies on workers that ask the store."""
        return self.overlap is not Overlap.ALLOW or self.max_attempts is not None

    @property
    def when_unknown(self) -> OnUnknown:
        """What a worker does when the store cannot be asked."""
        if self.on_unknown is not None:
            return self.on_unknown
        return OnUnknown.SKIP if self.needs_workers else OnUnknown.REPEAT


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The scheduler's own settings. Durations in milliseconds."""

    lease: Millis = 30_000
    heartbeat: Millis = 10_000
    batch: int = 100
    max_skew: Millis = 5_000
    """How far this host's clock may be off the store's."""
    early_tolerance: Millis = 5_000
    gate_wait: Millis = 30_000
    """How long a worker holds a run that it cannot ask the store about."""
    packaged_tzdata: bool = False
    """Read zones from the ``tzdata`` package only, whatever the host has."""
    one_step: bool | Literal["auto"] = "auto"
    """Claim and message as one write of the store: where it can be, never, or no start without."""


# --- reading single values --------------------------------------------------------------------------------------------


def _duration(value: Any, what: str) -> Millis:
    return parse_duration(value, what)


def _positive(value: Any, what: str) -> Millis:
    span = parse_duration(value, what)
    if span <= 0:
        raise ConfigurationError(f"{what} must be longer than zero, not {value!r}")
    return span


_LARGEST = 2**31 - 1
"""What every store can keep as it is: PostgreSQL's integer. Beyond 2**53 a script of Redis would round it."""


def _size(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ConfigurationError(f"{what} must be a whole number of at least 1 and at most {_LARGEST}, not {value!r}")
    return value


def _switch(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} must be True or False, not {value!r}")
    return value


def _one_step(value: Any, what: str) -> bool | Literal["auto"]:
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise ConfigurationError(f'{what} must be "auto", True or False, not {value!r}')
    return value


def _offset(value: Any, what: str) -> Millis | Literal["auto"]:
    return "auto" if value == "auto" else parse_duration(value, what, negative=True)


def _zone(value: Any, what: str) -> str:
    name = getattr(value, "key", None) or value
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f'{what} must be the name of a zone such as "Europe/Paris", not {value!r}')
    return name


def _coalesce(value: Any, what: str) -> Coalesce:
    try:
        return Coalesce(value)
    except ValueError:
        raise ConfigurationError(f'{what} must be "latest" or "all", not {value!r}') from None


def _overlap(value: Any, what: str) -> Overlap:
    try:
        return Overlap(value)
    except ValueError:
        raise ConfigurationError(f'{what} must be "allow", "skip" or "queue_one", not {value!r}') from None


def _on_unknown(value: Any, what: str) -> OnUnknown:
    try:
        return OnUnknown(value)
    except ValueError:
        raise ConfigurationError(f'{what} must be "repeat" or "skip", not {value!r}') from None


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "jitter": _duration,
    "timeout": _positive,
    "offset": _offset,
    "timezone": _zone,
    "max_late": _positive,
    "history_size": _size,
    "history_ttl": _positive,
    "catch_up": _duration,
    "coalesce": _coalesce,
    "overlap": _overlap,
    "max_attempts": _size,
    "queue_timeout": _positive,
    "on_unknown": _on_unknown,
}

JOB_OPTIONS = frozenset(_READERS)

THIS_STORE = "this store"
"""What a store is called in a refusal where its name is not known."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'jitter'?)``, or nothing when no known name is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


# --- job options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptionSources:
    """Where the options of a job may come from, the strongest first."""

    entry: Mapping[str, Any]
    """Of the schedule entry or the call that made it."""
    by_name: Mapping[str, Any]
    """``anarchon_jobs[job]``."""
    defaults: Mapping[str, Any]
    """``Anarchon(app, ...)``."""
    settings: Mapping[str, Any]
    """``anarchon_<option>``, without the prefix."""
    deadline: Any = None
    """``beat_cron_starting_deadline``, where it is about this job: `max_late`, if nothing else says that."""


def job_options(job: str, kind: Kind, sources: OptionSources, traits: Traits, store: str = THIS_STORE) -> JobOptions:
    """The options of *job*: each from the strongest source that names it.

    What is written for this very job (entry, ``anarchon_jobs``) must be honoured or is refused; a default for all jobs
    applies to those that can take it.

    :param store: the name of the backend, for refusals.
    :raises OptionError: an unknown name, a wrong value, or an option that this job, this store or this release cannot
        honour. The text names job, option, store and fix.
    """
    found: dict[str, Any] = {}
    for source, given in (("", sources.entry), ("anarchon_jobs: ", sources.by_name)):
        for name, value in given.items():
            if name in found or value is None:
                continue
            what = f"{source}job {job!r}: option {name!r}"
            _refuse_unknown(name, what)
            reason = None if is_stock(name, value) else _cannot(name, kind, traits, store)
            if reason:
                raise OptionError(f"{what} {reason}; remove it")
            found[name] = _read(name, value, what)
    for source, given in (("Anarchon(...)", sources.defaults), ("setting", sources.settings)):
        for name, value in given.items():
            if name not in found and value is not None and not _cannot(name, kind, traits):
                label = f"anarchon_{name}" if source == "setting" else name
                found[name] = _read(name, value, f"{source} {label!r}")
    reach = _REACH
    if sources.deadline is not None and "max_late" not in found and not _cannot("max_late", kind, traits):
        found["max_late"] = _read("max_late", sources.deadline, f"setting {DEADLINE!r}")
        reach = f"option 'jitter' + setting {DEADLINE!r}"
    if not traits.leases:
        found.setdefault("max_late", CLAIM_ONLY_MAX_LATE)
    options = JobOptions(**found)
    _refuse_beyond_horizon(job, options, traits, store, reach)
    _refuse_short_history(job, options, traits, store)
    return options


def check_job_name(name: Any) -> str:
    """*name*, if a job can be called so.

    :raises ConfigurationError: no text, or none that run ids and messages can carry.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a job's name is a text of at least one character, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"job {name!r}: half of a surrogate pair is no character, so run ids and messages cannot carry this name; "
            "give the job another one"
        ) from None
    return name


def check_job_options(job: str, given: Mapping[str, Any], kind: Kind, traits: Traits, store: str = THIS_STORE) -> None:
    """Refuse unknown names, wrong values and options that this kind of job cannot have, where the job is written; and
    what this store cannot honour whatever the defaults, which are not known there.

    :param store: the name of the backend, for refusals.
    :raises OptionError: the text names job, option, store and fix.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        what = f"job {job!r}: option {name!r}"
        _refuse_unknown(name, what)
        if value is not None:
            found[name] = _read(name, value, what)
            reason = None if is_stock(name, value) else _cannot(name, kind, traits, store)
            if reason:
                raise OptionError(f"{what} {reason}; remove it")
    options = JobOptions(**found)
    _refuse_beyond_horizon(job, options, traits, store)
    _refuse_short_history(job, options, traits, store)


def check_defaults(where: str, given: Mapping[str, Any], traits: Traits, store: str = THIS_STORE) -> None:
    """Refuse scheduler-wide defaults that no job could take on this store.

    :param store: the name of the backend, for refusals.
    :raises OptionError: the text names the default, the store and the fix.
    """
    for name, value in given.items():
        what = f"{where} {name!r}"
        _refuse_unknown(name, what)
        if value is None or is_stock(name, value):
            continue
        if all(_cannot(name, kind, traits) for kind in Kind):
            raise OptionError(f"{what} {_cannot(name, Kind.INTERVAL, traits, store)}; remove it")
        _read(name, value, what)


def late_warning(job: str, options: JobOptions, settings: Settings) -> str | None:
    """A sentence when ``max_late`` is too short for a takeover to be in time, else None."""
    least = settings.lease + settings.heartbeat
    if options.max_late is None or options.max_late >= least:
        return None
    return (
        f"job {job!r}: max_late {options.max_late / 1000:g} s is below lease + heartbeat ({least / 1000:g} s): "
        "a slot whose beat dies between claim and publish becomes a misfire"
    )


def is_stock(name: str, value: Any) -> bool:
    """Whether this asks for no more than what stock Celery does, so that every store can honour it."""
    return name == "overlap" and value == Overlap.ALLOW


def _refuse_unknown(name: str, what: str) -> None:
    if name not in JOB_OPTIONS:
        raise OptionError(f"{what} is not known{nearest(name, JOB_OPTIONS)}; known: {', '.join(sorted(JOB_OPTIONS))}")


def _cannot(name: str, kind: Kind, traits: Traits, store: str = THIS_STORE) -> str | None:
    if name == "offset" and kind is not Kind.INTERVAL:
        return f"shifts the grid of an interval, and this job is {kind}"
    if name == "timezone" and kind is not Kind.CRON:
        return f"is the zone of a crontab, and this job is {kind}"
    if name == "overlap" and kind is Kind.AT:
        return "is about the next slot, and an at() job has one only"
    if name in SLOTS_ONLY and kind is Kind.CHAIN:
        return f"needs slots that are known beforehand, and this job is {kind}"
    if name in LEASE_ONLY and not traits.leases:
        return f"needs a store with leases, and {store} only takes claims"
    if name in WORKER_SIDE and not traits.follows_runs:
        return (
            "needs the worker side: put Anarchon(app, ...) into the module that beat and workers load, on "
            "a store that follows runs"
        )
    if name == "history_ttl" and not traits.history_by_age:
        return f"needs a store that can drop history by age, and {store} cannot"
    return None


def _read(name: str, value: Any, what: str) -> Any:
    try:
        return _READERS[name](value, what)
    except AnarchonError as error:
        raise OptionError(str(error)) from None


_REACH = "options 'jitter' + 'max_late'"


def _refuse_beyond_horizon(job: str, options: JobOptions, traits: Traits, store: str, what: str = _REACH) -> None:
    if traits.horizon is None:
        return
    reach = options.jitter + (options.max_late or 0)
    if reach >= traits.horizon:
        raise OptionError(
            f"job {job!r}: {what} ({reach / 1000:g} s) must be shorter than {store} remembers a claim "
            f"({traits.horizon / 1000:g} s); lower them"
        )


def _refuse_short_history(job: str, options: JobOptions, traits: Traits, store: str) -> None:
    if options.history_ttl is not None and options.history_ttl <= traits.history_ttl_above:
        raise OptionError(
            f"job {job!r}: option 'history_ttl' ({options.history_ttl / 1000:g} s) must be longer than the window in "
            f"which {store} remembers claims ({traits.history_ttl_above / 1000:g} s); raise it"
        )


# --- the scheduler's settings -----------------------------------------------------------------------------------------


def scheduler_settings(given: Mapping[str, Any], traits: Traits, store: str = THIS_STORE) -> Settings:
    """The settings out of ``anarchon_*`` values, their prefix cut off. Job option defaults are left to others.

    :param store: the name of the backend, for refusals.
    :raises ConfigurationError: an unknown name, a wrong value, or ``heartbeat > lease / 3``.
    """
    known = OWN_SETTINGS | JOB_OPTIONS | LATER_SETTINGS
    for name, value in given.items():
        what = f"setting 'anarchon_{name}'"
        if name not in known:
            offered = nearest(f"anarchon_{name}", (f"anarchon_{other}" for other in known))
            raise ConfigurationError(f"{what} is not known{offered}")
        if name in LATER_SETTINGS and value not in (None, False, "auto"):
            raise ConfigurationError(f"{what} belongs to a feature that this release does not have yet; remove it")
        if name in ("lease", "heartbeat", "gate_wait", "max_skew") and value is not None and not traits.leases:
            raise OptionError(f"{what} needs a store with leases, and {store} only takes claims; remove it")
    lease = _given(given, "lease", _positive, Settings.lease)
    if lease < 1_000:
        raise ConfigurationError(f"setting 'anarchon_lease' must be at least 1 s, not {given['lease']!r}")
    max_skew = _given(given, "max_skew", _positive, Settings.max_skew)
    if max_skew < 1_000:
        raise ConfigurationError(f"setting 'anarchon_max_skew' must be at least 1 s, not {given['max_skew']!r}")
    heartbeat = _given(given, "heartbeat", _positive, lease // 3)
    if heartbeat * 3 > lease:
        raise ConfigurationError(
            f"setting 'anarchon_heartbeat' ({heartbeat / 1000:g} s) must be at most a third of 'anarchon_lease' "
            f"({lease / 1000:g} s): lower it to {lease // 3 / 1000:g} or raise the lease"
        )
    return Settings(
        lease=lease,
        heartbeat=heartbeat,
        batch=_given(given, "batch", _size, Settings.batch),
        max_skew=max_skew,
        early_tolerance=_given(given, "early_tolerance", _positive, Settings.early_tolerance),
        gate_wait=_given(given, "gate_wait", _duration, lease),
        packaged_tzdata=_given(given, "packaged_tzdata", _switch, Settings.packaged_tzdata),
        one_step=_given(given, "one_step", _one_step, Settings.one_step),
    )


def _given(given: Mapping[str, Any], name: str, reader: Callable[[Any, str], _T], default: _T) -> _T:
    value = given.get(name)
    return default if value is None else reader(value, f"setting 'anarchon_{name}'")
