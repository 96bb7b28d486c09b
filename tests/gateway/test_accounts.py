"""Accounts: every rollout is counted once, under the versions it was promised and ended with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fleet.sim import SimFleet
from gateway.metrics import SERIES_KEPT, Metrics
from gateway.settings_model import Log, Settings
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

INFO = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


async def _update(served: Served) -> None:
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"names": ["w"]}}),
        ("/finish_weight_update", None),
    ):
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_the_access_log_has_a_line_for_every_rollout(tmp_path: Path) -> None:
    """Versions at both ends, replica, times, tokens; a cancelled one has its line, too."""
    file = tmp_path / "access.jsonl"
    async with (
        SimFleet(replicas=1, backend="nccl", token_delay_ms=5) as fleet,
        serve(Settings(replicas=tuple(fleet.urls), log=Log(access=str(file)))) as served,
    ):
        await served.http.post("/init_weight_transfer_engine", json={"init_info": INFO})
        body = {"model": "sim", "prompt": "x", "max_tokens": 60}
        async with asyncio.TaskGroup() as group:
            headers = {"X-Request-Id": "spanning"}
            spanning = group.create_task(
                served.http.post("/v1/completions", json=body, headers=headers)
            )

            async def is_running() -> bool:
                return bool(served.gateway.gate.inflight)

            await wait_until(is_running)
            await _update(served)
        assert spanning.result().headers["x-weight-version-end"] == "1"
        stream = served.http.stream("POST", "/v1/completions", json={**body, "stream": True})
        async with stream as answer:
            await anext(answer.aiter_raw())

        async def both_written() -> bool:
            return len(_lines(file)) == 2

        await wait_until(both_written)
        metrics = (await served.http.get("/metrics")).text
    first, second = _lines(file)
    assert first["request_id"] == "spanning"
    assert (first["version"], first["version_end"], first["tokens"]) == ("default", "1", 60)
    assert (first["outcome"], first["status"]) == ("complete", 200)
    assert first["replica"] == fleet.replicas[0].id
    assert first["elapsed_s"] > 0.05
    assert (second["outcome"], second["version"]) == ("cancelled", "1")
    assert "fleet_rollouts_spanning_total 1.0" in metrics
    assert "fleet_rollouts_cancelled_total 1.0" in metrics


async def test_the_time_at_the_gate_is_counted(tmp_path: Path) -> None:
    """A rollout that was held says for how long."""
    file = tmp_path / "access.jsonl"
    async with (
        SimFleet(replicas=1, backend="nccl") as fleet,
        serve(Settings(replicas=tuple(fleet.urls), log=Log(access=str(file)))) as served,
    ):
        await served.http.post("/pause?mode=keep")
        async with asyncio.TaskGroup() as group:
            body = {"model": "sim", "prompt": "x", "max_tokens": 1}
            group.create_task(served.http.post("/v1/completions", json=body))

            async def is_held() -> bool:
                return served.gateway.gate.held == 1

            await wait_until(is_held)
            await served.http.post("/resume")
        metrics = (await served.http.get("/metrics")).text
    assert _lines(file)[0]["held_s"] > 0
    assert "fleet_rollout_held_seconds_count 1.0" in metrics


def test_old_versions_leave_the_metrics() -> None:
    """A run of thousands of versions must not leave thousands of series behind."""
    metrics = Metrics()
    for version in range(3 * SERIES_KEPT):
        metrics.count_rollout(str(version), 200)
    lines = [
        row for row in metrics.render().decode().splitlines() if "fleet_rollouts_total{" in row
    ]
    assert len(lines) == SERIES_KEPT
    assert any(f'version="{3 * SERIES_KEPT - 1}"' in line for line in lines)
