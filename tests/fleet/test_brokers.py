"""Real beats on RabbitMQ and NATS: one is killed between its claim and its publish; and many begin at once."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fleet.test_claim_only as claim_only
import pytest
from support import nats_servers, rabbitmq_servers
from support.beats import Beats, until

pytestmark = pytest.mark.fleet

QUEUE, STREAM, NATS, CLUSTER = "rabbitmq-queue", "rabbitmq-stream", "nats", "nats-cluster"


@contextmanager
def store(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty store."""
    if kind in (QUEUE, STREAM):
        with rabbitmq_servers.rabbitmq_server(folder) as server:
            yield f"{server.url}?strategy={kind.partition('-')[2]}"
    elif kind == NATS:
        with nats_servers.nats_server(folder) as single:
            yield single.url
    else:
        with nats_servers.nats_cluster(folder) as cluster:
            yield f"{cluster.url}?replicas=3"


@pytest.fixture
def beats(request: Any, tmp_path: Path) -> Iterator[Beats]:
    with store(request.param, tmp_path / "server") as url:
        made = Beats(tmp_path, claim_only.JOBS, {"anarchon_backend": url})
        yield made
        made.fleet.close()


@pytest.mark.parametrize(
    "beats",
    [QUEUE, NATS, pytest.param(STREAM, marks=pytest.mark.long), pytest.param(CLUSTER, marks=pytest.mark.long)],
    indirect=True,
)
def test_each_slot_is_sent_once_but_for_those_that_died_with_their_winner(
    beats: Beats, tmp_path: Path, record_property: Any
) -> None:
    claim_only.test_each_slot_is_sent_once_but_for_those_that_died_with_their_winner(beats, tmp_path, record_property)


@pytest.mark.parametrize(
    "beats",
    [STREAM, NATS, pytest.param(QUEUE, marks=pytest.mark.long), pytest.param(CLUSTER, marks=pytest.mark.long)],
    indirect=True,
)
def test_eight_beats_at_once_on_an_empty_server(beats: Beats) -> None:
    """Each makes what it finds missing; none may complain that another was faster."""
    beats.beats(*(f"b{number}" for number in range(8)))
    start = time.time() * 1000
    until(lambda: any(slot > start for _, slot in beats.count()), "a slot of all of them")
    assert all(len(ids) == 1 for ids in beats.count().values())
    logs = list(Path(beats.folder).glob("b*.log"))
    assert len(logs) == 8
    for log in logs:
        lines = log.read_text().splitlines()
        bad = [line for line in lines if re.search(r"\b(ERROR|CRITICAL|Traceback|WARNING)\b", line)]
        assert not bad, (log.name, bad)
