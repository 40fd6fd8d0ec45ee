"""What the test kit reads off an AMQP broker, past the product."""

from __future__ import annotations

from celery import Celery
from support.rabbitmq_servers import RabbitServer
from support.sites import RabbitBroker

from celery_anarchon.testing.fleet import events_of
from celery_anarchon.verdict import Event
from celery_anarchon.wire import header

SLOT = 1_774_746_000_000


def test_messages_are_read_and_left_there(rabbitmq: RabbitServer) -> None:
    broker = RabbitBroker(rabbitmq)
    assert broker.messages() == []
    app = Celery("kit", set_as_current=False)
    app.conf.update(broker.settings)
    run = header(namespace="n", job="report", slot=SLOT, attempt=1, late=12, beat="host:1")
    with app.connection_for_write() as connection:
        for task_id in ("one", "two"):
            app.send_task(
                "proj.work",
                (1, "\u00e9"),
                {"a": None},
                task_id=task_id,
                headers={"anarchon": run},
                connection=connection,
                priority=5,
            )
    for _ in range(2):
        messages = broker.messages()
        assert [message.task_id for message in messages] == ["one", "two"]
        assert messages[0].task == "proj.work"
        assert messages[0].body[:2] == [[1, "\u00e9"], {"a": None}]
        assert messages[0].run == run
        assert messages[0].properties["priority"] == 5
        assert events_of(messages)[0] == Event(job="report", slot=SLOT, task_id="one", beat="host:1")
