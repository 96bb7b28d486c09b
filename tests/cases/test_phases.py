"""cases.md, «Phases»: calls that come in the wrong order, fail half way, lie or come twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from time import time
from typing import Any

import pytest

from gateway.settings_model import Gate
from tests.cases.conftest import (
    FINISH,
    INIT,
    START,
    UPDATE,
    Case,
    all_of,
    case_of,
    check_error,
    nccl,
    outcomes_of,
    posts,
    update_of,
)
from tests.waiting import wait_until


async def test_case_8_a_start_while_a_round_is_open_says_who_holds_it_and_how_long() -> None:
    """409 with the holder, the round and its age; nothing is sent."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        await case.post(START, headers={"User-Agent": "first-trainer"})
        case.forget_logs()
        answer = await case.post(START, headers={"User-Agent": "second-trainer"})
        asked_at, opened_at = time(), (await case.fleet())["round"]["opened_at"]
        body = check_error(answer, 409, "round 1", "first-trainer", "started")
        age = re.search(r"\(first-trainer\) (\d+\.\d) s ago", body["error"]["message"])
        assert age is not None
        assert float(age[1]) <= asked_at - opened_at + 0.05  # it is rounded
        assert body["error"]["type"] == "RoundOpen"
        check_error(await case.init(4), 409, "first-trainer")
        assert case.all_sent() == [[], [], []]
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200


async def test_case_9_a_finish_after_a_failed_chunk_is_refused_and_commits_nothing() -> None:
    """The version stays where it was, and the label of the refused finish reaches nobody."""
    async with case_of() as case:
        await case.first_sync("good")
        case.replicas[1].faults.add(UPDATE, "status")
        assert (await case.start()).status_code == 200
        check_error(await case.update(), 424)
        await case.await_states("fenced", "fenced", "fenced")
        case.forget_logs()
        check_error(await case.finish("bad"), 409, "failed", "world_size=4")
        assert await case.version() == "good"
        assert not [c for r in case.replicas for c in posts(r, FINISH) if c.body]


async def test_case_9_a_chunk_after_a_failed_chunk_is_refused() -> None:
    """Nothing more is loaded into a round that has failed."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        case.replicas[1].faults.add(UPDATE, "status")
        check_error(await case.update(), 424)
        case.forget_logs()
        check_error(await case.update(["another"]), 409)
        assert UPDATE not in case.sent(0) + case.sent(1) + case.sent(2)


async def test_case_10_one_of_four_that_fails_an_update_fences_all_until_a_full_one() -> None:
    """Non-2xx at once, though the others take their time; no rollout until a full update."""
    async with case_of(nccl(4)) as case:
        await case.first_sync("1")
        for replica in case.replicas:
            failing = replica is case.replicas[2]
            replica.faults.add(UPDATE, "status" if failing else "delay", seconds=1.0)
        assert (await case.start()).status_code == 200
        answer = await case.update()
        check_error(answer, 424, case.replicas[2].id, "scripted fault")
        assert [outcomes_of(answer)[r.id] for r in case.replicas] == [
            "wedged",
            "wedged",
            "failed",
            "wedged",
        ]
        await case.await_states("fenced", "fenced", "fenced", "fenced")
        await _nobody_serves(case)
        assert (await case.init(5)).status_code == 200
        await case.sync(names=["embed"])  # partial: lifts nothing
        assert await case.states() == ["fenced"] * 4
        await case.sync()
        assert await case.states() == ["ready"] * 4
        assert (await case.complete()).headers["X-Weight-Version"] == await case.version()


async def test_case_11_a_start_that_one_refuses_is_undone_on_the_others() -> None:
    """Finish without an update, then resume: nothing stays half started."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        case.forget_logs()
        case.replicas[1].faults.add(START, "status")
        check_error(await case.start(), 424, case.replicas[1].id)
        for index in (0, 2):
            assert case.sent(index) == ["/pause", START, FINISH, "/resume"]
            assert posts(case.replicas[index], FINISH)[0].body is None
        assert [r.engine.session for r in case.replicas] == [None, None, None]
        assert [r.engine.paused for r in case.replicas] == [None, None, None]
        assert await case.states() == ["ready", "ready", "ready"]
        assert (await case.rounds())[0]["result"] == "undone"
        await case.sync("next")
        assert await case.version() == "next"


async def test_case_12_a_pause_that_reached_three_of_four_is_taken_back() -> None:
    """503 with Retry-After: all are resumed, who refused too (it may have paused all the same)."""
    async with case_of(nccl(4)) as case:
        case.replicas[3].faults.add("/pause", "status")
        answer = await case.post("/pause")
        check_error(answer, 503, case.replicas[3].id, "retry")
        assert int(answer.headers["Retry-After"]) >= 1
        assert case.all_sent() == [["/pause", "/resume"]] * 4
        assert await case.states() == ["ready"] * 4
        assert not (await case.http.get("/is_paused")).json()["is_paused"]
        assert (await case.complete()).status_code == 200
        assert (await case.ok("/pause"))["status"] == "paused"
        assert await case.states() == ["paused"] * 4


