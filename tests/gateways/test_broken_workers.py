"""Workers of one gateway that are killed while they carry rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from fleet.sim import SimFleet
from gateway.workers import FAILS_TO_START_S
from tests.cases.conftest import nccl
from tests.gateways.processes import FLEET, QUICK
from tests.ports import free_port
from tests.waiting import wait_until

WORKERS = 3


def children(process: asyncio.subprocess.Process) -> set[int]:
    """The ids of the workers that live."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return {int(pid) for pid in found.split()}


@asynccontextmanager
async def workers(
    sim: SimFleet, store: str, log: Path
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """Serve with several workers; yields the parent, and a client with a connection per request."""
    port = free_port()
    arguments = ["serve", "--host", "127.0.0.1", "--port", str(port), "--store", store]
    arguments += ["--workers", str(WORKERS), *[f"--replica={url}" for url in sim.urls]]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            FLEET, *arguments, env=clean | QUICK, stdout=output, stderr=output
        )
    one_each = httpx.Limits(max_keepalive_connections=0)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=60, trust_env=False, limits=one_each
        ) as http:
            yield process, http
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def all_there(http: httpx.AsyncClient) -> bool:
    """Whether every worker has its seat."""
    try:
        return len((await http.get("/fleet")).json()["gateways"]) == WORKERS
    except httpx.HTTPError:
        return False


async def test_workers_that_are_killed_one_after_the_other_take_no_other_along(
    redis_url: str, tmp_path: Path
) -> None:
    """Only their own rollouts are lost, though the second lived no longer than a failed start."""
    options = nccl(2, token_delay_ms=20)
    async with (
        SimFleet(options) as sim,
        workers(sim, redis_url, tmp_path / "log") as (parent, http),
    ):
        await wait_until(lambda: all_there(http), timeout_s=20)
        await asyncio.sleep(FAILS_TO_START_S)  # they count as started only then
        body = {"prompt": "x", "max_tokens": 400}
        rollouts = [
            asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(30)
        ]

        async def running() -> bool:
            return sum(replica.stats()["running"] for replica in sim.replicas) == len(rollouts)

        await wait_until(running)
        first = children(parent)
        for _ in range(2):
            before = children(parent)
            os.kill(max(before - first or before), signal.SIGKILL)

            async def replaced() -> bool:
                now = children(parent)
                return len(now) == WORKERS and now != before  # noqa: B023

            await wait_until(replaced)
        answers = await asyncio.gather(*rollouts, return_exceptions=True)
        served = [a for a in answers if isinstance(a, httpx.Response) and a.status_code == 200]
        assert len(served) >= len(rollouts) // 3
        assert len(first & children(parent)) == WORKERS - 1
        await wait_until(lambda: all_there(http), timeout_s=20)
        assert (await http.post("/v1/completions", json=body | {"max_tokens": 1})).is_success


def test_workers_that_cannot_start_end_the_gateway() -> None:
    """Replacing them for ever would only hide it."""
    script = "from gateway.workers import supervise; raise SystemExit(supervise(2, lambda: 1 / 0))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    assert ended.returncode == 1
