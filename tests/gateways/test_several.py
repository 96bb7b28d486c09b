"""Several gateways, one fleet: any of them takes any call, and all of them close their gates."""

from __future__ import annotations

import asyncio
from itertools import cycle
from pathlib import Path

from fleet.sim import SimFleet
from tests.cases.conftest import UPDATE, check_error, nccl
from tests.gateways.processes import gateways
from tests.gateways.test_deaths import until_called
from tests.waiting import wait_until


async def test_any_gateway_takes_any_call_of_a_round(redis_url: str, tmp_path: Path) -> None:
    """Each call goes to the next of three gateways, and each sees at once what the last one did."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path, 3) as several:
        turn = cycle([several.case(n) for n in range(3)])
        assert (await next(turn).init()).status_code == 200
        for version in ("1", "2", "3", "4"):
            for step in ("start", "update", "finish"):
                answer = await getattr(next(turn), step)()
                assert answer.status_code == 200, answer.text
            for n in range(3):
                assert await several.case(n).version() == version
                assert await several.case(n).states() == ["ready", "ready"]
        assert [replica.engine.version for replica in sim.replicas] == ["4", "4"]


async def test_gates_close_on_every_gateway_before_a_pause_goes_out(
    redis_url: str, tmp_path: Path
) -> None:
    """Case 27: a rollout at the other gateway is held too, then served by the new weights."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        for n in range(20):
            here.forget_logs()
            flood = [asyncio.ensure_future(there.complete()) for _ in range(8)]
            assert (await here.start()).status_code == 200
            late = asyncio.ensure_future(there.complete())
            await here.update()
            await here.finish(f"v{n}")
            for answer in await asyncio.gather(*flood, late):
                assert answer.status_code == 200
            assert late.result().headers["X-Weight-Version"] == f"v{n}"
            assert [r.log.outcomes["killed"] for r in sim.replicas] == [0, 0]


async def test_a_pause_at_one_gateway_is_resumed_at_another(redis_url: str, tmp_path: Path) -> None:
    """What the trainer paused, any gateway holds, says and resumes."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.ok("/pause?mode=keep")
        assert (await there.http.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.ensure_future(there.complete())
        await here.await_held(1)  # the other's held one is counted here, too
        await there.ok("/resume")
        assert (await waiting).status_code == 200
        assert (await here.http.get("/is_paused")).json() == {"is_paused": False}


async def test_a_reset_takes_for_silent_whoever_sits_in_a_collective_of_another_gateway(
    redis_url: str, tmp_path: Path
) -> None:
    """Who has answered there is not known here; the next init must not wait for a corpse."""
    times = {"FLEET_TIMEOUTS__PROBE_TIMEOUT_S": "0.5"}
    async with SimFleet(nccl(2)) as sim, gateways(sim, redis_url, tmp_path, 2, **times) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        await here.start()
        for path in (UPDATE, "/weight_info"):
            sim.replicas[1].faults.add(path, "hang", times=0)
        hanging = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE, 2)
        said = await there.ok("/fleet/reset")
        assert set(said["wedged"]) == {replica.id for replica in sim.replicas}
        await there.await_states("fenced", "wedged")
        assert (await there.init(2)).status_code == 200
        await there.sync("2")
        assert await there.states() == ["ready", "wedged"]
        await sim.replicas[1].die()
        check_error(await hanging, 409, "taken over")


async def test_an_abort_reaches_what_another_gateway_holds_or_carries(
    redis_url: str, tmp_path: Path
) -> None:
    """Item: the id is enough, whichever gateway the abort meets; held ones get vLLM's answer."""
    options = nccl(1, token_delay_ms=20)
    async with SimFleet(options) as sim, gateways(sim, redis_url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        running = asyncio.ensure_future(there.complete(max_tokens=5000, X_Request_Id="long"))

        async def in_flight() -> bool:
            return sim.replicas[0].stats()["running"] == 1

        await wait_until(in_flight)
        await here.ok("/abort_requests", {"request_ids": ["long"]})
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        await here.ok("/pause?mode=keep")
        held = asyncio.ensure_future(there.complete(X_Request_Id="held"))
        await here.await_held(1)
        await here.ok("/abort_requests", {"request_ids": ["held"]})
        assert (await held).json()["choices"][0]["finish_reason"] == "abort"
