"""A Redis that dies, stands still or forgets, under gateways that carry rollouts and rounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest

from fleet.errors import StoreUnavailable
from fleet.ledger import STATE
from fleet.sim import SimFleet
from tests.cases.conftest import UPDATE, Case, case_of, check_error, nccl, posts
from tests.gateways.processes import gateways
from tests.gateways.test_deaths import until_called
from tests.redis_server import RedisServer
from tests.waiting import wait_until


async def until_closed(case: Case) -> None:
    """Wait until the gate is shut."""

    async def closed() -> bool:
        return (await case.fleet())["gate"]["state"] == "closed"

    await wait_until(closed)


async def until_serving(case: Case) -> httpx.Response:
    """Return the first answer of a replica."""
    answers: list[httpx.Response] = []

    async def served() -> bool:
        answers.append(await case.complete())
        return answers[-1].status_code == 200

    await wait_until(served)
    return answers[-1]


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_without_its_store_a_gateway_serves_for_a_lease_and_then_holds(
    how: str, own_server: RedisServer, tmp_path: Path
) -> None:
    """Who cannot see what others decide must not admit; the store back, the line moves on."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path) as several:
        case, gateway = several.case(0), several.all[0]
        await case.first_sync("1")
        getattr(own_server, how)()
        assert (await case.complete()).status_code == 200  # the lease still holds
        await until_closed(case)
        assert not await gateway.ready()
        held = asyncio.ensure_future(case.complete())
        await case.await_held(1)
        own_server.thaw() if how == "freeze" else own_server.start()
        assert (await held).headers["X-Weight-Version"] == "1"
        await wait_until(gateway.ready)
        await case.sync("2")


