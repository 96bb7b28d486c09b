"""The rollout worker's client against a real gateway over simulated replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr

from fleet.client import AsyncFleetClient, FleetError
from fleet.client.errors import (
    AnswerLost,
    GateOverflow,
    NoEligibleReplica,
    Unauthenticated,
    Unreachable,
)
from fleet.client.rollouts import Stream
from gateway.settings_model import Auth, Gate, GateMode, Routing, RoutingPolicy
from tests.cases.conftest import Case, case_of
from tests.client.conftest import url_of
from tests.client.listener import listener, reply
from tests.waiting import wait_until

ASK = {"prompt": "hello", "max_tokens": 4}


async def test_a_rollout_says_which_weights_made_it_where_and_under_which_name() -> None:
    """Version at dispatch and at completion, replica, request id; and the answer itself."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        await case.first_sync("seven")
        made = await client.complete(ASK, request_id="mine-1")
        assert (made.weight_version, made.weight_version_end) == ("seven", "seven")
        assert made.made_by_one_version
        assert made.replica in {replica.id for replica in case.replicas}
        assert made.request_id == "mine-1"
        assert made.body["choices"][0]["finish_reason"] == "length"
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert (await client.chat(chat)).weight_version == await client.weight_info() == "seven"
        tokens = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
        assert (await client.generate(tokens)).weight_version == "seven"


async def test_a_rollout_across_an_update_says_so() -> None:
    """Frozen by the round's pause, ended under the next version."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        await case.first_sync("1")
        asked = asyncio.ensure_future(client.complete({"prompt": "x", "max_tokens": 400}))
        await wait_until(lambda: some_inflight(case))
        await case.sync("2")
        made = await asked
        assert (made.weight_version, made.weight_version_end) == ("1", "2")
        assert not made.made_by_one_version


async def test_a_rollout_says_when_its_prefix_may_rest_on_older_weights() -> None:
    """The trainer paused without clearing the caches, as is its right."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        await case.first_sync("1")
        assert not (await client.complete(ASK)).kv_mixed
        await client.pause(clear_cache=False)
        await case.sync("2")
        await client.resume()
        assert (await client.complete(ASK)).kv_mixed


async def test_a_stream_comes_event_by_event_and_ends_with_its_context() -> None:
    """Its end version is unknown: the headers were the first thing to come."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        async with client.stream("/v1/completions", ASK) as stream:
            events = await drained(stream)
        assert stream.rollout.weight_version == "default"
        assert stream.rollout.weight_version_end is None
        assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
        async with client.stream("/v1/completions", {"prompt": "x", "max_tokens": 9000}) as stream:
            await anext(stream.events())
        await wait_until(lambda: nothing_inflight(case))


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    """The replica died in the middle: what came so far is no answer."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        for replica in case.replicas:
            replica.faults.add("/v1/completions", "die", when="during", tokens=2)
        async with client.stream("/v1/completions", {"prompt": "x", "max_tokens": 50}) as stream:
            with pytest.raises(FleetError, match="broke off"):
                await drained(stream)


async def test_rollouts_of_one_session_go_to_one_replica() -> None:
    """Whatever else goes on."""
    routing = Routing(policy=RoutingPolicy.CONSISTENT_HASH)
    async with case_of(routing=routing) as case, AsyncFleetClient(url_of(case)) as client:
        made = [await client.complete(ASK, session="s-1") for _ in range(12)]
        assert len({rollout.replica for rollout in made}) == 1


async def test_a_rollout_may_wait_for_a_version() -> None:
    """A bound on staleness that the gateway keeps."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        await case.first_sync("1")
        asked = asyncio.ensure_future(client.complete(ASK, min_version="2"))
        await case.await_held(1)
        await case.sync("2")
        assert (await asked).weight_version == "2"


async def test_a_refusal_with_a_time_is_tried_again_and_patience_ends() -> None:
    """The gate is shut and holds nobody; nothing was generated."""
    async with case_of(gate=Gate(mode=GateMode.REJECT)) as case:
        await case.ok("/pause?mode=keep")
        async with AsyncFleetClient(url_of(case), patience_s=0) as client:
            with pytest.raises(GateOverflow):
                await client.complete(ASK)
        async with AsyncFleetClient(url_of(case)) as client:
            asked = asyncio.ensure_future(client.complete(ASK))
            await client.resume()
            assert (await asked).made_by_one_version


async def test_an_answer_that_was_lost_is_raised_and_not_asked_for_again() -> None:
    """Whether tokens were made for it is unknown."""
    async with listener(None) as silent, AsyncFleetClient(silent.url) as client:
        with pytest.raises(AnswerLost):
            await client.complete(ASK)
        assert len(silent.seen) == 1


async def test_a_gateway_that_is_not_there_is_unreachable() -> None:
    """Nothing was sent."""
    async with AsyncFleetClient("http://127.0.0.1:1", patience_s=0) as client:
        with pytest.raises(Unreachable):
            await client.complete(ASK)


async def test_a_model_servers_own_refusal_is_an_error_with_its_words() -> None:
    """Passed on as it is by the gateway."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        with pytest.raises(FleetError) as refusal:
            await client.complete({"prompt": "x", "max_tokens": -1})
        assert refusal.value.status == 400
        assert not isinstance(refusal.value, NoEligibleReplica)


async def test_rollouts_can_be_aborted_by_the_name_that_their_sender_knows() -> None:
    """And the pausing calls are there as well."""
    async with case_of() as case, AsyncFleetClient(url_of(case)) as client:
        asked = asyncio.ensure_future(
            client.complete({"prompt": "x", "max_tokens": 9000}, request_id="long")
        )
        await wait_until(lambda: some_inflight(case))
        assert await client.abort(["long"]) == 1
        assert (await asked).body["choices"][0]["finish_reason"] == "abort"
        await client.pause()
        assert (await case.fleet())["gate"]["state"] == "closed"
        await client.resume()


async def test_a_token_opens_what_it_should() -> None:
    """As an argument or in the URL."""
    auth = Auth(rollout_token=SecretStr("r-secret"))
    async with case_of(auth=auth) as case:
        async with AsyncFleetClient(url_of(case), token="r-secret") as client:
            assert (await client.complete(ASK)).replica
        async with AsyncFleetClient(url_of(case)) as client:
            with pytest.raises(Unauthenticated):
                await client.complete(ASK)


async def test_an_answer_from_no_gateway_lacks_what_only_a_gateway_knows() -> None:
    """One vLLM server alone: the same client, empty labels."""
    async with listener(reply("200 OK", b"{}")) as server, AsyncFleetClient(server.url) as client:
        made = await client.complete(ASK)
        assert (made.weight_version, made.replica, made.body) == ("", "", {})


async def drained(stream: Stream) -> list[Any]:
    return [event async for event in stream.events()]


async def some_inflight(case: Case) -> bool:
    replicas = (await case.http.get("/fleet/replicas")).json()["replicas"]
    return any(replica["inflight"] for replica in replicas)


async def nothing_inflight(case: Case) -> bool:
    return not await some_inflight(case)
