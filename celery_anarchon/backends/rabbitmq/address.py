"""Where a RabbitMQ is: a URL, or the connection of the app, read into connections that can be opened.

Belongs here: forms of addresses and the refusal of wrong ones. Does not belong here: what goes over a connection
(:mod:`.link`).
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kombu.connection import Connection
from kombu.transport import pyamqp

from celery_anarchon.backends.registry import masked
from celery_anarchon.errors import ConfigurationError

CALL_TIMEOUT = 5.0
"""Seconds that the server may take to answer one step of a call."""

_CERTIFICATES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def _certificates(text: str) -> ssl.VerifyMode:
    # Celery's own settings write CERT_REQUIRED.
    plain = text.lower().removeprefix("cert_")
    if plain not in _CERTIFICATES:
        raise ValueError(f"expected required, optional or none, not {text!r}")
    return _CERTIFICATES[plain]


TLS_OPTIONS: dict[str, Callable[[str], Any]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": _certificates,
}
"""What a URL's query may say about TLS; py-amqp's names with ``ssl_`` in front."""


class Address:
    """One server, or several of a cluster that are tried in turn."""

    def __init__(self, templates: Sequence[Any]) -> None:
        for template in templates:
            if not issubclass(template.get_transport_cls(), pyamqp.Transport):
                raise ConfigurationError(
                    f"a connection for {template.transport_cls}: claims need publisher confirms, so give one for "
                    "amqp:// (py-amqp)"
                )
        self._templates = list(templates)
        self.text = ", ".join(re.sub("^py", "", one.as_uri(mask="***")) for one in templates)
        """For logs and errors: no secrets."""

    def candidates(self) -> Iterator[Callable[[], Any]]:
        """Ways to open a connection of py-amqp, the one that worked last first."""
        for template in list(self._templates):
            yield partial(self._open, template)

    def _open(self, template: Any) -> Any:
        connection = template.clone()
        connection.connect_timeout = CALL_TIMEOUT
        # Heartbeats would need a thread. A dead line is found by the time limits, and by the kernel.
        connection.heartbeat = 0
        connection.transport_options = {
            "confirm_publish": False,
            "read_timeout": CALL_TIMEOUT,
            "write_timeout": CALL_TIMEOUT,
            "client_properties": {"connection_name": f"celery-anarchon {socket.gethostname()}:{os.getpid()}"},
        }
        opened = _establish(connection.transport)
        opened.client = None
        # Or a time limit of the socket is taken for an interrupted call, and waited out again and again.
        opened.transport.raise_on_initial_eintr = True
        self._templates.sort(key=lambda one: one is not template)
        return opened


def _establish(transport: Any) -> Any:
    """A connection; where it fails in the middle, py-amqp leaves its socket open, and kombu does not hand it out."""
    made: list[Any] = []
    kind = transport.Connection

    def make(**options: Any) -> Any:
        made.append(kind(**options))
        return made[-1]

    transport.Connection = make
    try:
        return transport.establish_connection()
    except BaseException:
        for connection in made:
            with suppress(Exception):
                connection.collect()
        raise


def address_of_url(url: Any, tls: Any) -> Address:
    """:raises ConfigurationError: *url* is none of ours."""
    if not isinstance(url, str) or "://" not in url:
        shown = masked(url) if isinstance(url, str) else type(url).__name__
        raise ConfigurationError(f"url={shown}: give a URL such as amqp://user:password@host:5672/vhost")
    places = [place.strip() for place in url.partition("?")[0].split(";") if place.strip()]
    for place in places:
        scheme = place.partition("://")[0].lower() if "://" in place else "amqp"
        if scheme not in ("amqp", "amqps", "pyamqp"):
            raise ConfigurationError(f"{masked(url)}: unknown scheme {scheme}://; expected amqp:// or amqps://")
    templates = []
    try:
        for place in places:
            secure = place.lower().startswith("amqps:")
            # Named, because another driver for amqp:// may be installed, which knows nothing of confirms.
            transport = "amqps" if secure else "pyamqp"
            templates.append(Connection(place, transport=transport, ssl=_tls(tls, secure)))
        return Address(templates)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{masked(url)}: {error}") from None


def _tls(given: Any, secure: bool) -> Any:
    if given is None or given is False:
        return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None} if secure else False
    if given is True:
        return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}
    if isinstance(given, Mapping):
        options = {str(name).removeprefix("ssl_"): value for name, value in given.items()}
        if "keyfile" in options and "certfile" not in options:
            raise ConfigurationError("ssl_keyfile goes with ssl_certfile: give both, or the latter with both in it")
        options.setdefault("cert_reqs", ssl.CERT_REQUIRED)
        if options["cert_reqs"] != ssl.CERT_NONE:
            options.setdefault("server_hostname", None)
        return options
    raise ConfigurationError(f"ssl={type(given).__name__}: give True or a mapping such as {{'ca_certs': path}}")


def address_of_connection(connection: Any) -> Address:
    """The place that a connection of the app leads to. The connection itself is neither used nor closed: claims need
    confirms, time limits and a thread of their own on it, so they go over one more, with its login and TLS."""
    if not isinstance(connection, Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise ConfigurationError(f"connection=... is a {kind}: give a kombu.Connection, as app.connection() makes it")
    templates = []
    for place in list(connection.alt) or [None]:
        template = connection.clone()
        if place is not None:
            template.switch(place)
            template.alt = []
        templates.append(template)
    return Address(templates)
