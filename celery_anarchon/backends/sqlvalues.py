"""Statements over the rows of a batch, where a dialect has no arrays: the rows stand in the text, as VALUES.

Belongs here: how such a statement is rendered and executed. Does not belong here: any statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy import CTE, Connection, CursorResult, bindparam, literal_column, select, text
from sqlalchemy.types import TypeEngine

_KEPT = 256
"""Texts. A beat asks with the same few numbers of rows again and again."""


def given(**columns: TypeEngine[Any]) -> CTE:
    """A table of the rows that :meth:`Values.execute` is given."""
    # A join, because SQLite walks the whole table for (job, slot) IN (VALUES ...). Core's own VALUES would be
    # compiled anew for each number of rows; an expanding parameter is not, and no construct takes one as a table.
    names = (
        literal_column(f"column{number}", type_).label(name) for number, (name, type_) in enumerate(columns.items(), 1)
    )
    rows = text(":rows AS given_rows").bindparams(bindparam("rows", expanding=True))
    return select(*names).select_from(rows).cte("given")


class _Text(NamedTuple):
    sql: str
    before: Sequence[str]
    """The names of the parameters that come before those of the rows."""
    after: Sequence[str]
    constants: Mapping[str, Any]


class Values:
    """Executes statements over a :func:`given`, each rendered once for each number of rows.

    Core renders an expanding parameter anew for each execution, which for a batch of 1,000 takes as long as the
    statement itself. Its types must need no conversion: none of SQLite's that we use does.

    :param compiler: SQLAlchemy's dialect.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler
        self._text = lru_cache(_KEPT)(self._rendered)

    def execute(
        self, connection: Connection, statement: Any, rows: Sequence[tuple[Any, ...]], values: Mapping[str, Any]
    ) -> CursorResult[Any]:
        rendered = self._text(statement, len(rows), len(rows[0]))
        named = {**rendered.constants, **values}
        before, after = ([named[name] for name in names] for names in (rendered.before, rendered.after))
        return connection.exec_driver_sql(rendered.sql, (*before, *chain.from_iterable(rows), *after))

    def _rendered(self, statement: Any, count: int, width: int) -> _Text:
        compiled = statement.compile(dialect=self._compiler)
        state = compiled.construct_expanded_state({**compiled.params, "rows": [(None,) * width] * count})
        places = list(state.positiontup or ())
        first = places.index("rows_1_1")
        last = first + count * width
        constants = {name: bound.value for name, bound in compiled.binds.items() if not bound.required}
        return _Text(state.statement, places[:first], places[last:], constants)
