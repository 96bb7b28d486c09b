"""Pauses and sleeps that fail half way, meet each other, or meet weights that nobody knows."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from fleet.sim import SimReplica
from tests.cases.conftest import FINISH, UPDATE, Case, case_of, check_error, nccl
from tests.waiting import wait_until

SLOW_TOKENS = 20.0  # ms: an answer of 200 tokens takes seconds


async def until_seen(case: Case, path: str, *, on: int) -> None:
    """Wait until a replica has been called on this path."""

    async def seen() -> bool:
        return bool(case.replicas[on].log.calls(path))

    await wait_until(seen)


async def generating(case: Case, count: int = 2) -> list[asyncio.Task[Any]]:
    """Begin long rollouts and return once every replica makes tokens for one of them."""
    rollouts = [asyncio.create_task(case.complete(max_tokens=200)) for _ in range(count)]

    async def running() -> bool:
        found = (await case.http.get("/fleet/replicas")).json()["replicas"]
        return [replica["inflight"] for replica in found] == [1] * count

    await wait_until(running)
    return rollouts


async def is_paused(case: Case, replica: SimReplica) -> bool:
    """Whether a server itself says that it is paused."""
    return (await case.http.get(f"{replica.url}/is_paused")).json()["is_paused"]


def why_ended(answer: httpx.Response) -> str:
    """The finish_reason of a whole answer."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["finish_reason"]


# -- sleep -----------------------------------------------------------------------------------------


async def test_a_sleep_that_failed_after_it_took_effect_counts_as_one() -> None:
    """The 5xx may come from something in between: whoever says that it sleeps is not routed to."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        case.replicas[1].faults.add("/sleep", "status", when="after")
        check_error(await case.post("/sleep"), 424, case.replicas[1].id)
        assert await case.states() == ["asleep", "asleep"]
        await case.ok("/wake_up")
        assert await case.states() == ["ready", "ready"]


async def test_who_refuses_to_sleep_or_says_that_it_is_awake_goes_on() -> None:
    """A 4xx changes nothing at a server; after a 5xx it is asked."""
    for status in (400, 500):
        async with case_of(nccl(2)) as case:
            await case.first_sync("1")
            case.replicas[1].faults.add("/sleep", "status", status=status)
            check_error(await case.post("/sleep?level=2"), 424, case.replicas[1].id)
            assert await case.states() == ["asleep", "ready"]
            assert (await case.complete()).headers["X-Fleet-Replica"] == case.replicas[1].id


async def test_a_sleep_at_level_2_that_nobody_answered_has_discarded_the_weights() -> None:
    """It is written down before it is sent, so what is lost on the way makes no garbage."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        for replica in case.replicas:
            replica.faults.add("/sleep", "drop", when="after", times=2)
        assert (await case.post("/sleep?level=2")).status_code == 424
        await case.ok("/wake_up")
        assert await case.states() == ["fenced", "fenced"]
        await case.first_sync("2")
        assert await case.states() == ["ready", "ready"]


async def test_a_wake_up_that_overtakes_a_sleep_leaves_the_fleet_asleep() -> None:
    """What a server did last nobody knows then; one that may sleep is not routed to."""
    async with case_of(nccl(1)) as case:
        await case.first_sync("1")
        case.replicas[0].faults.add("/sleep", "delay", seconds=0.5)
        sleeping = asyncio.create_task(case.post("/sleep"))
        await case.await_states("asleep")
        await case.ok("/wake_up")
        assert (await sleeping).status_code == 200
        assert await case.states() == ["asleep"]
        await case.ok("/wake_up")
        assert (await case.complete()).status_code == 200


async def test_a_sleep_that_overtakes_a_wake_up_is_not_ended_by_it() -> None:
    """The answer to the wake-up is about the sleep before."""
    async with case_of(nccl(1)) as case:
        await case.first_sync("1")
        await case.ok("/sleep")
        case.replicas[0].faults.add("/wake_up", "delay", seconds=0.5, when="after")
        waking = asyncio.create_task(case.post("/wake_up"))
        await until_seen(case, "/wake_up", on=0)
        await case.ok("/sleep")
        assert (await waking).status_code == 200
        assert await case.states() == ["asleep"]


# -- what must stay frozen -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", ["/pause?mode=wait", "/sleep?level=1&mode=wait", "/wake_up", "/resume"]
)
async def test_no_call_lets_rollouts_run_on_with_weights_that_nobody_knows(call: str) -> None:
    """A failed update has frozen them; they end by an abort, or go on after a full update."""
    async with case_of(nccl(2, token_delay_ms=SLOW_TOKENS)) as case:
        await case.first_sync("1")
        rollouts = await generating(case)
        assert (await case.start()).status_code == 200
        case.replicas[1].faults.add(UPDATE, "status")
        assert (await case.update()).status_code == 424
        await case.ok(call)
        await case.ok("/wake_up")
        if "sleep" not in call:
            assert [await is_paused(case, replica) for replica in case.replicas] == [True, True]
        assert "length" not in [why_ended(r.result()) for r in rollouts if r.done()]
        await case.first_sync("2")
        await case.ok("/resume")
        ends = {why_ended(answer) for answer in await asyncio.gather(*rollouts)}
        assert ends == ({"abort"} if "sleep" in call else {"length"})


async def test_engines_in_a_session_that_could_not_be_closed_are_left_as_they_are() -> None:
    """One that runs in a session dies; a reset cannot close what refuses its finish."""
    async with case_of(nccl(2, token_delay_ms=SLOW_TOKENS)) as case:
        await case.first_sync("1")
        rollouts = await generating(case)
        await case.start()
        await case.update()
        for replica in case.replicas:
            replica.faults.add(FINISH, "status", times=0)
        await case.post("/fleet/reset")
        for call in ("/pause?mode=wait", "/wake_up", "/resume"):
            await case.ok(call)
        assert [replica.log.outcomes["killed"] for replica in case.replicas] == [0, 0]
        for replica in case.replicas:
            replica.faults.clear()
        await case.first_sync("2")
        await case.ok("/resume")
        assert {why_ended(answer) for answer in await asyncio.gather(*rollouts)} == {"length"}


# -- pause -----------------------------------------------------------------------------------------


async def test_a_pause_while_a_round_resumes_pauses_whom_it_resumed() -> None:
    """The round's resumes are on their way when the trainer asks for it: it comes after them."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.start()
        await case.update()
        case.replicas[1].faults.add("/resume", "delay", seconds=0.5)
        case.forget_logs()
        finishing = asyncio.create_task(case.finish("2"))
        await until_seen(case, "/resume", on=1)
        await case.ok("/pause?mode=abort")
        assert (await finishing).status_code == 200
        assert [await is_paused(case, replica) for replica in case.replicas] == [True, True]
        await case.ok("/resume")
        await case.sync("3")