async def test_case_12_the_rounds_own_pause_is_taken_back_too() -> None:
    """Start answers 503, nobody was started, and the same start then succeeds."""
    async with case_of(nccl(4)) as case:
        assert (await case.init()).status_code == 200
        case.forget_logs()
        case.replicas[3].faults.add("/pause", "status")
        answer = await case.start()
        check_error(answer, 503, "pause failed on", "start again")
        assert int(answer.headers["Retry-After"]) >= 1
        assert all(START not in sent for sent in case.all_sent())
        assert [r.engine.paused for r in case.replicas] == [None] * 4
        assert await case.states() == ["ready"] * 4
        await case.sync()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_case_12_a_pause_whose_answer_broke_off_is_taken_back(when: str) -> None:
    """Whether that replica had paused is unknown, so it is resumed like the others."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        case.replicas[1].faults.add("/pause", "drop", when=when, times=2)  # it is tried twice
        check_error(await case.start(), 503, case.replicas[1].id)
        await case.await_states("ready", "ready", "ready")
        assert [r.engine.paused for r in case.replicas] == [None, None, None]


async def test_case_13_a_pause_that_nothing_follows_is_visible_and_can_be_ended() -> None:
    """/fleet says since when and by whom, a metric can be alarmed on, an operator resumes."""
    async with case_of() as case:
        await case.post("/pause?mode=keep", headers={"User-Agent": "dead-trainer"})
        seen = await case.fleet()
        assert seen["gate"]["state"] == "closed"
        assert seen["pause"]["by"].endswith("(dead-trainer)")
        assert seen["pause"]["since"] <= seen["gate"]["closed_since"]
        metrics = (await case.http.get("/metrics")).text
        assert _metric(metrics, "fleet_trainer_pause_seconds") > 0
        assert _metric(metrics, "fleet_gate_closed_seconds") > 0
        await case.ok("/resume")
        metrics = (await case.http.get("/metrics")).text
        assert _metric(metrics, "fleet_trainer_pause_seconds") == 0
        assert await case.states() == ["ready", "ready", "ready"]


@pytest.mark.parametrize("path", [INIT, START, UPDATE, FINISH])
async def test_case_14_a_200_whose_body_says_error_is_a_failure(path: str) -> None:
    """A status is a claim; the body knows better."""
    async with case_of() as case:
        case.replicas[1].faults.add(path, "lie")
        steps = {INIT: case.init, START: case.start, UPDATE: case.update, FINISH: case.finish}
        for name, step in steps.items():
            answer = await step()
            if name == path:
                check_error(answer, 424, case.replicas[1].id, "scripted fault")
                assert outcomes_of(answer)[case.replicas[1].id] == "failed"
                break
            assert answer.status_code == 200
        assert await case.version() == "default"


async def test_case_15_a_retry_while_the_call_is_on_its_way_joins_it() -> None:
    """Two equal update_weights at once are one call to each replica and two equal answers."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        for replica in case.replicas:
            replica.faults.add(UPDATE, "delay", seconds=0.3)
        first, second = await all_of([case.update(), case.update()])
        assert first.status_code == second.status_code == 200
        assert first.json() == second.json()
        assert [len(posts(r, UPDATE)) for r in case.replicas] == [1, 1, 1]


async def test_case_15_a_lost_answer_is_given_to_the_retry() -> None:
    """The first client is gone; its retry gets what happened, and no replica is called again."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        for replica in case.replicas:
            replica.faults.add(UPDATE, "delay", seconds=0.3)
        await _leave_once_asked(case, UPDATE, case.update())
        await _until_phase(case, "started")
        answer = await case.update()
        assert answer.json()["message"] == "Weights updated"
        assert [len(posts(r, UPDATE)) for r in case.replicas] == [1, 1, 1]
        assert (await case.rounds())[0]["updates"] == 1
        assert (await case.finish()).status_code == 200


async def test_case_15_a_lost_failure_is_given_to_the_retry() -> None:
    """The real result, also if it is a bad one."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        for replica in case.replicas:
            replica.faults.add(UPDATE, "hang")
        await _leave_once_asked(case, UPDATE, case.update())
        await case.replicas[1].die()
        await _until_phase(case, "failed")
        check_error(await case.update(), 424, case.replicas[1].id)
        assert [len(posts(r, UPDATE)) for r in case.replicas] == [1, 1, 1]


async def test_case_15_an_equal_chunk_after_an_answer_is_a_new_chunk() -> None:
    """Two chunks may look alike; both are sent."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        assert (await case.update()).status_code == 200
        assert [len(posts(r, UPDATE)) for r in case.replicas] == [2, 2, 2]


async def test_case_15_an_idempotency_key_makes_a_delivered_answer_repeatable() -> None:
    """A client that marks its retries gets the stored answer."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        for _ in range(2):
            answer = await case.post(UPDATE, update_of(), headers={"Idempotency-Key": "chunk-1"})
            assert answer.status_code == 200
        assert [len(posts(r, UPDATE)) for r in case.replicas] == [1, 1, 1]


