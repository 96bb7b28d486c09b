"""A gateway that is told to stop: what it holds has the drain time, like what runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import httpx
import pytest

from fleet.sim import SimFleet
from tests.cases.conftest import FINISH, Case, check_error, nccl
from tests.cases.raw_http import read_message, request_of
from tests.gateways.processes import GatewayProcess, gateways
from tests.waiting import wait_until

PATIENT = "15"
"""Seconds that a gateway may take to stop: more than any of these tests."""


def end(gateway: GatewayProcess) -> None:
    """Ask it to stop, as an operator or Kubernetes does."""
    gateway.process.terminate()


async def has_stopped_listening(gateway: GatewayProcess) -> bool:
    """Whether nobody new gets in: it has heard that it must stop."""
    where = urlsplit(gateway.url)
    with socket.socket() as asking:
        return asking.connect_ex((where.hostname, where.port)) != 0


async def closed_to_all(gateway: GatewayProcess) -> None:
    """Tell it to stop and wait until it has heard."""
    end(gateway)
    await wait_until(lambda: has_stopped_listening(gateway))


async def complete_in_pieces(case: Case) -> httpx.Response:
    """A rollout of unknown length: not the front carries that, but uvicorn."""

    async def pieces() -> AsyncGenerator[bytes]:
        yield b'{"prompt":"x",'
        yield b'"max_tokens":2}'

    headers = {"Content-Type": "application/json"}
    return await case.http.post("/v1/completions", content=pieces(), headers=headers)


async def ended(gateway: GatewayProcess, within_s: float) -> int:
    """Its exit status; TimeoutError if it runs on."""
    return await asyncio.wait_for(gateway.process.wait(), within_s)


async def test_what_a_stopping_gateway_holds_is_served_when_another_one_commits(
    redis_url: str, tmp_path: Path
) -> None:
    """The round began at the gateway that stops; nothing of it is lost, and nobody is sent away."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(sim, redis_url, tmp_path, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        here, there = several.case(0), several.case(1)
        await here.init()
        await here.start()
        held = [asyncio.ensure_future(here.complete()) for _ in range(4)]
        held.append(asyncio.ensure_future(complete_in_pieces(here)))
        await here.await_held(5)
        await closed_to_all(several.all[0])
        assert not any(waiting.done() for waiting in held)
        assert (await there.update()).status_code == 200
        assert (await there.finish("7")).status_code == 200
        for answer in await asyncio.gather(*held):
            assert answer.status_code == 200
            assert answer.headers["X-Weight-Version"] == "7"
            assert answer.headers["Connection"] == "close"
        assert await ended(several.all[0], 5) in (0, -15)


