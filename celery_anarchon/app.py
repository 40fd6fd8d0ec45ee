"""``Anarchon(app)``: the scheduler as the app's default, jobs defined beside the tasks, and the runs of a job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, cast, overload

from celery import Celery, current_app

from celery_anarchon import wire
from celery_anarchon.backends.base import AgedBackend, ClaimBackend, LeaseBackend
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.choice import app_name, choose_backend, own_settings
from celery_anarchon.entries import ANY_STORE, OPTIONS_KEY
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis, Run
from celery_anarchon.options import (
    THIS_STORE,
    Settings,
    check_defaults,
    check_job_name,
    check_job_options,
    scheduler_settings,
)
from celery_anarchon.ownschedules import at, cron, every
from celery_anarchon.schedules import kind_of
from celery_anarchon.wanted import AgedDefaults, ClaimDefaults, DefaultOptions, Duration

if TYPE_CHECKING:
    # Not in Python 3.10, and not needed when the code runs.
    from typing_extensions import TypeVar, Unpack

    from celery_anarchon import calls

    # A store that is named in a URL, or by the settings, is taken for one with leases; when it is there it has its say.
    StoreT = TypeVar("StoreT", bound=ClaimBackend, default=LeaseBackend, covariant=True)
    LeasesT = TypeVar("LeasesT", bound=LeaseBackend)
    AgedT = TypeVar("AgedT", bound=AgedBackend)
else:
    from typing import TypeVar

    StoreT = TypeVar("StoreT", covariant=True)

STOCK_SCHEDULER = "celery.beat:PersistentScheduler"
OUR_SCHEDULER = "celery_anarchon:Scheduler"
WORKER_STEP = "celery_anarchon.worker:GateStep"
"""By name: a beat need not load Celery's worker."""


