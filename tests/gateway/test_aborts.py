"""Aborts: the id that a client knows ends the right request, wherever it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet.sim import SimFleet
from gateway.aborts import guesses, internal_ids, names_of
from gateway.exchange import Request
from gateway.settings_model import Settings
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until


def asked(path: str, body: dict[str, Any], rid: str = "r1") -> Request:
    """A request as the gateway holds it."""
    return Request(b"POST", path.encode(), [], json.dumps(body).encode(), rid.encode())


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        ("/v1/completions", {"prompt": "x"}, ["cmpl-r1-0"]),
        ("/v1/completions?a=1", {"prompt": ["x", "y"]}, ["cmpl-r1-0", "cmpl-r1-1"]),
        ("/v1/completions", {"prompt": [1, 2, 3]}, ["cmpl-r1-0"]),
        ("/v1/completions", {"prompt": [[1], [2]]}, ["cmpl-r1-0", "cmpl-r1-1"]),
        ("/v1/chat/completions", {"messages": []}, ["chatcmpl-r1"]),
        ("/inference/v1/generate", {"token_ids": [1]}, ["generate-tokens-r1"]),
        ("/pooling", {}, ["r1"]),
    ],
)
def test_a_request_has_the_ids_that_vllm_gives_it(
    path: str, body: dict[str, Any], ids: list[str]
) -> None:
    """One per prompt for completions, one otherwise."""
    assert internal_ids(asked(path, body)) == ids


def test_a_client_may_know_its_request_by_several_names() -> None:
    """Its own header, the answer's id, the body's request_id."""
    request = asked("/v1/completions", {"prompt": "x", "request_id": "mine"})
    assert names_of(request) == {"r1", "cmpl-r1", "mine", "cmpl-mine"}
    assert "chatcmpl-z" in guesses("z")
    assert "cmpl-z-0" in guesses("z")


async def _running(served: Served, count: int) -> None:
    async def all_there() -> bool:
        return sum(served.gateway.gate.inflight.values()) == count

    await wait_until(all_there)


@pytest.mark.parametrize("known", ["rid-{}", "cmpl-rid-{}"])
async def test_an_abort_reaches_the_replica_that_has_the_request(known: str) -> None:
    """By the client's own id or the answer's; nobody else is asked, nothing else ends."""
    async with (
        SimFleet(replicas=3, backend="nccl", token_delay_ms=20) as fleet,
        serve(Settings(replicas=tuple(fleet.urls))) as served,
        asyncio.TaskGroup() as group,
    ):
        body = {"model": "sim", "prompt": "x", "max_tokens": 2000}
        rollouts = [
            group.create_task(
                served.http.post("/v1/completions", json=body, headers={"X-Request-Id": f"rid-{n}"})
            )
            for n in range(3)
        ]
        await _running(served, 3)
        named = {"request_ids": [known.format(1)]}
        answer = await served.http.post("/abort_requests", json=named)
        assert answer.json()["aborted"] == 1
        ended = await rollouts[1]
        assert ended.json()["choices"][0]["finish_reason"] == "abort"
        assert sum(served.gateway.gate.inflight.values()) == 2
        calls = [c.body for r in fleet.replicas for c in r.log.calls("/abort_requests")]
        assert calls == [{"request_ids": ["cmpl-rid-1-0"]}]
        everyone = await served.http.post("/abort_requests", json={})
        assert everyone.json()["aborted"] == 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, ["abort"] * 4),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, ["abort"]),
        ("/v1/completions", {"prompt": "a", "stream": True}, ["abort"]),
    ],
)
async def test_a_held_request_is_aborted_and_answered_as_vllm_would(
    path: str, body: dict[str, Any], says: list[str]
) -> None:
    """It never reaches a replica, and its client sees an aborted answer, not an error."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls))) as served,
        asyncio.TaskGroup() as group,
    ):
        await served.http.post("/pause?mode=keep")
        headers = {"X-Request-Id": "held"}
        call = served.http.post(path, json={"model": "sim", **body}, headers=headers)
        waiting = group.create_task(call)

        async def is_held() -> bool:
            return served.gateway.gate.held == 1

        await wait_until(is_held)
        await served.http.post("/abort_requests", json={"request_ids": ["held"]})
        answer = await waiting
        assert answer.status_code == 200
        text = answer.text.removeprefix("data: ").split("\n\n")[0]
        assert [c["finish_reason"] for c in json.loads(text)["choices"]] == says
        assert served.gateway.gate.held == 0
        assert not served.gateway.rollouts.running
        assert not fleet.replicas[0].log.rollouts


async def test_an_unknown_name_is_asked_of_everyone_and_ends_nothing_here() -> None:
    """Another gateway of the fleet may have it, so every form it can have goes to every replica."""
    async with (
        SimFleet(replicas=2, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls))) as served,
    ):
        await served.http.post("/abort_requests", json={"request_ids": ["z"]})
        for replica in fleet.replicas:
            [call] = replica.log.calls("/abort_requests")
            assert "cmpl-z-0" in call.body["request_ids"]
            assert "chatcmpl-z" in call.body["request_ids"]


async def test_the_inference_abort_ends_those_named_and_no_one_else() -> None:
    """An empty list there is nobody, while for /abort_requests it is everybody."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls))) as served,
    ):
        nobody = await served.http.post("/inference/v1/abort_requests", json={"request_ids": []})
        assert nobody.json()["aborted"] == 0
        assert (await served.http.post("/inference/v1/abort_requests", json={})).status_code == 400
        assert not fleet.replicas[0].log.calls("/abort_requests")
