"""A cluster over connections of our own: which of its masters serves a key, and calls that follow keys that move."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any

from celery_anarchon.backends.redis.address import Address, Host
from celery_anarchon.backends.redis.links import Links, Opener
from celery_anarchon.backends.redis.replies import Unusable
from celery_anarchon.backends.redis.scripts import Argument, Call
from celery_anarchon.backends.redis.source import REDIRECTIONS, Source
from celery_anarchon.backends.redis.talk import Driver, Wait, ask
from celery_anarchon.errors import BackendUnavailable, OutcomeUnknown

__all__ = ["OwnCluster", "hash_slot"]

_Range = tuple[int, int, Host]


class OwnCluster(Source):
    """The masters of a cluster. Which one serves a slot is asked when it is not known, and again after any failure."""

    sharded = True

    def __init__(self, address: Address, driver: Driver, wait: Wait | None) -> None:
        super().__init__(driver, address.text)
        self._product = driver.module.__name__
        self._opener = Opener(address, driver, wait)
        self._seeds = list(address.hosts)
        self._nodes: dict[Host, Links] = {}
        self._ranges: list[_Range] = []
        self._closed = False

    def perform(self, calls: Sequence[Call], *, writes: bool, wait: Wait | None = None) -> list[Any]:
        replies: dict[int, Any] = {}
        open_calls = list(range(len(calls)))
        for _ in range(REDIRECTIONS):
            moved: list[int] = []
            for host, numbers in self._by_host(calls, open_calls, bool(replies) and writes).items():
                try:
                    with self._links(host).use() as link:
                        some = self._perform_on(link, [calls[number] for number in numbers], writes, wait)
                except BackendUnavailable as error:
                    self._ranges = []
                    if writes and replies:
                        raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
                    raise
                except OutcomeUnknown:
                    self._ranges = []
                    raise
                try:
                    moved += self._sort(numbers, some, replies, writes=writes)
                except (BackendUnavailable, OutcomeUnknown):
                    self._ranges = []
                    raise
            if not moved:
                return [replies[number] for number in range(len(calls))]
            self._ranges = []
            open_calls = moved
        raise self._still_moving(bool(replies) and writes)

    def ask(self, *command: Argument) -> Any:
        host = self._host_of(0)
        with self._links(host).use() as link:
            return ask(link, self._driver, self.where, *command)

    def close(self) -> None:
        self._closed = True
        for links in list(self._nodes.values()):
            links.close()

    def reopen(self) -> None:
        self._closed = False
        for links in list(self._nodes.values()):
            links.closed = False

    def _links(self, host: Host) -> Links:
        links = self._nodes.get(host)
        if links is None:
            # One step: two threads that come together share it.
            links = self._nodes.setdefault(host, Links(lambda: self._opener.open(host), self._opener.alive))
        if self._closed:
            links.closed = True
        return links

    def _by_host(self, calls: Sequence[Call], numbers: Sequence[int], applied: bool) -> dict[Host, list[int]]:
        by_host: dict[Host, list[int]] = {}
        try:
            for number in numbers:
                by_host.setdefault(self._host_of(hash_slot(calls[number].keys[0])), []).append(number)
        except BackendUnavailable as error:
            if applied:
                raise OutcomeUnknown(f"{error} (a part of the batch was applied)") from error
            raise
        return by_host

    def _host_of(self, slot: int) -> Host:
        ranges = self._ranges
        if not ranges:
            self._ranges = ranges = self._discover()
        for first, last, host in ranges:
            if first <= slot <= last:
                return host
        self._ranges = []
        raise BackendUnavailable(f"{self.where}: no node serves slot {slot} of the cluster just now")

    def _discover(self) -> list[_Range]:
        said: BackendUnavailable | None = None
        for host in [*self._seeds, *(node for node in list(self._nodes) if node not in self._seeds)]:
            try:
                with self._links(host).use() as link:
                    answer = ask(link, self._driver, self.where, "CLUSTER", "SLOTS")
            except BackendUnavailable as error:
                if "cluster support disabled" in str(error):
                    raise Unusable(f"{self.where}: it is no cluster: write {self._product}://") from error
                said = error
                continue
            found = [
                # A node that does not know its own address leaves it out.
                (int(first), int(last), ((master[0] or b"").decode() or host[0], int(master[1])))
                for first, last, master, *_ in answer
            ]
            if found:
                return found
            said = BackendUnavailable(f"{self.where}: the cluster serves no slots (yet)")
        raise said or BackendUnavailable(f"{self.where}: no node answers")


def hash_slot(key: bytes) -> int:
    """The cluster's slot of *key*: of its tag, where it has one."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    tag = key[start + 1 : end] if end > start + 1 else key
    return binascii.crc_hqx(tag, 0) % 16384
