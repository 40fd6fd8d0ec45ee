"""From a URL, a mapping or an object to a backend; URL schemes and the entry points ``celery_anarchon.backends``.

Belongs here: names and the refusal of wrong ones, and masking of secrets. Does not belong here: any backend: each is
imported when its scheme is asked for, so that a driver that nobody uses need not be installed.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import parse_qsl, unquote

from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.errors import ConfigurationError

ENTRY_POINTS = "celery_anarchon.backends"

_REDIS = ("redis", "rediss", "redis+socket")
_VALKEY = ("valkey", "valkeys", "valkey+socket")
_REDIS_GROUPS = ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
_VALKEY_GROUPS = ("valkey+cluster", "valkeys+cluster", "valkey+sentinel", "valkeys+sentinel")

_OURS = {
    "memory": "celery_anarchon.backends.memory:MemoryBackend",
    **dict.fromkeys(("sqlite", "libsql", "libsql+http"), "celery_anarchon.backends.sqlite:SqliteBackend"),
    **dict.fromkeys((*_REDIS, *_REDIS_GROUPS, "sentinel"), "celery_anarchon.backends.redis:RedisBackend"),
    **dict.fromkeys(("postgresql", "postgres"), "celery_anarchon.backends.postgres:PostgresBackend"),
    **dict.fromkeys((*_VALKEY, *_VALKEY_GROUPS), "celery_anarchon.backends.redis:ValkeyBackend"),
    **dict.fromkeys(("amqp", "amqps"), "celery_anarchon.backends.rabbitmq:RabbitMQBackend"),
    **dict.fromkeys(("nats", "tls"), "celery_anarchon.backends.nats:NatsBackend"),
}

_CELERY_PREFIXES = ("sqla+", "db+")
_SEVERAL_HOSTS = frozenset({"nats", "tls", "sentinel", *_REDIS_GROUPS, *_VALKEY_GROUPS})
_TOKENS = frozenset({"nats", "tls"})
_HOST = re.compile(r"([^:@]*(:[^:@]*)?@)?[^:@/]+(:\d*)?(/.*)?")
_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:pas+w|pass|pwd|tok|auth|secret|key|cred)[^=&]*=)[^&#]*", re.IGNORECASE)
"""Names are also misspelled, and then the URL stands in the error that says so."""


def backend_from(value: Any, **options: Any) -> ClaimBackend:
    """The backend that a setting means: a URL, a mapping ``{"url": ..., option: ...}``, or a backend as it is.

    :raises ConfigurationError: it means none; the text names the fix.
    """
    if isinstance(value, ClaimBackend):
        if options:
            raise ConfigurationError(
                f"{_names(options)} cannot be set on a backend that is already made: give it to "
                f"{type(value).__name__}(...)"
            )
        return value
    if isinstance(value, str):
        return backend_from_url(value, **options)
    if isinstance(value, Mapping):
        if not isinstance(value.get("url"), str):
            raise ConfigurationError(
                f"a backend as a mapping needs the key 'url', a text; its keys are {_names(value)}"
            )
        given = {str(name): setting for name, setting in value.items() if name != "url"}
        return backend_from_url(value["url"], **given, **options)
    if isinstance(value, type) and issubclass(value, ClaimBackend):
        raise ConfigurationError(f"{value.__name__} is a class: make the backend, as in {value.__name__}(...)")
    raise ConfigurationError(
        f"a backend is a URL, a mapping with the key 'url', or a backend object, not a {type(value).__name__}"
    )


def backend_from_url(url: str, **options: Any) -> ClaimBackend:
    """The backend of *url*, not opened yet. *options* and the URL's query are its constructor's options, by name.

    :raises ConfigurationError: unknown scheme, unknown option or wrong value; the text names the fix and no secret.
    """
    for prefix in _CELERY_PREFIXES:
        url = url.removeprefix(prefix)
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigurationError(f"{masked(url)!r} is no URL: expected scheme://..., such as sqlite:///anarchon.db")
    backend: ClaimBackend = _backend_class(scheme.lower(), url).from_url(url, **options)
    return backend


def backend_from_celery(url: str, transport_options: Mapping[str, Any], use_ssl: Any) -> ClaimBackend:
    """The backend on a broker or a result backend that an app has, with its default options and not opened yet.

    Celery's URLs have words of their own, and some of what it takes to connect stands in other settings: a backend that
    can make use of them has ``from_celery(url, transport_options, use_ssl)`` beside ``from_url``.

    :raises ConfigurationError: it cannot be; the text names no secret.
    """
    kind = _backend_class(url.partition("://")[0].lower(), url)
    backend: ClaimBackend = (
        kind.from_celery(url, transport_options, use_ssl) if hasattr(kind, "from_celery") else kind.from_url(url)
    )
    return backend


def read_url(
    url: str, known: Mapping[str, Callable[[str], Any]], options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """What stands between ``://`` and ``?``, decoded, and the options of the query joined with *options*.

    For the ``from_url`` of a backend.

    :param known: each option's name and how its text is read; a ValueError or TypeError of that says what is wrong.
    :raises ConfigurationError: an option that is unknown, given twice or has a wrong value.
    """
    body, _, query = url.partition("://")[2].partition("?")
    pairs = [*parse_qsl(query, keep_blank_values=True), *options.items()]
    joined: dict[str, Any] = {}
    for name, value in pairs:
        if name not in known:
            raise ConfigurationError(
                f"{masked(url)}: unknown option {name!r}{_nearest(name, known)}; known are {_names(known)}"
            )
        if name in joined:
            raise ConfigurationError(f"{masked(url)}: option {name!r} is given twice")
        try:
            joined[name] = known[name](value) if isinstance(value, str) else value
        except (ValueError, TypeError, ConfigurationError) as error:
            raise ConfigurationError(f"{masked(url)}: option {name!r}: {error}") from None
    return unquote(body), joined


def read_flag(text: str) -> bool:
    """Yes or no, as a URL's query says it."""
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"expected true or false, not {text!r}")


