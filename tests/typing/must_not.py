"""What a user may not write: both checkers refuse each line that ends with ``# refused: WORD``, naming that word."""

from __future__ import annotations

from celery import Celery

from celery_anarchon import (
    Anarchon,
    NatsBackend,
    RabbitMQBackend,
    RedisBackend,
    SqliteBackend,
    ValkeyBackend,
    current_run,
    every,
)
from celery_anarchon.backends import ClaimBackend

app = Celery("typed")
anarchon = Anarchon(app)

# Names that nobody knows.
anarchon.every("a", 1, "task", jiter=5)  # refused: jiter
anarchon.cron("b", "@daily", "task", maxAttempts=1)  # refused: maxAttempts
Anarchon(app, catchup="1h")  # refused: catchup
Anarchon(app, lease=10)  # refused: lease

# Names that this kind of job cannot have.
anarchon.at("c", "2030-01-01T00:00Z", "task", overlap="skip")  # refused: overlap
anarchon.at("d", "2030-01-01T00:00Z", "task", offset=5)  # refused: offset
anarchon.at("e", "2030-01-01T00:00Z", "task", timezone="UTC")  # refused: timezone
anarchon.cron("f", "@daily", "task", offset="auto")  # refused: offset
anarchon.every("g", 1, "task", timezone="UTC")  # refused: timezone
anarchon.every("h", 1, "task", seconds=True)  # refused: seconds

# Words that an option does not know.
anarchon.every("i", 1, "task", overlap="never")  # refused: overlap
anarchon.cron("j", "@daily", "task", coalesce="newest")  # refused: coalesce
anarchon.every("k", 1, "task", on_unknown="run")  # refused: on_unknown
Anarchon(app, overlap="queue")  # refused: overlap

# Values of another kind.
anarchon.every("l", [1], "task")  # refused: list[int]
anarchon.every("m", 1, "task", jitter=[5])  # refused: jitter
anarchon.every("n", 1, "task", max_attempts="3")  # refused: max_attempts
anarchon.every("o", 1, "task", history_size=1.5)  # refused: history_size
anarchon.at("p", 5, "task", jitter=1)  # refused: datetime
anarchon.every("q", 1, "task", timeout=b"5s")  # refused: timeout
every("1h", offset=None)  # refused: offset
Anarchon(app, backend=5)  # refused: backend

# Backends.
RedisBackend(strategy="streams")  # refused: strategy
RedisBackend(strategy={"name": "script", "size": 5})  # refused: strategy
ValkeyBackend(strategy="idmp")  # refused: strategy
SqliteBackend(busy_timout=5)  # refused: busy_timout
SqliteBackend(busy_timeout=[5])  # refused: busy_timeout
RabbitMQBackend(strategy="streams")  # refused: strategy
RabbitMQBackend(slot_ttl=[5])  # refused: slot_ttl
RabbitMQBackend(window="10m")  # refused: window
NatsBackend(duplicate_window=[5])  # refused: duplicate_window
NatsBackend(replicas="3")  # refused: replicas
NatsBackend(slot_ttl="10m")  # refused: slot_ttl

# Somebody else may have sent it.
slot = current_run().slot  # refused: slot


# Needs leases.
def claims_only(board: ClaimBackend) -> None:
    on = Anarchon(app, backend=board)
    on.every("a", 1, "task", overlap="skip")  # refused: overlap
    on.every("b", 1, "task", max_attempts=2)  # refused: max_attempts
    on.every("c", 1, "task", catch_up="1h")  # refused: catch_up
    on.every("d", 1, "task", coalesce="all")  # refused: coalesce
    on.every("e", 1, "task", queue_timeout=5)  # refused: queue_timeout
    on.every("f", 1, "task", jiter=5)  # refused: jiter
    on.cron("g", "@daily", "task", on_unknown="skip")  # refused: on_unknown
    on.cron("h", "@daily", "task", overlap="queue_one")  # refused: overlap
    on.at("i", "2030-01-01T00:00Z", "task", max_attempts=1)  # refused: max_attempts
    on.at("j", "2030-01-01T00:00Z", "task", overlap="allow")  # refused: overlap
    on.at("k", "2030-01-01T00:00Z", "task", history_ttl="1d")  # refused: history_ttl
    on.backend.takeover([])  # refused: takeover


# As do these strategies, which make stores that only take claims.
script = Anarchon(Celery("script"), backend=RedisBackend(strategy={"name": "script", "window": "10m"}))
script.every("a", 1, "task", max_attempts=2)  # refused: max_attempts
stream = Anarchon(Celery("stream"), backend=ValkeyBackend("valkey://localhost", "stream-id"))
stream.cron("a", "@daily", "task", overlap="skip")  # refused: overlap


# Brokers: what needs leases, and history by age.
rabbitmq = Anarchon(Celery("rabbitmq"), backend=RabbitMQBackend(strategy="stream"))
rabbitmq.every("a", 1, "task", overlap="skip")  # refused: overlap
rabbitmq.every("b", 1, "task", max_attempts=2)  # refused: max_attempts
rabbitmq.every("c", 1, "task", catch_up="1h")  # refused: catch_up
rabbitmq.every("d", 1, "task", coalesce="all")  # refused: coalesce
rabbitmq.every("e", 1, "task", history_ttl="1d")  # refused: history_ttl
rabbitmq.every("f", 1, "task", jiter=5)  # refused: jiter
rabbitmq.backend.takeover([])  # refused: takeover
nats = Anarchon(Celery("nats"), backend=NatsBackend())
nats.cron("a", "@daily", "task", overlap="queue_one")  # refused: overlap
nats.cron("b", "@daily", "task", queue_timeout=5)  # refused: queue_timeout
nats.cron("c", "@daily", "task", history_ttl="1d")  # refused: history_ttl
nats.at("d", "2030-01-01T00:00Z", "task", on_unknown="skip")  # refused: on_unknown
nats.at("e", "2030-01-01T00:00Z", "task", history_ttl="1d")  # refused: history_ttl

# The same as defaults.
Anarchon(app, backend=RabbitMQBackend(), overlap="skip")  # refused: overlap
Anarchon(app, backend=RabbitMQBackend(), max_attempts=2)  # refused: max_attempts
Anarchon(app, backend=RabbitMQBackend(), history_ttl="1d")  # refused: history_ttl
Anarchon(app, backend=NatsBackend(), catch_up="1h")  # refused: catch_up
Anarchon(app, backend=NatsBackend(), coalesce="all")  # refused: coalesce
Anarchon(app, backend=NatsBackend(), queue_timeout="1h")  # refused: queue_timeout
Anarchon(app, backend=NatsBackend(), on_unknown="skip")  # refused: on_unknown
Anarchon(app, backend=NatsBackend(), jiter=5)  # refused: jiter
Anarchon(app, backend=RedisBackend(strategy="script"), max_attempts=2)  # refused: max_attempts
Anarchon(app, backend=ValkeyBackend("valkey://localhost", "stream-id"), overlap="skip")  # refused: overlap
Anarchon(app, backend=SqliteBackend(), overlap="never")  # refused: overlap
