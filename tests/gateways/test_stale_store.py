"""A store that came back empty is not filled by whoever knows least."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet.ledger import STATE
from fleet.sim import SimFleet
from fleet.store import open_store
from tests.cases.conftest import nccl
from tests.gateways.processes import LEASE_S, gateways
from tests.redis_server import RedisServer
from tests.waiting import wait_until


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


async def test_a_gateway_that_starts_on_a_store_just_lost_waits_for_who_knows_it(
    tmp_path: Path,
) -> None:
    """It writes no first state of its own: generation and version never go back, for no moment.

    Nor does it take the pause of the round that is open there for a trainer's, which would stay.
    """
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        async with SimFleet(nccl(2)) as sim, gateways(sim, redis.url, tmp_path, 1) as several:
            knows = several.case(0)
            await knows.first_sync("1")
            assert (await knows.start()).status_code == 200
            before = await knows.fleet()
            several.all[0].freeze()
            redis.kill()
            redis.start()
            fresh = asyncio.ensure_future(several.start())
            log = tmp_path / "gateway-1.log"
            await wait_until(lambda: says(log, "other gateways get the time"))
            async with open_store(redis.url, "fleet") as store:
                assert await store.load(STATE) is None
            several.all[0].thaw()
            await fresh
            after = await several.case(1).fleet()
            told = ("generation", "weight_version", "phase", "pause")
            assert [after[what] for what in told] == [before[what] for what in told]
            await several.case(1).update()
            assert (await several.case(1).finish("2")).status_code == 200
            assert (await several.case(1).complete()).headers["X-Weight-Version"] == "2"
    finally:
        redis.kill()


async def says(log: Path, words: str) -> bool:
    """Whether a gateway has logged this."""
    return log.exists() and words in log.read_text()  # noqa: ASYNC240
