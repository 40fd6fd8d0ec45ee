"""Schedule entries, as Celery users write them, to jobs, as the engine knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab

from celery_anarchon import wire
from celery_anarchon.alike import Alike
from celery_anarchon.appzones import own_zone
from celery_anarchon.choice import jobs_setting, own_settings, schedule_setting
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import ConfigurationError, OptionError
from celery_anarchon.job import Job
from celery_anarchon.model import Millis, Overlap, Terms, Traits
from celery_anarchon.options import (
    DEADLINE,
    JOB_OPTIONS,
    THIS_STORE,
    WORKER_SIDE,
    JobOptions,
    Kind,
    OptionSources,
    Settings,
    check_defaults,
    check_job_name,
    is_stock,
    job_options,
    nearest,
    scheduler_settings,
)
from celery_anarchon.ownschedules import cron, every
from celery_anarchon.pace import check_pace
from celery_anarchon.schedules import kind_of, timetable_by_class, timetable_of
from celery_anarchon.timetable import Chain
from celery_anarchon.zonedata import packaged

ENTRY_KEYS = frozenset({"task", "schedule", "args", "kwargs", "options", "relative"})
HOUR: Millis = 3_600_000
DAY: Millis = 24 * HOUR

OPTIONS_KEY = "anarchon"
"""The one key inside an entry's ``options`` that stock beat accepts and ignores."""

CANVAS = {"celery.chain": "chain", "celery.group": "group", "celery.chord": "chord"}
"""Canvas entries: stock sends a chain as a task that no worker can run, and cannot send a group at all."""

ANY_STORE = Traits(
    leases=True,
    horizon=None,
    server_time=True,
    durable=True,
    any_job_name=True,
    history_by_age=True,
    follows_runs=True,
)
"""For readers that look at no store: nothing is refused on a store's account."""


