"""What an engine does to requests that meet an update, a sleep or a pause at the wrong moment."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from fleet.sim import SimFleet, SimReplica
from fleet.sim.generation import expected_text
from tests.sim.conftest import Http
from tests.waiting import wait_until

LONG = {"prompt": "x", "max_tokens": 1000}


async def test_start_kills_the_engine_under_a_running_request(http: Http) -> None:
    """Not only new requests are deadly inside a session: one that runs steps into it."""
    async with SimFleet(token_delay_ms=5) as fleet:
        replica = fleet.replicas[0]
        async with asyncio.TaskGroup() as group:
            rollout = group.create_task(http.post(replica, "/v1/completions", LONG))
            await wait_until(_running(replica))
            assert (await http.post(replica, "/start_weight_update"))[0] == 200
        assert rollout.result()[0] == 500
        await wait_until(lambda: _gone(replica))
        assert replica.stats()["killed"] == 1


async def test_paused_engine_survives_requests_in_a_session(http: Http) -> None:
    """A pause holds requests back, so nothing steps between start and finish."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        await http.post(replica, "/pause?mode=keep")
        await http.post(replica, "/start_weight_update")
        async with asyncio.TaskGroup() as group:
            rollout = group.create_task(http.complete(replica, "x"))
            await wait_until(_holds(replica, 1))
            await http.post(replica, "/finish_weight_update")
            await http.post(replica, "/resume")
        assert rollout.result()["choices"][0]["finish_reason"] == "length"


async def test_request_to_a_sleeping_engine_kills_it(http: Http) -> None:
    """So does one after waking the weights alone."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        await http.post(replica, "/sleep?level=1")
        await http.post(replica, "/wake_up?tags=weights")
        assert (await http.post(replica, "/v1/completions", LONG))[0] == 500
        await wait_until(lambda: _gone(replica))


async def test_level_two_sleep_loses_the_weights(http: Http) -> None:
    """Awake again, the engine holds nothing that anyone sent."""
    async with SimFleet() as fleet:
        replica = fleet.replicas[0]
        before = replica.checksum
        await http.post(replica, "/sleep?level=2")
        await http.post(replica, "/wake_up")
        assert replica.checksum != before


async def test_newer_servers_reject_requests_in_an_abort_pause(http: Http) -> None:
    """vLLM 0.33 answers 503 where 0.32 queues; keep queues in both."""
    async with SimFleet(pause_behaviour="reject") as fleet:
        replica = fleet.replicas[0]
        await http.post(replica, "/pause?mode=abort")
        assert (await http.post(replica, "/v1/completions", LONG))[0] == 503
        await http.post(replica, "/pause?mode=keep")
        async with asyncio.TaskGroup() as group:
            rollout = group.create_task(http.complete(replica, "x"))
            await wait_until(_holds(replica, 1))
            await http.post(replica, "/resume")
        assert rollout.result()["choices"][0]["finish_reason"] == "length"


async def test_client_that_hangs_up_cancels_its_request(http: Http) -> None:
    """The engine is free again, and the request is counted as cancelled."""
    async with SimFleet(token_delay_ms=5) as fleet:
        replica = fleet.replicas[0]
        async with http.session.post(
            replica.url + "/v1/completions", json={**LONG, "stream": True}
        ) as reply:
            await reply.content.readline()
        await wait_until(_holds(replica, 0))
        await wait_until(_counted(replica, "cancelled", 1))


async def test_tokens_follow_from_the_weights_by_a_pure_function(http: Http) -> None:
    """A test can say which answer weights of a given checksum must give."""
    async with SimFleet(replicas=2) as fleet:
        answers = [await http.complete(replica, "hello", 12) for replica in fleet.replicas]
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert texts == {expected_text(fleet.replicas[0].checksum, "hello", 12)}


async def test_control_call_goes_on_when_its_caller_hangs_up(http: Http) -> None:
    """Dropping the connection frees nobody."""
    async with SimFleet(pause_latency_s=0.2) as fleet:
        replica = fleet.replicas[0]
        try:
            async with asyncio.timeout(0.05):
                await http.post(replica, "/pause?mode=keep")
        except TimeoutError:
            pass
        await wait_until(_is(lambda: replica.engine.paused == "keep"))


async def test_many_replicas_answer_at_once() -> None:
    """64 replicas in one process serve a burst."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        SimFleet(replicas=64, token_delay_ms=0) as fleet,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        http = Http(session)
        async with asyncio.TaskGroup() as group:
            for replica in fleet.replicas:
                for _ in range(4):
                    group.create_task(http.complete(replica, "x"))
        assert [replica.stats()["finished"] for replica in fleet.replicas] == [4] * 64


def _is(condition: Callable[[], Any]) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return bool(condition())

    return holds


def _running(replica: SimReplica) -> Callable[[], Awaitable[bool]]:
    return _is(replica.engine.running)


def _holds(replica: SimReplica, count: int) -> Callable[[], Awaitable[bool]]:
    return _is(lambda: len(replica.engine.requests) == count)


def _counted(replica: SimReplica, name: str, count: int) -> Callable[[], Awaitable[bool]]:
    return _is(lambda: replica.stats()[name] == count)


async def _gone(replica: SimReplica) -> bool:
    return not replica.alive
