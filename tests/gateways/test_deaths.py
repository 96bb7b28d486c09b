"""Gateways that die or stand still in the middle of a call, and what the trainer reads then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import httpx
import pytest

from fleet.sim import SimFleet, SimReplica
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
from tests.gateways import processes
from tests.gateways.processes import LEASE_S, Gateways
from tests.waiting import wait_until


class Field(NamedTuple):
    """Replicas, the gateways in front of them, and the fleet as the first and last one see it."""

    sim: SimFleet
    several: Gateways
    here: Case
    there: Case


Opening = Callable[..., AbstractAsyncContextManager[Field]]


@pytest.fixture
def gateways(redis_url: str, tmp_path: Path) -> Opening:
    """Open a field on an empty Redis: two replicas and two gateways, unless a test says otherwise.

    Its fleet holds `version`, which was committed at the first gateway; None leaves it fresh.
    """

    @asynccontextmanager
    async def opened(
        *, replicas: int = 2, count: int = 2, version: str | None = "1", **environment: str
    ) -> AsyncGenerator[Field]:
        async with (
            SimFleet(nccl(replicas)) as sim,
            processes.gateways(sim, redis_url, tmp_path, count, **environment) as several,
        ):
            here, there = several.case(0), several.case(-1)
            if version is not None:
                await here.first_sync(version)
            yield Field(sim, several, here, there)

    return opened


async def until_called(sim: SimFleet, path: str, count: int = 1) -> None:
    """Wait until every replica has got so many POSTs on a path."""

    async def called() -> bool:
        return all(len(posts(replica, path)) >= count for replica in sim.replicas)

    await wait_until(called)


async def until_posted(replica: SimReplica, path: str, count: int) -> None:
    """Wait until a replica has got exactly so many POSTs on a path."""

    async def got() -> bool:
        return len(posts(replica, path)) == count

    await wait_until(got)


async def until_phase(case: Case, *phases: str) -> None:
    """Wait until the fleet is in one of these phases and no call is on its way."""

    async def reached() -> bool:
        fleet = await case.fleet()
        return fleet["phase"] in phases and fleet["call"] is None

    await wait_until(reached)


def body_for(case: Case) -> dict[str, object]:
    """The init body of a trainer that has asked for the number."""
    info = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1}
    return {"init_info": info | {"world_size": 1 + len(case.replicas)}}


async def test_a_gateway_killed_between_update_and_finish_is_replaced_by_another(
    gateways: Opening,
) -> None:
    """Case 28: gate and round stay as they are, and the trainer's finish commits elsewhere."""
    async with gateways() as (_, several, here, there):
        await here.start()
        await here.update()
        held = asyncio.ensure_future(there.complete())
        await there.await_held(1)
        several.all[0].kill()
        fleet = await there.fleet()
        assert (fleet["phase"], fleet["gate"]["state"]) == ("started", "closed")
        answer = await there.finish("2")
        assert answer.status_code == 200, answer.text
        assert (await held).headers["X-Weight-Version"] == "2"
        assert await there.states() == ["ready", "ready"]


async def test_a_round_goes_on_at_the_only_gateway_after_its_restart(gateways: Opening) -> None:
    """Killed between update and finish, and started again on the same Redis."""
    async with gateways(count=1) as (_, several, before, _):
        await before.start()
        await before.update()
        several.all[0].kill()
        await several.start()
        after = several.case(1)
        assert (await after.fleet())["gate"]["state"] == "closed"
        assert (await after.finish("2")).status_code == 200
        assert await after.states() == ["ready", "ready"]


@pytest.mark.parametrize("path", [UPDATE, FINISH])
async def test_what_was_on_its_way_when_its_gateway_died_is_never_finished_by_guess(
    path: str, gateways: Opening
) -> None:
    """Members are fenced and the gate stays shut; a retry reads what happened and what to do."""
    async with gateways(replicas=3) as (sim, several, here, there):
        await here.start()
        body = update_of() if path == UPDATE else None
        if path == FINISH:
            await here.update()
        here.forget_logs()
        sim.replicas[1].faults.add(path, "hang")
        dying = asyncio.ensure_future(here.post(path, body))
        await until_called(sim, path)
        retry = asyncio.ensure_future(there.post(path, body))
        several.all[0].kill()
        began = monotonic()
        told = check_error(await retry, 504, "outcome unknown", "was lost", "world_size=4")
        assert monotonic() - began < 2 * LEASE_S + 1, told
        with pytest.raises(httpx.HTTPError):
            await dying
        await until_posted(sim.replicas[0], path, 1 if path == UPDATE else 2)  # bare finish
        assert await there.version() == "1"
        fleet = await there.fleet()
        assert (fleet["phase"], fleet["gate"]["state"]) == ("failed", "closed")
        assert set(await there.states()) <= {"fenced", "wedged"}
        check_error(await there.finish("2"), 409, "was lost")
        await sim.replicas[1].restart()
        await there.await_states("fenced", "fenced", "fenced")
        await there.first_sync("3")
        assert await there.states() == ["ready", "ready", "ready"]
        assert [r.log.outcomes["killed"] for r in sim.replicas] == [0, 0, 0]


