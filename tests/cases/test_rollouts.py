"""cases.md, «Rollouts»: which requests reach which replica when, and what their answers say."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from fleet.facts.state import Phase
from fleet.sim import SimOptions
from gateway.settings_model import Gate, GateMode
from tests.cases.conftest import (
    FINISH,
    INIT,
    START,
    UPDATE,
    Case,
    case_of,
    check_error,
    nccl,
    posts,
)
from tests.waiting import wait_until


async def test_case_16_the_gate_closes_before_the_pause_goes_out() -> None:
    """Whoever comes once a replica has been told to pause is held, and served after the commit."""
    async with case_of() as case:
        await case.first_sync()
        for replica in case.replicas:
            replica.faults.add("/pause", "delay", seconds=0.2)
        starting = asyncio.ensure_future(case.start())
        await _until_asked(case, "/pause")
        late = [asyncio.ensure_future(case.complete()) for _ in range(6)]
        await case.await_held(6)
        assert (await starting).status_code == 200
        assert (await case.fleet())["gate"] == {
            "state": "closed",
            "held": 6,
            "closed_since": pytest.approx((await case.fleet())["gate"]["closed_since"]),
        }
        assert (await case.update()).status_code == 200
        assert all(not replica.log.rollouts for replica in case.replicas)
        assert (await case.finish()).status_code == 200
        for answer in await asyncio.gather(*late):
            assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "2")
            assert answer.json()["sim"]["version"] == "2"


async def test_case_16_the_pause_waits_for_the_last_byte_of_what_was_let_through() -> None:
    """A rollout that overtook the closing gate reaches its replica before the pause does."""
    async with case_of(nccl(2)) as case:
        await case.first_sync()
        ticket = case.gateway.gate.try_admit(None)
        assert ticket is not None
        case.forget_logs()
        starting = asyncio.ensure_future(case.start())
        await case.gateway.ledger.until(lambda state: state.phase is Phase.PAUSING)
        done, _ = await asyncio.wait([starting], timeout=0.3)
        assert not done
        assert case.all_sent() == [[], []]
        ticket.done()
        assert (await starting).status_code == 200
        assert case.all_sent() == [["/pause", START]] * 2


async def test_case_17_a_rollout_during_an_abort_pause_is_held_and_labelled_new() -> None:
    """The server would queue it silently and answer it with the new weights: it never gets it."""
    async with case_of() as case:
        await case.first_sync("old")
        await case.ok("/pause?mode=abort")
        held = [asyncio.ensure_future(case.complete()) for _ in range(3)]
        await case.await_held(3)
        await case.sync("new")
        assert all(not replica.log.rollouts for replica in case.replicas)
        assert not any(replica.stats()["running"] for replica in case.replicas)
        await case.ok("/resume")
        for answer in await asyncio.gather(*held):
            assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "new")
            assert "X-Weight-Version-End" not in answer.headers


async def test_case_18_a_refused_rollout_says_when_to_come_back() -> None:
    """Mode reject: 503 with Retry-After, and nothing reaches a replica."""
    async with case_of(gate=Gate(mode=GateMode.REJECT)) as case:
        await case.ok("/pause")
        answer = await case.complete()
        check_error(answer, 503, "Retry-After")
        assert int(answer.headers["Retry-After"]) >= 1
        await case.ok("/resume")
        assert (await case.complete()).status_code == 200


async def test_case_18_a_full_gate_says_when_to_come_back_and_keeps_those_it_holds() -> None:
    """Back-pressure hits the newcomer, not those who wait."""
    async with case_of(gate=Gate(max_held=2)) as case:
        await case.ok("/pause")
        held = [asyncio.ensure_future(case.complete()) for _ in range(2)]
        await case.await_held(2)
        answer = await case.complete()
        check_error(answer, 503, "holds 2 rollouts")
        assert int(answer.headers["Retry-After"]) >= 1
        await case.ok("/resume")
        assert [a.status_code for a in await asyncio.gather(*held)] == [200, 200]


async def test_case_19_a_restarted_server_gets_no_traffic_until_it_holds_the_version() -> None:
    """It came back with the weights it was started with; a full update brings it in again."""
    async with case_of() as case:
        await case.first_sync("1")
        await case.replicas[1].restart()
        await case.await_states("ready", "stale", "ready")
        for _ in range(9):
            answer = await case.complete()
            assert answer.json()["sim"]["version"] == "1"
        assert not case.replicas[1].log.rollouts
        await case.first_sync("2")
        await case.await_states("ready", "ready", "ready")


async def test_case_20_a_sleeping_server_is_never_routed_to() -> None:
    """The first rollout would kill it; all wait until it is awake."""
    async with case_of() as case:
        await case.ok("/sleep?level=1")
        assert await case.states() == ["asleep"] * 3
        held = [asyncio.ensure_future(case.complete()) for _ in range(3)]
        await case.await_held(3)
        await case.ok("/wake_up")
        assert [a.status_code for a in await asyncio.gather(*held)] == [200] * 3
        assert [r.log.outcomes["killed"] for r in case.replicas] == [0, 0, 0]


@pytest.mark.parametrize("paused", [False, None])
async def test_case_20_a_server_that_sleeps_when_it_is_found_is_not_routed_to(
    *, paused: bool | None
) -> None:
    """Whether it says that it is not paused, or nothing of it; its wake-up makes it ready."""
    async with case_of(nccl(2)) as case:
        sleeper = case.replicas[0]
        sleeper.faults.add(
            "/is_sleeping", "status", status=200, body={"is_sleeping": True}, times=0
        )
        if paused is None:
            sleeper.faults.add("/is_paused", "status", status=404, times=0)
        await sleeper.die()
        await case.await_states("gone", "ready")
        await sleeper.restart()
        await case.await_states("asleep", "ready")
        assert (await case.complete()).headers["X-Fleet-Replica"] == case.replicas[1].id
        assert (await case.post("/wake_up")).status_code == 200
        await case.await_states("ready", "ready")


async def test_case_21_woken_with_weights_only_it_is_still_asleep() -> None:
    """Eligible again only when kv_cache is awake too."""
    async with case_of() as case:
        await case.ok("/sleep?level=1")
        answer = await case.ok("/wake_up?tags=weights")
        assert (answer["status"], answer["tags"]) == ("sleeping", ["weights"])
        assert await case.states() == ["asleep"] * 3
        assert (await case.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        held = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        answer = await case.ok("/wake_up?tags=kv_cache")
        assert answer["status"] == "awake"
        assert (await held).status_code == 200
        assert await case.states() == ["ready"] * 3
        assert [r.log.outcomes["killed"] for r in case.replicas] == [0, 0, 0]


async def test_case_21_a_fleet_that_wakes_piece_by_piece_may_be_updated_in_between() -> None:
    """Colocated training: weights awake, update, then the KV cache; only then rollouts."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        await case.ok("/sleep?level=2")
        assert (await case.ok("/wake_up?tags=weights"))["status"] == "sleeping"
        await case.sync("fresh")
        assert await case.states() == ["asleep"] * 3
        assert (await case.ok("/wake_up?tags=kv_cache"))["status"] == "awake"
        assert await case.states() == ["ready"] * 3
        answer = await case.complete()
        assert answer.headers["X-Weight-Version"] == "fresh"


