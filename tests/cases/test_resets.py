"""POST /fleet/reset before anything was sent: no weights have changed, so nobody needs healing."""

from __future__ import annotations

import asyncio

import pytest

from fleet.facts.state import Phase, Round
from fleet.rules.events import Event
from fleet.sim import SimReplica
from tests.cases.conftest import (
    FINISH,
    START,
    UPDATE,
    Case,
    case_of,
    check_error,
    nccl,
    outcomes_of,
    posts,
)
from tests.waiting import wait_until


@pytest.mark.parametrize("pause", ["keep", "off"])
async def test_a_reset_before_the_first_update_lets_the_fleet_go_on_as_before(pause: str) -> None:
    """Sessions are closed before anybody is resumed; what was held is served by the old weights."""
    async with case_of(pause_on_update=pause) as case:
        await case.first_sync("1")
        case.forget_logs()
        assert (await case.start()).status_code == 200
        held = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        said = await case.ok("/fleet/reset")
        assert said["fenced"] == {}
        assert await case.states() == ["ready"] * 3
        assert (await held).headers["X-Weight-Version"] == "1"
        assert [r.engine.session for r in case.replicas] == [None] * 3
        expected = ["/pause", START, FINISH, "/resume"] if pause == "keep" else [START, FINISH]
        assert case.all_sent() == [expected] * 3
        assert [r.log.outcomes["killed"] for r in case.replicas] == [0] * 3
        assert (await case.rounds())[0]["result"] == "abandoned"
        await case.first_sync("2")


async def test_who_does_not_close_its_session_stays_out_and_is_named() -> None:
    """Not resumed by anybody, /resume included; a second reset tries again, and then it serves."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        stuck = case.replicas[1]
        stuck.faults.add(FINISH, "status")
        answer = await case.post("/fleet/reset")
        assert answer.json()["fenced"] == {stuck.id: "its update session may still be open"}
        assert outcomes_of(answer)[stuck.id] == "failed"
        assert await case.states() == ["ready", "fenced", "ready"]
        resumed = await case.post("/resume")
        assert outcomes_of(resumed)[stuck.id] == "skipped"
        assert stuck.engine.paused == "keep"
        assert stuck.engine.session is not None
        for _ in range(4):
            assert (await case.complete()).headers["X-Fleet-Replica"] != stuck.id
        assert (await case.ok("/fleet/reset"))["fenced"] == {}
        assert await case.states() == ["ready"] * 3
        assert stuck.engine.session is None


async def test_the_next_init_closes_what_a_reset_could_not_close() -> None:
    """Its weights are the committed ones all the time, so not even a full update is needed."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        case.replicas[1].faults.add(FINISH, "status")
        await case.ok("/fleet/reset")
        assert await case.states() == ["ready", "fenced", "ready"]
        assert (await case.init()).status_code == 200
        await case.sync("2", names=("head",))
        assert await case.states() == ["ready"] * 3


async def test_a_round_that_its_trainer_left_before_the_first_update_ends_without_a_trace() -> None:
    """The round deadline abandons it as an operator would; nobody has to look after anything."""
    async with case_of(nccl(2), timeouts={"round_s": 0.4, "probe_s": 0.2}) as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200

        async def serves() -> bool:
            return (await case.states()) == ["ready", "ready"]

        await wait_until(serves)
        assert (await case.complete()).status_code == 200


async def test_a_reset_that_comes_to_act_only_in_the_next_round_leaves_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gateway stood still for a moment: the sessions that it finds open are not its own."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        ledger, go_on = case.gateway.ledger, asyncio.Event()
        archive = ledger.archive

        async def archive_late(finished: Round) -> None:
            monkeypatch.undo()
            await go_on.wait()
            await archive(finished)

        monkeypatch.setattr(ledger, "archive", archive_late)
        resetting = asyncio.ensure_future(case.post("/fleet/reset"))
        await ledger.until(lambda state: state.phase is Phase.IDLE)
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        case.forget_logs()
        go_on.set()
        assert (await resetting).status_code == 200
        assert case.all_sent() == [[], [], []]
        assert (await case.update()).status_code == 200
        assert (await case.finish("2")).status_code == 200
        assert await case.states() == ["ready"] * 3


