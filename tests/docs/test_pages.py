"""What the pages tell readers to type: Python runs, on private servers, and commands are there."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state
from celery.bin.celery import celery as celery_command
from celery.schedules import crontab
from sqlalchemy import Engine, create_engine, text
from support.columns import Servers
from support.nats_servers import nats_cluster
from support.pages import PAGES, ROOT, Block, commands, extras, python_blocks

import celery_anarchon
from celery_anarchon import Anarchon
from celery_anarchon.app import open_backend
from celery_anarchon.backends.base import ClaimBackend
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.choice import choose_backend
from celery_anarchon.errors import OptionError
from celery_anarchon.testing import BackendHarness, ClaimSuite

pytestmark = pytest.mark.fleet


def _task() -> None: ...


@contextmanager
def celery_as_it_was() -> Iterator[None]:
    """Tasks of a page are shared with all apps of the process, and its app becomes the current one: not for long."""
    shared, current = set(_state._on_app_finalizers), _state._tls.current_app
    try:
        yield
    finally:
        _state._on_app_finalizers.clear()
        _state._on_app_finalizers.update(shared)
        _state._tls.current_app = current


class Reader:
    """Types what a page says, from its first block to its last, where there are servers under the page's names."""

    def __init__(self, servers: Servers, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = servers
        self.folder = folder
        self.monkeypatch = monkeypatch

    def places(self) -> dict[str, Any]:
        """What pages name -> what there is here."""
        on = self.servers

        def redis() -> str:
            return str(on.redis86.url)

        def postgres() -> str:
            return str(on.postgres.url)

        return {
            "redis://cache.internal:6379/0": redis,
            "redis://localhost:6379/0": redis,
            "redis://localhost:6379/1": redis,
            "redis://localhost:6379": redis,
            "redis://cache": redis,
            "postgresql+psycopg://beat@db.internal/proj": lambda: postgres().replace("://", "+psycopg://"),
            "postgresql://beat@db.internal/proj": postgres,
            "libsql://proj-team.turso.io": lambda: on.sqld.url,
            "amqp://user:password@rabbit.internal:5672//": lambda: on.rabbitmq.url,
            '"nats://n1:4222", "nats://n2:4222"': lambda: str(json.dumps(self.cluster().url.split(",")))[1:-1],
            "nats://n1:4222,nats://n2:4222": lambda: self.cluster().url,
            "nats://n1:4222,n2:4222,n3:4222": lambda: self.cluster().url,
            "/var/lib/": lambda: f"{self.folder}/",
            "Proxy(5432": lambda: f"Proxy({on.postgres.port}",
            'environ["REDIS_URL"]': lambda: f'environ["_"] or "{redis()}"',
            'environ["VALKEY_URL"]': lambda: f'environ["_"] or "{on.valkey.url.replace("redis", "valkey")}"',
            'environ["AMQP_URL"]': lambda: f'environ["_"] or "{on.rabbitmq.url}"',
        }

    def cluster(self) -> Any:
        if not hasattr(self.servers, "nats_cluster"):
            self.servers.nats_cluster = self.servers.keep(nats_cluster(self.servers.folder / "cluster"))  # type: ignore[attr-defined]
        return self.servers.nats_cluster  # type: ignore[attr-defined]

    def text(self, code: str) -> str:
        for place, here in self.places().items():
            if place in code:
                code = code.replace(place, here())
        return code

    def prelude(self) -> dict[str, Any]:
        """What the text around the blocks supposes: an app, tasks and what everybody imports."""
        app = Celery("proj", broker=f"memory://localhost/{uuid.uuid4()}", set_as_current=False)
        app.conf.timezone = "UTC"
        self.monkeypatch.syspath_prepend(ROOT / "examples" / "third_party_backend")
        public = {name: getattr(celery_anarchon, name) for name in celery_anarchon.__all__}
        tasks = ("refresh", "report", "launch", "export", "export_all", "notify")
        made = {name: app.task(_task, name=f"proj.{name}", shared=False) for name in tasks}
        here = {"app": app, "os": os, "crontab": crontab, "datetime": datetime, "timezone": timezone, "text": text}
        return {**public, **made, **here, "create_engine": create_engine, "__name__": "page"}

    def run(self, block: Block, names: dict[str, Any]) -> list[Any]:
        """The values of the expressions that stand alone."""
        tree = ast.parse(self.text(block.code), block.name)
        values: list[Any] = []
        for statement in tree.body:
            if isinstance(statement, ast.Expr):
                values.append(eval(compile(ast.Expression(statement.value), block.name, "eval"), names))
            else:
                exec(compile(ast.Module([statement], []), block.name, "exec"), names)
        return values

    def try_stores(self, names: dict[str, Any], values: list[Any]) -> int:
        """Open each store that a block has named, as a beat would. How many there were."""
        app = names["app"]
        chosen = [value for value in values if isinstance(value, ClaimBackend)]
        for backend in chosen:
            self.clean()
            with closing(backend):
                backend.open("proj")
                assert backend.history("none", 1) == []
        if "default" in choose_backend(app)[1]:
            return len(chosen)
        self.clean()
        with closing(open_backend(app, create=True)) as backend:
            assert backend.history("none", 1) == []
        return len(chosen) + 1

    def clean(self) -> None:
        """A namespace has one strategy and one window, and pages show all of them."""
        if "redis86" in self.servers.__dict__:
            with self.servers.redis86.client() as client:
                client.flushall()
        if "nats_cluster" in self.servers.__dict__:
            for stream in ("CRON", "CRON_HISTORY"):
                self.servers.nats_cluster.api(f"STREAM.DELETE.{stream}")  # type: ignore[attr-defined]


@pytest.fixture
def reader(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CELERY_ANARCHON_BACKEND", raising=False)
    monkeypatch.setenv("_", "")
    for name in ("proj", "app"):
        (tmp_path / name).mkdir()
    return Reader(servers, tmp_path, monkeypatch)


WITH_PYTHON = [page for page in PAGES if any(True for _ in python_blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python(page: Path, reader: Reader, record_property: Any) -> None:
    with celery_as_it_was():
        read(page, reader, record_property)


def read(page: Path, reader: Reader, record_property: Any) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        if block.reason:
            record_property("not run", f"{block.name}: {block.reason}")
            continue
        # Each stands for itself; what a page has defined before is there.
        names = {**names, **reader.prelude(), **SUPPOSED.get(page.name, dict)()}
        if "anarchon." in block.code and "Anarchon(" not in block.code:
            names["anarchon"] = Anarchon(names["app"])
        refused = "# OptionError" in block.code
        if refused:
            with pytest.raises(OptionError):
                reader.run(block, names)
        else:
            reader.try_stores(names, reader.run(block, names))
        names["app"].close()
    for value in names.values():
        if isinstance(value, Engine):
            value.dispose()


def of_the_example() -> dict[str, Any]:
    """The backend that the page builds, as it is in the repository."""
    folder = vars(importlib.import_module("anarchon_folder"))
    return {**folder, "partial": partial, "contextmanager": contextmanager, "ClaimSuite": ClaimSuite, "self": None}


def of_the_reference() -> dict[str, Any]:
    names = {"namespace": "cron:", "job": "report", "slot": "2026-03-29T01:00:00.000Z"}
    return {"uuid5": uuid.uuid5, "NAMESPACE_URL": uuid.NAMESPACE_URL, "json": json, **names}


SUPPOSED: dict[str, Callable[[], dict[str, Any]]] = {
    "backends.md": lambda: {"MyBackend": MemoryBackend},
    "own-backend.md": lambda: {**of_the_example(), "BackendHarness": BackendHarness, "open_folder": None},
    "reference.md": of_the_reference,
}
"""What the text of a page names, and does not define."""


def test_the_run_id_is_as_the_reference_says(reader: Reader) -> None:
    (block,) = (block for block in python_blocks(ROOT / "docs" / "reference.md") if "uuid5" in block.code)
    (value,) = reader.run(block, of_the_reference())
    assert str(value) == celery_anarchon.run_id("report", "2026-03-29T01:00:00.000Z", namespace="cron:")


def test_what_is_not_run_says_why() -> None:
    """How many there are, so that a new one is seen."""
    left = [block.name.partition(":")[0] for page in PAGES for block in python_blocks(page) if block.reason]
    assert Counter(left) == {"docs/own-backend.md": 2}


# --- commands ---------------------------------------------------------------------------------------------------------

WITH_COMMANDS = [page for page in PAGES if any(True for _ in commands(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path) -> None:
    for line, words in commands(page):
        command: Any = celery_command
        for word in words[1:]:
            if word.startswith("-"):
                known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
                assert word.partition("=")[0] in known, f"{page.name}:{line}: {word} of {command.name}: {sorted(known)}"
            elif hasattr(command, "commands") or hasattr(command, "get_command"):
                if word in ("proj", "tenants", "COMMAND"):
                    continue
                found = command.get_command(None, word)
                assert found is not None, f"{page.name}:{line}: there is no {' '.join(words)}"
                command = found


def test_extras_that_pages_name() -> None:
    there = set(metadata.metadata("celery-anarchon").get_all("Provides-Extra") or ())
    for page in PAGES:
        assert extras(page) <= there, page.name


def test_the_table_of_extras_is_whole() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == set(metadata.metadata("celery-anarchon").get_all("Provides-Extra") or ())


def test_the_log_has_the_lines_that_operations_explains() -> None:
    code = "".join(file.read_text() for file in Path(celery_anarchon.__file__).parent.rglob("*.py"))
    # Texts that go over several lines of code.
    code = re.sub(r'"\s*f?"', "", code)
    page = (ROOT / "docs" / "operations.md").read_text()
    lines = [
        line for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for line in re.findall(r"\*([^*]+)\*", cell)
    ]
    assert len(lines) > 30
    for line in lines:
        for words in re.split(r"\.\.\.|\bN(?: slots)?\b|REASON|[()]", line):
            assert words.strip(" ,:;") in code, f"{line}: {words}"


OVERVIEW = ["brokers-and-leases", "claims", "several-services", "examples", "own-backend"]
OVERVIEW += ["redis", "postgresql", "sqlite", "rabbitmq", "nats"]


def test_the_overview_links_each_page_that_it_names() -> None:
    text = (ROOT / "docs" / "backends-overview.md").read_text()
    index = (ROOT / "docs" / "index.md").read_text()
    for page in OVERVIEW:
        assert (ROOT / "docs" / f"{page}.md").exists()
        assert f"]({page}.md" in text and f"\n{page}\n" in index, page