async def test_a_start_whose_gateway_died_is_taken_back_and_its_retry_starts_anew(
    gateways: Opening,
) -> None:
    """No session stays open, nobody stays paused, and the trainer need not know."""
    async with gateways() as (sim, several, here, there):
        sim.replicas[1].faults.add(START, "delay", seconds=60, when="after")
        dying = asyncio.ensure_future(here.start())
        await until_called(sim, START, 2)
        several.all[0].kill()
        retry = await there.start()
        assert retry.status_code == 200, retry.text
        with pytest.raises(httpx.HTTPError):
            await dying
        await there.update()
        assert (await there.finish("2")).status_code == 200
        assert await there.states() == ["ready", "ready"]


async def test_a_start_that_nobody_retries_is_taken_back_all_the_same(gateways: Opening) -> None:
    """The trainer died with the gateway: rollouts are served by the old weights again."""
    async with gateways() as (sim, several, here, there):
        sim.replicas[1].faults.add(START, "hang")
        dying = asyncio.ensure_future(here.start())
        await until_called(sim, START, 2)
        several.all[0].kill()
        await until_phase(there, "initialized")
        with pytest.raises(httpx.HTTPError):
            await dying
        answer = await there.complete()
        assert answer.headers["X-Weight-Version"] == "1"
        assert (await there.rounds())[0]["result"] == "undone"


async def test_an_init_whose_gateway_died_is_failed_and_a_new_init_works(gateways: Opening) -> None:
    """Nobody is fenced: no weight was touched."""
    async with gateways() as (sim, several, here, there):
        sim.replicas[1].faults.add(INIT, "delay", seconds=60)
        dying = asyncio.ensure_future(here.post(INIT, body_for(here)))
        await until_called(sim, INIT, 2)
        several.all[0].kill()
        check_error(await there.post(INIT, body_for(there)), 504, "init was on its way")
        with pytest.raises(httpx.HTTPError):
            await dying
        await sim.replicas[1].restart()
        await there.await_states("ready", "stale")
        await there.first_sync("2")


async def test_a_retry_at_another_gateway_joins_the_call_that_is_on_its_way(
    gateways: Opening,
) -> None:
    """Case 15 across gateways: one fan-out, two answers, both the real one."""
    async with gateways() as (sim, _, here, there):
        await here.start()
        here.forget_logs()
        sim.replicas[1].faults.add(UPDATE, "delay", seconds=1)
        first = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE)
        second = await there.update()
        assert (await first).status_code == second.status_code == 200
        assert [r["outcome"] for r in second.json()["replicas"].values()] == ["ok", "ok"]
        assert [len(posts(r, UPDATE)) for r in sim.replicas] == [1, 1]


async def test_a_failed_call_is_told_to_a_retry_elsewhere_as_it_was(gateways: Opening) -> None:
    """The retry reads who failed, though another gateway made the calls."""
    async with gateways(FLEET_TIMEOUTS__UPDATE_S="2") as (sim, _, here, there):
        await here.start()
        sim.replicas[1].faults.add(UPDATE, "hang")
        first = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE, 2)
        retry = asyncio.ensure_future(there.update())
        answers = await asyncio.gather(first, retry)
        told = [check_error(a, 504, sim.replicas[1].id, "wedged") for a in answers]
        assert told[0]["error"] == told[1]["error"]


async def test_an_answer_that_reached_nobody_waits_for_a_retry_at_any_gateway(
    gateways: Opening,
) -> None:
    """The client hung up in mid-call; its retry elsewhere is not sent to the replicas again."""
    async with gateways() as (sim, _, here, there):
        await here.start()
        here.forget_logs()
        sim.replicas[1].faults.add(UPDATE, "delay", seconds=0.5)
        leaving = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE)
        leaving.cancel()
        await until_phase(there, "started")

        async def noted() -> bool:
            return (await there.update()).status_code == 200 and len(
                posts(sim.replicas[0], UPDATE)
            ) == 1

        await wait_until(noted, timeout_s=0.2)
        assert (await there.update()).status_code == 200  # delivered now: an equal chunk is new
        assert [len(posts(r, UPDATE)) for r in sim.replicas] == [2, 2]