async def test_a_pause_that_is_still_on_its_way_when_its_round_is_abandoned_is_taken_back() -> None:
    """It reaches its replica after the reset's resume; paused for ever, it would count as ready."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        late = case.replicas[0]
        late.faults.add("/pause", "delay", seconds=1.0)
        starting = asyncio.ensure_future(case.start())
        await case.gateway.ledger.until(lambda state: state.phase is Phase.PAUSING)
        assert (await case.ok("/fleet/reset"))["fenced"] == {}
        check_error(await starting, 409, "taken over")
        assert [replica.engine.paused for replica in case.replicas] == [None, None]
        assert await case.states() == ["ready", "ready"]


async def test_a_late_pause_is_not_taken_back_over_the_trainers_own() -> None:
    """Which has come meanwhile, and outlives every round."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        case.replicas[0].faults.add("/pause", "delay", seconds=1.0)
        starting = asyncio.ensure_future(case.start())
        await case.gateway.ledger.until(lambda state: state.phase is Phase.PAUSING)
        await case.ok("/fleet/reset")
        await case.ok("/pause?mode=keep")
        check_error(await starting, 409, "taken over")
        assert [replica.engine.paused for replica in case.replicas] == ["keep", "keep"]


async def begins_anew(case: Case) -> None:
    """The operator abandons the round, and a trainer opens the next one at once."""
    await case.ok("/fleet/reset")
    assert (await case.init()).status_code == 200
    assert (await case.start()).status_code == 200


def in_session(case: Case) -> list[bool]:
    """Which of the engines are between start and finish, and at rest."""
    engines = [replica.engine for replica in case.replicas]
    return [engine.session is not None and engine.paused == "keep" for engine in engines]


async def test_the_next_round_waits_for_the_abandoned_one_to_be_undone() -> None:
    """A finish that comes late would close the new session, a resume let a frozen rollout run."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        slow, refuses = case.replicas
        refuses.faults.add(START, "status", times=1)
        slow.faults.add(FINISH, "delay", seconds=1.0, times=1)
        starting = asyncio.ensure_future(case.start())
        await wait_until(lambda: has_heard(slow, FINISH, 2))
        await begins_anew(case)
        check_error(await starting, 409, "taken over")
        assert in_session(case) == [True, True]
        assert (await case.update()).status_code == 200
        assert (await case.finish("2")).status_code == 200
        assert await case.states() == ["ready", "ready"]


async def test_an_update_that_was_planned_before_the_next_init_is_not_sent_in_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 6: it was cut for the ranks of a group that is over, and another trainer is awaited."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        case.forget_logs()
        ledger = case.gateway.ledger
        apply = ledger.apply

        async def apply_late(event: Event) -> object:
            monkeypatch.undo()
            await begins_anew(case)
            return await apply(event)

        monkeypatch.setattr(ledger, "apply", apply_late)
        check_error(await case.update(), 409, "another call")
        assert [posts(replica, UPDATE) for replica in case.replicas] == [[], []]
        assert in_session(case) == [True, True]
        assert (await case.update(["other"])).status_code == 200


async def has_heard(replica: SimReplica, path: str, times: int) -> bool:
    """Whether so many calls have come here on this path."""
    return len(posts(replica, path)) == times


async def test_a_commit_that_comes_to_resume_only_in_the_next_round_resumes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had to wait for a gateway that did not answer; the engines are the next round's now."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        waits, go_on = asyncio.Event(), asyncio.Event()

        async def informed_late() -> None:
            waits.set()
            await go_on.wait()

        monkeypatch.setattr(case.gateway.peers, "informed", informed_late)
        finishing = asyncio.ensure_future(case.finish("2"))
        await waits.wait()
        monkeypatch.undo()
        await begins_anew(case)
        go_on.set()
        check_error(await finishing, 409, "taken over")
        assert in_session(case) == [True, True]
