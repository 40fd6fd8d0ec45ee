"""Clients that the app already has. Their connections come from their own pools and go back there; a client is never
closed, and its retries are not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from celery_anarchon.backends.redis.replies import connect_failure, words_of
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.backends.redis.source import REDIRECTIONS, OneServer, Source, check_timeout
from celery_anarchon.backends.redis.talk import Driver, Wait, ask, disconnect
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown

__all__ = ["Handed", "HandedCluster"]


@contextmanager
def _borrowed(client: Any, driver: Driver, where: str) -> Iterator[Any]:
    """A connection from the pool of the app's client."""
    pool = client.connection_pool
    named = "command_name" in inspect.signature(pool.get_connection).parameters
    optional = named and inspect.signature(pool.get_connection).parameters["command_name"].default is None
    try:
        link = pool.get_connection() if optional or not named else pool.get_connection("EVALSHA")
    except driver.failures as error:
        raise connect_failure(where, error) from error
    try:
        yield link
    except BaseException:
        disconnect(link)
        raise
    finally:
        pool.release(link)


class Handed(OneServer):
    """A client of one server that the app has. Never closed."""

    def __init__(self, client: Any, driver: Driver, wait: Wait | None) -> None:
        super().__init__(driver, f"client of the app ({_place(client)})")
        self._client = client
        self._wait = wait

    def check(self) -> None:
        check_timeout(self.where, self._client.connection_pool.connection_kwargs, self._wait)

    def _use(self) -> AbstractContextManager[Any]:
        return _borrowed(self._client, self._driver, self.where)

    # Its pool may have one connection only, and a call under way holds one.
    begin = Source.begin

    def close(self) -> None:
        """It is not ours."""


class HandedCluster(Source):
    """A cluster client that the app has. It knows which node has which keys; never closed."""

    sharded = True

    def __init__(self, client: Any, driver: Driver, wait: Wait | None) -> None:
        super().__init__(driver, "cluster client of the app")
        self._client = client
        self._wait = wait

    def check(self) -> None:
        check_timeout(self.where, self._client.get_connection_kwargs(), self._wait)

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        replies: dict[int, Any] = {}
        open_calls = list(range(len(calls)))
        for _ in range(REDIRECTIONS):
            moved: list[int] = []
            by_node: dict[str, tuple[Any, list[int]]] = {}
            try:
                for number in open_calls:
                    node = self._node(calls[number].keys[0])
                    by_node.setdefault(node.name, (node, []))[1].append(number)
                for node, numbers in by_node.values():
                    with _borrowed(self._client.get_redis_connection(node), self._driver, self.where) as link:
                        some = self._perform_on(link, [calls[number] for number in numbers], writes, wait)
                    moved += self._sort(numbers, some, replies, writes=writes)
            except (BackendUnavailable, OutcomeUnknown) as error:
                self._look_again()
                if writes and replies and isinstance(error, BackendUnavailable):
                    raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
                raise
            if not moved:
                return [replies[number] for number in range(len(calls))]
            self._look_again()
            open_calls = moved
        raise self._still_moving(bool(replies) and writes)

    def ask(self, *command: Argument) -> Any:
        node = self._node(b"{0}")
        with _borrowed(self._client.get_redis_connection(node), self._driver, self.where) as link:
            return ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        """It is not ours."""

    def _node(self, key: bytes) -> Any:
        try:
            return self._client.get_node_from_key(key)
        except Exception as error:
            raise BackendUnavailable(f"{self.where}: {words_of(error)}") from error

    def _look_again(self) -> None:
        with suppress(Exception):
            self._client.nodes_manager.initialize()


def _place(client: Any) -> str:
    options = client.connection_pool.connection_kwargs
    if options.get("path"):
        return str(options["path"])
    if "host" in options:
        return f"{options['host']}:{options.get('port', 6379)}/{options.get('db') or 0}"
    return type(client.connection_pool).__name__
