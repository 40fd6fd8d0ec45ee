"""Which store an app's beats share: one test for each branch of the order, and no secret in what is said about it."""

from __future__ import annotations

import logging
import ssl
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_anarchon import Anarchon, Scheduler
from celery_anarchon.backends import registry
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.choice import choose_backend, own_settings
from celery_anarchon.errors import AnarchonError, ConfigurationError


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CELERY_ANARCHON_BACKEND", "CELERY_BROKER_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def app_with(broker: Any = None, results: str | None = None, **conf: Any) -> Celery:
    app = Celery("bare", broker=broker, backend=results, set_as_current=False)
    app.conf.update(conf)
    return app


def chosen(app: Celery) -> tuple[str, str]:
    backend, source = choose_backend(app)
    return backend.name, source


def address(app: Celery) -> Address:
    backend: Any = choose_backend(app)[0]
    source = backend._source
    found: Address = source.address if backend.name == "rabbitmq" else source._address
    return found


class Rabbit(MemoryBackend):
    """Stands for the store on RabbitMQ: it takes claims only."""

    name = "rabbitmq"
    url = ""

    @classmethod
    def from_celery(cls, url: str, transport_options: Any, use_ssl: Any) -> Rabbit:
        made = cls()
        made.url = url
        return made


@pytest.fixture
def rabbit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rabbit_of_this_test", types.SimpleNamespace(Rabbit=Rabbit))
    monkeypatch.setattr(registry, "_OURS", {**registry._OURS, "amqp": "rabbit_of_this_test:Rabbit"})


# --- the order --------------------------------------------------------------------------------------------------------


def test_first_what_anarchon_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_ANARCHON_BACKEND", "memory://env")
    app = app_with("redis://r", anarchon_backend="memory://conf")
    Anarchon(app, backend={"url": "memory://", "namespace": "given"})
    assert chosen(app) == ("memory", "Anarchon(app, backend=...)")
    assert choose_backend(app)[0].namespace == "given"


def test_then_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_ANARCHON_BACKEND", "memory://env")
    app = app_with("redis://r", anarchon_backend={"url": "memory://conf", "namespace": "other"})
    assert chosen(app) == ("memory", "setting anarchon_backend")
    assert choose_backend(app)[0].namespace == "other"


def configured(namespace: str | None, **settings: Any) -> Celery:
    app = Celery("bare", broker="redis://r", set_as_current=False)
    app.config_from_object(types.SimpleNamespace(**settings), namespace=namespace)
    return app


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        (None, "anarchon_batch"),
        ("CELERY", "CELERY_ANARCHON_BATCH"),
        ("CELERY", "anarchon_batch"),
        ("proj", "proj_anarchon_batch"),
    ],
)
def test_settings_are_read_under_the_namespace_of_the_app(namespace: str | None, key: str) -> None:
    assert own_settings(configured(namespace, **{key: 7})) == {"batch": 7}


@pytest.mark.parametrize(
    ("namespace", "key", "right"),
    [
        (None, "ANARCHON_BACKEND", "anarchon_backend"),
        (None, "Anarchon_Backend", "anarchon_backend"),
        (None, "CELERY_ANARCHON_BACKEND", "anarchon_backend"),
        ("CELERY", "ANARCHON_BACKEND", "CELERY_ANARCHON_BACKEND"),
        ("CELERY", "celery_anarchon_backend", "CELERY_ANARCHON_BACKEND"),
        ("proj", "PROJ_ANARCHON_BACKEND", "proj_anarchon_backend"),
    ],
)
def test_a_setting_that_celery_does_not_find_is_refused(namespace: str | None, key: str, right: str) -> None:
    """It would count for nothing, and nobody would be told."""
    app = configured(namespace, **{key: "memory://conf"})
    for read in (own_settings, choose_backend):
        with pytest.raises(ConfigurationError, match=f"setting {key!r} .*: write '{right}'"):
            read(app)


