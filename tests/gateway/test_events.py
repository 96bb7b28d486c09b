"""GET /fleet/events: what happens to the fleet, as it happens, and from where one was cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet.sim import SimFleet
from gateway.settings_model import Settings
from tests.gateway.serving import Served, serve

INFO = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    """Both kinds of store deliver events."""
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")


@asynccontextmanager
async def following(served: Served, last: str | None = None) -> AsyncGenerator[Any]:
    """Yield an iterator over (id, event) pairs; it follows from the first line on."""
    headers = {"Last-Event-ID": last} if last else {}
    async with served.http.stream("GET", "/fleet/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith(":")

        async def pairs() -> AsyncGenerator[tuple[str, dict[str, Any]]]:
            found = ""
            async for line in lines:
                if line.startswith("id: "):
                    found = line[4:]
                elif line.startswith("data: "):
                    yield found, json.loads(line[6:])

        yield pairs()


async def _round(served: Served) -> None:
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"names": ["w"]}}),
        ("/finish_weight_update", None),
    ):
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


async def test_a_weight_update_is_told_event_by_event_and_can_be_taken_up_again(store: str) -> None:
    """In order, with phase and version; a follower that was cut off misses nothing."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls), store=store)) as served,
        asyncio.timeout(20),
    ):
        async with following(served) as events:
            first = asyncio.ensure_future(anext(events))
            await served.http.post("/init_weight_transfer_engine", json={"init_info": INFO})
            seen_id, event = await first
            assert (event["event"], event["phase"]) == ("InitRequested", "initializing")
            await _round(served)
        async with following(served, seen_id) as events:
            told = [(await anext(events))[1] for _ in range(9)]
    assert [e["event"] for e in told] == [
        "InitArrived",
        "StartRequested",
        "PauseArrived",
        "StartArrived",
        "UpdateRequested",
        "UpdateArrived",
        "FinishRequested",
        "FinishArrived",
        "Resumed",
    ]
    assert [e["weight_version"] for e in told][-3:] == ["default", "1", "1"]


async def test_a_failure_is_told_with_who_failed_and_why(store: str) -> None:
    """The event carries the replica's own words."""
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls), store=store)) as served,
        asyncio.timeout(20),
    ):
        fleet.replicas[0].faults.add("/init_weight_transfer_engine", "status", status=500)
        async with following(served) as events:
            first = asyncio.ensure_future(anext(events))
            await served.http.post("/init_weight_transfer_engine", json={"init_info": INFO})
            await first
            _, event = await anext(events)
    assert event["event"] == "InitFailed"
    assert list(event["failed"]) == [fleet.replicas[0].id]