class Anarchon(Generic[StoreT]):
    """Makes ``celery_anarchon.Scheduler`` the app's beat scheduler, gives its workers the gate, and gives it jobs.

    :param backend: a store as URL, mapping or backend object; without it the settings decide.
    :param option_defaults: job options for all jobs that can take them.
    :raises OptionError: an unknown option or a wrong value.
    :raises ConfigurationError: the app has an Anarchon with other settings already, or *backend* names no store.
    """

    if TYPE_CHECKING:
        # Which defaults there may be, by the store. pyright reads both of these, and names unknown ones by the first.
        def __new__(
            cls,
            app: Celery,
            *,
            backend: StoreT | str | Mapping[str, Any] | None = None,
            **option_defaults: Unpack[DefaultOptions],
        ) -> Anarchon[StoreT]: ...

        @overload
        def __init__(
            self: Anarchon[LeaseBackend],
            app: Celery,
            *,
            backend: str | Mapping[str, Any] | None = None,
            **option_defaults: Unpack[DefaultOptions],
        ) -> None: ...

        @overload
        def __init__(
            self: Anarchon[LeasesT], app: Celery, *, backend: LeasesT, **option_defaults: Unpack[DefaultOptions]
        ) -> None: ...

        @overload
        def __init__(
            self: Anarchon[AgedT], app: Celery, *, backend: AgedT, **option_defaults: Unpack[AgedDefaults]
        ) -> None: ...

        @overload
        def __init__(self, app: Celery, *, backend: StoreT, **option_defaults: Unpack[ClaimDefaults]) -> None: ...

        def __init__(self, app: Celery, *, backend: Any = None, **option_defaults: Any) -> None: ...

    else:

        def __init__(
            self,
            app: Celery,
            *,
            backend: StoreT | str | Mapping[str, Any] | None = None,
            **option_defaults: Any,
        ) -> None:
            self._set_up(app, backend, option_defaults)

    def _set_up(self, app: Celery, backend: Any, option_defaults: Mapping[str, Any]) -> None:
        known = getattr(app, "anarchon", None)
        if known is not None:
            if backend not in (None, known.backend_given) or (
                option_defaults and option_defaults != known.option_defaults
            ):
                raise ConfigurationError(
                    f"app {app.main!r} has an Anarchon already, with other settings: make one per app, beside the app"
                )
            # One, however often it is made: an app factory may run twice.
            self.__dict__ = known.__dict__
            return
        # What is written here is judged here. A store that the settings name has its say when beat starts.
        self._traits, self._store = ANY_STORE, THIS_STORE
        if backend is not None:
            chosen = backend_from(backend)
            self._traits, self._store = chosen.traits, chosen.name
        check_defaults("Anarchon(...):", option_defaults, self._traits, self._store)
        self.app = app
        self.backend_given = backend
        self.option_defaults: Mapping[str, Any] = {**option_defaults}
        self._backend: ClaimBackend | None = None
        self._names: set[str] = set()
        app.anarchon = self
        app.steps["worker"].add(WORKER_STEP)
        if app.configured:
            self._prefer_our_scheduler()
        else:
            app.on_after_configure.connect(self._prefer_our_scheduler, weak=False)

    def _prefer_our_scheduler(self, *_args: Any, **_kwargs: Any) -> None:
        # Only where the user chose none: a default may not win over a setting.
        if self.app.conf.beat_scheduler == STOCK_SCHEDULER:
            self.app.conf.beat_scheduler = OUR_SCHEDULER

    # --- jobs ---------------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:
        every, cron, at = calls.Every(), calls.Cron(), calls.At()
    else:

        def every(
            self,
            name: str,
            interval: Duration,
            task: Any,
            args: Any = (),
            kwargs: Mapping[str, Any] | None = None,
            *,
            options: Mapping[str, Any] | None = None,
            **job: Any,
        ) -> None:
            """A job at every multiple of *interval* (seconds, ``timedelta`` or text such as ``"1h"``) since the epoch.

            :param task: a task, its name, or a signature.
            :param options: what ``apply_async`` takes: queue, priority, expires, ...
            :param job: job options (:mod:`celery_anarchon.options`).
            :raises OptionError: an option that is unknown or wrong.
            """
            self._add(name, every(interval), task, args, kwargs, options, job)

        def cron(
            self,
            name: str,
            text: str,
            task: Any,
            args: Any = (),
            kwargs: Mapping[str, Any] | None = None,
            *,
            options: Mapping[str, Any] | None = None,
            seconds: bool = False,
            **job: Any,
        ) -> None:
            """A job at the times of a cron text, in ``timezone=`` or the app's zone; the rest as :meth:`every`."""
            self._add(name, cron(text, seconds=seconds), task, args, kwargs, options, job)

        def at(
            self,
            name: str,
            when: datetime | str,
            task: Any,
            args: Any = (),
            kwargs: Mapping[str, Any] | None = None,
            *,
            options: Mapping[str, Any] | None = None,
            **job: Any,
        ) -> None:
            """A job with one slot; the rest as :meth:`every`."""
            self._add(name, at(when), task, args, kwargs, options, job)

    def _add(
        self,
        name: str,
        schedule: Any,
        task: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        options: Mapping[str, Any] | None,
        job: Mapping[str, Any],
    ) -> None:
        check_job_name(name)
        if name in self._names:
            raise ConfigurationError(f"job {name!r} is defined twice: its name is its identity, choose another")
        check_job_options(name, job, kind_of(schedule, job=name), self._traits, self._store)
        self._names.add(name)
        called = self.app.signature(task) if isinstance(task, str) else task
        self.app.add_periodic_task(
            schedule, called, tuple(args), dict(kwargs or {}), name=name, **{**(options or {}), OPTIONS_KEY: dict(job)}
        )

    # --- runs ---------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> StoreT:
        """The store, opened for reading.

        :raises BackendUnavailable: it does not answer.
        """
        if self._backend is None:
            self._backend = open_backend(self.app, create=False)
        return cast(StoreT, self._backend)

    def history(self, job: str, limit: int = 20) -> list[Run]:
        """The latest runs of *job*, newest slot first."""
        return self.backend.history(job, limit)

    def last_run(self, job: str) -> Run | None:
        """The latest run of *job* that was sent, or None."""
        return self.backend.last_run(job)

    def run_id(self, job: str, slot: datetime | str | Millis) -> str:
        """The id of the run of (job, slot): the Celery task id of its message."""
        return wire.run_id(namespace_of(self.app), job, _instant(slot))

    def close(self) -> None:
        """Close the store, where this object opened it. Repeatable."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


def open_backend(app: Celery, *, create: bool) -> ClaimBackend:
    """The app's store, opened. With *create* False nothing is made that is not there.

    :raises ConfigurationError: it can never work as it is configured.
    :raises BackendUnavailable: it does not answer.
    """
    backend, _ = choose_backend(app)
    settings = settings_of(app, backend)
    backend.early_tolerance = settings.early_tolerance
    backend.open(app_name(app), create=create)
    return backend


def settings_of(app: Celery, backend: ClaimBackend) -> Settings:
    """The scheduler's own settings of *app* on this store.

    :raises ConfigurationError: one of them is wrong.
    """
    return scheduler_settings(own_settings(app), backend.traits, backend.name)


def namespace_of(app: Celery) -> str:
    """What keeps this app's runs apart from others on its store. Opens nothing."""
    return choose_backend(app)[0].namespace


def run_id(job: str, slot: datetime | str | Millis, *, namespace: str | None = None) -> str:
    """The id of the run of (job, slot).

    :param slot: an aware datetime, an ISO text with a zone, or milliseconds since the epoch.
    :param namespace: without it that of the current Celery app.
    """
    return wire.run_id(namespace_of(current_app) if namespace is None else namespace, job, _instant(slot))


def _instant(slot: datetime | str | Millis) -> Millis:
    if isinstance(slot, datetime):
        return wire.instant(slot)
    return wire.parse_time(slot) if isinstance(slot, str) else slot
