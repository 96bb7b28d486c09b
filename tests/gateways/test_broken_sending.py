"""A gateway that loses its lease, or its seat, while a rollout is still on its way to a replica."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fleet.sim import SimFleet
from tests.cases.conftest import Case, nccl
from tests.gateways.processes import gateways
from tests.slow_port import LARGE, slow_port
from tests.waiting import wait_until


async def test_what_an_expelled_gateway_has_not_sent_is_not_sent_into_the_session(
    redis_url: str, tmp_path: Path
) -> None:
    """It is taken back when the lease ends, held, and answered by the next weights as theirs."""
    async with SimFleet(nccl(1)) as sim, slow_port(sim.urls[0]) as slow:
        slow.reads.clear()
        seen = cast("SimFleet", SimpleNamespace(replicas=[SimpleNamespace(url=slow.url)]))
        async with gateways(seen, redis_url, tmp_path) as several:
            here, there = (Case(sim, gateway) for gateway in several.all)
            await here.first_sync("1")
            body: Any = msgspec.json.encode({"prompt": "x" * LARGE, "max_tokens": 1})
            kind = {"Content-Type": "application/json"}
            rollout = asyncio.ensure_future(
                there.http.post("/v1/completions", content=body, headers=kind)
            )

            await wait_until(slow.is_stuck)
            assert (await here.start()).status_code == 200
            await there.await_held(1)
            slow.reads.set()
            await here.update()
            assert (await here.finish("2")).status_code == 200
            assert (await rollout).headers["X-Weight-Version"] == "2"
            assert sim.replicas[0].log.outcomes["killed"] == 0
