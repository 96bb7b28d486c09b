"""Who belongs to the group: newcomers, leavers, restarts, fences, sleepers, and what is counted."""

from __future__ import annotations

import asyncio

from tests.cases.conftest import FINISH, START, UPDATE, Case, case_of, check_error, fast, nccl
from tests.waiting import wait_until


async def test_a_newcomer_between_init_and_start_blocks_nothing_and_is_announced() -> None:
    """It is stale until the next init; every answer says which world size that one needs."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        newcomer = await case.sim.add()
        added = await case.ok("/fleet/replicas", {"url": newcomer.url})
        assert (added["id"], added["state"]) == (newcomer.id, "stale")
        for step in (case.start, case.update, case.finish):
            answer = await step()
            assert answer.status_code == 200
            assert answer.headers["X-Fleet-Membership"] == "changed; world_size=4"
            assert newcomer.id not in answer.json()["replicas"]
        assert (await case.fleet())["membership"]["changed"]
        assert not {START, UPDATE, FINISH} & set(newcomer.log.paths())
        assert await case.states() == ["ready", "ready", "stale"]
        await _check_only_current_ones_serve(case, 2)
        answer = await case.init(4)
        assert answer.status_code == 200
        assert "X-Fleet-Membership" not in answer.headers
        await case.sync("3")
        assert await case.states() == ["ready"] * 3


async def test_an_unchanged_membership_is_not_announced() -> None:
    """The header is there only when there is something to say."""
    async with case_of() as case:
        answer = await case.init()
        assert "X-Fleet-Membership" not in answer.headers
        assert "X-Fleet-Membership" not in (await case.start()).headers


async def test_a_newcomer_to_a_fleet_without_a_version_serves_at_once() -> None:
    """Nothing is committed, so everybody holds what there is to hold."""
    async with case_of(nccl(1)) as case:
        newcomer = await case.sim.add()
        assert (await case.ok("/fleet/replicas", {"url": newcomer.url}))["state"] == "ready"


async def test_a_replica_that_is_removed_while_it_is_looked_at_is_unknown() -> None:
    """Whoever adds it once more hears what any call to one that is not there hears, and it stays
    removed; a newcomer is not there before it was looked at."""
    async with case_of(nccl(2)) as case, asyncio.TaskGroup() as group:
        looked_at = case.replicas[1]
        looked_at.faults.add("/server_info", "delay", seconds=1)
        adding = group.create_task(case.post("/fleet/replicas", {"url": looked_at.url}))

        async def is_looked_at() -> bool:
            return not looked_at.faults.as_json()

        await wait_until(is_looked_at)
        assert (await case.http.delete(f"/fleet/replicas/{looked_at.id}")).is_success
        assert not adding.done()
        check_error(await adding, 404, f"no replica '{looked_at.id}'")


async def test_a_server_that_does_not_tell_its_instance_for_once_keeps_its_fence() -> None:
    """The look before an init gets no /server_info; /metrics still says when it was started."""
    async with case_of(nccl(2)) as case:
        await case.ok(f"/fleet/replicas/{case.replicas[0].id}/fence")
        case.replicas[0].faults.add("/server_info", "status", times=2)
        assert (await case.init()).status_code == 200
        assert not case.replicas[0].faults.as_json()
        assert await case.states() == ["fenced", "ready"]


async def test_world_size_counts_exactly_the_next_group() -> None:
    """Stale and fenced ones are healed by it and count; draining and dead ones are not in it."""
    async with case_of(nccl(4, world_size=2)) as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[0].id}/fence")
        await case.replicas[1].restart()
        await case.await_states("fenced", "stale", "ready", "ready")
        await _check_next_group(case, 8)
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/drain")
        await case.replicas[3].die()
        await case.await_states("fenced", "stale", "draining", "gone")
        await _check_next_group(case, 4)
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/readmit")
        await _check_next_group(case, 6)
        assert (await case.init(7)).status_code == 200
        await case.sync("2")
        assert await case.states() == ["ready", "ready", "ready", "gone"]


async def test_an_init_at_once_after_a_failure_takes_those_in_that_only_waited() -> None:
    """They sit in the broken collective for a moment still; the trainer knows its number."""
    async with case_of() as case:
        assert (await case.init(4)).status_code == 200
        assert (await case.start()).status_code == 200
        for replica, action in zip(case.replicas, ("status", "delay", "delay"), strict=True):
            replica.faults.add(UPDATE, action, seconds=2.0)
        check_error(await case.update(), 424, case.replicas[0].id)
        assert await case.states() == ["fenced", "wedged", "wedged"]
        assert (await case.init(4)).status_code == 200
        await case.sync()


async def test_an_init_looks_again_at_who_counts_as_lost() -> None:
    """A connection that broke is no death, and no probe has had the time to see that."""
    async with case_of(timeouts=fast(probe_s=60)) as case:
        assert (await case.init(4)).status_code == 200
        assert (await case.start()).status_code == 200
        case.replicas[0].faults.add(UPDATE, "drop")
        check_error(await case.update(), 424, case.replicas[0].id)
        assert await case.states() == ["gone", "fenced", "fenced"]
        assert (await case.init(4)).status_code == 200
        await case.sync()


async def test_a_drained_replica_gets_no_rollout_and_no_update() -> None:
    """Its weights fall behind, so it is stale when it is taken back."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/drain")
        assert (await case.init(3)).status_code == 200
        case.forget_logs()
        await case.sync("2")
        await _check_only_current_ones_serve(case, 2)
        assert case.sent(2) == []
        await case.ok(f"/fleet/replicas/{case.replicas[2].id}/readmit")
        assert await case.states() == ["ready", "ready", "stale"]