@pytest.mark.parametrize("stream", [False, True])
async def test_case_22_a_client_that_disconnects_is_cancelled_upstream(stream: bool) -> None:
    """The request ends on the replica and the counter goes down, streaming or not."""
    async with case_of(nccl(1, token_delay_ms=5)) as case:
        body = {"prompt": "x", "max_tokens": 5000, "stream": stream}
        call = asyncio.ensure_future(case.post("/v1/completions", body))
        await _until_running(case, 1)
        assert (await _inflight(case)) == 1
        call.cancel()
        await asyncio.wait([call])
        await _until_running(case, 0)
        await wait_until(lambda: _is_zero(case))
        assert case.replicas[0].log.outcomes["cancelled"] == 1


async def test_case_22_a_client_that_disconnects_while_held_leaves_the_line() -> None:
    """It is never dispatched."""
    async with case_of() as case:
        await case.ok("/pause")
        call = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        call.cancel()
        await asyncio.wait([call])
        await case.await_held(0)
        await case.ok("/resume")
        assert (await case.complete("next")).status_code == 200
        assert sum(len(replica.log.rollouts) for replica in case.replicas) == 1


async def test_case_24_reset_prefix_cache_reaches_every_replica_as_it_was_asked() -> None:
    """The query travels; `success` is false if any of them could not."""
    async with case_of(nccl(3, token_delay_ms=5)) as case:
        await case.ok("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        for replica in case.replicas:
            [call] = posts(replica, "/reset_prefix_cache")
            assert call.query == {"reset_running_requests": ["true"], "reset_external": ["true"]}
        call = asyncio.ensure_future(case.complete(max_tokens=5000))
        await _until_running(case, 1)
        assert not (await case.ok("/reset_prefix_cache"))["success"]
        assert (await case.ok("/reset_prefix_cache?reset_running_requests=true"))["success"]
        call.cancel()
        await asyncio.wait([call])


async def test_case_24_a_pause_is_passed_through_as_given() -> None:
    """Mode and clear_cache are the trainer's; a bare /pause means what vLLM means by it."""
    async with case_of() as case:
        asked = [(mode, clear) for mode in ("abort", "wait", "keep") for clear in ("true", "false")]
        for mode, clear in asked:
            await case.ok(f"/pause?mode={mode}&clear_cache={clear}")
        await case.ok("/pause")
        for replica in case.replicas:
            got = [call.query for call in posts(replica, "/pause")]
            assert got[:-1] == [{"mode": [m], "clear_cache": [c]} for m, c in asked]
            assert got[-1] == {"mode": ["abort"], "clear_cache": ["true"]}


async def test_case_25_a_server_without_the_weight_endpoints_is_found_out_and_left_out() -> None:
    """Named and refused as a member when it joins, not in the middle of an update."""
    options = SimOptions(weight_endpoints=False)
    async with case_of() as case, case_of(options) as other:
        plain = other.replicas[0]
        added = await case.ok("/fleet/replicas", {"url": plain.url})
        assert added["state"] == "fenced"
        assert "lacks POST" in added["reason"]
        assert "VLLM_SERVER_DEV_MODE=1" in added["reason"]
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 3
        check_error(await case.init(5), 409, "world_size=4", plain.id, "lacks POST")
        await case.first_sync()
        for _ in range(8):
            assert (await case.complete()).headers["X-Fleet-Replica"] != plain.id
        assert not plain.log.rollouts
        assert not {INIT, START, UPDATE, FINISH} & set(plain.log.paths())


async def test_case_25_a_fleet_of_such_servers_cannot_form_a_group() -> None:
    """The answer says why there is nobody."""
    async with case_of(SimOptions(weight_endpoints=False)) as case:
        check_error(await case.init(2), 409, "0 replicas can join", "lacks POST")


async def test_a_minimum_version_that_was_never_committed_waits_then_times_out() -> None:
    """As the gate does, then 504; one that is committed meanwhile is served."""
    async with case_of(gate=Gate(timeout_s=1.5)) as case:
        await case.first_sync("1")
        answer = await case.complete(X_Min_Weight_Version="1")
        assert answer.status_code == 200
        check_error(await case.complete(X_Min_Weight_Version="2"), 504, "'2'", "'1'")
        waiting = asyncio.ensure_future(case.complete(X_Min_Weight_Version="2"))
        await case.await_held(1)
        await case.sync("2")
        assert (await waiting).headers["X-Weight-Version"] == "2"


async def test_a_gate_that_stays_closed_ends_in_504() -> None:
    """Nobody is held for ever."""
    async with case_of(gate=Gate(timeout_s=0.3)) as case:
        await case.ok("/pause")
        check_error(await case.complete(), 504, "stayed closed")
        assert (await case.fleet())["gate"]["held"] == 0


async def _until_asked(case: Case, path: str) -> None:
    async def reached() -> bool:
        return all(len(posts(r, path)) == 2 for r in case.replicas)

    await wait_until(reached)


async def _until_running(case: Case, count: int) -> None:
    async def reached() -> bool:
        return sum(r.stats()["running"] for r in case.replicas) == count

    await wait_until(reached)


async def _inflight(case: Case) -> int:
    found = (await case.http.get("/fleet/replicas")).json()["replicas"]
    return sum(replica["inflight"] for replica in found)


async def _is_zero(case: Case) -> bool:
    return await _inflight(case) == 0


async def test_a_rollout_that_no_replica_can_serve_ends_in_503() -> None:
    """No eligible replica within the gate's time: may be retried as it is."""
    async with case_of(nccl(1), gate=Gate(timeout_s=0.3)) as case:
        await case.first_sync()
        await case.replicas[0].restart()
        await case.await_states("stale")
        answer = await case.complete()
        check_error(answer, 503, "no replica could serve")
        assert isinstance(answer, httpx.Response)
        assert "Retry-After" in answer.headers