async def test_a_gateway_that_comes_while_the_only_one_stops_opens_its_gate(
    redis_url: str, tmp_path: Path
) -> None:
    """A lone gateway is replaced in the middle of a round; its successor finishes that."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(sim, redis_url, tmp_path, 1, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        before = several.case(0)
        await before.init()
        await before.start()
        held = asyncio.ensure_future(before.complete())
        await before.await_held(1)
        await closed_to_all(several.all[0])
        await several.start()
        after = several.case(1)
        await after.update()
        assert (await after.finish()).status_code == 200
        assert (await held).status_code == 200
        assert await ended(several.all[0], 5) in (0, -15)


async def test_a_finish_on_its_way_lets_out_what_the_same_gateway_holds(tmp_path: Path) -> None:
    """The trainer's own connection is closed after the answer; the rollouts are served before."""
    async with (
        SimFleet(nccl(2)) as sim,
        gateways(sim, "memory://", tmp_path, 1, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        here = several.case(0)
        await here.init()
        await here.start()
        await here.update()
        held = asyncio.ensure_future(here.complete())
        await here.await_held(1)
        sim.replicas[0].faults.add(FINISH, "delay", seconds=1.5)
        finishing = asyncio.ensure_future(here.finish("3"))
        await wait_until(lambda: is_in_phase(here, "finishing"))
        await closed_to_all(several.all[0])
        assert (await finishing).status_code == 200
        assert (await held).headers["X-Weight-Version"] == "3"
        assert await ended(several.all[0], 5) in (0, -15)


async def is_in_phase(case: Case, phase: str) -> bool:
    """Whether the fleet has come to this phase."""
    return (await case.fleet())["phase"] == phase


async def test_what_nobody_lets_out_is_sent_away_before_the_drain_time_is_over(
    redis_url: str, tmp_path: Path
) -> None:
    """503 with Retry-After, from this gateway, and not a connection that breaks."""
    async with (
        SimFleet(nccl(1)) as sim,
        gateways(sim, redis_url, tmp_path, FLEET_TIMEOUTS__DRAIN_S="3") as several,
    ):
        here = several.case(0)
        await here.ok("/pause?mode=keep")
        held = asyncio.ensure_future(here.complete())
        await here.await_held(1)
        told_at = monotonic()
        await closed_to_all(several.all[0])
        answer = await held
        assert 2.0 < monotonic() - told_at < 3.0
        check_error(answer, 503, "stopping")
        assert answer.headers["Retry-After"]
        assert await ended(several.all[0], 5) in (0, -15)
        assert "Traceback" not in several.all[0].log.read_text()


async def test_a_gate_that_nobody_can_open_any_more_holds_nobody_up(tmp_path: Path) -> None:
    """With the state in this process alone, and no call on its way here, waiting would be vain."""
    async with (
        SimFleet(nccl(1)) as sim,
        gateways(sim, "memory://", tmp_path, 1, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        here = several.case(0)
        await here.ok("/pause?mode=keep")
        held = asyncio.ensure_future(here.complete())
        await here.await_held(1)
        end(several.all[0])
        assert await ended(several.all[0], 5) in (0, -15)
        check_error(await held, 503, "stopping")


async def test_a_gateway_that_holds_nothing_stops_at_once(redis_url: str, tmp_path: Path) -> None:
    """Whatever the drain time, however closed the gate, and with connections that are kept."""
    async with (
        SimFleet(nccl(1)) as sim,
        gateways(sim, redis_url, tmp_path, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        here = several.case(0)
        assert (await here.complete()).status_code == 200
        await here.init()
        assert (await here.start()).status_code == 200
        end(several.all[0])
        assert await ended(several.all[0], 3) in (0, -15)


async def test_a_request_of_which_a_part_has_come_is_still_answered(tmp_path: Path) -> None:
    """Its client cannot know that the gateway stops; the answer says that the connection ends."""
    async with (
        SimFleet(nccl(1)) as sim,
        gateways(sim, "memory://", tmp_path, 1, FLEET_TIMEOUTS__DRAIN_S=PATIENT) as several,
    ):
        raw = request_of(
            "/v1/completions",
            b'{"prompt":"x","max_tokens":2}',
            "Content-Type: application/json",
        )
        where = urlsplit(several.all[0].url)
        async with AsyncExitStack() as stack:
            opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, int]] = []
            for cut in (30, len(raw) - 5):  # within the head, within the body
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                stack.callback(writer.close)
                writer.write(raw[:cut])
                opened.append((reader, writer, cut))
            await several.case(0).fleet()  # what was sent before has been read by then
            await closed_to_all(several.all[0])
            for reader, writer, cut in opened:
                writer.write(raw[cut:])
                answer = await read_message(reader)
                assert answer.first_line.split()[1] == "200"
                assert answer.values("connection") == ["close"]
                assert await reader.read() == b""
        assert await ended(several.all[0], 5) in (0, -15)


async def test_a_short_drain_time_is_an_end_all_the_same(tmp_path: Path) -> None:
    """Less than a second is not «for ever»: a rollout that goes on and on is cut off."""
    async with (
        SimFleet(nccl(1)) as sim,
        gateways(sim, "memory://", tmp_path, 1, FLEET_TIMEOUTS__DRAIN_S="0.4") as several,
    ):
        sim.replicas[0].faults.add("/v1/completions", "hang")
        endless = asyncio.ensure_future(several.case(0).complete())

        async def is_running() -> bool:
            found = (await several.all[0].http.get("/fleet/replicas")).json()["replicas"]
            return found[0]["inflight"] == 1

        await wait_until(is_running)
        end(several.all[0])
        assert await ended(several.all[0], 5) in (0, -15)
        with pytest.raises(httpx.HTTPError):
            await endless