async def test_a_lost_answer_is_not_replayed_once_its_effect_was_taken_back(
    gateways: Opening,
) -> None:
    """Load an adapter (answer lost), unload it, load it again: the last is a new call."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    adapter = {"lora_name": "a", "lora_path": "/a"}
    async with gateways(replicas=1, count=1, version=None) as (sim, _, case, _):
        loaded = sim.replicas[0].engine.loras
        sim.replicas[0].faults.add(load, "delay", seconds=0.5, when="after")
        leaving = asyncio.ensure_future(case.post(load, adapter))

        async def is_loaded() -> bool:
            return "a" in loaded

        await wait_until(is_loaded)
        leaving.cancel()
        assert (await case.post(unload, {"lora_name": "a"})).status_code == 200
        assert "a" not in loaded
        await asyncio.wait({leaving})

        async def landed() -> bool:
            return (await case.post(load, adapter)).status_code == 200 and "a" in loaded

        await wait_until(landed)


async def test_a_finish_that_committed_when_its_gateway_died_is_answered_to_a_retry(
    gateways: Opening,
) -> None:
    """Nothing is committed twice, and a trainer that repeats its finish goes on training."""
    async with gateways() as (_, several, here, there):
        await here.start()
        await here.update()
        assert (await here.finish("2")).status_code == 200
        several.all[0].kill()

        async def gone() -> bool:
            return len((await there.fleet())["gateways"]) == 1

        await wait_until(gone)
        assert (await there.finish("2")).status_code == 200
        assert len(await there.rounds()) == 2
        await there.sync("3")


async def test_a_frozen_gateway_delays_a_start_by_its_lease_and_then_keeps_its_gate_shut(
    gateways: Opening,
) -> None:
    """It is waited for until its lease has ended; thawed, it sees the round first."""
    async with gateways() as (sim, several, here, there):
        several.all[1].freeze()
        rollouts = [asyncio.ensure_future(there.complete()) for _ in range(5)]
        began = monotonic()
        assert (await here.start()).status_code == 200
        assert monotonic() - began < 2 * LEASE_S + 1
        several.all[1].thaw()
        await here.update()
        await there.await_held(5)
        assert (await there.finish("2")).status_code == 200
        for answer in await asyncio.gather(*rollouts):
            assert answer.headers["X-Weight-Version"] == "2"
        assert [r.log.outcomes["killed"] for r in sim.replicas] == [0, 0]


async def test_a_frozen_gateway_whose_call_was_taken_over_changes_nothing_when_it_wakes(
    gateways: Opening,
) -> None:
    """Its token is not the one that holds the fleet any more; its trainer is told."""
    async with gateways() as (sim, several, here, there):
        await here.start()
        sim.replicas[1].faults.add(UPDATE, "delay", seconds=0.5)
        stuck = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE, 2)
        several.all[0].freeze()
        await until_phase(there, "failed")
        await there.first_sync("2")
        before = await there.fleet()
        several.all[0].thaw()
        check_error(await stuck, 409, "re-init")
        after = await there.fleet()
        for fact in ("weight_version", "phase", "generation", "replicas"):
            assert after[fact] == before[fact]
        await here.sync("3")
        assert await there.states() == ["ready", "ready"]


async def test_gateways_that_stop_in_order_keep_nobody_waiting(gateways: Opening) -> None:
    """A stopped gateway gives its seat back: the next start does not wait for its lease."""
    async with gateways() as (_, several, here, _):
        await several.all[1].stop()
        assert len((await here.fleet())["gateways"]) == 1
        began = monotonic()
        await here.sync("2")
        assert monotonic() - began < LEASE_S


async def rollout_until(case: Case, status: int) -> None:
    """Send rollouts until one gets this status."""

    async def got() -> bool:
        return (await case.complete()).status_code == status

    await wait_until(got)


async def test_a_gateway_that_is_told_to_stop_in_mid_call_says_so_and_hands_over(
    gateways: Opening,
) -> None:
    """504 within the drain time, a clean end, and another gateway takes the call over at once."""
    async with gateways() as (sim, several, here, there):
        await here.start()
        sim.replicas[1].faults.add(UPDATE, "hang")
        stuck = asyncio.ensure_future(here.update())
        await until_called(sim, UPDATE, 2)
        await several.all[0].stop()
        check_error(await stuck, 504, "this gateway stops", "update was on its way")
        await until_phase(there, "failed")
        assert "Traceback" not in several.all[0].log.read_text()


async def test_all_gateways_killed_and_one_started_again_keep_version_and_fences(
    gateways: Opening,
) -> None:
    """Promise 6: nothing that matters lived in a process."""
    async with gateways(replicas=3, version="seven") as (sim, several, _, there):
        await there.ok(f"/fleet/replicas/{sim.replicas[2].id}/fence")
        for gateway in several.all:
            gateway.kill()
        await several.start()
        after = several.case(2)
        assert await after.version() == "seven"
        assert await after.states() == ["ready", "ready", "fenced"]
        await rollout_until(after, 200)


async def test_weights_that_a_dying_gateway_had_sent_to_sleep_at_level_2_serve_no_more(
    gateways: Opening,
) -> None:
    """The weights are gone: woken at another gateway, the fleet waits for a full update."""
    async with gateways() as (sim, several, here, there):
        sim.replicas[1].faults.add("/sleep", "delay", seconds=2)
        lost = asyncio.ensure_future(here.post("/sleep?level=2"))
        await until_called(sim, "/sleep")
        several.all[0].kill()
        await asyncio.wait((lost,))
        await there.ok("/wake_up")
        assert await there.states() == ["fenced", "fenced"]
        await there.first_sync("2")
        assert await there.states() == ["ready", "ready"]
