"""``celery anarchon ...``: one module for each family of commands.

Every ``celery`` command imports this module, a worker's too: nothing here may cost time. A command's module, and with
it rich and the stores, is imported when that command is called.
"""

from __future__ import annotations

import importlib

import click
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]

COMMANDS = {
    "next": "celery_anarchon.cli.schedule:next_slots",
    "status": "celery_anarchon.cli.runs:status",
    "history": "celery_anarchon.cli.runs:history",
    "explain": "celery_anarchon.cli.why:explain",
    "release": "celery_anarchon.cli.why:release",
    "create-tables": "celery_anarchon.cli.tables:create_tables",
    "demo": "celery_anarchon.cli.demo:demo",
}


class _LazyGroup(DYMGroup):  # type: ignore[misc]
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup)
def anarchon() -> None:
    """See what any number of beats will send, and have sent."""