async def test_a_removed_member_blocks_the_next_start() -> None:
    """The group of the last init cannot complete a collective without it."""
    async with case_of() as case:
        await case.first_sync()
        gone = case.replicas[1].id
        assert (await case.http.delete(f"/fleet/replicas/{gone}")).status_code == 200
        check_error(await case.start(), 409, gone, "world_size=3")
        assert (await case.init(3)).status_code == 200
        await case.sync()


async def test_a_member_of_an_open_round_cannot_be_removed() -> None:
    """409 with the way to do it."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        answer = await case.http.delete(f"/fleet/replicas/{case.replicas[1].id}")
        check_error(answer, 409, "drain")


async def test_a_restart_in_the_middle_of_a_round_fails_its_update() -> None:
    """The server that came back has no session and no weights; the version does not move."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        await case.replicas[1].restart()
        check_error(await case.update(), 424, case.replicas[1].id)
        check_error(await case.finish(), 409)
        assert await case.version() == "1"
        assert "ready" not in await case.states()
        await case.first_sync("2")
        assert await case.states() == ["ready"] * 3


async def test_a_restart_between_update_and_finish_commits_nothing() -> None:
    """Its finish is refused: not every member has arrived."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        await case.replicas[1].restart()
        check_error(await case.finish("2"), 424, case.replicas[1].id)
        assert await case.version() == "1"
        assert "ready" not in await case.states()
        reason = (await case.rounds())[0]["reason"]
        assert case.replicas[1].id in reason
        await case.first_sync("3")
        assert await case.states() == ["ready"] * 3


async def test_a_reset_abandons_the_round_and_says_what_stays_fenced() -> None:
    """Members that may be mixed stay out until a full update."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        said = await case.ok("/fleet/reset")
        assert set(said["fenced"]) == {r.id for r in case.replicas}
        assert said["fleet"]["phase"] == "idle"
        check_error(await case.finish("2"), 409)
        assert await case.version() == "1"
        assert await case.states() == ["fenced"] * 3
        await case.first_sync("2")
        assert await case.states() == ["ready"] * 3


async def test_sleep_level_1_keeps_the_weights_and_level_2_loses_them() -> None:
    """After waking: ready again, or fenced until a full update."""
    async with case_of() as case:
        await case.first_sync("1")
        assert await case.ok("/sleep?level=1&mode=keep")
        await case.ok("/wake_up")
        assert await case.states() == ["ready"] * 3
        await case.ok("/sleep?level=2")
        assert await case.states() == ["asleep"] * 3
        await case.ok("/wake_up")
        assert await case.states() == ["fenced"] * 3
        await case.sync(names=["embed"])
        assert await case.states() == ["fenced"] * 3
        await case.sync()
        assert await case.states() == ["ready"] * 3
        assert (await case.complete()).status_code == 200


async def test_sleep_that_failed_on_one_is_told_and_no_sleeper_is_routed_to() -> None:
    """Those that sleep are known to; the one that refused goes on."""
    async with case_of() as case:
        await case.first_sync()
        case.replicas[1].faults.add("/sleep", "status")
        check_error(await case.post("/sleep"), 424, case.replicas[1].id)
        assert await case.states() == ["asleep", "ready", "asleep"]
        await _check_only_current_ones_serve(case, 1)
        assert [r.log.outcomes["killed"] for r in case.replicas] == [0, 0, 0]


async def test_sleeping_and_waking_inside_a_round_are_refused() -> None:
    """A server that wakes up resumes, and would die in its session."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        case.forget_logs()
        check_error(await case.post("/sleep"), 409)
        check_error(await case.post("/wake_up"), 409)
        assert case.all_sent() == [[], [], []]


async def test_a_shutdown_lets_every_member_leave_and_needs_a_new_init() -> None:
    """Refused while a round is open."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        check_error(await case.post("/shutdown_weight_transfer_engine"), 409)
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200
        await case.ok("/shutdown_weight_transfer_engine")
        assert all(sent[-1] == "/shutdown_weight_transfer_engine" for sent in case.all_sent())
        check_error(await case.start(), 409, "/init_weight_transfer_engine first")
        await case.first_sync()


async def test_too_few_members_refuse_an_init() -> None:
    """FLEET_MIN_REPLICAS: training on half a fleet by accident is not wanted."""
    async with case_of(min_replicas=3) as case:
        await case.replicas[1].die()
        await case.await_states("ready", "gone", "ready")
        check_error(await case.init(3), 409, "3 are needed", case.replicas[1].id)


async def _check_next_group(case: Case, workers: int) -> None:
    assert (await case.http.get("/get_world_size")).json()["world_size"] == workers
    assert (await case.fleet())["membership"]["world_size"] == workers + 1


async def _check_only_current_ones_serve(case: Case, count: int) -> None:
    """Rollouts go to those that hold the committed version, and to no one else."""
    current = {
        r.id for r, s in zip(case.replicas, await case.states(), strict=True) if s == "ready"
    }
    assert len(current) == count
    answers = await asyncio.gather(*(case.complete() for _ in range(8)))
    assert {answer.headers["X-Fleet-Replica"] for answer in answers} == current
