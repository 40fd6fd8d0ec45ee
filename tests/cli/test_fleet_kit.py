"""What the test kit reads off a broker, past the product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from servers import RedisServer

from celery_anarchon.testing.fleet import (
    Message,
    decode_message,
    events_of,
    filesystem_broker,
    filesystem_messages,
    redis_messages,
)
from celery_anarchon.verdict import Event
from celery_anarchon.wire import header

SLOT = 1_774_746_000_000


def publish(settings: dict[str, Any], *ids: str, **options: Any) -> None:
    app = Celery("kit", set_as_current=False)
    app.conf.update(settings)
    run = header(namespace="n", job="report", slot=SLOT, attempt=1, late=12, beat="host:1")
    with app.connection_for_write() as connection:
        for task_id in ids:
            app.send_task(
                "proj.work",
                (1, "é"),
                {"a": None},
                task_id=task_id,
                headers={"anarchon": run},
                connection=connection,
                **options,
            )
    app.close()


def check(message: Message, task_id: str) -> None:
    assert (message.task_id, message.task) == (task_id, "proj.work")
    assert message.body[:2] == [[1, "é"], {"a": None}]
    assert message.run is not None and message.run["job"] == "report"
    assert message.properties["delivery_info"]["routing_key"] == "celery"
    assert events_of([message]) == [Event(job="report", slot=SLOT, task_id=task_id, beat="host:1")]


def test_files(tmp_path: Path) -> None:
    settings = filesystem_broker(tmp_path)
    bound = tmp_path / "control" / "celery.exchange"
    before = bound.read_text()
    publish(settings, "one", "two")
    assert json.loads(bound.read_text()) == json.loads(before), "bound as kombu binds"
    # Within a millisecond files have no order.
    first, second = sorted(filesystem_messages(tmp_path), key=lambda message: message.task_id)
    check(first, "one")
    check(second, "two")
    taken = next((tmp_path / "queue").glob("*.msg"))
    taken.rename(tmp_path / "processed" / taken.name)
    assert len(filesystem_messages(tmp_path)) == 2
    assert len(filesystem_messages(tmp_path, processed=False)) == 1


def test_a_file_that_stays_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_anarchon.testing.fleet._HALF_WRITTEN", 0.1)
    filesystem_broker(tmp_path)
    (tmp_path / "queue" / "1_x.celery.msg").write_text('{"body": ')
    with pytest.raises(ValueError, match=r"1_x\.celery\.msg"):
        filesystem_messages(tmp_path)


def test_redis(redis: RedisServer, namespace: str) -> None:
    from redis import Redis

    settings = {"broker_url": redis.url, "task_default_queue": namespace}
    publish(settings, "one", "two")
    publish(settings, "urgent", priority=6)
    with Redis.from_url(redis.url) as client:
        messages = redis_messages(client, namespace)
        assert [message.task_id for message in messages] == ["one", "two", "urgent"]
        assert events_of(messages)[0] == Event(job="report", slot=SLOT, task_id="one", beat="host:1")
        client.delete(*client.keys(f"*{namespace}*"))


@pytest.mark.parametrize("payload", ["", "[]", "{}", '{"headers": {}, "properties": {}, "body": ""}'])
def test_what_is_no_message(payload: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever words JSON finds for it
        decode_message(payload)


def test_messages_of_nobodys_slot_say_nothing() -> None:
    message = Message(task_id="x", task="t", headers={"id": "x"}, body=[], properties={}, envelope={})
    assert message.run is None
    assert events_of([message]) == []
