"""URLs, mappings and objects; options; and no secret in any text."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_anarchon.backends import backend_from_url, registry
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.registry import backend_from, masked
from celery_anarchon.backends.sqlite import SqliteBackend
from celery_anarchon.errors import ConfigurationError


def refusal(value: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        backend_from(value, **options)
    text = str(caught.value)
    assert "\n" not in text and "secret" not in text
    return text


@pytest.mark.parametrize("prefix", ["", "sqla+", "db+"])
def test_sqlite_urls(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (
        ("sqlite:///anarchon.db", tmp_path / "anarchon.db"),
        ("sqlite:///./deep/er.db", tmp_path / "deep" / "er.db"),
        ("sqlite:////var/lib/app/a.db", Path("/var/lib/app/a.db")),
        ("sqlite:////srv/a%20b.db", Path("/srv/a b.db")),
        ("SQLite:////srv/a@b/c.db", Path("/srv/a@b/c.db")),
    ):
        backend = backend_from_url(prefix + url)
        assert isinstance(backend, SqliteBackend)
        assert str(path) in backend.describe()
        assert backend.namespace == "anarchon_runs"


def test_options_of_a_url() -> None:
    backend = backend_from_url("sqlite:////srv/a.db?table=billing_runs&busy_timeout=1m")
    assert isinstance(backend, SqliteBackend)
    assert (backend.namespace, backend.busy_timeout) == ("billing_runs", 60)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:////a.db?tabel=x", ["unknown option 'tabel'", "did you mean 'table'", "'busy_timeout'"]),
        ("sqlite:////a.db?early_tolerance=9", ["unknown option 'early_tolerance'"]),
        ("sqlite:////a.db?table=a&table=b", ["'table' is given twice"]),
        ("sqlite:////a.db?busy_timeout=soon", ["busy_timeout", "'soon'"]),
        ("sqlite:////a.db?table=1", ["table='1'"]),
        ("sqlite://", ["names no file", "sqlite:///anarchon.db"]),
        ("sqlite:///", ["names no file"]),
        ("sqlite://a.db", ["names no file", "sqlite:///anarchon.db"]),
        ("sqlite:///:memory:", ["names no file"]),
        ("sqlite+pysqlite:///a.db", ["sqlite:///", "Engine"]),
        ("db+sqlite+aiosqlite:///a.db", ["sqlite:///", "Engine"]),
        ("memory://x?namespaces=1", ["did you mean 'namespace'"]),
        ("sqlit:///a.db", ["unknown scheme sqlit://", "did you mean 'sqlite'"]),
        ("mongodb://user:secret@host/db", ["unknown scheme mongodb://", "memory://, "]),
        ("anarchon.db", ["no URL", "sqlite:///anarchon.db"]),
        ("", ["no URL"]),
        ("postgresql+psycopg://user:secret@host/db", ["postgresql:// without a driver", "Engine"]),
        ("libsql://user:secret@host", ["auth_token"]),
        ("libsql://host/path?auth_token=secret", ["libsql://host:port"]),
        ("libsql://host?auth_tokn=x", ["did you mean 'auth_token'"]),
        ("redis+clutser://:secret@host", ["unknown scheme redis+clutser://", "did you mean 'redis+cluster'"]),
        ("turso://a.db", ["pyturso locks its file", "sqlite:///path"]),
    ],
)
def test_wrong_urls_are_refused_with_the_fix(url: str, words: list[str]) -> None:
    text = refusal(url)
    for word in words:
        assert word in text, text


def test_a_mapping_is_a_url_with_options() -> None:
    backend = backend_from({"url": "sqlite:////srv/a.db?table=x", "busy_timeout": 7})
    assert isinstance(backend, SqliteBackend)
    assert (backend.namespace, backend.busy_timeout) == ("x", 7)
    assert "'table' is given twice" in refusal({"url": "sqlite:////srv/a.db?table=x", "table": "y"})
    assert "did you mean 'table'" in refusal({"url": "sqlite:////srv/a.db", "tables": "y"})
    assert "needs the key 'url'" in refusal({"uri": "sqlite:////srv/a.db"})


def test_an_object_is_itself() -> None:
    backend = MemoryBackend()
    assert backend_from(backend) is backend
    assert "give it to MemoryBackend(...)" in refusal(backend, table="x")


def test_other_things_are_no_backend() -> None:
    assert "is a class" in refusal(MemoryBackend)
    assert "not a int" in refusal(7)
    assert "not a NoneType" in refusal(None)


# --- outsiders --------------------------------------------------------------------------------------------------------


class Outsider(MemoryBackend):
    @classmethod
    def from_url(cls, url: str, **options: Any) -> Outsider:
        return cls(url)


class Unreachable:
    pass


@pytest.fixture
def outsiders(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint(name, value, registry.ENTRY_POINTS)
        for name, value in (
            ("clay", f"{__name__}:Outsider"),
            ("sqlite", f"{__name__}:Outsider"),
            ("glass", "no_such_module_of_glass:Backend"),
            ("stone", f"{__name__}:Nobody"),
            ("wax", f"{__name__}:Unreachable"),
        )
    ]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: points if "anarchon" in group else [])
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Outsider.__module__])


@pytest.mark.usefixtures("outsiders")
def test_an_entry_point_brings_a_scheme() -> None:
    assert isinstance(backend_from_url("clay://somewhere"), Outsider)
    assert isinstance(backend_from_url("sqlite:////srv/a.db"), SqliteBackend), "ours is ours"
    assert "did you mean 'clay'" in refusal("claay://x")


@pytest.mark.usefixtures("outsiders")
def test_an_entry_point_that_cannot_be_loaded_is_named() -> None:
    text = refusal("glass://host?auth_token=secret")
    assert "no_such_module_of_glass" in text and "mend it" in text
    assert f"{__name__}:Nobody" in refusal("stone://x")
    assert "from_url" in refusal("wax://x")


def test_the_package_s_own_entry_points_are_its_schemes() -> None:
    found = {point.name: point.value for point in metadata.entry_points(group=registry.ENTRY_POINTS)}
    for name, value in registry._OURS.items():
        assert found.get(name, value) == value


def test_importing_the_registry_loads_no_backend() -> None:
    script = (
        "import sys, celery_anarchon.backends\n"
        "assert not {'sqlalchemy', 'celery', 'sqlite3', 'celery_anarchon.backends.memory'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:pw@host/0", "redis://:***@host/0"),
        ("redis://user:pw@host:1/0?prefix=a:", "redis://user:***@host:1/0?prefix=a:"),
        ("redis://user:p@w@host/0", "redis://user:***@host/0"),
        ("redis://:p/w@host/0", "redis://:***@host/0"),
        ("redis://:p?w@host/0", "redis://:***@host/0"),
        ("redis://:p#w@host/0", "redis://:***@host/0"),
        ("redis+socket:///tmp/a.sock?password=pw&db=1", "redis+socket:///tmp/a.sock?password=***&db=1"),
        ("sentinel://:pw@h1:1;h2:2/0?sentinel_password=pw", "sentinel://:***@h1:1;h2:2/0?sentinel_password=***"),
        ("sentinel://:pw@h1;:pw@h2/0", "sentinel://:***@h1;:***@h2/0"),
        ("valkey+cluster://u:pw@h1:1,u:pw@h2", "valkey+cluster://u:***@h1:1,u:***@h2"),
        ("rediss+sentinel://:pw@h1;:pw@h2/0", "rediss+sentinel://:***@h1;:***@h2/0"),
        ("nats://user:pw@h1:4222,user:pw@h2", "nats://user:***@h1:4222,user:***@h2"),
        ("nats://token@h1,token@h2", "nats://***@h1,***@h2"),
        ("postgresql://user@host/db?password=pw", "postgresql://user@host/db?password=***"),
        ("libsql://host?auth_token=pw&table=x", "libsql://host?auth_token=***&table=x"),
        ("libsql://host?AUTH_TOKEN=pw", "libsql://host?AUTH_TOKEN=***"),
        ("sqlite:////srv/a:b@c/d.db?table=x", "sqlite:////srv/a:b@c/d.db?table=x"),
        ("sqlite:////srv/a.db?table=x@y", "sqlite:////srv/a.db?table=x@y"),
        ("host=h password=pw", "host=h password=pw"),
        ("no url", "no url"),
    ],
)
def test_masked(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown


@example(scheme="nats", user="", middle=";@;")
@example(scheme="sentinel", user="abc", middle="@;x;@")
@given(
    scheme=st.sampled_from(["redis", "amqp", "postgresql", "nats", "valkeys", "sentinel"]),
    user=st.text("abc_", max_size=5),
    middle=st.text("/@:;,?#=&%.x", max_size=8),
)
def test_no_password_survives(scheme: str, user: str, middle: str) -> None:
    secret = f"QQ{middle}ZZ"
    shown = masked(f"{scheme}://{user}:{secret}@host:1/0?x=1")
    assert "QQ" not in shown and "ZZ" not in shown, shown
