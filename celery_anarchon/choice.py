"""Which store a Celery app's beats share, and why; the settings of the app as plain mappings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from celery import Celery

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.registry import backend_from, backend_from_celery
from celery_anarchon.errors import ConfigurationError

ENVIRONMENT = "CELERY_ANARCHON_BACKEND"
DEFAULT_URL = "sqlite:///anarchon.db"
PREFIX = "anarchon_"
CELERYS = "celery_"
"""What people write before a setting of an app without a namespace, where it does not belong."""

DATABASE_PREFIXES = ("sqla", "sqlalchemy", "db")
"""What Celery writes before the URL of a database."""

DATABASE = "a database: "

HOLD_LEASES = {
    **{name: name for name in ("redis", "rediss", "redis+socket", "redis+cluster", "sentinel", "valkey", "valkeys")},
    **{f"{DATABASE}{name}": name for name in ("postgresql", "sqlite")},
    f"{DATABASE}postgres": "postgresql",
}
"""Schemes of Celery's brokers and result backends that can be a store with leases -> that store's scheme."""

BROKER, BROKER_WRITE, RESULTS = "setting broker_url", "setting broker_write_url", "setting result_backend"
APPS_OWN = (BROKER, BROKER_WRITE, RESULTS)
"""Where a choice came from that nobody made: what the app has for other ends."""

RABBITMQ = {"amqp": "amqp", "pyamqp": "amqp", "librabbitmq": "amqp", "amqps": "amqps"}


def own_settings(app: Celery) -> dict[str, Any]:
    """Every ``anarchon_*`` setting that the user gave, by its name without that prefix, from whichever form of
    configuration and under whichever namespace (Django: ``CELERY_ANARCHON_...``).

    :raises ConfigurationError: one is spelt so that Celery does not find it.
    """
    # Before its first setting is read, an app's configuration is not there, and neither is its namespace.
    app.conf.get(PREFIX)
    namespace: str = getattr(app.conf, "prefix", None) or ""
    names: set[str] = set()
    for mapping in getattr(app.conf, "maps", ()):
        for key in map(str, list(mapping)):
            name = key.lower().removeprefix(namespace.lower() or CELERYS)
            if name.startswith(PREFIX):
                _check_spelling(key, name, namespace)
                names.add(name)
    return {name.removeprefix(PREFIX): app.conf.get(name) for name in sorted(names)}


def _check_spelling(key: str, name: str, namespace: str) -> None:
    """As Celery looks it up: in the letters of the app's namespace, or in small ones without it."""
    right = f"{namespace}{name.upper() if namespace.isupper() else name}"
    if key not in (right, name):
        raise ConfigurationError(
            f"setting {key!r} is not read by Celery, so it would count for nothing: write {right!r}"
        )


def choose_backend(app: Celery) -> tuple[ClaimBackend, str]:
    """The store, not opened yet, and where the choice comes from. Costs no I/O.

    The order: ``Anarchon(app, backend=...)``, the setting ``anarchon_backend``, the environment's
    ``CELERY_ANARCHON_BACKEND``; what the app has already: its broker, or its result backend, where that can hold
    leases, then its broker where that is RabbitMQ; else SQLite in the working directory, which serves the beats of one
    machine.

    :raises ConfigurationError: the text names the source and the fix.
    """
    given = own_settings(app)
    installed = getattr(app, "anarchon", None)
    for value, source in (
        (getattr(installed, "backend_given", None), "Anarchon(app, backend=...)"),
        (given.get("backend"), "setting anarchon_backend"),
        (os.environ.get(ENVIRONMENT), f"environment {ENVIRONMENT}"),
    ):
        if value:
            try:
                return backend_from(value), source
            except ConfigurationError as error:
                raise type(error)(f"{source}: {error}") from None
    return _of_the_app(app) or (backend_from(DEFAULT_URL), "default")


def _of_the_app(app: Celery) -> tuple[ClaimBackend, str] | None:
    """A store where the app's messages or results are."""
    conf = app.conf
    broker = conf.broker_write_url or ""
    # A list of them, or one text, is a broker and those that stand in for it.
    urls = broker if isinstance(broker, str) else ";".join(broker)
    source = BROKER if broker == (conf.broker_url or "") else BROKER_WRITE
    brokers = _Found(source, urls, conf.broker_transport_options, conf.broker_use_ssl)
    results = _Found(
        RESULTS,
        conf.result_backend if isinstance(conf.result_backend, str) else "",
        conf.result_backend_transport_options,
        conf.redis_backend_use_ssl,
    )
    found: _Found
    for found, kinds in ((brokers, HOLD_LEASES), (results, HOLD_LEASES), (brokers, RABBITMQ)):
        url = _as_store(found.url, kinds)
        if url is None:
            continue
        try:
            return backend_from_celery(url, found.transport_options or {}, found.use_ssl), found.source
        except ConfigurationError as error:
            raise type(error)(f"{found.source}: {error}; or name the store with anarchon_backend") from None
    return None


class _Found(NamedTuple):
    """What the app says of a server that it has."""

    source: str
    url: str
    transport_options: Mapping[str, Any] | None
    use_ssl: Any


def _as_store(url: str, kinds: Mapping[str, str]) -> str | None:
    """*url* as a store's, without Celery's prefix and SQLAlchemy's driver; None: it is none of *kinds*."""
    scheme, separator, rest = url.partition("://")
    prefix, plus, inner = scheme.lower().partition("+")
    if prefix in DATABASE_PREFIXES and plus:
        scheme = f"{DATABASE}{inner.partition('+')[0]}"
        if rest in ("", "/", "/:memory:"):
            # A database of one process: nothing that beats could share.
            return None
    store = kinds.get(scheme.lower())
    return f"{store}{separator}{rest}" if store and separator else None


def app_name(app: Celery) -> str:
    """Who owns the namespace: ``anarchon_app_name``, else the app's main module."""
    name = app.conf.get("anarchon_app_name") or app.main or "celery"
    if not isinstance(name, str):
        raise ConfigurationError(f"setting 'anarchon_app_name' must be a text, not {name!r}")
    return name


def schedule_setting(app: Celery) -> Mapping[str, Any]:
    """The value of ``beat_schedule``, as it is now.

    :raises ConfigurationError: it has another shape.
    """
    value = app.conf.beat_schedule or {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            "setting 'beat_schedule' must map names to entries, such as "
            f'{{"export": {{"task": "proj.export", "schedule": 60}}}}, not {value!r}'
        )
    return value


def jobs_setting(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The value of ``anarchon_jobs``: job name -> options.

    :raises ConfigurationError: it has another shape.
    """
    value = settings.get("jobs") or {}
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise ConfigurationError(
            "setting 'anarchon_jobs' must map job names to options, such as "
            f'{{"export": {{"jitter": 5}}}}, not {value!r}'
        )
    return {str(name): dict(options) for name, options in value.items()}
