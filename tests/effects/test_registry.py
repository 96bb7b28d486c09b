"""The registry: what a sweep writes down, and in how many steps."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from fleet.facts.options import FleetOptions
from fleet.facts.state import FleetState
from fleet.ledger import Ledger
from fleet.owner import task_owner
from fleet.replicas.fanout import FanOut
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import open_client
from fleet.sim import SimFleet
from fleet.store import open_store
from tests.waiting import wait_until


@asynccontextmanager
async def registry_over(fleet: SimFleet) -> AsyncGenerator[tuple[Registry, Ledger]]:
    """A registry with a ledger of its own, the replicas added and not looked at yet."""
    async with (
        open_store("memory://", "fleet") as store,
        open_client() as client,
        task_owner() as owner,
    ):
        ledger = await Ledger.open(store, "fleet")
        registry = Registry(ledger, client, FanOut(owner), FleetOptions())
        await registry.add(fleet.urls)
        yield registry, ledger


async def _label(fleet: SimFleet, versions: list[str]) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        for url, version in zip(fleet.urls, versions, strict=True):
            answer = await http.post(f"{url}/update_weight_version", json={"new_version": version})
            assert answer.status_code == 200


async def test_replicas_that_disagree_are_never_ready_not_even_for_a_moment() -> None:
    """Over an empty store, what was seen and what follows from it are one write."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        await _label(fleet, ["7", "8"])
        async with registry_over(fleet) as (registry, ledger):
            ready: list[int] = []
            ledger.watch(lambda state: ready.append(len(state.ready())))
            await registry.sweep()
    assert set(ready) == {0}
    assert all(r.fence and "disagree" in r.fence for r in ledger.state.replicas.values())


async def test_replicas_that_agree_teach_an_empty_store_the_version() -> None:
    """The fleet goes on from there: the version is known, everyone is ready."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        await _label(fleet, ["7", "7"])
        async with registry_over(fleet) as (registry, ledger):
            await registry.sweep()
    state: FleetState = ledger.state
    assert (state.weight_version, state.counter, len(state.ready())) == ("7", 7, 2)


async def test_a_silent_replica_delays_the_news_of_no_other() -> None:
    """A restart is seen within a probe, though someone else takes a whole deadline for nothing."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        await _label(fleet, ["7", "7"])
        silent, other = fleet.replicas
        async with registry_over(fleet) as (registry, ledger), task_owner() as owner:
            await registry.sweep()
            silent.log.clear()
            silent.faults.add("/*", "hang", times=0)
            owner.create_task(registry.run())

            async def is_looked_at() -> bool:
                return bool(silent.log.calls("/weight_info"))

            async def has_restarted() -> bool:
                return ledger.state.replicas[other.id].version == "default"

            await wait_until(is_looked_at, timeout_s=4)
            await other.restart()
            await wait_until(has_restarted, timeout_s=4)
            assert ledger.state.replicas[silent.id].reachable
