"""The store for beats on any number of machines that have a PostgreSQL: by a URL, or over what the app already has.

Belongs here: what PostgreSQL says in its own way. Does not belong here: the claim algorithm (:mod:`.sqlclaims`), and
how connections are opened and borrowed (:mod:`.pgconnections`).

Transactions run side by side. What keeps them exact: READ COMMITTED, whatever the role's default, so that each
statement sees what was committed before it; the rows of the jobs, locked in one order by a statement of its own, as
a lock taken inside the statement that needs it is younger than that statement's view; and unsettled runs locked in one
order before an UPDATE of several. Only locks that end with the transaction: behind a pooler others end who knows when.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Table,
    Text,
    TypeDecorator,
    bindparam,
    cast,
    column,
    extract,
    func,
    inspect,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateSchema
from sqlalchemy.types import TypeEngine

from celery_anarchon.backends.base import Traits
from celery_anarchon.backends.sql import NoTables, SqlBackend, Unusable
from celery_anarchon.backends.sqltables import in_state
from celery_anarchon.errors import BackendUnavailable, ConfigurationError, OutcomeUnknown
from celery_anarchon.model import UNSETTLED, Millis, RunState

OLDEST_POSTGRES = 10

_NAMESPACE_LOCK = 0x616E6172_63686F6E
"""The advisory lock of whoever makes tables: "anarchon" in ASCII."""

_LOCK_TIMEOUT: Millis = 8_000
"""Shorter than the patience of a call: what waits in vain ends on the server too."""

_IDLE_TIMEOUT: Millis = 10_000
"""A beat that freezes in the middle of a transaction must not keep its locks from all others."""

_UNSTORABLE = re.compile("[\\\\\x00\ud800-\udfff]")
_STORED = re.compile(r"\\(\\|0|u[0-9a-f]{4})")


def _stored(match: re.Match[str]) -> str:
    character = match[0]
    return {"\\": "\\\\", "\0": "\\0"}.get(character) or f"\\u{ord(character):04x}"


def _meant(match: re.Match[str]) -> str:
    code = match[1]
    return {"\\": "\\", "0": "\0"}.get(code) or chr(int(code[1:], 16))


class AnyText(TypeDecorator[str]):
    """Text that may contain NUL and half surrogate pairs, which PostgreSQL cannot store: they stand as ``\\0`` and
    ``\\ud800``, and a backslash therefore as two."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        # Nearly always there is nothing to do, and this is asked for each text of a batch.
        if value is None or (value.isascii() and "\\" not in value and "\0" not in value):
            return value
        return _UNSTORABLE.sub(_stored, value)

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        return value if value is None or "\\" not in value else _STORED.sub(_meant, value)


