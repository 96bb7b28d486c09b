"""A store that came back empty is not filled by whoever knows least."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet.sim import SimFleet
from tests.cases.conftest import nccl
from tests.gateways.processes import LEASE_S, gateways
from tests.redis_server import RedisServer


async def test_a_gateway_that_slept_does_not_bring_an_old_version_back(tmp_path: Path) -> None:
    """It admits nobody before those who may know more have had their say."""
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with SimFleet(nccl(2)) as sim, gateways(sim, redis.url, tmp_path) as several:
            knows, slept = several.case(0), several.case(1)
            await knows.first_sync("1")
            several.all[1].freeze()
            await knows.sync("2")
            await knows.sync("3")
            several.all[0].freeze()
            redis.kill()
            redis.start()
            several.all[1].thaw()
            asked = asyncio.ensure_future(slept.complete())
            await asyncio.wait((asked,), timeout=LEASE_S)
            several.all[0].thaw()
            answer = await asked
            assert answer.json()["sim"]["version"] == "3"
            assert answer.headers["X-Weight-Version"] == "3"
            assert await slept.version() == "3"
            await slept.sync("4")
            assert await knows.version() == "4"
    finally:
        redis.kill()
