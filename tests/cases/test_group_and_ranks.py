"""cases.md, «Group and ranks»: who has which ranks, and what happens when the numbers are wrong."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet.sim import SimOptions
from fleet.sim.trainer import free_port
from tests.cases.conftest import (
    INIT,
    START,
    Case,
    case_of,
    check_error,
    fast,
    nccl,
    outcomes_of,
    posts,
)
from tests.waiting import wait_until


async def test_case_1_a_wrong_world_size_is_refused_before_any_replica_is_called() -> None:
    """The answer names the right number: 16 workers and one trainer rank are 17."""
    async with case_of(nccl(4, world_size=4)) as case:
        for asked in (32, 16, 18, 1):
            answer = await case.init(asked)
            body = check_error(answer, 409, f"world_size is {asked}", "needs 17", "world_size=17")
            assert body["error"]["type"] == "WorldSizeMismatch"
        assert case.all_sent() == [[], [], [], []]
        assert (await case.fleet())["phase"] == "idle"
        assert (await case.init(17)).status_code == 200


async def test_case_2_unequal_replicas_get_cumulative_offsets() -> None:
    """1, 2 and 4 workers behind one trainer rank: offsets 1, 2, 4 in a group of 8."""
    async with case_of(nccl(world_sizes=(1, 2, 4))) as case:
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 7
        assert (await case.init(8)).status_code == 200
        assert _offsets(case) == [1, 2, 4]
        assert _world_sizes(case) == [8, 8, 8]
        layout = (await case.http.get("/fleet/layout")).json()
        assert [r["rank_offset"] for r in layout["replicas"]] == [1, 2, 4]


async def test_case_2_the_trainers_own_ranks_come_first() -> None:
    """A trainer of two ranks moves every offset by one more."""
    async with case_of(nccl(world_sizes=(1, 2, 4))) as case:
        assert (await case.init(9, base=2)).status_code == 200
        assert _offsets(case) == [2, 3, 5]
        assert _world_sizes(case) == [9, 9, 9]


async def test_case_2_what_else_the_trainer_wrote_reaches_every_replica() -> None:
    """Fields that are not the gateway's business travel as they are."""
    async with case_of() as case:
        info = {"rank_offset": 1, "world_size": 4, "master_port": 1, "packed": True, "x": [1]}
        await case.ok(INIT, {"init_info": info})
        for offset, replica in enumerate(case.replicas, 1):
            [call] = posts(replica, INIT)
            assert call.body == {"init_info": {**info, "rank_offset": offset}}


async def test_case_3_one_expert_parallel_deployment_is_counted_once() -> None:
    """Each of three servers reports all six workers: a group of 7, the same offset for all."""
    async with case_of(nccl(3, world_size=2, topology="moe_dp")) as case:
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 6
        assert (await case.init(7)).status_code == 200
        assert _offsets(case) == [1, 1, 1]
        assert _world_sizes(case) == [7, 7, 7]


async def test_case_3_one_dense_deployment_has_one_offset_and_the_sum_of_its_workers() -> None:
    """Each server adds its own data_parallel_index to the offset that all of them share."""
    async with case_of(nccl(3, world_size=2, topology="dense_dp")) as case:
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 6
        assert (await case.init(7)).status_code == 200
        assert _offsets(case) == [1, 1, 1]


async def test_case_4_a_trainer_that_never_joins_gets_a_bounded_typed_error() -> None:
    """504 after init_s; nobody is ready for an update; who sits in the group is wedged."""
    options = SimOptions(replicas=2, init_timeout_s=2.0)
    async with case_of(options, timeouts=fast(init_s=0.5)) as case:
        answer = await _lonely_init(case, world_size=3)
        body = check_error(answer, 504, "init failed on", "re-init")
        assert body["error"]["type"] == "DeadlinePassed"
        assert set(outcomes_of(answer).values()) == {"wedged"}
        assert await case.states() == ["wedged", "wedged"]
        assert (await case.fleet())["phase"] == "failed"
        check_error(await case.start(), 409)
        assert START not in case.sent(0) + case.sent(1)
        await case.await_states("ready", "ready")  # their own deadline has let them out


