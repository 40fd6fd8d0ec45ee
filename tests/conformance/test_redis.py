from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from conformance.redis_harness import ClusterHarness, RedisHarness, ValkeyHarness
from conformance.test_machine import machine_for
from conformance.test_run_machine import run_machine_for
from support.redis_servers import cluster, private_server, wanted

from celery_anarchon.testing import RunSuite


class Redis7(RedisHarness):
    pass


class Redis6(RedisHarness):
    pass


class Redis8(RedisHarness):
    pass


class Valkey8(ValkeyHarness):
    pass


class Valkey9(ValkeyHarness):
    pass


@pytest.fixture(scope="class", autouse=True)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server, or cluster, for all tests of a class; each test has a prefix of its own."""
    folder = tmp_path_factory.mktemp("server")
    flavour = request.cls.flavour
    with cluster(folder) if flavour == "cluster" else private_server(folder, flavour) as running:
        request.cls.harness_class.server = running
        yield


class RedisMachine(RedisHarness):
    pass


class OnServer(RunSuite):
    flavour: ClassVar[str]


class Smaller:
    """The races of the versions that differ in little."""

    race_threads: ClassVar[int] = 20
    race_slots: ClassVar[int] = 30
    race_processes: ClassVar[tuple[int, int]] = (4, 5)


class TestRedis7(OnServer):
    harness_class = Redis7
    flavour = "redis7"


if wanted("redis6"):

    class TestRedis6(Smaller, OnServer):
        harness_class = Redis6
        flavour = "redis6"


if wanted("redis8"):

    class TestRedis8(Smaller, OnServer):
        harness_class = Redis8
        flavour = "redis8"


if wanted("valkey8"):

    class TestValkey8(Smaller, OnServer):
        harness_class = Valkey8
        flavour = "valkey8"


if wanted("valkey9"):

    class TestValkey9(Smaller, OnServer):
        harness_class = Valkey9
        flavour = "valkey9"


class TestCluster(Smaller, OnServer):
    harness_class = ClusterHarness
    flavour = "cluster"


TestRedisMachine = machine_for(RedisMachine, 15, 30)
TestRedisMachineLong = pytest.mark.long(machine_for(RedisMachine, 400, 60))
TestRedisRunMachine = run_machine_for(RedisMachine, 15, 30)
TestRedisRunMachineLong = pytest.mark.long(run_machine_for(RedisMachine, 400, 60))
for _case in (TestRedisMachine, TestRedisMachineLong, TestRedisRunMachine, TestRedisRunMachineLong):
    _case.harness_class, _case.flavour = RedisMachine, "redis7"

# The scripts are the same everywhere, and the servers' Lua nearly so.
TestClusterRunMachine = run_machine_for(ClusterHarness, 5, 20)
TestClusterRunMachineLong = pytest.mark.long(run_machine_for(ClusterHarness, 60, 40))
TestRedis6RunMachineLong = pytest.mark.long(run_machine_for(Redis6, 100, 40))
TestRedis8RunMachineLong = pytest.mark.long(run_machine_for(Redis8, 100, 40))
TestValkey8RunMachineLong = pytest.mark.long(run_machine_for(Valkey8, 100, 40))
TestValkey9RunMachineLong = pytest.mark.long(run_machine_for(Valkey9, 100, 40))
for _case, _harness, _flavour in (
    (TestClusterRunMachine, ClusterHarness, "cluster"),
    (TestClusterRunMachineLong, ClusterHarness, "cluster"),
    (TestRedis6RunMachineLong, Redis6, "redis6"),
    (TestRedis8RunMachineLong, Redis8, "redis8"),
    (TestValkey8RunMachineLong, Valkey8, "valkey8"),
    (TestValkey9RunMachineLong, Valkey9, "valkey9"),
):
    _case.harness_class, _case.flavour = _harness, _flavour
