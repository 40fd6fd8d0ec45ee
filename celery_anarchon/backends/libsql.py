"""A libSQL server (sqld, Turso) for a SQLite backend: its HTTP protocol as a driver, or a client of the app.

Belongs here: requests, replies, and how a transaction is kept together over them. Does not belong here: statements and
what errors mean (:mod:`.sqlite`): a libSQL server speaks SQLite's SQL and words.

A transaction is a *stream* of requests that a baton holds together; each statement is one request. A stream that its
client has left open inside a transaction keeps others waiting for five seconds, then the server ends it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import sqlite3
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import Connection, create_engine
from sqlalchemy.pool import NullPool

from celery_anarchon.backends.base import Unusable
from celery_anarchon.backends.sqlconnections import OwnConnections
from celery_anarchon.errors import BackendUnavailable, ConfigurationError

CALL_TIMEOUT = 10.0
"""Seconds for the reply to one statement; a server lets a writer wait for five."""

_SCHEMES = {"libsql": "https", "https": "https", "libsql+http": "http", "http": "http"}


def is_url(text: str) -> bool:
    return text.partition("://")[0].lower() in {*_SCHEMES, "ws", "wss"} and "://" in text


class NotCommitted(sqlite3.OperationalError):
    """The server has refused a COMMIT, and ended its stream: nothing of the transaction stands."""


class Remote:
    """A server that we speak to ourselves: one stream for each call."""

    def __init__(self, url: str, auth_token: str | None) -> None:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        if scheme not in _SCHEMES:
            raise ConfigurationError(
                f"SqliteBackend: {scheme}:// is not spoken here; write libsql://host, or libsql+http://host:port for a "
                "server without TLS"
            )
        if parts.query or parts.path not in ("", "/") or not parts.hostname or parts.username is not None:
            raise ConfigurationError(
                f"SqliteBackend: write {scheme}://host or {scheme}://host:port, and give the token as auth_token"
            )
        self._address = f"{_SCHEMES[scheme]}://{parts.netloc}"
        self.where = f"{scheme}://{parts.netloc}"
        self._token = auth_token
        self._connections = OwnConnections(self._connect)
        self._engine = create_engine(
            "sqlite://", creator=self._connect_driver, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )

    def open(self, create: bool) -> None:
        self._connections.open()

    def prepare(self, connection: Connection, create: bool) -> None:
        pass

    def close(self) -> None:
        self._connections.close()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._connections.use() as connection:
            yield connection

    def _connect(self) -> Connection:
        return self._engine.connect()

    def _connect_driver(self) -> Any:
        return HranaConnection(self._address, self._token)


class HranaConnection:
    """As much of Python's database interface as SQLAlchemy needs, in autocommit. Errors are those of sqlite3."""

    isolation_level = None

    def __init__(self, address: str, token: str | None) -> None:
        self._address = address
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._http: http.client.HTTPConnection | None = None
        self._http_address = ""
        self._base: str | None = None
        self._baton: str | None = None

    @property
    def in_transaction(self) -> bool:
        return self._baton is not None

    def cursor(self, *_: Any) -> HranaCursor:
        return HranaCursor(self)

    def create_function(self, *_: Any, **__: Any) -> None:
        pass

    def commit(self) -> None:
        if self.in_transaction:
            self.run("COMMIT", [()])

    def rollback(self) -> None:
        if self.in_transaction:
            self.run("ROLLBACK", [()])

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.rollback()
        self._hang_up()

    def run(self, sql: str, rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Execute *sql* once for each of *rows*, in one request; the results."""
        word = sql.lstrip()[:8].upper()
        begins, commits, undoes = (word.startswith(one) for one in ("BEGIN", "COMMIT", "ROLLBACK"))
        if self._baton is None and undoes:
            # Its stream has ended, and the transaction with it. A server that just gave no answer is not waited for.
            return [{"cols": [], "rows": [], "affected_row_count": 0}]
        if self._baton is None and commits:
            raise NotCommitted("the transaction has ended without a commit")
        requests: list[dict[str, Any]] = [
            {"type": "execute", "stmt": {"sql": sql, "args": [_encoded(value) for value in row]}} for row in rows
        ]
        if commits or undoes or (self._baton is None and not begins):
            requests.append({"type": "close"})
        results = self._ask(requests)
        for result in results[: len(rows)]:
            if result.get("type") != "ok":
                if begins:
                    # There is no transaction to go on with.
                    self._ask([{"type": "close"}])
                words = str(result.get("error", {}).get("message") or result)
                raise (NotCommitted if commits else sqlite3.OperationalError)(words)
        return [result["response"]["result"] for result in results[: len(rows)]]

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        baton, self._baton = self._baton, None
        body = json.dumps({"baton": baton, "requests": requests}).encode()
        try:
            status, reply = self._post(body, again=baton is None)
            answer = json.loads(reply) if status == http.client.OK else None
            results = None if answer is None else answer["results"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            self._hang_up()
            raise sqlite3.OperationalError(f"no answer: {type(error).__name__}: {error}") from error
        if answer is None or results is None:
            self._hang_up()
            words = " ".join(reply[:300].decode(errors="replace").split())
            raise sqlite3.OperationalError(f"HTTP {status}: {words}")
        self._baton, self._base = answer.get("baton"), answer.get("base_url")
        found: list[dict[str, Any]] = results
        return found

    def _post(self, body: bytes, *, again: bool) -> tuple[int, bytes]:
        address = self._base if self._base and not again else self._address
        if self._http is not None and self._http_address != address:
            self._hang_up()
        fresh = self._http is None
        if self._http is None:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
            if parts.scheme == "https":
                context = ssl.create_default_context()
                self._http = http.client.HTTPSConnection(host, port, timeout=CALL_TIMEOUT, context=context)
            else:
                self._http = http.client.HTTPConnection(host, port, timeout=CALL_TIMEOUT)
            self._http_address = address
        try:
            self._http.request("POST", "/v2/pipeline", body, self._headers)
            response = self._http.getresponse()
            return response.status, response.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The server has closed what was idle. What begins a stream has changed nothing yet.
            self._hang_up()
            if fresh or not again:
                raise
            return self._post(body, again=again)

    def _hang_up(self) -> None:
        self._baton = self._base = None
        if self._http is not None:
            self._http.close()
            self._http = None


class HranaCursor:
    arraysize = 1
    lastrowid: int | None = None

    def __init__(self, connection: HranaConnection) -> None:
        self._connection = connection
        self._rows: list[tuple[Any, ...]] = []
        self.description: list[tuple[Any, ...]] | None = None
        self.rowcount = -1

    def execute(self, sql: str, row: Sequence[Any] = ()) -> HranaCursor:
        (result,) = self._connection.run(sql, [row])
        columns = result["cols"]
        self.description = [(column["name"], *[None] * 6) for column in columns] if columns else None
        self._rows = [tuple(_decoded(value) for value in row) for row in result["rows"]]
        self.rowcount = result["affected_row_count"]
        return self

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> HranaCursor:
        results = self._connection.run(sql, rows)
        self.description, self._rows = None, []
        self.rowcount = sum(result["affected_row_count"] for result in results)
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows.pop(0) if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        size = size or self.arraysize
        rows, self._rows = self._rows[:size], self._rows[size:]
        return rows

    def fetchall(self) -> list[tuple[Any, ...]]:
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        self._rows = []


def _encoded(value: Any) -> dict[str, Any]:
    if value is None:
        return {"type": "null"}
    if isinstance(value, int):
        return {"type": "integer", "value": str(int(value))}
    if isinstance(value, float):
        return {"type": "float", "value": value}
    if isinstance(value, bytes):
        return {"type": "blob", "base64": base64.b64encode(value).decode()}
    return {"type": "text", "value": str(value)}


def _decoded(value: dict[str, Any]) -> Any:
    kind = value["type"]
    if kind == "null":
        return None
    if kind == "integer":
        return int(value["value"])
    return base64.b64decode(value["base64"] + "==") if kind == "blob" else value["value"]


# --- a client of the app ----------------------------------------------------------------------------------------------


def is_client(database: Any) -> bool:
    """Whether it is a connection of the package ``libsql``, which gives its class no module of its own."""
    return type(database).__name__ == "Connection" and all(
        hasattr(database, name) for name in ("sync", "in_transaction", "executescript", "isolation_level")
    )


class HandedClient:
    """A ``libsql.Connection`` of the app: used call by call, never closed."""

    where = "libSQL connection of the app"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._engine = create_engine(
            "sqlite://", creator=lambda: _Borrowed(client), poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )

    def open(self, create: bool) -> None:
        pass

    def prepare(self, connection: Connection, create: bool) -> None:
        pass

    def close(self) -> None:
        pass

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        if self._pid != os.getpid():
            raise Unusable(f"{self.where}: it does not survive a fork; hand over a URL")
        with self._lock:
            if self._client.in_transaction:
                raise BackendUnavailable(
                    f"{self.where} is inside a transaction, and a claim in it could be undone later; commit or roll "
                    "back first, or hand over a URL"
                )
            with self._engine.connect() as connection:
                yield connection


class _Borrowed:
    """The app's client as SQLAlchemy gets it: errors are those of sqlite3, rows are tuples, and it stays open."""

    isolation_level = None

    def __init__(self, client: Any) -> None:
        self._client = client

    def cursor(self, *_: Any) -> _BorrowedCursor:
        return _BorrowedCursor(self._client.cursor())

    def create_function(self, *_: Any, **__: Any) -> None:
        pass

    def commit(self) -> None:
        with _sqlite_errors():
            self._client.commit()

    def rollback(self) -> None:
        with _sqlite_errors():
            if self._client.in_transaction:
                self._client.rollback()

    def close(self) -> None:
        pass


class _BorrowedCursor:
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, sql: str, row: Sequence[Any] = ()) -> _BorrowedCursor:
        with _sqlite_errors():
            self._cursor.execute(sql, tuple(row))
        return self

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> _BorrowedCursor:
        with _sqlite_errors():
            self._cursor.executemany(sql, [tuple(row) for row in rows])
        return self

    def fetchall(self) -> list[tuple[Any, ...]]:
        with _sqlite_errors():
            return [tuple(row) for row in self._cursor.fetchall()]

    def fetchone(self) -> Any:
        with _sqlite_errors():
            row = self._cursor.fetchone()
        return None if row is None else tuple(row)

    def close(self) -> None:
        pass


@contextmanager
def _sqlite_errors() -> Iterator[None]:
    """Every error of this client is a ValueError."""
    try:
        yield
    except ValueError as error:
        raise sqlite3.OperationalError(str(error)) from error