@dataclass
class JobFactory:
    """Builds jobs of one app for one kind of store.

    :raises ConfigurationError: a scheduler-wide setting is wrong.
    """

    app: Celery
    traits: Traits
    entry_class: type[ScheduleEntry] = ScheduleEntry
    store: str = THIS_STORE
    """The name of the backend, for refusals."""
    settings: Settings = field(init=False)
    _by_name: dict[str, dict[str, Any]] = field(init=False)
    _defaults: Mapping[str, Any] = field(init=False)
    _option_settings: dict[str, Any] = field(init=False)
    _alike: Alike = field(init=False)

    def __post_init__(self) -> None:
        given = own_settings(self.app)
        installed = getattr(self.app, "anarchon", None)
        # A store that could follow runs does not help where no worker asks it.
        self.traits = replace(self.traits, follows_runs=self.traits.follows_runs and installed is not None)
        self.settings = scheduler_settings(given, self.traits, self.store)
        if self.settings.packaged_tzdata:
            # Here, because no timetable is made before, by a beat or by a command.
            packaged()
        self._by_name = jobs_setting(given)
        self._option_settings = {name: value for name, value in given.items() if name in JOB_OPTIONS}
        check_defaults("setting 'anarchon_...':", self._option_settings, self.traits, self.store)
        self._defaults = getattr(installed, "option_defaults", {})
        check_defaults("Anarchon(...):", self._defaults, self.traits, self.store)
        self._alike = Alike(self.app)

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse an ``anarchon_jobs`` key that names none of *names*: its options would be silently ignored.

        :raises OptionError: with the nearest name.
        """
        known = set(names)
        for name in self._by_name:
            if name not in known:
                raise OptionError(f"anarchon_jobs: no job {name!r}{nearest(name, known)}")

    def entry(self, name: str, definition: Any) -> ScheduleEntry:
        """The schedule entry of a definition out of ``beat_schedule``.

        :raises ConfigurationError: the text names the job, the key and the fix.
        """
        if isinstance(definition, ScheduleEntry):
            return _copy_of(definition, name, self.app)
        if not isinstance(definition, Mapping):
            raise ConfigurationError(f"job {name!r}: a schedule entry is a mapping, not {definition!r}")
        for key in definition:
            if key not in ENTRY_KEYS:
                hint = ' (job options go into "options": {"anarchon": {...}})' if key in JOB_OPTIONS else ""
                raise ConfigurationError(
                    f"job {name!r}: key {key!r} is not known{hint or nearest(str(key), ENTRY_KEYS)}"
                )
        for key in ("task", "schedule"):
            if not definition.get(key) and definition.get(key) != 0:
                raise ConfigurationError(f"job {name!r}: key {key!r} is missing")
        for key, kinds in (("args", (list, tuple)), ("kwargs", (Mapping,)), ("options", (Mapping,))):
            if definition.get(key) is not None and not isinstance(definition[key], kinds):
                wanted = "a list or tuple" if key == "args" else "a mapping"
                raise ConfigurationError(f"job {name!r}: key {key!r} must be {wanted}, not {definition[key]!r}")
        try:
            schedule = self._alike.schedule(definition["schedule"], definition.get("relative"))
            # When beat started: stock works it out anew for each entry, and here nothing depends on it.
            given = {**definition, "schedule": schedule, "last_run_at": self._alike.started}
            return self.entry_class(**given, name=name, app=self.app)
        except Exception as error:
            raise ConfigurationError(f"job {name!r}: {error}") from error

    def job(self, entry: ScheduleEntry) -> Job:
        """The job of an entry.

        :raises ConfigurationError: the text names the job, the option and the fix.
        """
        name = check_job_name(entry.name)
        given = (entry.options or {}).get(OPTIONS_KEY) or {}
        if not isinstance(given, Mapping):
            raise OptionError(f'job {name!r}: "options": {{"anarchon": ...}} must be a mapping, not {given!r}')
        try:
            schedule = timetable_by_class(entry.schedule, job=name, app=self.app)
            kind = kind_of(schedule, job=name)
            options = self._job_options(name, kind, entry, given)
            timetable = timetable_of(
                schedule,
                job=name,
                app=self.app,
                offset=options.offset,
                timezone=options.timezone,
                apps_zone=self._alike.zone,
            )
            check_pace(name, options, timetable, self.traits, SystemClock().wall(), self.store)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"job {name!r}: {type(error).__name__}: {error}") from error
        if isinstance(timetable, Chain) and not self.traits.leases:
            raise ConfigurationError(
                f"job {name!r}: its class names no slots beforehand ({timetable.reason}), and {self.store} cannot "
                "tell what the last run was; register a timetable for the class, or use a store with leases"
            )
        if options.timeout is not None and (entry.options or {}).get("time_limit") is not None:
            raise OptionError(f"job {name!r}: options 'timeout' and 'time_limit' mean the same; remove one of them")
        if entry.task in CANVAS:
            self._refuse_for_canvas(name, entry.task, given)
        sent = entry.options or {}
        eta = sent.get("eta")
        return Job(
            name=name,
            timetable=timetable,
            options=options,
            task=entry.task,
            payload=entry,
            terms=self._terms(entry.task, options, sent.get("expires")),
            countdown=_span(sent.get("countdown")) or 0,
            eta=wire.instant(eta) if isinstance(eta, datetime) and eta.tzinfo else None,
        )

    def _refuse_for_canvas(self, name: str, task: str, given: Mapping[str, Any]) -> None:
        """Nothing of what is written for this very job may be ignored; defaults are not for it."""
        by_name = self._by_name.get(name, {})
        for option in sorted(WORKER_SIDE):
            value = by_name.get(option) if given.get(option) is None else given[option]
            if value is not None and not is_stock(option, value):
                raise OptionError(
                    f"job {name!r}: option {option!r} is about one run, and {task} is many messages; remove it, or "
                    "schedule a task that starts the canvas"
                )

    def _terms(self, task: str, options: JobOptions, expires: Any) -> Terms | None:
        """What runs are followed by, where they are: by workers that ask the store, and not those of a canvas."""
        if task in CANVAS or not self.traits.follows_runs:
            return None
        default = DAY if options.overlap is Overlap.ALLOW else HOUR
        return self._alike.one(
            Terms(
                lease=self.settings.lease,
                queue_timeout=options.queue_timeout or max(0, _span(expires) or 0) or default,
                max_attempts=options.max_attempts,
                overlap=options.overlap,
            )
        )

    def _job_options(self, name: str, kind: Kind, entry: ScheduleEntry, given: Mapping[str, Any]) -> JobOptions:
        def resolved() -> JobOptions:
            sources = self._sources(name, kind, entry, given)
            return job_options(name, kind, sources, self.traits, self.store)

        if given or name in self._by_name:
            return self._alike.one(resolved())
        # Most jobs have no options of their own: what the defaults make of such a job depends on its class alone, and
        # on which of them are not for it.
        return self._alike.options((kind, isinstance(entry.schedule, crontab), self._not_for(entry)), resolved)

    def _sources(self, name: str, kind: Kind, entry: ScheduleEntry, given: Mapping[str, Any]) -> OptionSources:
        left_out = self._not_for(entry)
        settings = {option: value for option, value in self._option_settings.items() if option not in left_out}
        defaults = {option: value for option, value in self._defaults.items() if option not in left_out}
        celerys = kind is Kind.CRON and isinstance(entry.schedule, crontab)
        return OptionSources(
            entry=given,
            by_name=self._by_name.get(name, {}),
            defaults=defaults,
            settings=settings,
            deadline=self.app.conf.get(DEADLINE) if celerys else None,
        )

    def _not_for(self, entry: ScheduleEntry) -> frozenset[str]:
        """The options whose defaults are not for this entry: it cannot take them, or says the same in another way."""
        found: frozenset[str] = WORKER_SIDE if entry.task in CANVAS else frozenset()
        if _has_zone(entry.schedule, self.app):
            found |= {"timezone"}
        if isinstance(entry.schedule, every) and entry.schedule.offset != 0:
            found |= {"offset"}
        if (entry.options or {}).get("time_limit") is not None:
            found |= {"timeout"}
        return found


def _copy_of(entry: ScheduleEntry, name: str, app: Celery) -> ScheduleEntry:
    """*entry* as the entry of its key, which names the job, as in stock: one object may stand under several keys."""
    # Neither by its class nor by copy.copy(), which asks ScheduleEntry what to make it of: what a subclass has beyond
    # that would be lost, or refused.
    copied = object.__new__(type(entry))
    vars(copied).update(vars(entry), name=name, app=app)
    return copied


def _has_zone(schedule: Any, app: Celery) -> bool:
    """Whether the schedule itself says in which zone it is meant."""
    if isinstance(schedule, cron):
        return schedule.zone is not None
    try:
        return isinstance(schedule, crontab) and own_zone(schedule, app) is not None
    except ConfigurationError:
        # It does, and which zones will not do is told when its timetable is made.
        return True


def _span(value: Any) -> Millis | None:
    """Seconds or a timedelta, as Celery takes them, in milliseconds; None: neither."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return round(value * 1000) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def definitions_of(app: Celery) -> dict[str, Any]:
    """The app's ``beat_schedule`` and Celery's default entries, as a beat of this app has them."""
    definitions = dict(schedule_setting(app))
    return {**default_definitions(app, definitions), **definitions}


def default_definitions(app: Celery, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Celery's own periodic task, under stock beat's condition."""
    name = "celery.backend_cleanup"
    if name in definitions or not app.conf.result_expires or app.backend.supports_autoexpire:
        return {}
    return {name: {"task": name, "schedule": crontab("0", "4", "*"), "options": {"expires": 12 * 3600}}}


def jobs_of(app: Celery) -> tuple[list[Job], list[ConfigurationError]]:
    """The app's jobs, and what is wrong with the entries that are none. Looks at no store.

    :raises ConfigurationError: a scheduler-wide setting is wrong.
    """
    factory = JobFactory(app, ANY_STORE)
    jobs: list[Job] = []
    errors: list[ConfigurationError] = []
    definitions = definitions_of(app)
    for name, definition in definitions.items():
        try:
            jobs.append(factory.job(factory.entry(name, definition)))
        except ConfigurationError as error:
            errors.append(error)
    try:
        factory.check_names(definitions)
    except ConfigurationError as error:
        errors.append(error)
    return jobs, errors