class PostgresBackend(SqlBackend):
    """Beats that share a PostgreSQL database.

    :param connection: a URL or DSN as libpq reads it (None: libpq's defaults and ``PG...`` variables); a SQLAlchemy
        Engine with psycopg; a psycopg Connection; or a ``psycopg_pool.ConnectionPool``. What is handed over is never
        closed, keeps its settings, and must not be inside a transaction when a call comes.
    :param table: the name of the tables, or ``schema.name``; one for each service.
    :param early_tolerance: how far ahead of the store's clock a slot may lie, in milliseconds.
    """

    name = "postgres"
    traits = Traits(
        leases=True,
        horizon=None,
        server_time=True,
        durable=True,
        any_job_name=True,
        history_by_age=True,
        follows_runs=True,
    )
    _has_schemas = True
    _text = AnyText()

    def __init__(
        self, connection: Any = None, table: str = "anarchon_runs", *, early_tolerance: Millis = 5_000
    ) -> None:
        super().__init__(table, early_tolerance=early_tolerance)
        self._source = _source(connection)
        self._begin_text, self._look_text = _begin_text(durable=True), _begin_text(look=True)
        self._noted: set[str] = set()
        runs, jobs = self.tables.runs, self.tables.jobs
        asked = self._given(job=self._text)
        self._job_locks = (
            select(jobs.c.job, jobs.c.floor)
            .where(jobs.c.job == asked.c.job)
            .order_by(jobs.c.job)
            .with_for_update(of=jobs)
        )
        keys = self._given(job=self._text, slot=BigInteger())
        self._run_locks = (
            select(runs.c.slot)
            .where(
                runs.c.job == keys.c.job,
                runs.c.slot == keys.c.slot,
                in_state(runs, *UNSETTLED, RunState.DISPATCHED),
            )
            .order_by(runs.c.job, runs.c.slot)
            .with_for_update(of=runs)
        )

    @classmethod
    def from_url(cls, url: str, **options: Any) -> PostgresBackend:
        """``postgresql://user:password@host/database``, as libpq reads it, with ``?table=`` and libpq's options."""
        from celery_anarchon.backends.registry import read_url

        driver = _driver()
        _, given = read_url(url, {"table": str, **dict.fromkeys(driver.libpq_options(), str)}, options)
        ours = {"table": given.pop("table")} if "table" in given else {}
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in given.items())
        return cls(url.partition("?")[0] + (f"?{query}" if query else ""), **ours)

    def describe(self) -> str:
        return f"postgres {self._source.where}, table {self.namespace}"

    def open(self, app_name: str, *, create: bool = True) -> None:
        self._source.open()
        try:
            with self._calling() as connection:
                self._check_server(connection)
        except Unusable as error:
            raise ConfigurationError(str(error)) from error
        super().open(app_name, create=create)

    def close(self) -> None:
        self._source.close()

    def _check_server(self, connection: Connection) -> None:
        version, encoding, commit = connection.execute(
            select(
                func.current_setting("server_version_num"),
                func.current_setting("server_encoding"),
                func.current_setting("synchronous_commit"),
            )
        ).one()
        if int(version) < OLDEST_POSTGRES * 10_000:
            raise Unusable(
                f"{self.describe()}: PostgreSQL {int(version) // 10_000} is too old; {OLDEST_POSTGRES} or newer is "
                "needed"
            )
        if encoding not in ("UTF8", "SQL_ASCII"):
            raise Unusable(
                f"{self.describe()}: the database's encoding is {encoding}, which cannot store every job name; use one "
                "with UTF8"
            )
        self._begin_text = _begin_text(durable=commit == "off")

    # --- what a dialect says ------------------------------------------------------------------------------------------

    def _connection(self) -> AbstractContextManager[Connection]:
        connection: AbstractContextManager[Connection] = self._source.connection()
        return connection

    def _begin(self, connection: Connection) -> None:
        connection.exec_driver_sql(self._begin_text)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        # Also a look waits for whoever keeps a table locked. Its limit is that of a transaction: a pooler would pass on
        # one of the session to the next client.
        with self._calling() as connection:
            connection.exec_driver_sql(self._look_text)
            with self._undone_on_error(connection):
                yield connection
            connection.exec_driver_sql("COMMIT")

    def _commit(self, connection: Connection) -> None:
        try:
            connection.exec_driver_sql("COMMIT")
        except SQLAlchemyError as error:
            if _sqlstate(error) in _NOT_COMMITTED:
                raise
            raise OutcomeUnknown(f"{self.describe()}: the commit failed ({_words(error)})") from error

    def _clock(self) -> ColumnElement[int]:
        # Not now(): that is when the transaction began, and it may have waited for a lock since.
        return cast(func.floor(extract("epoch", func.clock_timestamp()) * 1000), BigInteger)

    def _insert(self, table: Table) -> Any:
        return postgresql.insert(table)

    def _given(self, **columns: TypeEngine[Any]) -> CTE:
        arrays = [bindparam(f"given_{name}", type_=ARRAY(type_)) for name, type_ in _numbered(columns.values())]
        rows = func.unnest(*arrays).table_valued(
            *(column(name, type_) for name, type_ in columns.items()), name="given_rows"
        )
        return select(*rows.render_derived().c).cte("given")

    def _execute_with(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], values: dict[str, Any]
    ) -> CursorResult[Any]:
        arrays = {f"given_{name}": list(its_values) for name, its_values in _numbered(zip(*rows, strict=True))}
        return connection.execute(statement, {**arrays, **values})

    def _floors(self, connection: Connection, jobs: Iterable[str]) -> dict[str, Millis]:
        wanted = sorted(set(jobs))
        # A job that has no row yet cannot be locked: its row is made first, before anything is locked. Whoever makes
        # one while it holds locks could wait for somebody who waits for it.
        self._note_jobs(connection, [job for job in wanted if job not in self._noted])
        locked = self._execute(connection, self._job_locks, [(job,) for job in wanted])
        if len(locked) < len(wanted):
            # Somebody has deleted rows, or a transaction that made some was undone. Once more without the locks:
            # nothing else has been done yet.
            self._noted.clear()
            connection.exec_driver_sql("ROLLBACK")
            self._begin(connection)
            self._note_jobs(connection, wanted)
            locked = self._execute(connection, self._job_locks, [(job,) for job in wanted])
        self._noted.update(wanted)
        return {row.job: row.floor for row in locked if row.floor is not None}

    def _lock_runs(self, connection: Connection, keys: Iterable[tuple[str, Millis]]) -> None:
        self._execute(connection, self._run_locks, sorted(set(keys)))

    def _lock_namespace(self, connection: Connection) -> None:
        connection.execute(select(func.pg_advisory_xact_lock(_NAMESPACE_LOCK)))

    def _create_tables(self, connection: Connection) -> None:
        schema = self.tables.metadata.schema
        # Who may not make schemas may not even ask for one that is there.
        if schema is not None and not inspect(connection).has_schema(schema):
            for statement in self._before_tables():
                connection.execute(statement)
        super()._create_tables(connection)

    def _compiler(self) -> Any:
        return postgresql.dialect()  # type: ignore[no-untyped-call]

    def _before_tables(self) -> list[Any]:
        schema = self.tables.metadata.schema
        return [] if schema is None else [CreateSchema(schema, if_not_exists=True)]

    def _error(self, error: SQLAlchemyError) -> BackendUnavailable:
        words, state = _words(error), _sqlstate(error)
        kind, fix = _MEANINGS.get(state or "", (None, ""))
        if kind is None:
            for sign, its_kind, its_fix in _AT_CONNECT if state is None else ():
                if sign in words:
                    kind, fix = its_kind, its_fix
        return (kind or BackendUnavailable)(f"{self.describe()}: {words}" + (f"; {fix}" if fix else ""))


