"""The registry: what a sweep writes down, and in how many steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from fleet.facts.options import Deadlines, FleetOptions
from fleet.facts.state import FleetState
from fleet.ledger import Ledger
from fleet.owner import task_owner
from fleet.replicas.fanout import FanOut
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import open_client
from fleet.rules.events import InitRequested
from fleet.sim import SimFleet, SimReplica
from fleet.store import open_store
from tests.fleets import NOW, change, group_for
from tests.waiting import wait_until


@asynccontextmanager
async def registry_over(
    fleet: SimFleet, probe_s: float = 5.0
) -> AsyncGenerator[tuple[Registry, Ledger]]:
    """A registry with a ledger of its own, the replicas added and not looked at yet."""
    options = FleetOptions(deadlines=Deadlines(probe_s=probe_s))
    async with (
        open_store("memory://", "fleet") as store,
        open_client() as client,
        task_owner() as owner,
    ):
        ledger = await Ledger.open(store, "fleet")
        registry = Registry(ledger, client, FanOut(owner), options)
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


async def _hangs(replica: SimReplica) -> bool:
    """Whether the call that its only fault was for has come."""
    return not replica.faults.as_json()


async def _asked(replica: SimReplica, path: str) -> bool:
    return bool(replica.log.calls(path))


async def test_who_is_silent_to_a_look_because_a_collective_has_begun_is_not_wedged() -> None:
    """The look went out before, whoever carries the collective: nobody would end that silence."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        busy = fleet.replicas[0]
        async with registry_over(fleet, probe_s=0.5) as (registry, ledger):
            await registry.sweep()
            busy.log.clear()
            busy.faults.add("/server_info", "hang")
            looking = asyncio.ensure_future(registry.suspect(busy.id))
            await wait_until(lambda: _hangs(busy))
            await ledger.apply(InitRequested(now=NOW, group=group_for(ledger.state)))
            await looking
            assert ledger.state.replicas[busy.id].reachable


async def test_who_sits_in_a_collective_is_not_looked_at_whoever_carries_it() -> None:
    """It answers nobody, and silence would make it a wedged one."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        busy = fleet.replicas[0]
        async with registry_over(fleet, probe_s=0.5) as (registry, ledger):
            await registry.sweep()
            await ledger.apply(InitRequested(now=NOW, group=group_for(ledger.state)))
            busy.faults.add("/server_info", "hang")
            await registry.suspect(busy.id)
            assert not await _hangs(busy)
            assert ledger.state.replicas[busy.id].reachable


async def test_who_is_silent_to_a_look_without_a_reason_is_wedged() -> None:
    """Its engine does not answer, though its server does."""
    async with SimFleet(replicas=2, backend="nccl") as fleet:
        silent = fleet.replicas[0]
        async with registry_over(fleet, probe_s=0.5) as (registry, ledger):
            await registry.sweep()
            silent.faults.add("/server_info", "hang")
            await registry.suspect(silent.id)
            assert "its engine is silent" in (ledger.state.replicas[silent.id].wedged or "")


async def test_a_newcomer_that_is_found_paused_is_paused_whatever_the_fleet_did_meanwhile() -> None:
    """A round that came and went had nothing to do with it, and no later look asks again."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        registry_over(fleet) as (registry, ledger),
    ):
        await registry.sweep()
        newcomer = await fleet.add()
        newcomer.engine.paused = "keep"
        newcomer.faults.add("/is_paused", "delay", seconds=0.3)
        [name] = await registry.add([newcomer.url])
        looking = asyncio.ensure_future(registry.suspect(name))
        await wait_until(lambda: _asked(newcomer, "/is_paused"))
        await ledger.amend(lambda state: change(state, next_round=state.next_round + 1))
        await looking
        assert ledger.state.replicas[name].known
        assert ledger.state.replicas[name].paused
