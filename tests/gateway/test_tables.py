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


def _printed(table: RenderableType) -> str:
    console = Console(width=1000)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _send(url: str) -> None:
    trainer = SimTrainer(url, timeout_s=30)
    with suppress(TrainerError):
        trainer.init()
        trainer.send_weights(build_state_dict(1), "v1")
    trainer.close()


async def _status(served: Served, *, later_s: float = 0) -> str:
    replicas = (await served.http.get("/fleet/replicas")).json()
    return _printed(status_table(await served.fleet(), replicas, time() + later_s))


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
        reasons = [line for line in after.splitlines() if line.startswith(f"{ids} fenced: ")]
        assert len(reasons) == 1
        assert REASON in reasons[0]
        assert "init again with world_size=4" in after

        rounds = _printed(rounds_table((await served.http.get("/fleet/rounds")).json()))
        told = [line for line in rounds.splitlines() if REASON in line]
        assert len(told) == 1
        assert told[0].startswith("round 1: finish: ")


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