_NOT_COMMITTED = frozenset({"40000", "40001", "40002", "40P01", "23505", "23503", "23514", "25P02", "25P03"})
"""What a COMMIT says when it has surely not been one."""

_MEANINGS: dict[str, tuple[type[BackendUnavailable], str]] = {
    "42P01": (NoTables, "there are no tables of anarchon in it (any more): start a beat to make them"),
    "3F000": (Unusable, "there is no such schema: make it, or set table=schema.name"),
    "42501": (
        Unusable,
        "grant the rights that the page on PostgreSQL lists; whoever may make tables runs what "
        "'celery -A proj anarchon create-tables --sql' prints",
    ),
    "42703": (Unusable, "the tables are of another structure; set table=... to a name that nobody uses"),
    "42804": (Unusable, "the tables are of another structure; set table=... to a name that nobody uses"),
    "42P10": (Unusable, "the tables lack their primary keys; set table=... to a name that nobody uses"),
    "25006": (BackendUnavailable, "it is a standby, or read-only: name all hosts with target_session_attrs=read-write"),
    "53100": (BackendUnavailable, "make room on the disk"),
    "53300": (BackendUnavailable, "raise max_connections, or use a pooler"),
    "55P03": (BackendUnavailable, "somebody has kept the tables locked for long"),
    "28P01": (Unusable, "give the right password"),
    "28000": (Unusable, "let this role log in (pg_hba.conf)"),
    "3D000": (Unusable, "make the database, or name another"),
}

_AT_CONNECT: tuple[tuple[str, type[BackendUnavailable], str], ...] = (
    # A refusal to connect reaches us as text only.
    ("password authentication failed", Unusable, "give the right user and password"),
    ("no password supplied", Unusable, "give a password, in the URL or in ~/.pgpass"),
    ("no pg_hba.conf entry", Unusable, "let this host and role in (pg_hba.conf)"),
    ('" does not exist', Unusable, "make it, or name another"),
    ("too many", BackendUnavailable, "raise max_connections, or use a pooler"),
)


def _begin_text(*, durable: bool = False, look: bool = False) -> str:
    """One message to the server. *durable*: a claim that was answered survives a crash whatever the role's default.
    *look*: nothing is to be written."""
    settings = [
        "BEGIN ISOLATION LEVEL READ COMMITTED" + (" READ ONLY" if look else ""),
        f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT}",
        f"SET LOCAL idle_in_transaction_session_timeout = {_IDLE_TIMEOUT}",
    ]
    return "; ".join([*settings, *(["SET LOCAL synchronous_commit = on"] if durable else [])])


def _numbered(values: Iterable[Any]) -> Iterable[tuple[int, Any]]:
    return enumerate(values, 1)


def _words(error: BaseException) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _sqlstate(error: BaseException) -> str | None:
    state: str | None = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state


def _driver() -> Any:
    try:
        from celery_anarchon.backends import pgconnections
    except ImportError as error:
        raise ConfigurationError(
            f'the driver psycopg cannot be loaded ({error}): pip install "celery-anarchon[postgres]" "psycopg[binary]"'
        ) from error
    return pgconnections


def _source(connection: Any) -> Any:
    driver = _driver()
    if connection is None or isinstance(connection, str):
        try:
            return driver.Own(connection or "")
        except driver.psycopg.Error:
            # What libpq says of a URL may quote it, with its password.
            raise ConfigurationError(
                "PostgresBackend(connection=...): this is neither a URL such as postgresql://user:password@host/database"
                ' nor a DSN such as "host=... dbname=..."; escape special characters of a password (% as %25, @ as %40)'
            ) from None
    if isinstance(connection, Engine):
        return driver.HandedEngine(connection)
    if isinstance(connection, driver.psycopg.Connection):
        return driver.HandedConnection(connection)
    if all(hasattr(connection, name) for name in ("getconn", "putconn", "conninfo", "kwargs")) and not hasattr(
        connection, "getconn_async"
    ):
        if "Async" in type(connection).__name__:
            raise ConfigurationError(
                "PostgresBackend(connection=...) is a pool for asyncio; make a psycopg_pool.ConnectionPool"
            )
        return driver.HandedPool(connection)
    raise ConfigurationError(
        "PostgresBackend(connection=...) takes a URL or DSN, a SQLAlchemy Engine, a psycopg Connection or a "
        f"psycopg_pool.ConnectionPool, not {type(connection).__module__}.{type(connection).__qualname__}"
    )
