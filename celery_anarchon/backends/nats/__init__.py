"""NATS JetStream as a store that takes claims: no leases, so nobody takes over.

A reader's path: :mod:`.store` (streams, claims, history), :mod:`.connection` (the event loop and its thread).
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from celery_anarchon.backends.nats.connection import Connection, Handed, Own
from celery_anarchon.backends.nats.store import NatsStore
from celery_anarchon.backends.registry import masked, read_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis

__all__ = ["NatsBackend"]

_SCHEMES = ("nats", "tls")
_TLS = ("tls_ca", "tls_cert", "tls_key")


class NatsBackend(NatsStore):
    """Beats that share a NATS server, or a cluster, with JetStream.

    :param servers: a URL or a list of them; logins in them are the driver's (``nats://user:password@host``,
        ``nats://token@host``).
    :param connection: instead, a connected client of nats-py whose event loop runs on another thread. It is not closed.
    :param stream: the stream of the claims; history is in a second one, ``<stream>_HISTORY``.
    :param prefix: what their subjects begin with. Both together are the namespace, one for each service.
    :param duplicate_window: how long a claim is remembered: seconds, a timedelta or text (``"10m"``). The same in all
        beats.
    :param history_size: runs kept for each job, at least; there is one size for all jobs, the largest asked for.
    :param replicas: servers of a cluster that hold the streams; 3 survive the loss of one.
    :param credentials: path of a ``.creds`` file.
    :param tls: an ``ssl.SSLContext``, or a mapping of paths ``{"ca": ..., "cert": ..., "key": ...}``.
    :param early_tolerance: how far ahead of this host's clock a slot may lie, in milliseconds.
    """

    def __init__(
        self,
        servers: str | Sequence[str] = "nats://localhost:4222",
        *,
        connection: Any = None,
        stream: str = "CRON",
        prefix: str = "cron.",
        duplicate_window: float | timedelta | str = 300,
        history_size: int = 1000,
        replicas: int = 1,
        credentials: str | None = None,
        tls: Any = None,
        early_tolerance: Millis = 5_000,
    ) -> None:
        if connection is not None and (credentials is not None or tls is not None):
            raise ConfigurationError("credentials and tls go with servers=...; a connection has its own")
        super().__init__(
            _own(servers, credentials, tls) if connection is None else Handed(connection),
            stream=stream,
            prefix=prefix,
            duplicate_window=duplicate_window,
            history_size=history_size,
            replicas=replicas,
            early_tolerance=early_tolerance,
        )

    @classmethod
    def from_url(cls, url: str, **options: Any) -> NatsBackend:
        """``nats://h1:4222,h2:4222`` or ``tls://``, a login before each host or before the first for all; the query is
        options of the constructor, and ``tls_ca``, ``tls_cert``, ``tls_key``."""
        known = {
            "stream": str,
            "prefix": str,
            "duplicate_window": str,
            "history_size": int,
            "replicas": int,
            "credentials": str,
            "tls": str,
            **dict.fromkeys(_TLS, str),
        }
        _, given = read_url(url, known, options)
        if isinstance(given.get("tls"), str):
            raise ConfigurationError(f"{masked(url)}: write tls_ca, tls_cert and tls_key")
        files = {name.removeprefix("tls_"): given.pop(name) for name in _TLS if name in given}
        if files:
            given["tls"] = files
        return cls(url.partition("?")[0], **given)


def _own(servers: Any, credentials: str | None, tls: Any) -> Connection:
    given = [servers] if isinstance(servers, str) else list(servers) if isinstance(servers, Sequence) else []
    places: list[str] = []
    for one in given:
        if not isinstance(one, str):
            given = []
            break
        scheme, separator, body = one.partition("://")
        if not separator:
            scheme, body = "nats", one
        if scheme.lower() not in _SCHEMES:
            raise ConfigurationError(f"{masked(one)}: unknown scheme {scheme}://; expected nats:// or tls://")
        places += _hosts(scheme.lower(), body.partition("?")[0].rstrip("/"))
    if not given or not places:
        raise ConfigurationError("servers=...: give a URL such as nats://host:4222, or a list of them")
    options: dict[str, Any] = {}
    if credentials is not None:
        try:
            importlib.import_module("nkeys")
        except ImportError as error:
            raise ConfigurationError(
                'credentials=... needs the package nkeys: pip install "celery-anarchon[nats]"'
            ) from error
        options["user_credentials"] = credentials
    context = _context(tls)
    if context is not None:
        options["tls"] = context
    return Own(places, ", ".join(masked(place) for place in places), options)


def _hosts(scheme: str, body: str) -> list[str]:
    """A login before the first host is that of all hosts that have none."""
    shared = ""
    found = []
    for part in filter(None, (piece.strip() for piece in body.split(","))):
        login, at, host = part.removeprefix(f"{scheme}://").rpartition("@")
        shared = shared or (login if at else "")
        found.append(f"{scheme}://{login or shared}{'@' if login or shared else ''}{host}")
    return found or [f"{scheme}://localhost"]


def _context(tls: Any) -> ssl.SSLContext | None:
    if tls is None or isinstance(tls, ssl.SSLContext):
        return tls
    if not isinstance(tls, Mapping) or set(tls) - {"ca", "cert", "key"}:
        raise ConfigurationError("tls=...: give an ssl.SSLContext, or a mapping of paths with ca, cert, key")
    if "key" in tls and "cert" not in tls:
        raise ConfigurationError("tls=...: key goes with cert: give both, or the latter with both in it")
    try:
        context = ssl.create_default_context(cafile=tls.get("ca"))
        if "cert" in tls:
            context.load_cert_chain(tls["cert"], tls.get("key"))
    except OSError as error:
        raise ConfigurationError(f"tls=...: {error}") from error
    return context
