"""Servers without /server_info and /metrics: their label is all that tells a restart."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fleet.sim import SimFleet
from gateway.settings_model import Settings
from tests.cases.conftest import Case, case_of, fast, nccl
from tests.gateway.serving import serve
from tests.waiting import wait_until


@asynccontextmanager
async def unnamed() -> AsyncGenerator[Case]:
    """A gateway before three such servers."""
    async with SimFleet(nccl(3)) as sim:
        for replica in sim.replicas:
            for path in ("/server_info", "/metrics"):
                replica.faults.add(path, "status", status=404, times=0)
        async with serve(Settings(replicas=tuple(sim.urls), timeouts=fast())) as served:
            yield Case(sim, served)


async def test_case_19_a_restart_that_only_the_label_tells_gets_no_traffic() -> None:
    """Not before the next full update, which takes it in again."""
    async with unnamed() as case:
        await case.first_sync("1")

        async def named() -> bool:
            known = case.gateway.ledger.state.replicas
            return known[case.replicas[0].id].named == "1"

        await wait_until(named)
        await case.replicas[0].restart()
        await case.await_states("stale", "ready", "ready")
        await case.first_sync("2")
        await case.await_states("ready", "ready", "ready")


async def test_case_19_one_that_was_away_longer_than_a_probe_needs_no_label_before() -> None:
    """Whether it had ever been seen to name a version or not."""
    async with unnamed() as case:
        await case.first_sync("1")
        await case.replicas[0].die()
        await case.await_states("gone", "ready", "ready")
        await case.replicas[0].restart()
        await case.await_states("stale", "ready", "ready")


async def test_case_7_a_member_that_was_away_between_init_and_start_blocks_the_start() -> None:
    """It may have been restarted, and then its group is gone."""
    async with unnamed() as case:
        assert (await case.init()).status_code == 200
        await case.replicas[0].die()
        await case.await_states("gone", "ready", "ready")
        await case.replicas[0].restart()
        await case.await_states("ready", "ready", "ready")
        assert (await case.start()).status_code == 409
        await case.first_sync("1")


async def test_a_server_whose_api_processes_each_name_an_instance_is_one_server() -> None:
    """Which of them answers is chance: that is no restart, and its rounds go on as any other's."""
    async with case_of(nccl(2, api_processes=3)) as case:
        await case.first_sync("1")
        for version in ("2", "3", "4"):
            await case.sync(version)
        assert await case.states() == ["ready", "ready"]
        await case.replicas[0].restart()
        await case.await_states("stale", "ready")
        await case.first_sync("5")
        assert await case.states() == ["ready", "ready"]
