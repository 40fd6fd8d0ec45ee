"""RabbitMQ as the broker of workers: it delivers again within milliseconds, long before a lease is over."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.beats import ENOUGH, until
from support.crew import Crew
from support.rabbitmq_servers import RabbitServer, rabbitmq_server

from celery_anarchon.model import RunState

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    with rabbitmq_server(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


@pytest.fixture
def crew_of(broker: RabbitServer, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    crews: list[Crew] = []

    def build(task: str, *args: Any) -> Crew:
        entry = {"task": task, "seconds": 1, "args": args, "options": {"anarchon": {"overlap": "skip"}}}
        settings = {"result_backend": None, "task_default_queue": tmp_path.name}
        store = f"sqlite:///{tmp_path}/anarchon.db"
        crews.append(Crew(tmp_path, store, broker.url, jobs={"job": entry}, settings=settings))
        return crews[0]

    yield build
    for crew in crews:
        crew.close()


def test_a_killed_worker(crew_of: Callable[..., Crew], tmp_path: Path) -> None:
    """Its message came inside the lease and was refused; the store then left the run to a redelivery that had been. It
    lay for its ``queue_timeout``, its job skipped every slot meanwhile, and it ended lost."""
    fleet = crew_of("late", 0, str(tmp_path / "go"))
    first = fleet.worker("first", concurrency=1)
    fleet.beat()
    start = fleet.started()[0]
    second = fleet.worker("second", concurrency=1)
    first.send(signal.SIGKILL, group=True)
    second.wait_for_log("is held: another delivery of it has the run", ENOUGH)
    again = fleet.started(2, slot=start["slot"])[1]
    assert again["attempt"] == 2 and again["worker"].startswith("second")
    (tmp_path / "go").touch()
    assert fleet.ended("job", start["slot"], RunState.SUCCEEDED).attempt == 2
    assert len(fleet.lines("start", slot=start["slot"])) == 2


def test_a_body_whose_process_dies(crew_of: Callable[..., Crew]) -> None:
    """``reject_on_worker_lost``: put back by the worker, which tells the store a moment later."""
    fleet = crew_of("die.lost")
    fleet.worker("first", concurrency=1)
    fleet.beat()
    start = fleet.started()[0]
    starts = fleet.started(3, slot=start["slot"])
    assert [line["attempt"] for line in starts[:3]] == [1, 2, 3]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_connections_that_go_while_a_redelivery_is_held(
    crew_of: Callable[..., Crew], broker: RabbitServer, tmp_path: Path, pool: str
) -> None:
    """Each time the broker delivers both messages anew: that of the body and the held one. One body all the same, and
    nothing stays behind that would keep the next slots away."""
    fleet = crew_of("late", 0, str(tmp_path / "go"))
    workers = [fleet.worker(name, pool, 1) for name in ("first", "second")]
    fleet.beat()
    start = fleet.started()[0]
    for count in (1, 2, 3):
        broker.control("close_all_connections", "as wished")
        until(
            lambda count=count: sum(worker.output.count("is held:") for worker in workers) >= count,
            f"hold number {count}",
        )
    (tmp_path / "go").touch()
    assert fleet.ended("job", start["slot"], RunState.SUCCEEDED).attempt == 1
    assert len(fleet.lines("start", slot=start["slot"])) == 1
    fleet.started(4)
    assert all(worker.running and "Unrecoverable" not in worker.output for worker in workers)