async def test_case_15_a_stored_answer_is_not_given_once_the_fleet_has_moved_on() -> None:
    """A start whose caller left, then a reset: the next start is a new one, and is carried out."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        for replica in case.replicas:
            replica.faults.add(START, "delay", seconds=0.3)
        await _leave_once_asked(case, START, case.start())
        await _until_phase(case, "started")
        await case.ok("/fleet/reset")
        assert (await case.init()).status_code == 200
        case.forget_logs()
        assert (await case.start()).status_code == 200
        assert all(START in sent for sent in case.all_sent())
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200
        assert await case.states() == ["ready", "ready", "ready"]


async def test_a_pause_whose_caller_left_does_not_answer_a_later_pause() -> None:
    """Between them the fleet was resumed, so the second pause must pause."""
    async with case_of() as case:
        for replica in case.replicas:
            replica.faults.add("/pause", "delay", seconds=0.3)
        await _leave_once_asked(case, "/pause", case.post("/pause"))
        await case.await_states("paused", "paused", "paused")
        await case.ok("/resume")
        await case.ok("/pause")
        assert await case.states() == ["paused", "paused", "paused"]
        assert [r.engine.paused for r in case.replicas] == ["abort"] * 3


async def test_a_label_whose_caller_left_does_not_answer_a_later_one() -> None:
    """Between them the weights got another label, so the second time it must be set again."""
    path = "/update_weight_version"
    async with case_of() as case:
        await case.first_sync("1")
        for replica in case.replicas:
            replica.faults.add(path, "delay", seconds=0.3)
        await _leave_once_asked(case, path, case.post(path, {"new_version": "best"}))
        await wait_until(lambda: _is_labelled(case, "best"))
        await case.ok(path, {"new_version": "worse"})
        await case.ok(path, {"new_version": "best"})
        assert await case.version() == "best"
        assert [r.engine.version for r in case.replicas] == ["best"] * 3


async def test_an_abort_whose_caller_left_does_not_answer_a_later_abort() -> None:
    """What came in between must be aborted too."""
    async with case_of(nccl(1, token_delay_ms=5)) as case:
        case.replicas[0].faults.add("/abort_requests", "delay", seconds=0.3)
        await _leave_once_asked(case, "/abort_requests", case.post("/abort_requests", {}))
        await wait_until(lambda: _has_answered(case, "/abort_requests", 1))
        rollout = asyncio.ensure_future(case.complete(max_tokens=5000))
        await wait_until(lambda: _is_running(case))
        assert (await case.ok("/abort_requests", {}))["aborted"] == 1
        assert (await rollout).json()["choices"][0]["finish_reason"] == "abort"


async def _has_answered(case: Case, path: str, times: int) -> bool:
    return [call.status for call in posts(case.replicas[0], path)] == [200] * times


async def _is_labelled(case: Case, version: str) -> bool:
    return await case.version() == version


async def _is_running(case: Case) -> bool:
    return case.replicas[0].stats()["running"] == 1


async def _leave_once_asked(case: Case, path: str, call: Coroutine[Any, Any, object]) -> None:
    """Hang up as soon as every replica has been asked, and so before the answer."""
    calling = asyncio.ensure_future(call)

    async def everyone_was_asked() -> bool:
        return all(posts(replica, path) for replica in case.replicas)

    await wait_until(everyone_was_asked)
    calling.cancel()
    await asyncio.wait([calling])


async def _until_phase(case: Case, phase: str) -> None:
    async def reached() -> bool:
        return (await case.fleet())["phase"] == phase

    await wait_until(reached)


async def _nobody_serves(case: Case) -> None:
    """A rollout sent now is held, and reaches no replica."""
    held = asyncio.ensure_future(case.complete("held"))
    await case.await_held(1)
    held.cancel()
    await asyncio.wait([held])
    await case.await_held(0)
    assert all(not replica.log.rollouts for replica in case.replicas)


def _metric(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def test_gate_settings_do_not_matter_to_control_calls() -> None:
    """A gate that holds nothing still lets the trainer work."""
    async with case_of(gate=Gate(max_held=1)) as case:
        await case.first_sync()
        assert await case.version() == "1"


async def test_while_replicas_are_at_work_the_connections_for_their_next_phase_are_opened() -> None:
    """An opening takes a round trip and CPU, times the fleet, and the trainer would wait for it."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        used = case.gateway.client.fresh.used
        used.clear()
        for replica in case.replicas:
            for path in ("/pause", START, UPDATE):
                replica.faults.add(path, "delay", seconds=0.2)
        await case.sync()
        assert used == {"ahead": 9}
