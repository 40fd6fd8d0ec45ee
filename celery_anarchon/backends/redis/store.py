"""A namespace on a Redis or Valkey: how it is named, opened and checked, whatever the strategy.

Belongs here: options, first looks and warnings. Does not belong here: claims (:mod:`.lease`), the names of keys
(:mod:`.keys`), and how calls get there (:mod:`.connect`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from celery_anarchon import wire
from celery_anarchon.backends.base import ClaimBackend, check_charter
from celery_anarchon.backends.redis.address import celery_address, read_address, split_url
from celery_anarchon.backends.redis.connect import CALL_TIMEOUT, Source, Unusable, Wait, handed_source, own_source
from celery_anarchon.backends.redis.keys import Keys, decoded, encoded
from celery_anarchon.backends.redis.scripts import Argument, Call, script
from celery_anarchon.backends.redis.strategies import ALL_OPTIONS, in_words, with_options
from celery_anarchon.durations import parse_duration
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, LayoutMismatch, OutcomeUnknown
from celery_anarchon.model import Millis

logger = logging.getLogger("celery_anarchon.backend")

OLDEST = 5
"""The first Redis whose scripts may ask for the time before they write."""


class RedisStore(ClaimBackend):
    """Subclasses are the strategies."""

    product: str
    """``redis`` or ``valkey``: the driver, and the first half of the backend's name."""
    _claims_expire: ClassVar[bool] = False
    """Claims are keys that the server drops by itself: what ``volatile-*`` evicts first."""

    def __init__(
        self,
        server: Any,
        *,
        prefix: str,
        wait_replicas: int,
        wait_timeout: Any,
        early_tolerance: Millis,
    ) -> None:
        if not isinstance(prefix, str) or not prefix:
            raise ConfigurationError(f'prefix={prefix!r}: give a text such as "billing:cron:"; it keeps services apart')
        if isinstance(wait_replicas, bool) or not isinstance(wait_replicas, int) or wait_replicas < 0:
            raise ConfigurationError(f"wait_replicas={wait_replicas!r}: give a number of replicas, 0 for none")
        millis = parse_duration(wait_timeout, "wait_timeout")
        if wait_replicas and not 0 < millis < CALL_TIMEOUT * 1000:
            # WAIT takes 0 for "for ever".
            raise ConfigurationError(f"wait_timeout={wait_timeout!r}: give more than 0 and less than {CALL_TIMEOUT} s")
        self.namespace = prefix
        self.early_tolerance = early_tolerance
        self._wait = Wait(wait_replicas, millis) if wait_replicas else None
        self._keys = Keys(prefix)
        self._app_name: str | None = None
        self._source: Source
        if hasattr(server, "connection_pool") or hasattr(server, "nodes_manager"):
            self._source = handed_source(server, self.product, self._wait)
        else:
            self._source = own_source(read_address(server, self.product), self.product, self._wait)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Any:
        """See the documentation of the store for the forms. The query is the options of the constructor, by name, and
        those of the connection (TLS, timeouts)."""
        known = {"strategy": str, "prefix": str, "wait_replicas": int, "wait_timeout": str}
        address, given = split_url(url, {**known, **dict.fromkeys(ALL_OPTIONS, str)}, options)
        beside = {name: given.pop(name) for name in ALL_OPTIONS & given.keys()}
        if beside:
            given["strategy"] = with_options(given.get("strategy", "lease"), beside)
        return cls(**{cls.product: address, **given})

    @property
    def _strategy_text(self) -> str:
        """How claims are stored here, with what all beats must have alike."""
        return "lease"

    @classmethod
    def from_celery(cls, url: str, transport_options: Mapping[str, Any], use_ssl: Any) -> Any:
        """The store on an app's own broker or result backend."""
        options: dict[str, Any] = {cls.product: celery_address(url, transport_options, use_ssl)}
        return cls(**options)

    # --- life ---------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"{self.product} {self._source.where}, prefix {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        self._source.check()
        self._source.reopen()
        try:
            self._look_at_server(create)
            told: list[Argument] = [wire.LAYOUT_VERSION, encoded(app_name), int(create), self._strategy_text]
            call = script("open")([self._keys.meta], told)
            layout, app, strategy = self._reply([call], writes=create)[0]
        except Unusable as error:
            raise ConfigurationError(str(error)) from error
        owner = decoded(app) if app else None
        check_charter(self, app_name, layout=int(layout or 0), app=owner, own="prefix=...")
        if strategy and decoded(strategy) != self._strategy_text:
            raise LayoutMismatch(
                f"namespace {self.namespace!r}: its beats claim by strategy {in_words(decoded(strategy))}, and this "
                f"one would by {in_words(self._strategy_text)} and not see their claims; use the same, or set "
                "prefix=... for a new namespace"
            )
        self._app_name = app_name if create else None

    def close(self) -> None:
        self._source.close()

    def now(self) -> Millis:
        seconds, micros = self._source.ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _look_at_server(self, warn: bool) -> None:
        """Refuse what cannot work; say what works until it is too late."""
        facts = self._facts()
        where = self._source.where
        version = facts.get("redis_version", "")
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < OLDEST:
            raise ConfigurationError(f"{where}: Redis {version} is too old: {OLDEST}.0 or newer is needed")
        if facts.get("redis_mode") == "sentinel" or facts.get("server_mode") == "sentinel":
            raise ConfigurationError(
                f"{where}: this is a sentinel: write {self.product}+sentinel://host:port/0?master_name=..."
            )
        if facts.get("cluster_enabled") == "1" and not self._source.sharded:
            raise ConfigurationError(f"{where}: this is a node of a cluster: write {self.product}+cluster://host:port")
        self._check_server(facts)
        if not warn:
            return
        policy = facts.get("maxmemory_policy", "")
        if policy.startswith("allkeys-") or (policy.startswith("volatile-") and self._claims_expire):
            logger.warning(
                "%s: maxmemory-policy is %s, so it may drop claims when memory is short, and their slots could be sent "
                "again. Set it to noeviction%s",
                where,
                policy,
                "" if self._claims_expire else " or one of volatile-*",
            )
        if facts.get("aof_enabled") == "0":
            saves = self._setting("save")
            if saves == "":
                logger.warning(
                    "%s: nothing is persisted: after a restart of the server all claims are forgotten, and slots still "
                    "within reach could be sent again. Set appendonly yes",
                    where,
                )
            elif saves:
                logger.info(
                    "%s: only snapshots are persisted (save %s): a crash of the server forgets the claims since the "
                    "last one. appendonly yes forgets a second at most",
                    where,
                    saves,
                )

    def _check_server(self, facts: Mapping[str, str]) -> None:
        """Refuse a server that lacks what the strategy needs."""

    def _facts(self) -> dict[str, str]:
        try:
            text = self._source.ask("INFO")
        except Unusable as error:
            if "NOPERM" not in str(error) and "permission" not in str(error):
                raise
            logger.debug("%s: it cannot be asked about itself (%s)", self._source.where, error)
            return {}
        lines = (line.partition(":") for line in decoded(text).splitlines() if ":" in line)
        return {name: value.strip() for name, _, value in lines}

    def _setting(self, name: str) -> str | None:
        """None: it does not say (hosted servers often do not)."""
        try:
            reply = self._source.ask("CONFIG", "GET", name)
        except BackendUnavailable:
            return None
        if isinstance(reply, dict):
            reply = [part for pair in reply.items() for part in pair]
        return decoded(reply[1]) if len(reply) == 2 else None

    # --- calls --------------------------------------------------------------------------------------------------------

    def _reply(self, calls: Sequence[Call], *, writes: bool, wait: bool = False) -> list[Any]:
        if not calls:
            return []
        try:
            return self._source.perform(calls, writes=writes, wait=self._wait if wait else None)
        except UnicodeError as error:
            raise OutcomeUnknown(f"{self.describe()}: {error}") from error


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