def masked(url: str) -> str:
    """*url* without its passwords and tokens, for logs and errors. People forget to escape passwords: where it is not
    clear what belongs to one, too much is masked. A path, and text that is no URL, stay as they are."""
    scheme, separator, rest = url.partition("://")
    body = rest.partition("?")[0]
    bare = re.fullmatch(r"[^:@]*(:\d*)?", re.split("[/?]", rest)[0])
    if separator and "@" in rest and not rest.startswith("/") and ("@" in body or not bare):
        rest = _mask_logins(scheme.lower(), rest)
    return _SECRET_OPTION.sub(r"\1***", scheme + separator + rest)


def _mask_logins(scheme: str, rest: str) -> str:
    hosts, question, query = rest.partition("?")
    if scheme in _SEVERAL_HOSTS and "@" not in query and re.search("@[^@]*[,;][^@]*@", hosts):
        parts = re.split("([,;])", hosts)
        # A separator may stand in a password: then the pieces do not look like logins and hosts, and all is one login.
        if all(_HOST.fullmatch(part) for part in parts[::2]):
            return "".join(_mask_login(part, token=True) for part in parts) + question + query
    return _mask_login(rest, token=scheme in _TOKENS)


def _mask_login(text: str, *, token: bool) -> str:
    """*token*: what stands in the place of the user is a secret too, if it stands alone."""
    login, at, address = text.rpartition("@")
    user, colon, _ = login.partition(":")
    if colon:
        return f"{user}:***@{address}"
    return f"***@{address}" if at and token else text


def _backend_class(scheme: str, url: str) -> Any:
    if scheme in _OURS:
        module, _, name = _OURS[scheme].partition(":")
        return getattr(importlib.import_module(module), name)
    outsiders = {point.name.lower(): point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if scheme in outsiders:
        return _load(outsiders[scheme], scheme)
    here = sorted({*_OURS, *outsiders})
    offered = ", ".join(f"{name}://" for name in here)
    if scheme.startswith("sqlite+"):
        raise ConfigurationError(
            f"{masked(url)}: write sqlite:/// and the path, without a driver: it is always Python's own sqlite3; "
            "for another driver hand SqliteBackend a SQLAlchemy Engine"
        )
    if scheme in ("turso", "pyturso", "sqlite+turso"):
        raise ConfigurationError(
            f"{masked(url)}: pyturso locks its file for one process, and other beats could not open it; write "
            "sqlite:///path, or libsql://host for a server"
        )
    if scheme.startswith(("postgresql+", "postgres+")):
        raise ConfigurationError(
            f"{masked(url)}: write postgresql:// without a driver: it is always psycopg 3, and libpq reads the rest; "
            "or hand PostgresBackend a SQLAlchemy Engine"
        )
    raise ConfigurationError(
        f"{masked(url)}: unknown scheme {scheme}://{_nearest(scheme, here)}; this release has {offered}"
    )


def _load(point: metadata.EntryPoint, scheme: str) -> Any:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the backend for {scheme}:// cannot be loaded ({error}); entry point {point.value} brings it: mend it"
        ) from error
    if not hasattr(loaded, "from_url"):
        raise ConfigurationError(f"the backend for {scheme}:// ({point.value}) has no from_url(url, **options)")
    return loaded


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _names(names: Iterable[Any]) -> str:
    return ", ".join(repr(str(name)) for name in names) or "none"
