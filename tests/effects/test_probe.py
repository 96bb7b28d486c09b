"""Probing: what one server tells of itself, and what its silence means."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet.facts.options import Placement
from fleet.facts.replica import Naming, Topology, naming_of
from fleet.replicas.probe import _Parallel, explain_silence, identify, topology_of
from fleet.replicas.replica_client import ReplicaClient, open_client
from fleet.sim import SimFleet, SimReplica

MASTER = {"data_parallel_master_ip": "10.0.0.1", "data_parallel_rpc_port": 5}
D = "10.0.0.1:5"


@asynccontextmanager
async def server() -> AsyncGenerator[tuple[ReplicaClient, SimReplica]]:
    """A client, and one simulated server."""
    async with SimFleet(replicas=1, backend="nccl") as fleet, open_client() as client:
        yield client, fleet.replicas[0]


# -- silence ---------------------------------------------------------------------------------------


async def test_a_server_that_says_it_is_healthy_has_a_silent_engine() -> None:
    """It sits in a collective, or hangs: wedged, not gone."""
    async with server() as (client, replica):
        seen = await explain_silence(client, replica.url, 0.5)
        assert (seen.lost, bool(seen.silent)) == (None, True)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"action": "status", "status": 503}, "unhealthy: it answers 503"),
        ({"action": "hang"}, "unreachable: no answer to a probe within 0.5 s"),
        ({"action": "drop", "times": 0}, "unreachable: "),
    ],
)
async def test_a_silent_server_that_is_not_healthy_either_is_lost(
    fault: dict[str, Any], why: str
) -> None:
    """The reason says what it answered, or that it did not."""
    async with server() as (client, replica):
        replica.faults.add("/health", **fault)
        seen = await explain_silence(client, replica.url, 0.5)
        assert (seen.lost or "").startswith(why)
        assert seen.silent is None


# -- the boot --------------------------------------------------------------------------------------


async def test_a_server_without_an_instance_is_known_by_when_it_was_started() -> None:
    """Without VLLM_SERVER_DEV_MODE there is no /server_info, but there are metrics."""
    async with server() as (client, replica):
        replica.faults.add("/server_info", "status", status=404, times=0)
        told = [(await identify(client, replica.url, Placement())).instance for _ in range(2)]
        assert told[0] == told[1]
        assert naming_of(told[0]) is Naming.BY_START
        await replica.restart()
        assert (await identify(client, replica.url, Placement())).instance != told[0]


async def test_an_instance_that_is_told_needs_no_metrics() -> None:
    """It is random at each boot, so nothing else tells a restart as surely."""
    async with server() as (client, replica):
        replica.faults.add("/metrics", "status", status=404, times=0)
        seen = await identify(client, replica.url, Placement())
        assert naming_of(seen.instance) is Naming.BY_ITSELF


# -- the place in a layout -------------------------------------------------------------------------


def parallel(**facts: Any) -> _Parallel:
    """What /server_info tells of one server; `facts` without their common prefix."""
    own = {"tensor_parallel_size", "pipeline_parallel_size"}
    return _Parallel(**MASTER, **{k if k in own else f"data_parallel_{k}": facts[k] for k in facts})


@pytest.mark.parametrize(
    ("facts", "size", "expected"),
    [
        ({}, None, Topology(workers=1, master=D, index=0)),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, None, Topology(workers=6)),
        ({"tensor_parallel_size": 2, "size": 4, "size_local": 4}, None, Topology(workers=8)),
        ({"tensor_parallel_size": 2}, 4, Topology(workers=4)),
    ],
)
def test_a_server_on_its_own_has_as_many_workers_as_it_says(
    facts: dict[str, Any], size: int | None, expected: Topology
) -> None:
    """The answer of /get_world_size, else what follows from its configuration."""
    found = topology_of(parallel(**facts), size, Placement())
    assert (found.workers, found.deployment) == (expected.workers, None)
    assert (found.master, found.index) == (D, 0)


@pytest.mark.parametrize(
    ("facts", "size", "expected"),
    [
        # dense, or expert parallel: told by whether the size covers all ranks
        ({"size": 4, "rank": 3, "external_lb": True}, 1, (False, 4, 3)),
        ({"size": 4, "rank": 3, "external_lb": True}, 4, (True, 4, 3)),
        ({"size": 4, "size_local": 2, "rank": 2, "hybrid_lb": True}, 2, (False, 2, 1)),
        ({"size": 4, "size_local": 2, "rank": 2, "hybrid_lb": True}, 4, (True, 2, 1)),
        # a dense server keeps its index only: vLLM makes ranks and sizes of its own for it
        ({"index": 2}, 1, (False, None, 2)),
    ],
)
def test_a_server_of_a_deployment_says_which_one_of_how_many_it_is(
    facts: dict[str, Any], size: int, expected: tuple[bool, int | None, int]
) -> None:
    """The deployment is named by its master, which all of its servers share."""
    found = topology_of(parallel(**facts), size, Placement())
    assert found.deployment == D
    assert (found.counts_deployment, found.servers, found.index) == expected
    assert found.workers == size


def test_what_the_operator_says_of_a_place_wins() -> None:
    """Where probing cannot tell, or tells wrong."""
    said = Placement(explicit=True, workers=8, deployment="mine", counts_deployment=True)
    found = topology_of(parallel(size=4, rank=1, external_lb=True), 2, said)
    assert found == Topology(workers=8, deployment="mine", counts_deployment=True)
