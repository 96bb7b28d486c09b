"""Who keeps a gate from closing is named, and a replica that is no more keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from fleet.sim import SimFleet
from gateway.settings_model import Gate, PauseOnUpdate, Settings
from tests.cases.conftest import START, Case, check_error, fast, nccl, outcomes_of
from tests.gateway.serving import serve
from tests.slow_port import LARGE, SlowPort, slow_port
from tests.waiting import wait_until


@asynccontextmanager
async def one_behind_a_port(**settings: Any) -> AsyncGenerator[tuple[Case, SlowPort]]:
    """Serve two replicas that have synced once, the first behind a port that can be slow."""
    async with SimFleet(nccl(2)) as sim, slow_port(sim.urls[0]) as slow:
        chosen: dict[str, Any] = {"replicas": (slow.url, sim.urls[1])} | settings
        async with serve(Settings(**chosen)) as served:
            case = Case(sim, served)
            await case.first_sync("1")
            yield case, slow


async def send_large(case: Case, slow: SlowPort) -> asyncio.Task[httpx.Response]:
    """Send rollouts until one is under way to the slow port; return that one."""
    while True:
        body = {"prompt": "x" * LARGE, "max_tokens": 1}
        task = asyncio.ensure_future(case.post("/v1/completions", body))

        async def is_known(task: asyncio.Task[httpx.Response] = task) -> bool:
            return slow.stuck > 0 or task.done()

        await wait_until(is_known)
        if not task.done():
            return task


async def test_a_start_that_a_slow_replica_keeps_waiting_names_that_replica() -> None:
    """It takes the bytes of a rollout too slowly; the other member has nothing to do with it."""
    async with one_behind_a_port(timeouts=fast(pause_s=0.5)) as (case, slow):
        slow.reads.clear()
        rollout = await send_large(case, slow)
        refused = await case.post(START)
        told = check_error(refused, 503, f"{slow.id}: timeout", "1 rollout is still being sent")
        assert outcomes_of(refused) == {slow.id: "timeout", case.replicas[1].id: "skipped"}
        assert case.replicas[1].id not in told["error"]["message"]
        slow.reads.set()
        assert (await rollout).headers["X-Fleet-Replica"] == slow.id
        await case.sync("2")


async def test_a_start_that_waits_for_answers_names_who_gives_them() -> None:
    """With the pause off, rollouts under way are waited for, and a client may not read its own."""
    off = {"pause_on_update": PauseOnUpdate.OFF, "gate": Gate(timeout_s=0.5)}
    async with one_behind_a_port(timeouts=fast(), **off) as (case, slow):
        slow.reads.clear()
        rollouts = [asyncio.ensure_future(case.complete()) for _ in range(2)]
        await wait_until(slow.is_stuck)
        await asyncio.wait(rollouts, return_when=asyncio.FIRST_COMPLETED)
        refused = await case.post(START)
        check_error(refused, 503, f"{slow.id}: timeout (1 rollout is still being answered by it)")
        assert outcomes_of(refused)[case.replicas[1].id] == "skipped"
        slow.reads.set()
        assert {(await rollout).status_code for rollout in rollouts} == {200}
        await case.sync("2")


async def test_a_replica_that_stands_still_keeps_no_update_waiting() -> None:
    """Frozen with half a body, it is lost; its rollout goes elsewhere, the others are updated."""
    times = fast(pause_s=5, probe_timeout_s=0.3)
    async with one_behind_a_port(timeouts=times) as (case, slow):
        slow.reads.clear()
        rollout = await send_large(case, slow)
        slow.lives.clear()

        async def is_gone() -> bool:
            return (await case.served.states())[slow.id] == "gone"

        await wait_until(is_gone)
        assert (await rollout).headers["X-Fleet-Replica"] == case.replicas[1].id
        assert (await case.init()).status_code == 200
        await case.sync("2")


@pytest.mark.parametrize("call", ["/pause?mode=keep", "/pause?mode=wait", "/sleep?level=1"])
async def test_a_call_that_must_close_the_gate_and_cannot_names_who_holds_it_and_changes_nothing(
    call: str,
) -> None:
    """Nobody hangs on a replica that takes no bytes; the same call may be made again."""
    times = fast(pause_s=0.5, control_s=0.5)
    async with one_behind_a_port(timeouts=times) as (case, slow):
        slow.reads.clear()
        rollout = await send_large(case, slow)
        refused = await case.post(call)
        check_error(refused, 503, f"{slow.id}: 1 rollout is still being sent", "retry")
        assert refused.headers["Retry-After"]
        assert set((await case.served.states()).values()) == {"ready"}
        slow.reads.set()
        assert (await rollout).headers["X-Fleet-Replica"] == slow.id
        await case.ok(call)
        assert "ready" not in (await case.served.states()).values()
