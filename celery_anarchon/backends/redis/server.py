"""One server over connections of our own: named directly, or by the sentinels that watch it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from celery_anarchon.backends.redis.address import Address, Host
from celery_anarchon.backends.redis.links import Links, Opener
from celery_anarchon.backends.redis.replies import Unusable
from celery_anarchon.backends.redis.source import OneServer
from celery_anarchon.backends.redis.talk import Driver, Wait, ask, disconnect
from celery_anarchon.errors import BackendUnavailable

__all__ = ["Own"]


class Own(OneServer):
    """One server at a time: named directly, or by sentinels."""

    def __init__(self, address: Address, driver: Driver, wait: Wait | None) -> None:
        super().__init__(driver, address.text)
        self._address = address
        self._opener = Opener(address, driver, wait)
        self._links = Links(self._connect, self._opener.alive)
        self._sentinels = list(address.hosts)

    def _use(self) -> AbstractContextManager[Any]:
        return self._links.use()

    def _doubt(self) -> None:
        # Perhaps it is not the master any more, or reads its data: ask for the way anew.
        self._links.drop()

    def close(self) -> None:
        self._links.close()

    def reopen(self) -> None:
        self._links.closed = False

    def _connect(self) -> Any:
        address = self._address
        if address.kind == "socket":
            return self._opener.open(None, db=address.db)
        if address.kind == "server":
            return self._opener.open(address.hosts[0], db=address.db)
        link = self._opener.open(self._master(), db=address.db)
        try:
            role = ask(link, self._driver, self.where, "ROLE")[0]
        except Unusable:
            # It may not be asked. Writes to a replica are refused anyway.
            return link
        except BaseException:
            disconnect(link)
            raise
        if role != b"master":
            disconnect(link)
            raise BackendUnavailable(f"{self.where}: the sentinels name a {role.decode()}; a failover is under way")
        return link

    def _master(self) -> Host:
        said = ""
        for sentinel in list(self._sentinels):
            try:
                link = self._opener.open(sentinel, sentinel=True)
                try:
                    answer = ask(
                        *(link, self._driver, self.where),
                        *("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.master_name),
                    )
                finally:
                    disconnect(link)
            except BackendUnavailable as error:
                said = str(error)
                continue
            if answer:
                # The one that answered is asked first the next time.
                self._sentinels.sort(key=lambda one: one != sentinel)
                return answer[0].decode(), int(answer[1])
            said = f"{self.where}: the sentinels watch no master of that name"
        raise BackendUnavailable(said)
