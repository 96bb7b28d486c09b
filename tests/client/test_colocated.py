"""Trainer and replicas share their memory: one call, one order, and everything back if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fleet.client import FleetWeightSyncClient
from fleet.client.colocated import colocated_update
from fleet.client.errors import FleetError, MemberFailed
from tests.cases.conftest import FINISH, START, UPDATE, Case, case_of
from tests.client.conftest import aside, join, send, url_of

ORDER = ["/pause", "/sleep", "/wake_up", START, UPDATE, FINISH, "/wake_up", "/resume"]


@asynccontextmanager
async def joined() -> AsyncGenerator[tuple[Case, FleetWeightSyncClient]]:
    """A trainer whose fleet is at version 1."""
    async with case_of() as case:
        with FleetWeightSyncClient(url_of(case)) as client:
            await aside(join, client)
            await aside(send, client, "1")
            case.forget_logs()
            yield case, client


async def cycle(client: FleetWeightSyncClient, version: str = "2", **more: Any) -> None:
    """One whole choreography around an update that commits this version."""
    await aside(colocated_update, client, lambda: send(client, version), **more)


@pytest.mark.parametrize("level", [1, 2])
async def test_one_call_moves_every_replica_through_sleep_and_update(level: int) -> None:
    """Asleep while the trainer trains; weights first, then the update, then the cache."""
    async with joined() as (case, client):
        states: list[list[str]] = []
        loop = asyncio.get_running_loop()

        def train() -> None:
            states.append(asyncio.run_coroutine_threadsafe(case.states(), loop).result(10))

        await cycle(client, train=train, level=level)
        assert states == [["asleep", "asleep", "asleep"]]
        assert case.all_sent() == [ORDER] * 3
        assert await case.states() == ["ready", "ready", "ready"]
        assert await case.version() == "2"
        assert (await case.complete()).headers["X-Weight-Version"] == "2"


async def test_the_gate_is_shut_from_before_the_first_sleeps_until_all_are_awake() -> None:
    """A rollout that comes while the trainer trains is served by the new weights."""
    async with joined() as (case, client):
        asked: list[asyncio.Task[Any]] = []
        loop = asyncio.get_running_loop()

        async def ask() -> None:
            asked.append(asyncio.ensure_future(case.complete()))
            await case.await_held(1)

        def train() -> None:
            asyncio.run_coroutine_threadsafe(ask(), loop).result(10)

        await cycle(client, train=train)
        answer = await asked[0]
        assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "2")


async def test_a_training_step_that_fails_gives_the_fleet_back_as_it_was() -> None:
    """Level 1 kept the weights: it serves the old version again."""
    async with joined() as (case, client):
        with pytest.raises(ZeroDivisionError):
            await cycle(client, train=lambda: 1 // 0)
        assert await case.states() == ["ready", "ready", "ready"]
        assert (await case.complete()).headers["X-Weight-Version"] == "1"


async def test_what_sleep_threw_away_stays_fenced_until_it_comes_back() -> None:
    """Level 2 discarded the weights, so nothing may be served; the next cycle heals."""
    async with joined() as (case, client):
        with pytest.raises(ZeroDivisionError):
            await cycle(client, train=lambda: 1 // 0, level=2)
        assert await case.states() == ["fenced", "fenced", "fenced"]
        await aside(join, client)
        await cycle(client)
        assert await case.states() == ["ready", "ready", "ready"]


async def test_a_replica_that_does_not_fall_asleep_wakes_the_others() -> None:
    """Half a fleet asleep is no state to stay in."""
    async with joined() as (case, client):
        case.replicas[1].faults.add("/sleep", "status", status=500)
        with pytest.raises(MemberFailed, match="sleep failed"):
            await cycle(client)
        assert await case.states() == ["ready", "ready", "ready"]


async def test_an_update_that_fails_leaves_nobody_asleep_and_nobody_serving_mixed_weights() -> None:
    """The gateway's fences stay; memory and gate are back for the next attempt."""
    async with joined() as (case, client):
        case.replicas[1].faults.add(UPDATE, "status", status=500)
        with pytest.raises(MemberFailed, match="update failed"):
            await cycle(client)
        assert await case.states() == ["fenced", "fenced", "fenced"]
        assert not await aside(client.is_sleeping)
        await aside(join, client)
        await aside(send, client, "2")
        assert await case.states() == ["ready", "ready", "ready"]
        assert (await case.complete()).headers["X-Weight-Version"] == "2"


async def test_a_fleet_that_was_paused_before_stays_paused() -> None:
    """Whoever paused it resumes it."""
    async with joined() as (case, client):
        await aside(client.pause)
        await cycle(client)
        assert (await case.fleet())["gate"]["state"] == "closed"
        await aside(client.resume)
        assert await case.states() == ["ready", "ready", "ready"]


async def test_what_cannot_be_taken_back_is_told_with_the_failure() -> None:
    """One replica does not wake up any more."""
    async with joined() as (case, client):
        case.replicas[2].faults.add("/wake_up", "status", status=500, times=0)
        with pytest.raises(FleetError, match="wake_up failed") as failure:
            await cycle(client)
        assert any("not taken back" in note for note in failure.value.__notes__)
        assert await case.states() == ["ready", "ready", "asleep"]