def test_the_settings_of_another_app_in_the_same_module_are_its_own() -> None:
    both = {"CELERY_ANARCHON_BATCH": 5, "OTHER_ANARCHON_BATCH": 7}
    assert own_settings(configured("OTHER", **both)) == {"batch": 7}
    assert own_settings(configured("CELERY", **both)) == {"batch": 5}


def test_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_ANARCHON_BACKEND", "memory://env")
    assert chosen(app_with("redis://r")) == ("memory", "environment CELERY_ANARCHON_BACKEND")


def test_then_a_broker_that_can_hold_leases() -> None:
    app = app_with("redis://me:pw@r:7/3", "redis://other")
    assert chosen(app) == ("redis:lease", "setting broker_url")
    assert address(app).hosts == (("r", 7),)
    assert address(app).db == 3
    assert address(app).login == {"username": "me", "password": "pw"}


def test_the_broker_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://env")
    assert chosen(app_with()) == ("redis:lease", "setting broker_url")


def test_the_broker_that_beats_write_to() -> None:
    app = app_with("memory://", broker_write_url="redis://w")
    assert chosen(app) == ("redis:lease", "setting broker_write_url")
    assert address(app).hosts == (("w", 6379),)


def test_then_a_result_backend_that_can_hold_leases() -> None:
    app = app_with("memory://", "redis://results/1")
    assert chosen(app) == ("redis:lease", "setting result_backend")
    assert address(app).db == 1


def test_a_result_backend_with_leases_before_a_broker_without(rabbit: None) -> None:
    assert chosen(app_with("amqp://rabbit", "redis://results")) == ("redis:lease", "setting result_backend")


@pytest.mark.parametrize("scheme", ["amqp", "pyamqp", "librabbitmq"])
def test_then_a_broker_that_is_rabbitmq(rabbit: None, scheme: str) -> None:
    app = app_with(f"{scheme}://me@rabbit:5/v", "rpc://")
    assert chosen(app) == ("rabbitmq", "setting broker_url")
    backend: Any = choose_backend(app)[0]
    assert backend.url == "amqp://me@rabbit:5/v"


@pytest.mark.parametrize(
    ("broker", "results"),
    [
        (None, None),
        ("memory://", "cache+memory://"),
        ("filesystem://", "rpc://"),
        ("sqs://", "db+mysql://h/d"),
        # A database of one process.
        ("sqla+sqlite://", "db+sqlite:///:memory:"),
        ("memory://", "disabled"),
    ],
)
def test_else_a_file_for_this_machine(broker: str | None, results: str | None) -> None:
    assert chosen(app_with(broker, results)) == ("sqlite", "default")


# --- what Celery writes, read as a store ------------------------------------------------------------------------------


def test_a_database(tmp_path: Path) -> None:
    app = app_with("memory://", f"db+sqlite:///{tmp_path / 'results.db'}")
    assert chosen(app) == ("sqlite", "setting result_backend")
    assert str(tmp_path / "results.db") in choose_backend(app)[0].describe()
    assert chosen(app_with("sqla+sqlite+pysqlite:///broker.db")) == ("sqlite", "setting broker_url")


def test_a_postgresql_database_whatever_driver_celery_uses_for_it() -> None:
    app = app_with("memory://", f"db+postgresql+psycopg2://u:{SECRET}@h:5/d")
    assert chosen(app) == ("postgres", "setting result_backend")
    assert SECRET not in choose_backend(app)[0].describe()
    assert chosen(app_with("sqla+postgresql://h/d", "redis://r")) == ("postgres", "setting broker_url")


