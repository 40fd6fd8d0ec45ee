"""``celery anarchon create-tables``: for a store whose beats may not make tables themselves."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_anarchon.app import open_backend
from celery_anarchon.choice import choose_backend
from celery_anarchon.cli.common import app_of, guarded, json_option, show_json
from celery_anarchon.errors import ConfigurationError


@click.command("create-tables", cls=CeleryCommand)
@click.option("--sql", is_flag=True, help="Print the statements, and connect to nothing.")
@json_option
@click.pass_context
@guarded
def create_tables(ctx: click.Context, sql: bool, as_json: bool) -> None:
    """Make the tables of a SQL store, as a beat would; or print how."""
    app = app_of(ctx)
    chosen, _ = choose_backend(app)
    ddl: Any = getattr(chosen, "ddl", None)
    if ddl is None:
        raise ConfigurationError(f"{chosen.name} has no tables: there is nothing to make")
    if sql:
        statements: list[str] = ddl()
        if as_json:
            show_json({"namespace": chosen.namespace, "statements": statements})
        else:
            click.echo("\n\n".join(f"{statement};" for statement in statements))
        return
    backend = open_backend(app, create=True)
    try:
        where = backend.describe()
    finally:
        backend.close()
    if as_json:
        show_json({"namespace": backend.namespace, "store": where})
    else:
        click.echo(f"the tables are there: {where}")
