"""What a user may write: both checkers take each line."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from celery import Celery

from celery_anarchon import (
    Anarchon,
    MemoryBackend,
    NatsBackend,
    PostgresBackend,
    RabbitMQBackend,
    RedisBackend,
    Run,
    SqliteBackend,
    ValkeyBackend,
    at,
    cron,
    current_run,
    every,
    run_id,
)
from celery_anarchon.backends import ClaimBackend, LeaseBackend
from celery_anarchon.model import Coalesce, OnUnknown, Overlap

app = Celery("typed")
anarchon = Anarchon(
    app, backend="redis://localhost:6379/0", jitter=5, overlap="skip", timezone="Europe/Paris", offset="auto"
)
by_object = Anarchon(app, backend=SqliteBackend("./anarchon.db", busy_timeout="10s"))
by_mapping = Anarchon(app, backend={"url": "redis://localhost", "strategy": "script", "window": "10m"})
by_settings = Anarchon(app)

anarchon.every("number", 60, "task")
anarchon.every("text", "1h30m", "task", ("a",), {"b": 1}, options={"queue": "slow"}, jitter="500ms")
anarchon.every("delta", timedelta(hours=1), "task", timeout=1.5, max_late=timedelta(minutes=5), history_ttl="7d")
anarchon.every("offset", "1h", "task", offset="auto", history_size=10, catch_up=0, coalesce="all")
anarchon.every("workers", "1h", "task", overlap="queue_one", max_attempts=3, queue_timeout="1h", on_unknown="skip")
anarchon.every("words", 1, "task", overlap=Overlap.SKIP, coalesce=Coalesce.LATEST, on_unknown=OnUnknown.REPEAT)
anarchon.every("nothing", 1, "task", overlap=None, jitter=None, max_attempts=None)
anarchon.cron("nightly", "0 3 * * *", "task", timezone="Europe/Paris", overlap="allow", catch_up="6h")
anarchon.cron("zone", "0 3 * * * 30", "task", seconds=True, timezone=ZoneInfo("Europe/Paris"))
anarchon.at("once", datetime(2030, 1, 1, tzinfo=timezone.utc), "task", max_attempts=1, jitter=5)
anarchon.at("iso", "2030-01-01T00:00Z", "task")

entries = {"a": every("1h", offset="auto"), "b": cron("@daily", timezone="Europe/Paris"), "c": at("2030-01-01T00:00Z")}

RedisBackend()
RedisBackend("redis://localhost", "stream-id", prefix="billing:cron:")
RedisBackend({"host": "localhost"}, strategy="idmp")
RedisBackend(strategy={"name": "idmp", "duration": 300, "max_size": 1000})
RedisBackend(strategy={"name": "script", "window": timedelta(minutes=10)}, wait_replicas=1, wait_timeout="200ms")
ValkeyBackend("valkey://localhost", strategy="script")
ValkeyBackend(strategy={"name": "script", "window": "10m"})
PostgresBackend("postgresql://localhost", table="scheduler.runs")
MemoryBackend()
RabbitMQBackend("amqp://localhost", prefix="billing.cron.", slot_ttl=timedelta(minutes=10), strategy="stream")
RabbitMQBackend(connection=app.connection(), ssl={"ca_certs": "/etc/ca.pem"})
NatsBackend(["nats://n1:4222", "nats://n2:4222"], replicas=3, duplicate_window="10m", history_size=5_000)
NatsBackend("tls://n1", tls={"ca": "/etc/ca.pem"}, credentials="/run/beat.creds")
SqliteBackend("libsql://host", auth_token="token", busy_timeout=timedelta(seconds=5))

runs: list[Run] = anarchon.history("number", 5)
last: Run | None = anarchon.last_run("number")
name: str = anarchon.run_id("number", datetime.now(timezone.utc)) + run_id("number", 0, namespace="cron:")

run = current_run()
if run is not None:
    slot: datetime = run.slot
    lost: bool = run.lost


# --- by the store ---

leases: LeaseBackend = anarchon.backend
sqlite: SqliteBackend = by_object.backend
by_redis = Anarchon(app, backend=RedisBackend(strategy="lease"))
by_redis.every("redis", 1, "task", overlap="skip", max_attempts=1)
by_script = Anarchon(app, backend=RedisBackend(strategy="script"))
by_script.every("redis", 1, "task", jitter=1, max_late="1m")
by_object.every("sqlite", 1, "task", overlap="skip", max_attempts=1)
by_object.cron("sqlite", "@daily", "task", catch_up="1h")
by_object.at("sqlite", "2030-01-01T00:00Z", "task", coalesce="all")


# Brokers take claims only.
on_rabbitmq = Anarchon(app, backend=RabbitMQBackend(), jitter=5, overlap="allow", offset="auto", history_size=5)
on_rabbitmq.every("a", 1, "task", jitter=1, timeout=30, max_late="1m", history_size=5, offset=3, overlap="allow")
on_rabbitmq.cron("b", "@daily", "task", timezone="UTC", seconds=True)
on_rabbitmq.at("c", "2030-01-01T00:00Z", "task", max_late=5)
rabbitmq: RabbitMQBackend = on_rabbitmq.backend
on_nats = Anarchon(app, backend=NatsBackend(), timezone="Europe/Paris", max_late="1m", timeout=None, max_attempts=None)
on_nats.every("a", 1, "task", jitter=1, timeout=30)
nats: NatsBackend = on_nats.backend
aged = Anarchon(app, backend=RedisBackend(strategy="stream-id"), history_ttl="7d", jitter=1)
aged.every("a", 1, "task", history_ttl="1d")
aged.cron("b", "@daily", "task", history_ttl="1d", timezone="UTC")
aged.at("c", "2030-01-01T00:00Z", "task", history_ttl="1d")
leased = Anarchon(app, backend=PostgresBackend(), overlap="skip", max_attempts=2, catch_up="1h", history_ttl="7d")
postgres: PostgresBackend = leased.backend


def plain(on: Anarchon) -> None:
    on.every("a", 1, "task", overlap="skip")


def typed(on: Anarchon[SqliteBackend]) -> SqliteBackend:
    plain(on)
    return on.backend


def claims_only(board: ClaimBackend) -> None:
    on = Anarchon(app, backend=board, jitter=5)
    on.every("a", 1, "task", jitter=1, timeout=30, max_late="1m", history_size=5, offset="auto", overlap="allow")
    on.cron("b", "@daily", "task", timezone="UTC", seconds=True)
    on.at("c", "2030-01-01T00:00Z", "task", max_late=5)
    store: ClaimBackend = on.backend
    store.history("a", 1)
