"""RabbitMQ as a store that takes claims: no leases, so nobody takes over.

A reader's path: :mod:`.claims` (who was first), :mod:`.store` (the operations, history), :mod:`.link` (AMQP),
:mod:`.address` (URLs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

from celery_anarchon.backends.rabbitmq.address import TLS_OPTIONS, address_of_connection, address_of_url
from celery_anarchon.backends.rabbitmq.store import RabbitMQStore
from celery_anarchon.backends.registry import masked, read_flag, read_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.model import Millis

__all__ = ["RabbitMQBackend"]


class RabbitMQBackend(RabbitMQStore):
    """Beats that share a RabbitMQ.

    :param url: where it is; several nodes of a cluster with ``;`` between them.
    :param connection: instead, the ``kombu.Connection`` of an app for ``amqp://``. It is neither used nor closed:
        claims go over a connection of their own to the same place.
    :param prefix: what the names of all queues begin with; one for each service.
    :param slot_ttl: how long a claim is remembered: seconds, a timedelta or text (``"10m"``). The same in all beats.
    :param strategy: ``"queue"`` (a queue for each slot) or ``"stream"`` (a log of claims).
    :param ssl: True, or options of py-amqp such as ``{"ca_certs": path}``; ``amqps://`` means True.
    :param early_tolerance: how far ahead of this host's clock a slot may lie, in milliseconds.
    """

    def __init__(
        self,
        url: str = "amqp://localhost",
        *,
        connection: Any = None,
        prefix: str = "cron.",
        slot_ttl: float | timedelta | str = 300,
        strategy: Literal["queue", "stream"] = "queue",
        ssl: Any = None,
        early_tolerance: Millis = 5_000,
    ) -> None:
        if connection is not None and ssl is not None:
            raise ConfigurationError("ssl=... goes with url=...; a connection has its own")
        address = address_of_connection(connection) if connection is not None else address_of_url(url, ssl)
        super().__init__(address, prefix=prefix, slot_ttl=slot_ttl, strategy=strategy, early_tolerance=early_tolerance)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RabbitMQBackend:
        """``amqp://user:password@host:5672/vhost`` or ``amqps://``; the query is options of the constructor, and of TLS
        (``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_cert_reqs``)."""
        known: dict[str, Callable[[str], Any]] = {
            "prefix": str,
            "slot_ttl": str,
            "strategy": str,
            "ssl": read_flag,
            **TLS_OPTIONS,
        }
        _, given = read_url(url, known, options)
        tls = {name: given.pop(name) for name in TLS_OPTIONS if name in given}
        if tls:
            if "ssl" in given:
                raise ConfigurationError(f"{masked(url)}: ssl is given twice")
            given["ssl"] = tls
        return cls(url.partition("?")[0], **given)

    @classmethod
    def from_celery(cls, url: str, transport_options: Mapping[str, Any], use_ssl: Any) -> RabbitMQBackend:
        """The store on an app's own broker. *use_ssl*: ``broker_use_ssl``, options of py-amqp as well."""
        return cls.from_url(url, **({"ssl": use_ssl} if use_ssl else {}))