async def test_a_call_that_sent_nothing_may_be_retried_when_the_store_is_away(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """503 with Retry-After, and no replica has heard of it."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path, 1) as several:
        case = several.case(0)
        await case.first_sync("1")
        case.forget_logs()
        own_server.kill()
        answer = await case.start()
        check_error(answer, 503)
        assert answer.headers["Retry-After"]
        assert case.all_sent() == [[], []]
        own_server.start()
        await wait_until(several.all[0].ready)
        await case.sync("2")


async def test_an_outage_of_the_store_is_named_while_it_lasts_and_logged_once(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """Who looks at the fleet sees why its gate is closed; a log does not fill up with it."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path, 1) as several:
        case = several.case(0)
        assert (await case.fleet())["store"] is None
        own_server.kill()
        await until_closed(case)
        store = (await case.fleet())["store"]
        assert "the store does not answer" in store["reason"]
        assert store["since"] <= time()
        own_server.start()
        await wait_until(several.all[0].ready)
        await wait_until(lambda: is_well(case))
        log = several.all[0].log.read_text()
        assert log.count("store fails what=heartbeat") == 1
        assert log.count("store is back what=heartbeat") == 1


async def is_well(case: Case) -> bool:
    """Whether the fleet's summary names no outage."""
    return (await case.fleet())["store"] is None


async def test_what_changes_no_state_is_not_sent_either_while_the_store_is_away(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """Another gateway may have opened a session, in which it would do harm."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path) as several:
        here = several.case(0)
        await here.first_sync("1")
        here.forget_logs()
        own_server.kill()
        answer = await here.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})
        check_error(answer, 503)
        assert answer.headers["Retry-After"]
        assert here.all_sent() == [[], []]


async def test_a_store_that_comes_back_empty_is_given_what_the_gateways_know(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """Version, group and open round were in memory as well: the trainer's finish still commits."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path) as several:
        here, there = several.case(0), several.case(1)
        await here.first_sync("1")
        await here.start()
        await here.update()
        before = await here.fleet()
        own_server.kill()
        own_server.start()

        async def both_there() -> bool:
            fleets = [await case.fleet() for case in (here, there)]
            return all(len(fleet["gateways"]) == 2 for fleet in fleets)

        await wait_until(both_there)
        for case in (here, there):
            after = await case.fleet()
            for fact in ("generation", "phase", "weight_version"):
                assert after[fact] == before[fact]

        async def finished() -> bool:
            answer = await there.finish("2")
            assert answer.status_code in (200, 503), answer.text  # 503: the gateways still agree
            return answer.status_code == 200

        await wait_until(finished, timeout_s=30)
        assert (await until_serving(here)).headers["X-Weight-Version"] == "2"


async def test_a_store_that_is_away_for_a_moment_fails_no_round(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """What the replicas have answered is written when the store is back within a lease."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path, 1) as several:
        case = several.case(0)
        await case.first_sync("1")
        await case.start()
        case.forget_logs()
        sim.replicas[1].faults.add(UPDATE, "delay", seconds=0.5)
        update = asyncio.ensure_future(case.update())
        await until_called(sim, UPDATE)
        own_server.kill()
        own_server.start()
        assert (await update).status_code == 200
        assert [len(posts(r, UPDATE)) for r in sim.replicas] == [1, 1]
        assert (await case.finish("2")).status_code == 200
        assert await case.states() == ["ready", "ready"]


async def test_a_write_whose_answer_was_lost_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was done, so a second one would find the round where it has not expected it."""
    async with case_of(nccl(2)) as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        store, lost = case.gateway.ledger.store, 0
        swap = store.swap

        async def swap_unheard(key: str, **words: Any) -> bool:
            nonlocal lost
            done = await swap(key, **words)
            if key == STATE and b'"UpdateArrived"' in words["body"] and not lost:
                lost += 1
                raise StoreUnavailable("the store did not answer")
            return done

        monkeypatch.setattr(store, "swap", swap_unheard)
        assert (await case.update()).status_code == 200
        assert lost == 1
        assert (await case.rounds())[0]["updates"] == 1
        assert (await case.finish("1")).status_code == 200


async def test_a_store_that_stays_away_in_mid_call_leaves_the_outcome_unknown_and_named(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """504: replicas were called, and nobody could write down what came of it."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path, 1) as several:
        case = several.case(0)
        await case.first_sync("1")
        await case.start()
        sim.replicas[1].faults.add(UPDATE, "delay", seconds=0.5)
        update = asyncio.ensure_future(case.update())
        await until_called(sim, UPDATE, 2)
        own_server.kill()
        check_error(await update, 504, "outcome unknown")
        own_server.start()

        async def failed() -> bool:
            return (await case.fleet())["phase"] == "failed"

        await wait_until(failed)
        assert await case.states() == ["fenced", "fenced"]
        check_error(await case.finish("2"), 409, "world_size=3")
        await case.first_sync("2")
        assert await case.states() == ["ready", "ready"]


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("/pause", None),
        ("/resume", None),
        ("/sleep", None),
        ("/wake_up", None),
        ("/update_weight_version", {"new_version": "renamed"}),
    ],
)
async def test_outside_of_a_round_too_an_outcome_that_nobody_wrote_down_is_unknown(
    call: str, body: dict[str, str] | None, own_server: RedisServer, tmp_path: Path
) -> None:
    """504, not «retry as it is»: replicas were called. The same call again puts things right."""
    async with SimFleet(nccl(2)) as sim, gateways(sim, own_server.url, tmp_path, 1) as several:
        case = several.case(0)
        await case.first_sync("1")
        if call == "/wake_up":
            await case.ok("/sleep")
        case.forget_logs()
        sim.replicas[1].faults.add(call, "delay", seconds=0.5)
        answer = asyncio.ensure_future(case.post(call, body))
        await until_called(sim, call)
        own_server.kill()
        check_error(await answer, 504, "outcome unknown", "then repeat")
        own_server.start()
        await wait_until(several.all[0].ready)
        await case.ok(call, body)
        await case.ok("/wake_up")
        await case.ok("/resume")
        assert (await until_serving(case)).headers["X-Weight-Version"] in {"1", "renamed"}
