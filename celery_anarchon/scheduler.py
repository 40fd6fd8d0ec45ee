"""The Celery beat scheduler: glue between Celery's calls and the dispatcher. What is not about Celery belongs below."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import Any

from celery import Celery, beat

from celery_anarchon import __version__, beatlog, events, signals
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.building import CeleryBuilder
from celery_anarchon.choice import APPS_OWN, app_name, choose_backend
from celery_anarchon.clock import Clock, SystemClock
from celery_anarchon.dispatcher import Dispatcher
from celery_anarchon.entries import JobFactory, default_definitions
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.interrupts import held_back
from celery_anarchon.job import Job
from celery_anarchon.live import CountingDict, WatchedSchedule
from celery_anarchon.onestep import OneStep
from celery_anarchon.options import late_warning
from celery_anarchon.publish import CeleryPublisher
from celery_anarchon.zonedata import packaged

logger = logging.getLogger("celery_anarchon.beat")


class Scheduler(beat.Scheduler):  # type: ignore[misc]
    """``celery -A proj beat -S celery_anarchon.Scheduler``, on as many machines as you like.

    Takes what stock beat takes (``beat_schedule``, ``add_periodic_task``) and neither reads nor writes
    ``celerybeat-schedule``: what was sent is in the store that all beats share.
    """

    dispatcher_class: type[Dispatcher] = Dispatcher
    publisher_class: type[CeleryPublisher] = CeleryPublisher
    clock: Clock = SystemClock()

    def __init__(self, app: Celery, *args: Any, lazy: bool = False, **kwargs: Any) -> None:
        self.dispatcher: Dispatcher | None = None
        self.data: CountingDict
        self.fanout = events.Fanout()
        self.fanout.add(beatlog.log_event, beatlog.wants)
        self._jobs: dict[str, Job] = {}
        self._stop_signals: list[int] = []
        self._unread = ""
        """Why changes could not be taken in at the last look."""
        super().__init__(app, *args, lazy=lazy, **kwargs)

    # --- start --------------------------------------------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Celery calls this once the process is the one that will beat (after the fork of ``worker -B``)."""
        try:
            self._set_up()
        except ConfigurationError as error:
            # Celery logs any other exception with its traceback; this one is for the person who wrote the setting.
            logger.critical("%s", error)
            raise SystemExit(2) from None

    def _set_up(self) -> None:
        backend, source = choose_backend(self.app)
        self._factory = JobFactory(self.app, backend.traits, self.Entry, backend.name)
        settings = self._factory.settings
        backend.early_tolerance = settings.early_tolerance
        self._definitions = WatchedSchedule(self.app, self.max_interval, self.clock)
        self.schedule = {}
        for name, definition in self._definitions.current.items():
            self.schedule[name] = self._factory.entry(name, definition)
        self.install_default_entries(self.schedule)
        self._factory.check_names(self.schedule)
        self._jobs = {name: self._job(name, entry) for name, entry in self.schedule.items()}
        self.schedule.take_touched()

        self.fanout.add(signals.teller(self.app, backend.namespace), signals.wants)
        if settings.packaged_tzdata:
            logger.info("zones: those of the tzdata package, release %s", packaged())
        label = f"{socket.gethostname()}:{os.getpid()}"
        publisher = self.publisher_class(self.app, namespace=backend.namespace, label=label)
        self.dispatcher = self.dispatcher_class(
            backend=backend,
            publisher=publisher,
            builder=CeleryBuilder(publisher) if backend.traits.one_step else None,
            owner=secrets.token_hex(16),
            label=label,
            app_name=app_name(self.app),
            version=__version__,
            settings=settings,
            clock=self.clock,
            fanout=self.fanout,
            max_interval=self.max_interval,
            stopping=lambda: bool(self._stop_signals),
        )
        one_step = self.dispatcher.one_step
        self.dispatcher.open(lambda: _say_where(backend, source, one_step))
        self.dispatcher.load(self._jobs)

    def install_default_entries(self, data: dict[str, Any]) -> None:
        """As stock's, which would lose them again when it merges ``beat_schedule``."""
        for name, definition in default_definitions(self.app, data).items():
            data[name] = self._factory.entry(name, definition)

    def _job(self, name: str, entry: beat.ScheduleEntry) -> Job:
        job = self._factory.job(entry)
        if job.name != name:
            # The engine knows a job by one name: a second one would stop it, and all jobs with it.
            raise ConfigurationError(
                f"job {name!r}: the entry object under this key is named {job.name!r}; give it the name of its key"
            )
        warning = late_warning(job.name, job.options, self._factory.settings)
        if warning and self._factory.traits.leases:
            logger.warning("%s", warning)
        return job

    # --- the schedule, as Celery and its users see it -----------------------------------------------------------------

    def get_schedule(self) -> CountingDict:
        return self.data

    def set_schedule(self, schedule: Any) -> None:
        self.data = CountingDict()
        self.data.update(schedule)

    schedule = property(get_schedule, set_schedule)

    def _see_changes(self) -> None:
        """Take in what this process changed; whatever that raises, beat goes on with the schedule that it has."""
        try:
            self._take_changes()
        except Exception as error:
            # Said once, not at every tick until somebody has mended it.
            if repr(error) != self._unread:
                logger.error(
                    "the schedule cannot be read, the one before goes on: %s",
                    error,
                    exc_info=None if isinstance(error, ConfigurationError) else error,
                )
            self._unread = repr(error)
        else:
            self._unread = ""

    def _take_changes(self) -> None:
        """A definition that has turned bad is one job's trouble."""
        changed = self._definitions.changed()
        for name in changed:
            if name in self._definitions.current:
                self._try(name, self._redefine, name, self._definitions.current[name])
            else:
                self.schedule.pop(name, None)
        if changed:
            self.install_default_entries(self.schedule)
        if self.schedule.is_touched:
            for name in self.schedule.take_touched():
                self._jobs.pop(name, None)
                if name in self.schedule:
                    self._try(name, self._rebuild, name)
            if self.dispatcher is not None:
                self.dispatcher.load(self._jobs)

    def _redefine(self, name: str, definition: Any) -> None:
        self.schedule.pop(name, None)
        self.schedule[name] = self._factory.entry(name, definition)

    def _rebuild(self, name: str) -> None:
        self._jobs[name] = self._job(name, self.schedule[name])

    def _try(self, name: str, step: Any, *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:
            self.fanout.emit(events.JobTrouble(job=name, error=error))

    # --- ticks --------------------------------------------------------------------------------------------------------

    def tick(self, *_args: Any, **_kwargs: Any) -> float:
        """Everything that is due; seconds until the next call."""
        if self.dispatcher is None:
            return float(self.max_interval)
        with held_back() as self._stop_signals:
            self._see_changes()
            wait = self.dispatcher.tick()
        return wait

    def should_sync(self) -> bool:
        """There is nothing to write: every decision is in the store when a tick ends."""
        return False

    def close(self) -> None:
        """Called inside Celery's signal handler and again at exit."""
        if self.dispatcher is not None:
            self.dispatcher.close()
        super().close()

    @property
    def info(self) -> str:
        """For beat's banner: made by a throw-away instance, so nothing is opened."""
        try:
            backend, source = choose_backend(self.app)
        except ConfigurationError as error:
            return f"    . store -> {error}"
        return f"    . store -> {backend.describe()} ({source})"


def _say_where(backend: ClaimBackend, source: str, one_step: OneStep) -> None:
    where = backend.describe()
    if source == "default":
        logger.warning("store: %s (no anarchon_backend is set: this file serves the beats of this one machine)", where)
    elif backend.name == "sqlite" and source in APPS_OWN:
        logger.warning("store: %s (%s: this file serves the beats of this one machine)", where, source)
    else:
        logger.info("store: %s (%s)%s", where, source, _in_words(one_step) if backend.traits.one_step else "")


def _in_words(one_step: OneStep) -> str:
    if one_step.on:
        return "; claim and enqueue in one step"
    if one_step.reason:
        return f"; claim and enqueue in two steps: {one_step.reason}"
    return ""
