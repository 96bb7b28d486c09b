"""Calls of two trainers that meet at two gateways, one of them slow on its way to the replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from fleet.sim import SimFleet
from tests.cases.conftest import Case, nccl
from tests.gateways.processes import gateways
from tests.gateways.test_deaths import until_called
from tests.waiting import wait_until

LATE_S = 0.7


async def frozen_rollouts(case: Case, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Send rollouts that last, and wait until all of them are with their replicas."""
    sent = [asyncio.ensure_future(case.complete(max_tokens=60)) for _ in range(count)]

    async def running() -> bool:
        return sum(replica.stats()["running"] for replica in case.replicas) == count

    await wait_until(running)
    return sent


@pytest.mark.parametrize("there", [0, 1])
@pytest.mark.parametrize(
    ("rest", "wake"), [("/pause?mode=keep", "/resume"), ("/sleep?mode=keep", "/wake_up")]
)
async def test_what_sets_engines_going_never_lands_between_start_and_finish(
    rest: str, wake: str, there: int, redis_url: str, tmp_path: Path
) -> None:
    """A start waits for it, then pauses who goes again: an engine would die of its rollouts."""
    options = nccl(2, token_delay_ms=10)
    async with SimFleet(options) as sim, gateways(sim, redis_url, tmp_path) as several:
        here = several.case(0)
        await here.first_sync("1")
        rollouts = await frozen_rollouts(here, 4)
        await here.ok(rest)
        here.forget_logs()
        for replica in sim.replicas:
            replica.faults.add(wake, "delay", seconds=LATE_S)
        waking = asyncio.ensure_future(several.case(there).post(wake))
        await until_called(sim, wake)
        assert (await here.start()).status_code == 200
        assert (await waking).status_code == 200
        await here.update()
        assert (await here.finish("2")).status_code == 200
        assert [replica.log.outcomes["killed"] for replica in sim.replicas] == [0, 0]
        assert [(await rollout).status_code for rollout in rollouts] == [200] * 4
        assert await here.states() == ["ready", "ready"]


@pytest.mark.parametrize("there", [0, 1])
async def test_a_label_that_is_on_its_way_is_not_put_on_the_next_weights(
    there: int, redis_url: str, tmp_path: Path
) -> None:
    """The round waits for it: gateway and replicas name the same version in the end."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path) as several:
        here = several.case(0)
        await here.first_sync("1")
        path = "/update_weight_version"
        sim.replicas[1].faults.add(path, "delay", seconds=LATE_S)
        naming = asyncio.ensure_future(several.case(there).post(path, {"new_version": "late"}))
        await until_called(sim, path)
        await here.sync("2")
        assert (await naming).status_code == 200
        assert await here.version() == "2"
        assert [replica.engine.version for replica in sim.replicas] == ["2", "2"]


async def test_a_sleep_that_is_on_its_way_ends_before_the_session_opens(
    redis_url: str, tmp_path: Path
) -> None:
    """Weights are never taken away under an update."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        for replica in sim.replicas:
            replica.faults.add("/sleep", "delay", seconds=LATE_S)
        sleeping = asyncio.ensure_future(there.post("/sleep"))
        await until_called(sim, "/sleep")
        assert (await here.start()).status_code == 200
        async with asyncio.timeout(LATE_S / 2):
            assert (await sleeping).status_code == 200
        await here.update()
        assert (await here.finish("2")).status_code == 200
        assert await here.states() == ["asleep", "asleep"]
        await there.ok("/wake_up")
        assert (await here.complete()).headers["X-Weight-Version"] == "2"
