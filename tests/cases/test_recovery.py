"""What a gateway finds out when it starts, what an operator may do, and a fleet too small."""

from __future__ import annotations

import asyncio

from fleet.sim import SimFleet
from gateway.settings_model import Settings
from tests.cases.conftest import FINISH, Case, case_of, check_error, fast, nccl
from tests.gateway.serving import serve
from tests.waiting import wait_until


async def test_an_open_session_that_the_store_has_forgotten_fences_its_replica() -> None:
    """A store that came back empty in mid-round: version learned again, mixed ones fenced."""
    async with SimFleet(nccl(3)) as sim:
        settings = Settings(replicas=tuple(sim.urls), timeouts=fast())
        async with serve(settings) as served:
            before = Case(sim, served)
            await before.first_sync("7")
            await before.start()
        async with serve(settings) as served:
            after = Case(sim, served)
            assert await after.version() == "7"
            assert await after.states() == ["fenced", "fenced", "fenced"]
            assert [r.engine.session for r in sim.replicas] == [None, None, None]
            await after.ok("/resume")
            await after.first_sync("8")
            assert await after.states() == ["ready", "ready", "ready"]


async def test_servers_that_nobody_has_touched_are_not_asked_for_sessions() -> None:
    """A first start sends no finish to a fresh fleet."""
    async with case_of(nccl(2)) as case:
        assert case.all_sent() == [[], []]


async def test_a_fleet_found_paused_says_so_and_opens_with_a_resume() -> None:
    """Somebody paused all servers before this gateway came: /is_paused tells, /resume ends it."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), timeouts=fast())
        async with serve(settings) as served:
            await Case(sim, served).ok("/pause?mode=keep")
        async with serve(settings) as served:
            after = Case(sim, served)
            assert (await after.http.get("/is_paused")).json() == {"is_paused": True}
            fleet = await after.fleet()
            assert fleet["gate"]["state"] == "closed"
            assert fleet["pause"]["by"] == "found paused at start"
            waiting = asyncio.ensure_future(after.complete())
            await after.await_held(1)
            await after.ok("/resume")
            assert (await waiting).status_code == 200


async def test_a_replica_that_restarted_while_no_gateway_watched_is_stale_at_once(
    redis_url: str,
) -> None:
    """Case 19: a new gateway holds what the store says against the replicas before it serves."""
    async with SimFleet(nccl(2)) as sim:
        settings = Settings(replicas=tuple(sim.urls), store=redis_url, timeouts=fast())
        async with serve(settings) as served:
            await Case(sim, served).first_sync("7")
        await sim.replicas[1].restart()
        async with serve(settings) as served:
            assert await Case(sim, served).states() == ["ready", "stale"]


async def test_an_operator_commits_a_failed_finish_for_those_that_completed_it() -> None:
    """The completed ones serve the new version; the others stay fenced until a full update."""
    async with case_of(nccl(3)) as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        case.replicas[1].faults.add(FINISH, "status")
        check_error(await case.finish("2"), 424, case.replicas[1].id)
        assert await case.version() == "1"
        number = (await case.fleet())["round"]["id"]
        check_error(
            await case.post(f"/fleet/rounds/{number + 1}/commit"), 409, "cannot be committed"
        )
        told = await case.ok(f"/fleet/rounds/{number}/commit")
        assert told["weight_version"] == "2"
        assert list(told["fenced"]) == [case.replicas[1].id]
        assert await case.states() == ["ready", "fenced", "ready"]
        answer = await case.complete()
        assert answer.headers["X-Weight-Version"] == "2"
        newest = (await case.rounds())[0]
        assert newest["result"] == "committed"
        assert "committed by" in newest["reason"]
        await case.first_sync("3")
        assert await case.states() == ["ready", "ready", "ready"]


async def test_a_round_that_failed_before_its_finish_cannot_be_committed() -> None:
    """Nobody has finished it, so nobody holds its weights for certain."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.start()
        case.replicas[1].faults.add("/update_weights", "status")
        assert (await case.update()).status_code == 424
        number = (await case.fleet())["round"]["id"]
        check_error(await case.post(f"/fleet/rounds/{number}/commit"), 409, "cannot be committed")


async def test_below_the_minimum_the_gate_and_init_refuse() -> None:
    """FLEET_MIN_REPLICAS: a rest of a fleet serves nobody, and comes back with its replicas."""
    async with case_of(nccl(2), min_replicas=2) as case:
        await case.first_sync("1")
        assert (await case.complete()).status_code == 200
        await case.replicas[1].die()
        await case.await_states("ready", "gone")
        refused = await case.complete()
        check_error(refused, 503, "1 replicas are there, at least 2 are needed")
        assert refused.headers["Retry-After"]
        check_error(await case.init(), 409, "2 are needed")
        await case.replicas[1].start()

        async def serves() -> bool:
            return (await case.complete()).status_code == 200

        await wait_until(serves)
