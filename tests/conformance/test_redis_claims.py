"""The strategies that only take claims, on each kind of server that has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from conformance.redis_harness import IdmpHarness, OnCluster, ScriptHarness, StreamIdHarness, ValkeyHarness
from support.redis_servers import cluster, private_server, wanted

from celery_anarchon.testing import ClaimSuite


@pytest.fixture(scope="class", autouse=True)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server, or cluster, for all tests of a class; each test has a prefix of its own."""
    if not hasattr(request.cls, "flavour"):
        yield
        return
    folder = tmp_path_factory.mktemp("server")
    flavour = request.cls.flavour
    clustered, _, its_flavour = flavour.rpartition("-")
    with (cluster if clustered else private_server)(folder, its_flavour) as running:
        request.cls.harness_class.server = running
        yield


class OnServer(ClaimSuite):
    flavour: ClassVar[str]
    race_threads: ClassVar[int] = 10
    race_slots: ClassVar[int] = 30
    race_processes: ClassVar[tuple[int, int]] = (3, 3)


class OnOne(OnServer):
    """Where most of the work is done."""

    race_threads: ClassVar[int] = 40
    race_slots: ClassVar[int] = 60
    race_processes: ClassVar[tuple[int, int]] = (8, 4)


def suite_on(flavour: str, harness: type[Any], base: type[Any] = OnServer, *mixed_in: type[Any]) -> Any:
    """The suite for one strategy on one server. A harness class of its own, which knows its server."""
    own = type(f"{harness.__name__}On{flavour.replace('-', '')}", (*mixed_in, harness), {})
    return type(
        f"Test{harness.__name__}On{flavour}",
        (base,),
        {"harness_class": own, "flavour": flavour, "__module__": __name__},
    )


class OnValkey:
    backend = ValkeyHarness.backend


TestScriptRedis7 = suite_on("redis7", ScriptHarness, OnOne)
TestStreamIdRedis7 = suite_on("redis7", StreamIdHarness, OnOne)

if sys.version_info[:2] == (3, 11):
    TestScriptCluster = suite_on("cluster-redis7", ScriptHarness, OnServer, OnCluster)
    TestStreamIdCluster = suite_on("cluster-redis7", StreamIdHarness, OnServer, OnCluster)

if wanted("redis6"):
    TestScriptRedis6 = suite_on("redis6", ScriptHarness)
    TestStreamIdRedis6 = suite_on("redis6", StreamIdHarness)

if wanted("redis8"):
    TestScriptRedis8 = suite_on("redis8", ScriptHarness)
    TestStreamIdRedis8 = suite_on("redis8", StreamIdHarness)

if wanted("valkey8"):
    TestScriptValkey8 = suite_on("valkey8", ScriptHarness, OnServer, OnValkey)
    TestStreamIdValkey8 = suite_on("valkey8", StreamIdHarness, OnServer, OnValkey)

if wanted("valkey9"):
    TestScriptValkey9 = pytest.mark.long(suite_on("valkey9", ScriptHarness, OnServer, OnValkey))
    TestStreamIdValkey9 = pytest.mark.long(suite_on("valkey9", StreamIdHarness, OnServer, OnValkey))

if wanted("redis86"):
    TestIdmpRedis86 = suite_on("redis86", IdmpHarness, OnOne)
    TestIdmpCluster = suite_on("cluster-redis86", IdmpHarness, OnServer, OnCluster)
