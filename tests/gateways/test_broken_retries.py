"""The same call at two gateways at once, and calls that were planned on what is past."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.sim import SimFleet
from tests.cases.conftest import (
    FINISH,
    INIT,
    START,
    UPDATE,
    Case,
    check_error,
    nccl,
    posts,
    update_of,
)
from tests.gateways.processes import gateways
from tests.gateways.store_proxy import store_proxy
from tests.gateways.test_deaths import body_for
from tests.redis_server import RedisServer
from tests.waiting import wait_until

SLOW_S = 0.2
CALM = {
    "FLEET_TIMEOUTS__LEASE_S": "20",
    "FLEET_TIMEOUTS__LEASE_RENEW_S": "8",
    "FLEET_TIMEOUTS__PROBE_S": "30",
}
"""Nothing but the calls of the test goes to the slow store."""
Call = Callable[[Case], Awaitable[httpx.Response]]


def same_call(path: str, number: int) -> Call:
    """The call of one round on a path, byte for byte the same whenever it is made."""

    async def call(case: Case) -> httpx.Response:
        body: Any = {"weight_version": f"v{number}"} if path == FINISH else None
        body = update_of() if path == UPDATE else body
        return await case.post(path, body_for(case) if path == INIT else body)

    return call


async def until_even(fast: Case, slow: Case) -> None:
    """Wait until one gateway knows what the other one knows: its next call reads nothing else."""

    async def even() -> bool:
        fleets = [await case.fleet() for case in (fast, slow)]
        facts = ("generation", "phase", "round", "call", "weight_version")
        return all(fleets[0][fact] == fleets[1][fact] for fact in facts)

    await wait_until(even)


async def test_the_same_call_at_two_gateways_at_once_is_carried_out_once_and_told_twice(
    redis_url: str, tmp_path: Path
) -> None:
    """A client whose connection broke asks elsewhere, before the first gateway has begun."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        for number in range(5):
            for path in (INIT, START, UPDATE, FINISH):
                here.forget_logs()
                call = same_call(path, number)
                answers = await asyncio.gather(call(here), call(there))
                assert [a.status_code for a in answers] == [200, 200], [a.text for a in answers]
                assert [len(posts(replica, path)) for replica in sim.replicas] == [1, 1]
        assert len(await here.rounds()) == 6


@pytest.mark.parametrize("path", [UPDATE, FINISH])
async def test_a_slow_gateway_does_not_send_again_what_another_was_faster_with(
    path: str, own_server: RedisServer, tmp_path: Path
) -> None:
    """It finds out when its own turn comes: a second collective would hang everyone."""
    async with (
        SimFleet(nccl(2)) as sim,
        store_proxy(own_server.port) as proxy,
        gateways(sim, own_server.url, tmp_path, 1, **CALM) as several,
    ):
        await several.start(store=proxy.url)
        fast, slow = several.case(0), several.case(1)
        await fast.first_sync("1")
        await fast.start()
        if path == FINISH:
            await fast.update()
        fast.forget_logs()
        await until_even(fast, slow)
        proxy.delay_s = SLOW_S
        call = same_call(path, 2)
        late = asyncio.ensure_future(call(slow))
        await asyncio.sleep(SLOW_S / 2)  # it has asked how things stand, and not heard yet
        assert (await call(fast)).status_code == 200
        answer = await late
        assert answer.status_code == 200, answer.text
        assert [len(posts(replica, path)) for replica in sim.replicas] == [1, 1]


async def test_an_init_that_was_planned_before_another_one_is_refused(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """Its group would have an old generation, and the members of then."""
    async with (
        SimFleet(nccl(2)) as sim,
        store_proxy(own_server.port) as proxy,
        gateways(sim, own_server.url, tmp_path, 1, **CALM) as several,
    ):
        await several.start(store=proxy.url)
        fast, slow = several.case(0), several.case(1)
        await fast.first_sync("1")
        await until_even(fast, slow)
        proxy.delay_s = SLOW_S
        other = body_for(slow)
        late = asyncio.ensure_future(slow.post(INIT, {**other, "another": "trainer"}))
        await asyncio.sleep(SLOW_S / 2)
        assert (await fast.post(INIT, other)).status_code == 200
        generation = (await fast.fleet())["generation"]
        check_error(await late, 409, "another call")
        assert (await fast.fleet())["generation"] == generation
        await fast.sync("2")