def test_tls() -> None:
    app = app_with("rediss://r:1/0?ssl_cert_reqs=CERT_NONE")
    assert (address(app).tls, address(app).options["ssl_cert_reqs"]) == (True, "none")
    app = app_with("redis://r", broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca.pem"})
    assert address(app).tls
    assert address(app).options["ssl_cert_reqs"] == "required"
    assert address(app).options["ssl_ca_certs"] == "/ca.pem"
    app = app_with("memory://", "rediss://r", redis_backend_use_ssl={"ssl_cert_reqs": "optional"})
    assert address(app).options["ssl_cert_reqs"] == "optional"


@pytest.mark.parametrize(
    ("broker", "use_ssl", "certificates"),
    [
        ("amqp://r:5671", {"ca_certs": "/ca.pem"}, "/ca.pem"),
        ("amqp://r:5671;amqp://s:5671", {"ca_certs": "/ca.pem", "cert_reqs": ssl.CERT_REQUIRED}, "/ca.pem"),
        ("amqp://r:5671", True, None),
        ("amqps://r", None, None),
    ],
)
def test_tls_of_a_rabbitmq(broker: str, use_ssl: Any, certificates: str | None) -> None:
    """Else a login would go there in the clear."""
    places = address(app_with(broker, broker_use_ssl=use_ssl))._templates  # type: ignore[attr-defined]
    assert len(places) == broker.count("://")
    for place in places:
        assert (place.ssl["cert_reqs"], place.ssl.get("ca_certs")) == (ssl.CERT_REQUIRED, certificates)


def test_a_rabbitmq_without_tls() -> None:
    (place,) = address(app_with("amqp://r"))._templates  # type: ignore[attr-defined]
    assert not place.ssl


@pytest.mark.parametrize(
    "broker",
    ["sentinel://:pw@a:1/2;sentinel://:pw@b:2/2", ["sentinel://:pw@a:1/2", "sentinel://:pw@b:2/2"]],
)
def test_sentinels(broker: Any) -> None:
    options = {"master_name": "mine", "sentinel_kwargs": {"password": "other"}, "visibility_timeout": 3600}
    found = address(app_with(broker, broker_transport_options=options))
    assert (found.kind, found.hosts, found.master_name, found.db) == ("sentinel", (("a", 1), ("b", 2)), "mine", 2)
    assert (found.login, found.sentinel_login) == ({"password": "pw"}, {"password": "other"})


def test_what_concerns_messages_only_is_left_out() -> None:
    found = address(app_with("redis://r:1//?visibility_timeout=3600&health_check_interval=5&socket_timeout=2"))
    assert (found.hosts, found.db, found.options) == ((("r", 1),), 0, {"socket_timeout": 2.0})


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        # Claims on the one that answers just now would be forgotten with it.
        ("redis://a;redis://b", "names several hosts"),
        (["redis://a", "redis://b"], "names several hosts"),
        ("sentinel://a", "which master"),
        ("redis://r/nine", "number of one database"),
    ],
)
def test_a_broker_that_cannot_be_the_store_is_refused_with_the_fix(broker: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        choose_backend(app_with(broker))
    text = str(refused.value)
    assert text.startswith("setting broker_url: ")
    assert words in text
    assert text.endswith("or name the store with anarchon_backend")


# --- the first log line -----------------------------------------------------------------------------------------------


def first_line(app: Celery, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    with caplog.at_level(logging.DEBUG):
        scheduler = Scheduler(app=app)
        scheduler.close()
    return next(record for record in caplog.records if record.name.startswith("celery_anarchon"))


def test_the_first_log_line_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    line = first_line(app_with("redis://127.0.0.1:1/4", beat_schedule={}), caplog)
    assert line.getMessage() == "store: redis redis://127.0.0.1:1/4, prefix cron: (setting broker_url)"
    assert line.levelno == logging.INFO


@pytest.mark.parametrize(
    ("conf", "source"),
    [
        ({"broker": "memory://"}, "no anarchon_backend is set"),
        ({"broker": "sqla+sqlite:///b.db"}, "setting broker_url"),
    ],
)
def test_a_file_that_nobody_chose_is_warned_of(
    conf: dict[str, Any], source: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = first_line(app_with(**conf), caplog)
    assert line.levelno == logging.WARNING
    assert source in line.getMessage()
    assert "one machine" in line.getMessage()


SECRET = "s3cr3tword"
TOLD = [
    {"anarchon_backend": f"redis://me:{SECRET}@127.0.0.1:1/0"},
    {"anarchon_backend": f"redis://:{SECRET}@127.0.0.1:1/0"},
    {"anarchon_backend": f"redis://127.0.0.1:1/0?password={SECRET}"},
    {"anarchon_backend": f"rediss://u:{SECRET}@127.0.0.1:1/0?ssl_password={SECRET}"},
    {"anarchon_backend": {"url": "redis://127.0.0.1:1/0", "password": SECRET}},
    {"anarchon_backend": f"sentinel://:{SECRET}@127.0.0.1:1/0?master_name=m&sentinel_password={SECRET}"},
    {"anarchon_backend": f"sentinel://:{SECRET}@127.0.0.1:1;sentinel://:{SECRET}@127.0.0.1:2/0?master_name=m"},
    {"anarchon_backend": f"redis+cluster://u:{SECRET}@127.0.0.1:1,127.0.0.1:2"},
    {"anarchon_backend": f"valkey://u:{SECRET}@127.0.0.1:1/0"},
    # Refused, with words.
    {"anarchon_backend": f"redis://u:{SECRET}@127.0.0.1:1/x"},
    {"anarchon_backend": f"redis://u:{SECRET}@127.0.0.1:1/0?pasword={SECRET}&passwordd={SECRET}"},
    {"anarchon_backend": f"libsql://host?auth_token={SECRET}"},
    {"anarchon_backend": f"libsql://host?authToken={SECRET}"},
    {"anarchon_backend": f"nosuch://u:{SECRET}@host/d?token={SECRET}"},
    {"anarchon_backend": f"postgresql://u:{SECRET}@127.0.0.1:1/d?nosuch=1"},
    {"anarchon_backend": f"amqp://u:{SECRET}@127.0.0.1:1/v?nosuch=1"},
    {"anarchon_backend": f"nats://{SECRET}@127.0.0.1:1?nosuch=1"},
    # What the app has.
    {"broker": f"redis://u:{SECRET}@127.0.0.1:1/0"},
    {"broker": f"redis://u:{SECRET}@127.0.0.1:1/x"},
    {"broker": [f"redis://u:{SECRET}@127.0.0.1:1", f"redis://u:{SECRET}@127.0.0.1:2"]},
    {
        "broker": f"sentinel://:{SECRET}@127.0.0.1:1/0",
        "broker_transport_options": {"master_name": "m", "sentinel_kwargs": {"password": SECRET}},
    },
    {"results": f"redis://:{SECRET}@127.0.0.1:1/0"},
]


@pytest.mark.parametrize("conf", TOLD, ids=lambda conf: str(next(iter(conf.values()))).partition(":")[0][:20])
def test_no_secret_is_told(conf: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    app = app_with(**{"broker": "memory://", **conf})
    app.conf.beat_schedule = {"a": {"task": "t", "schedule": 60}}
    said: list[str] = []
    with caplog.at_level(logging.DEBUG):
        try:
            scheduler = Scheduler(app=app)
        except SystemExit:
            said.append("refused")
        else:
            scheduler.tick()
            backend = choose_backend(app)[0]
            said += [scheduler.info, repr(backend)]
            try:
                backend.now()
            except AnarchonError as error:
                said.append(str(error))
            scheduler.close()
    said += [record.getMessage() + (record.exc_text or "") for record in caplog.records]
    assert len(said) > 1
    for words in said:
        assert SECRET not in words


def test_a_rabbitmq_broker_is_the_store_of_claims() -> None:
    """The real one: without anything else, beats meet in the broker that they send to."""
    app = Celery("proj", broker="amqp://user:s3cr3tword@host//", set_as_current=False)
    backend, source = choose_backend(app)
    assert (backend.name, source) == ("rabbitmq", "setting broker_url")
    assert "s3cr3tword" not in backend.describe()
