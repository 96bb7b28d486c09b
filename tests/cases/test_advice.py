"""What an error advises, done to the letter, ends with a fleet that serves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from fleet.sim import SimFleet
from fleet.sim.trainer import SimTrainer, TrainerError
from fleet.sim.weights import build_state_dict
from gateway.settings_model import Settings, Timeouts
from tests.cases.conftest import check_error
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

INIT, UPDATE, FINISH = "/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"


@asynccontextmanager
async def fleet_of(count: int, init_s: float = 60) -> AsyncGenerator[tuple[SimFleet, Served]]:
    """Run servers with real groups, and a gateway in front of them."""
    async with SimFleet(replicas=count) as fleet:
        settings = Settings(replicas=tuple(fleet.urls), timeouts=Timeouts(init_s=init_s))
        async with serve(settings) as served:
            yield fleet, served


def _sync(url: str, version: str, world_size: int | None = None) -> None:
    trainer = SimTrainer(url, timeout_s=60)
    try:
        trainer.init(world_size)
        trainer.send_weights(build_state_dict(1), version)
    finally:
        trainer.close()


async def _fails(served: Served, version: str) -> str:
    """Send a version that fails; return the advice, the same one wherever it is looked for."""
    with suppress(TrainerError):
        await asyncio.to_thread(_sync, served.url, version)
    fleet = await served.fleet()
    assert fleet["phase"] == "failed"
    refusal = await served.http.post("/start_weight_update")
    check_error(refusal, 409, "re-init with world_size=")
    assert refusal.json()["hint"] == (await served.fleet())["hint"]
    return fleet["hint"]


async def _answers(served: Served, *states: str) -> None:
    async def all_do() -> bool:
        return set((await served.fleet())["replicas"]) == set(states)

    await wait_until(all_do)


async def _heal(served: Served, hint: str, version: str) -> None:
    """Init with the first number that is told, and send everything."""
    told = re.search(r"init with world_size=(\d+) and send a full update", hint)
    assert told is not None, hint
    await asyncio.to_thread(_sync, served.url, version, int(told.group(1)))
    assert (await served.fleet())["weight_version"] == version


async def test_who_waits_beside_one_that_refused_comes_back_as_the_advice_says() -> None:
    """The refuser keeps the group open, so it must be told to leave as well as the trainer."""
    async with fleet_of(3) as (fleet, served):
        await asyncio.to_thread(_sync, served.url, "v1")
        fleet.replicas[1].faults.add(UPDATE, "status")
        hint = await _fails(served, "v2")
        assert "(or stop it) and POST /shutdown_weight_transfer_engine, so that" in hint
        assert (await served.http.post("/shutdown_weight_transfer_engine")).status_code == 200
        await _answers(served, "fenced")
        await _heal(served, hint, "v3")
        assert (await served.fleet())["replicas"] == {"ready": 3}


async def test_where_a_dead_one_leaves_only_waiting_ones_they_are_the_next_group() -> None:
    """Never a group without replicas: the trainer has left, so they answer, and then it heals."""
    async with fleet_of(3) as (fleet, served):
        await asyncio.to_thread(_sync, served.url, "v1")
        fleet.replicas[1].faults.add(UPDATE, "die")
        hint = await _fails(served, "v2")
        assert "world_size=1 " not in hint
        await _answers(served, "fenced", "gone")
        await _heal(served, hint, "v3")
        assert (await served.fleet())["replicas"] == {"ready": 2, "gone": 1}


async def test_a_failed_finish_is_committed_by_the_route_that_its_hint_names() -> None:
    """A second time, or for another round, the answer says when a commit by hand can be."""
    async with fleet_of(2) as (fleet, served):
        await asyncio.to_thread(_sync, served.url, "v1")
        fleet.replicas[1].faults.add(FINISH, "status")
        route = re.search(r"POST (/fleet/rounds/\d+/commit)", await _fails(served, "v2"))
        assert route is not None
        strange = await served.http.post("/fleet/rounds/99/commit")
        check_error(strange, 409, "round 99 cannot be committed: only the current round can")
        assert (await served.http.post(route.group(1))).json()["weight_version"] == "v2"
        assert "send a full update" in (await served.fleet())["hint"]  # for the other one
        again = await served.http.post(route.group(1))
        check_error(again, 409, "commit of round 2 does not follow in phase initialized")
        check_error(again, 409, "only a round whose finish failed", "GET /fleet/rounds")
        assert "start_weight_update" not in again.json()["hint"]


async def test_an_init_that_finds_only_silent_ones_names_them_and_how_they_come_back() -> None:
    """They wait for a trainer that never entered; a number could only be that of nobody."""
    async with fleet_of(1, init_s=0.5) as (fleet, served):
        place = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
        init = {"init_info": {**place, "world_size": 2}}
        name = fleet.urls[0].removeprefix("http://")
        free = f"let the trainer leave its group (or stop it), so that {name} answers again"
        late = await served.http.post(INIT, json=init)
        check_error(late, 504, f"{free}; then re-init with world_size=2; restart who stays silent")
        check_error(
            late, 504, "no group can be formed without it; no replica is ready, so rollouts"
        )
        assert late.json()["hint"] == (await served.fleet())["hint"]

        refusal = await served.http.post(INIT, json=init)
        check_error(refusal, 409, "0 replicas can join a group, 1 are needed", f"left out: {name}")
        check_error(refusal, 409, f"{free}, and restart who stays silent; then re-init")
        await fleet.replicas[0].die()
