"""What operators read on a terminal after an update has failed."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from time import time

from rich.console import Console, RenderableType

from fleet.sim import SimFleet
from fleet.sim.trainer import SimTrainer, TrainerError
from fleet.sim.weights import build_state_dict
from gateway.settings_model import Settings
from gateway.tables import rounds_table, status_table
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

REASON = "scripted fault"


def _printed(table: RenderableType, width: int = 1000) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _send(url: str) -> None:
    trainer = SimTrainer(url, timeout_s=30)
    with suppress(TrainerError):
        trainer.init()
        trainer.send_weights(build_state_dict(1), "v1")
    trainer.close()


async def _status(served: Served, *, later_s: float = 0, width: int = 1000) -> str:
    replicas = (await served.http.get("/fleet/replicas")).json()
    return _printed(status_table(await served.fleet(), replicas, time() + later_s), width)


async def test_each_reason_stands_once_and_the_next_step_is_named() -> None:
    """A failure of the whole fleet is one line, not one per replica, and says what to do."""
    async with SimFleet(replicas=3) as fleet, serve(Settings(replicas=tuple(fleet.urls))) as served:
        before = await _status(served)
        assert "none (1 worker)" in before
        assert "world_size" not in before

        fleet.replicas[1].faults.add("/finish_weight_update", "status")
        await asyncio.to_thread(_send, served.url)
        after = await _status(served)
        ids = ", ".join(url.removeprefix("http://") for url in fleet.urls)
        reasons = [line for line in after.splitlines() if REASON in line]
        assert len(reasons) == 1
        assert reasons[0].startswith(f"{ids} fenced: ")
        assert re.search(r"^round 1, failed, opened .*: finish failed$", after, re.MULTILINE)
        told = (await served.fleet())["hint"]
        assert told.startswith("re-init with world_size=4 and send a full update; or commit it")
        assert f"next: {told}" in after

        rounds = _printed(rounds_table((await served.http.get("/fleet/rounds")).json()))
        told = [line for line in rounds.splitlines() if REASON in line]
        assert len(told) == 1
        assert told[0].startswith("round 1: finish: ")


async def test_after_a_reset_with_everyone_fenced_an_operator_reads_what_to_do() -> None:
    """The same words in the answer, on the terminal and in GET /fleet; no label counts any more."""
    async with SimFleet(replicas=2) as fleet, serve(Settings(replicas=tuple(fleet.urls))) as served:
        await asyncio.to_thread(_send, served.url)
        healthy = await _status(served)
        assert "│ v1 " in healthy
        assert "next:" not in healthy

        fleet.replicas[1].faults.add("/finish_weight_update", "status")
        await asyncio.to_thread(_send, served.url)
        reset = (await served.http.post("/fleet/reset")).json()
        hint = reset["fleet"]["hint"]
        assert hint == (
            "init with world_size=3 and send a full update; no replica is ready, so rollouts wait "
            "although the gate is open, each for at most FLEET_GATE__TIMEOUT_S"
        )
        status = await _status(served)
        assert f"next: {hint}" in status
        assert status.count("│ v1? ") == 2


async def test_a_store_that_fails_is_told_first_since_all_else_may_be_old() -> None:
    """As the dashboard does, with its reason."""
    async with SimFleet(replicas=1) as fleet, serve(Settings(replicas=tuple(fleet.urls))) as served:
        seen = await served.fleet() | {"store": {"since": time() - 200, "reason": "refused"}}
        replicas = (await served.http.get("/fleet/replicas")).json()
        told = _printed(status_table(seen, replicas, time())).splitlines()[2]
        assert re.fullmatch(
            r"the store fails, first 3 min \d+ s ago, so this may be old: refused", told
        )


async def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    """No line of the summary and no row of the rounds wraps; the first line says no word twice."""
    async with SimFleet(replicas=1) as fleet, serve(Settings(replicas=tuple(fleet.urls))) as served:
        empty = _printed(rounds_table((await served.http.get("/fleet/rounds")).json()), 80)
        assert empty == "no rounds yet\n"
        await asyncio.to_thread(_send, served.url)
        first, second, *_ = (await _status(served, width=80)).splitlines()
        assert first == "fleet: weight_version v1, phase initialized"
        assert re.fullmatch(r"gate open, 0 held, generation \d+", second)
        rounds = _printed(rounds_table((await served.http.get("/fleet/rounds")).json()), 80)
        times = r"(\d+ ms\s+){3}\d+ ms"
        assert re.search(
            rf"^\s*1 +committed +v1 +\d\d-\d\d \d\d:\d\d:\d\d +{times}", rounds, re.MULTILINE
        )


async def test_whatever_lasts_is_told_with_its_age() -> None:
    """A closed gate, a pause, a round, a call: an operator sees at once which of them hangs."""
    async with SimFleet(replicas=1) as fleet, serve(Settings(replicas=tuple(fleet.urls))) as served:
        await served.http.post("/pause?mode=keep")
        paused = await _status(served, later_s=200)
        assert re.search(r"gate closed 3 min \d+ s ago, 0 held", paused)
        assert re.search(r"^paused 3 min \d+ s ago by 127\.0\.0\.1:", paused, re.MULTILINE)
        await served.http.post("/resume")

        fleet.replicas[0].faults.add("/finish_weight_update", "hang")
        sending = asyncio.ensure_future(asyncio.to_thread(_send, served.url))

        async def is_finishing() -> bool:
            return (await served.fleet())["phase"] == "finishing"

        await wait_until(is_finishing)
        hanging = await _status(served, later_s=200)
        assert re.search(r"^finish on its way, begun 3 min \d+ s ago by ", hanging, re.MULTILINE)
        assert re.search(r"^round 1, open, opened 3 min \d+ s ago by ", hanging, re.MULTILINE)
        await fleet.replicas[0].die()
        await sending
