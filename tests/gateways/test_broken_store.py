"""A store that holds what nobody can read, or that has lost the gateways' signs of life."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from fleet.sim import SimFleet
from fleet.store import open_store
from tests.cases.conftest import check_error, nccl
from tests.gateways.processes import Gateways, gateways
from tests.redis_server import RedisServer
from tests.waiting import wait_until

TALK = "fleet:{fleet}:talk"


async def all_ready(several: Gateways) -> bool:
    """Whether every gateway serves."""
    return all([await gateway.ready() for gateway in several.all])


async def none_ready(several: Gateways) -> bool:
    """Whether every gateway says that it does not."""
    return not any([await gateway.ready() for gateway in several.all])


async def test_a_message_that_nobody_can_read_ends_no_gateway(
    redis_url: str, tmp_path: Path
) -> None:
    """Another release, or somebody else, has said it; the next news are heard as before."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(sim, redis_url, tmp_path) as several,
        Redis.from_url(redis_url) as redis,
    ):
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        await cast("Any", redis).xadd(TALK, {"m": b"no JSON"})
        await cast("Any", redis).xadd(TALK, {"other": b"{}"})

        async def complained() -> bool:
            return all("bug in hearing" in gateway.log.read_text() for gateway in several.all)

        await wait_until(complained)
        for case, version in ((here, "2"), (there, "3")):
            await case.sync(version)
            assert (await here.complete()).headers["X-Weight-Version"] == version
        assert await all_ready(several)


async def test_a_state_that_cannot_be_read_is_neither_served_by_nor_overwritten(
    redis_url: str, tmp_path: Path
) -> None:
    """A newer release has written it: an old one stops admitting, and changes nothing."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(sim, redis_url, tmp_path) as several,
        open_store(redis_url, "fleet") as store,
    ):
        here = several.case(0)
        await here.first_sync("1")
        entry = await store.load("state")
        assert entry is not None
        generation, revision, _ = entry.stamp.split(":")
        state = msgspec.json.decode(entry.body)
        unreadable = msgspec.json.encode({**state, "phase": "a phase of the next release"})
        newer = f"{generation}:{int(revision) + 9}:newer"
        await store.swap("state", expected=entry.stamp, stamp=newer, body=unreadable)
        await store.publish("talk", b'{"sender":"newer","what":"news","revision":%d}' % 10**6)
        await wait_until(lambda: none_ready(several))
        assert (await here.start()).status_code == 409
        found = await store.load("state")
        assert found is not None
        assert (found.stamp, found.body) == (newer, unreadable)
        extended = msgspec.json.encode({**state, "a_field_of_the_next_release": {}})
        readable = f"{generation}:{int(revision) + 10}:newer"
        await store.swap("state", expected=newer, stamp=readable, body=extended)
        await wait_until(lambda: all_ready(several))
        await several.case(1).sync("2")


async def test_a_start_right_after_the_store_came_back_empty_overtakes_no_rollout(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """Every key is gone, the leases are not: a gateway that has not heard yet is waited for."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(
            sim,
            own_server.url,
            tmp_path,
            FLEET_TIMEOUTS__LEASE_S="5",
            FLEET_TIMEOUTS__LEASE_RENEW_S="1",
        ) as several,
    ):
        here, there = several.case(0), several.case(1)
        await here.first_sync("0")
        for n in range(1, 3):
            own_server.kill()
            own_server.start()
            start = await here.start()
            while start.status_code == 503:  # the gateways agree on what was lost
                await asyncio.sleep(0.1)
                start = await here.start()
            late = asyncio.ensure_future(there.complete())
            if start.status_code != 200:  # the heartbeats met the empty store in mid-call
                check_error(start, 409, "taken over")
                late.cancel()
                await here.ok("/fleet/reset")
                await here.first_sync(str(n))
                continue
            await here.update()
            finish = await here.finish(str(n))
            assert finish.status_code == 200, finish.text
            assert (await late).headers["X-Weight-Version"] == str(n)
