"""The app of a beat that sends in one step, and of stock workers: told by its environment what to do.

ONE_STEP_CONFIG is JSON: Celery settings, ``every``, and ``jobs``: name -> an entry without its schedule. Bodies note
themselves in the list ``journal`` of the broker.
"""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery, Task, chain, group
from kombu import Exchange, Queue
from kombu.common import Broadcast

config = json.loads(os.environ["ONE_STEP_CONFIG"])
jobs: dict[str, Any] = config.pop("jobs")
every: float = config.pop("every")

TOPIC = Exchange("news", type="topic")
EVERYONE = Broadcast("everyone")

app = Celery("one_step", set_as_current=False)
app.conf.update(config)
app.conf.task_queues = [
    Queue("celery"),
    Queue("named"),
    Queue("routed"),
    Queue("brief", expires=600.0),
    Queue("sports", TOPIC, routing_key="news.sports.*"),
    Queue("all", TOPIC, routing_key="news.#"),
    Queue("bound", Exchange("straight", type="direct"), routing_key="a-key"),
    EVERYONE,
]
app.conf.task_routes = {"by.route": {"queue": "routed", "priority": 6}}
app.conf.accept_content = ["json", "pickle", "msgpack"]
app.conf.beat_schedule = {name: {"schedule": every, **entry} for name, entry in jobs.items()}
for entry in jobs.values():
    if entry.get("options", {}).get("queue") == "everyone":
        # Whoever sends to all must, over the same connection: else kombu takes it for an exchange of another kind.
        entry["options"]["declare"] = [EVERYONE.exchange]


def note(task: Task, *args: Any, **kwargs: Any) -> None:
    headers = task.request.headers or {}
    own = headers.get("anarchon") or headers.get("anarchon_slot") or {}
    line = {"job": own.get("job"), "slot": own.get("slot"), "id": task.request.id, "args": [args, kwargs]}
    line["queue"] = task.request.delivery_info["routing_key"]
    line["worker"] = task.request.hostname
    with redis.Redis.from_url(config["broker_url"]) as raw:
        raw.rpush("journal", json.dumps(line))


app.task(name="note", bind=True, typing=False, shared=False)(note)
app.task(name="by.route", bind=True, typing=False, shared=False)(note)


@app.on_after_finalize.connect
def add_canvas(sender: Celery, **_: Any) -> None:
    work = sender.tasks["note"]
    sender.add_periodic_task(every, chain(work.si(1), work.si(2)), name="a chain")
    sender.add_periodic_task(every, group(work.si(1), work.si(2)), name="a group")
