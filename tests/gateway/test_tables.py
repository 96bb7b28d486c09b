"""What operators read on a terminal after an update has failed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rich.console import Console, RenderableType

from fleet.sim import SimFleet
from fleet.sim.trainer import SimTrainer, TrainerError
from fleet.sim.weights import build_state_dict
from gateway.settings_model import Settings
from gateway.tables import rounds_table, status_table
from tests.gateway.serving import Served, serve

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


async def _status(served: Served) -> str:
    replicas = (await served.http.get("/fleet/replicas")).json()
    return _printed(status_table(await served.fleet(), replicas))


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