async def test_case_4_wedged_replicas_are_left_out_of_the_next_group_and_named() -> None:
    """The next init does not wait for a corpse."""
    async with case_of(timeouts=fast(init_s=1.2)) as case:
        case.replicas[2].faults.add(INIT, "hang")
        check_error(await case.init(4), 504, case.replicas[2].id, "world_size=3")
        assert await case.states() == ["ready", "ready", "wedged"]
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 2
        check_error(await case.init(4), 409, "world_size=3", case.replicas[2].id, "silent")
        assert (await case.init(3)).status_code == 200


async def test_case_5_a_second_init_that_fails_on_one_replica_names_only_that_one() -> None:
    """The error says which replica needs a restart; the others are not blamed."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        body = {"error": {"message": "NCCL error: unhandled system error", "code": 500}}
        case.replicas[1].faults.add(INIT, "status", status=500, body=body)
        answer = await case.init()
        culprit = case.replicas[1].id
        told = check_error(answer, 424, f"init failed on {culprit}: failed", "NCCL error")
        assert f"restart {culprit} if" in told["hint"]
        assert "world_size=4" in told["hint"]
        assert "restart helps" not in told["hint"]
        assert outcomes_of(answer)[culprit] == "failed"
        await case.await_states("ready", "ready", "ready")


async def test_case_6_a_new_trainers_init_ends_what_the_old_one_had_begun() -> None:
    """Its generation is a new one, and what still comes of the old trainer's round is refused."""
    async with case_of() as case:
        await case.first_sync("1")
        old = await case.fleet()
        assert (await case.start()).status_code == 200
        check_error(await case.init(), 409, "is still open", "/fleet/reset")
        await case.ok("/fleet/reset")
        told = (await case.init()).json()
        assert told["generation"] == (await case.fleet())["generation"] > old["generation"]
        case.forget_logs()
        check_error(await case.update(), 409, "initialized")
        check_error(await case.finish("late"), 409, "initialized")
        assert case.all_sent() == [[], [], []]
        assert await case.version() == "1"
        await case.sync("2")
        assert [r["generation"] for r in await case.rounds()] == [
            told["generation"],
            old["generation"],
            old["generation"],
        ]


async def test_case_7_a_replica_that_dies_between_init_and_start_is_found_out() -> None:
    """Start is refused with the new world size, and nobody else was touched."""
    async with case_of() as case:
        assert (await case.init(4)).status_code == 200
        case.forget_logs()
        await case.replicas[1].die()
        body = check_error(await case.start(), 409, case.replicas[1].id, "world_size=3")
        assert body["error"]["type"] == "MembershipChanged"
        assert case.all_sent() == [[], [], []]
        assert (await case.fleet())["gate"]["state"] == "open"
        assert (await case.init(3)).status_code == 200
        await case.sync("after")
        assert await case.version() == "after"


async def test_case_7_a_replica_that_restarts_between_init_and_start_blocks_it_too() -> None:
    """It is not in the group any more, however alive it is: the same number, but a new init."""
    async with case_of() as case:
        await case.first_sync()
        await case.replicas[1].restart()
        case.forget_logs()
        check_error(await case.start(), 409, case.replicas[1].id, "restarted", "world_size=4")
        assert case.all_sent() == [[], [], []]
        await case.first_sync()
        await case.await_states("ready", "ready", "ready")


async def _lonely_init(case: Case, world_size: int) -> Any:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    call = asyncio.ensure_future(case.post(INIT, {"init_info": {**info, "world_size": world_size}}))

    async def everyone_was_asked() -> bool:
        return all(INIT in replica.log.paths() for replica in case.replicas)

    await wait_until(everyone_was_asked)
    return await call


def _offsets(case: Case) -> list[int]:
    return [posts(r, INIT)[-1].body["init_info"]["rank_offset"] for r in case.replicas]


def _world_sizes(case: Case) -> list[int]:
    return [posts(r, INIT)[-1].body["init_info"]["world_size"] for r in case.replicas]
