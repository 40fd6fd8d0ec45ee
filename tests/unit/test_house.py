"""What holds of the package as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

import celery_anarchon


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import celery_anarchon",
        "import celery_anarchon.dispatcher",
        "import celery_anarchon.backends.memory",
        "from celery_anarchon import MemoryBackend, Run, RunState",
        "import celery_anarchon.sweeper, celery_anarchon.roster, celery_anarchon.options, celery_anarchon.verdict",
    ],
)
def test_the_core_is_free_of_celery(statement: str) -> None:
    loaded = modules_after(statement)
    for name in ("celery", "kombu", "billiard", "sqlalchemy", "rich", "pytest"):
        assert name not in loaded


def test_the_command_line_plugin_is_light() -> None:
    loaded = modules_after("import celery_anarchon.cli")
    for name in ("sqlalchemy", "rich", "croniter", "celery_anarchon.scheduler"):
        assert name not in loaded


def test_public_names_are_there() -> None:
    for name in celery_anarchon.__all__:
        assert getattr(celery_anarchon, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        celery_anarchon.nothing  # noqa: B018 - the access is what is tested
