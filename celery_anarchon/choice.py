"""Which store a Celery app's beats share, and why; the settings of the app as plain mappings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.registry import backend_from
from celery_anarchon.errors import ConfigurationError

ENVIRONMENT = "CELERY_ANARCHON_BACKEND"
DEFAULT_URL = "sqlite:///anarchon.db"
PREFIX = "anarchon_"


def own_settings(app: Celery) -> dict[str, Any]:
    """Every ``anarchon_*`` setting that the user gave, by its name without that prefix, from whichever form of
    configuration and under whichever namespace (Django: ``CELERY_ANARCHON_...``)."""
    namespace = (getattr(app.conf, "prefix", None) or "").lower()
    names: set[str] = set()
    for mapping in getattr(app.conf, "maps", ()):
        for key in list(mapping):
            name = str(key).lower().removeprefix(namespace)
            if name.startswith(PREFIX):
                names.add(name)
    return {name.removeprefix(PREFIX): app.conf.get(name) for name in sorted(names)}


def choose_backend(app: Celery) -> tuple[ClaimBackend, str]:
    """The store, not opened yet, and where the choice comes from. Costs no I/O.

    The order: ``Anarchon(app, backend=...)``, the setting ``anarchon_backend``, the environment's
    ``CELERY_ANARCHON_BACKEND``, else SQLite in the working directory, which serves the beats of one machine.

    :raises ConfigurationError: the text names the source and the fix.
    """
    installed = getattr(app, "anarchon", None)
    for value, source in (
        (getattr(installed, "backend_given", None), "Anarchon(app, backend=...)"),
        (app.conf.get("anarchon_backend"), "setting anarchon_backend"),
        (os.environ.get(ENVIRONMENT), f"environment {ENVIRONMENT}"),
    ):
        if value:
            try:
                return backend_from(value), source
            except ConfigurationError as error:
                raise type(error)(f"{source}: {error}") from None
    return backend_from(DEFAULT_URL), "default"


def app_name(app: Celery) -> str:
    """Who owns the namespace: ``anarchon_app_name``, else the app's main module."""
    name = app.conf.get("anarchon_app_name") or app.main or "celery"
    if not isinstance(name, str):
        raise ConfigurationError(f"setting 'anarchon_app_name' must be a text, not {name!r}")
    return name


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
