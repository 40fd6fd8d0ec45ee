"""What every SQL store shares besides the contract: how it is opened, how a call runs, and what a dialect says.

Belongs here: tables that are made once, transactions, names, and the methods under "what a dialect says": all that a
dialect's module has to give. Does not belong here: claims (:mod:`.sqlclaims`) and leases (:mod:`.sql`).
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    CursorResult,
    Row,
    Table,
    Text,
    inspect,
    select,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.types import TypeEngine

from celery_anarchon import wire
from celery_anarchon.backends.base import LeaseBackend, Unusable, check_charter
from celery_anarchon.backends.sqlrunstatements import RunStatements
from celery_anarchon.backends.sqltables import Statements, Tables
from celery_anarchon.clock import SystemClock
from celery_anarchon.errors import BackendUnavailable, ConfigurationError
from celery_anarchon.model import Millis

_ROWS_AT_ONCE = 5_000
_VALUES_AT_ONCE = 32_000
"""Of one statement: SQLite allows 32,766 parameters."""

_SUFFIXES = ("_jobs", "_sights", "_beats", "_workers", "_meta")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_NAME = 63 - len("_workers")
"""PostgreSQL cuts longer names silently, and two tables would become one."""
_T = TypeVar("_T")


class NoTables(Unusable):
    """There are no tables of ours. To readers that were not to make any it is an empty store."""


class SqlStore(LeaseBackend):
    """See the module."""

    _has_schemas = False
    _text: TypeEngine[str] = Text()
    """The type of a column of any text."""

    def __init__(self, table: str, *, early_tolerance: Millis = 5_000) -> None:
        schema, name = self._table_name(table)
        self.namespace = table
        self.early_tolerance = early_tolerance
        self._may_be_empty = True
        self.tables = Tables(name, schema, self._text)
        self._sql = Statements(self)
        self._run_sql = RunStatements(self)

    # --- what a dialect says ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _connection(self) -> AbstractContextManager[Connection]:
        """A connection of nobody else's, in autocommit, and with no transaction open."""

    @abc.abstractmethod
    def _begin(self, connection: Connection) -> None:
        """Begin a write transaction whose statements each see what was committed before them."""

    @abc.abstractmethod
    def _commit(self, connection: Connection) -> None:
        """Commit. Raises OutcomeUnknown when it may or may not have been."""

    @abc.abstractmethod
    def _error(self, error: SQLAlchemyError) -> BackendUnavailable:
        """What a driver's error means, in one line with the fix. Nothing was committed."""

    @abc.abstractmethod
    def _clock(self) -> ColumnElement[int]:
        """The store's clock at this statement, in milliseconds."""

    @abc.abstractmethod
    def _insert(self, table: Table) -> Any:
        """The dialect's INSERT, which knows ON CONFLICT."""

    @abc.abstractmethod
    def _given(self, **columns: TypeEngine[Any]) -> CTE:
        """A table of the rows that :meth:`_execute_with` is given."""

    @abc.abstractmethod
    def _execute_with(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], values: dict[str, Any]
    ) -> CursorResult[Any]:
        """Execute a *statement* over a :meth:`_given` with *rows*, and with *values* for its other parameters."""

    def _patiently(self, step: Callable[[], _T]) -> _T:
        """Do *step*; again and again where a store answers "busy" to what is only read."""
        return step()

    def _floors(self, connection: Connection, jobs: Iterable[str]) -> dict[str, Millis]:
        """The floors of *jobs*, before anything else in a transaction but :meth:`_note_jobs`. A dialect whose
        transactions run side by side locks these jobs until the commit."""
        found = self._execute(connection, self._sql.floors, [(job,) for job in sorted(set(jobs))])
        return {row.job: row.floor for row in found}

    def _lock_runs(self, connection: Connection, keys: Iterable[tuple[str, Millis]]) -> None:
        """A dialect whose transactions run side by side locks these runs, as far as they may change, in one order for
        all, until the commit: an UPDATE of several locks them in the order in which it finds them, and two could wait
        for each other."""

    def _lock_namespace(self, connection: Connection) -> None:
        """A dialect whose transactions run side by side lets only one at a time make tables."""

    def _create_tables(self, connection: Connection) -> None:
        """Make the tables, within a write transaction that found none."""
        self.tables.metadata.create_all(connection, checkfirst=False)

    @abc.abstractmethod
    def _compiler(self) -> Any:
        """SQLAlchemy's dialect, for statements as text."""

    def _before_tables(self) -> list[Any]:
        """What is to be made before the tables."""
        return []

    # --- life ---------------------------------------------------------------------------------------------------------

    def open(self, app_name: str, *, create: bool = True) -> None:
        try:
            meta = self._read_meta()
            if create and "app" not in (meta or {}):
                meta = self._initialise(app_name)
            self._may_be_empty = meta is None
        except Unusable as error:
            raise ConfigurationError(str(error)) from error
        if meta is not None:
            self._check_meta(meta, app_name)

    def _read_meta(self) -> dict[str, str] | None:
        try:
            with self._reading() as connection:
                return self._patiently(lambda: self._meta_in(connection))
        except NoTables:
            return None

    def _initialise(self, app_name: str) -> dict[str, str]:
        with self._writing() as connection:
            # Once more, now that nobody else can: of many beats that start at once one makes the tables.
            self._lock_namespace(connection)
            meta = self._meta_in(connection)
            if meta is None:
                self._create_tables(connection)
                meta = {"layout": str(wire.LAYOUT_VERSION)}
            new = [] if "app" in meta else [{"key": "app", "value": app_name}]
            new += [{"key": "layout", "value": meta["layout"]}]
            connection.execute(self._insert(self.tables.meta).on_conflict_do_nothing(), new)
            return {"app": app_name, **meta}

    def _meta_in(self, connection: Connection) -> dict[str, str] | None:
        """What the namespace says of itself, None: there is no such namespace."""
        schema = self.tables.metadata.schema

        def there(table: Table) -> bool:
            # A new inspector each time: one remembers its answers.
            return inspect(connection).has_table(table.name, schema)

        foreign: list[str] = []
        if not there(self.tables.meta):
            foreign = [table.name for table in self.tables.metadata.sorted_tables if there(table)]
            # A look without a transaction is several: another beat may have made the tables between the first and the
            # last of them.
            if not there(self.tables.meta):
                if not foreign:
                    return None
                raise Unusable(
                    f"{self.describe()}: there is a table {foreign[0]} that is not of this namespace; set table=... to "
                    "a name that nobody uses"
                )
        return {row.key: row.value for row in connection.execute(select(self.tables.meta))}

    def _check_meta(self, meta: dict[str, str], app_name: str) -> None:
        check_charter(self, app_name, layout=int(meta["layout"]), app=meta.get("app"), own="table=...")

    def now(self) -> Millis:
        try:
            with self._reading() as connection:
                return int(self._patiently(lambda: connection.execute(self._sql.ping).scalar_one()))
        except NoTables:
            if not self._may_be_empty:
                raise
            return SystemClock().wall()

    def ddl(self) -> list[str]:
        """The statements that make the tables, for whoever may where the beats' own role may not."""
        layout = self._insert(self.tables.meta).values(key="layout", value=str(wire.LAYOUT_VERSION))
        statements = self._before_tables()
        for table in self.tables.metadata.sorted_tables:
            statements += [
                CreateTable(table),
                *map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name))),
            ]
        texts = [str(statement.compile(dialect=self._compiler())) for statement in statements]
        texts.append(str(layout.compile(dialect=self._compiler(), compile_kwargs={"literal_binds": True})))
        return ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in texts]

    def _time(self, connection: Connection) -> Millis:
        return int(connection.execute(self._sql.now).scalar_one())

    # --- calls --------------------------------------------------------------------------------------------------------

    def _look(self, read: Callable[[Connection], Iterable[Row[Any]]]) -> list[Row[Any]]:
        """What *read* finds; nothing where there are no tables yet and we are not to make any."""
        try:
            with self._reading() as connection:
                return self._patiently(lambda: list(read(connection)))
        except NoTables:
            if not self._may_be_empty:
                raise
            return []

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._calling() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._calling() as connection:
            self._begin(connection)
            with self._undone_on_error(connection):
                yield connection
            self._commit(connection)

    @contextmanager
    def _undone_on_error(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise

    @contextmanager
    def _calling(self) -> Iterator[Connection]:
        try:
            with self._connection() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise self._error(error) from error

    def _execute(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], **values: Any
    ) -> list[Row[Any]]:
        """The rows that *statement* returns for the given ones, if it returns any."""
        found: list[Row[Any]] = []
        for some in chunks(rows, _VALUES_AT_ONCE // len(rows[0]) if rows else 1):
            result = self._execute_with(connection, statement, some, values)
            if result.returns_rows:
                # fetchall: SQLite cannot commit while rows of a RETURNING are still to come.
                found += result.fetchall()
        return found

    def _note_jobs(self, connection: Connection, jobs: Sequence[str]) -> None:
        """See to it that each of *jobs*, sorted, has its row."""
        self._execute(connection, self._sql.new_jobs, [(job,) for job in jobs])

    # --- names --------------------------------------------------------------------------------------------------------

    def _table_name(self, table: Any) -> tuple[str | None, str]:
        schema, dot, name = table.rpartition(".") if isinstance(table, str) else ("", "", "")
        if dot and not self._has_schemas:
            raise ConfigurationError(f"table={table!r}: {self.name} has no schemas; give a name without a dot")
        for part in (schema, name) if dot else (name,):
            if not _IDENTIFIER.fullmatch(part) or len(part) > _LONGEST_NAME or part.lower().startswith("sqlite_"):
                raise ConfigurationError(
                    f"table={table!r}: give a name of letters, digits and _, at most {_LONGEST_NAME} of them, not "
                    "beginning with a digit or sqlite_" + (", or schema.name" if self._has_schemas else "")
                )
        if name.lower().endswith(_SUFFIXES):
            raise ConfigurationError(
                f"table={table!r}: names ending in {', '.join(_SUFFIXES)} are for the tables beside it; choose another"
            )
        return schema or None, name


def chunks(items: Sequence[_T], size: int = _ROWS_AT_ONCE) -> Iterator[Sequence[_T]]:
    size = min(size, _ROWS_AT_ONCE)
    return (items[start : start + size] for start in range(0, len(items), size))
