"""`fleet demo`: the main job on embedded defaults, start to end, with every claim checked.

Simulated servers with real tensors, a gateway on a real socket, rollouts in flight all the time,
and a torch trainer that syncs several versions through the stock client protocol. It ends with a
table, and with exit status 0 only if every check held: each version reached every replica, the
weights are those that the trainer sent, no rollout was lost or mislabelled, no server died.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from rich.console import Console
from rich.table import Table

from fleet.owner import task_owner
from fleet.sim import SimFleet
from fleet.sim.trainer import SimTrainer
from fleet.sim.weights import build_state_dict, replica_checksum
from gateway.app import create_app
from gateway.server import uvicorn_config
from gateway.settings_model import Settings
from gateway.tables import milliseconds, phase_s, total_s

console = Console()

TOKENS = 120
TOKEN_DELAY_MS = 2.0
BETWEEN_SYNCS_S = 0.5


@dataclass
class Rollouts:
    """What became of every rollout."""

    served: Counter[str] = field(default_factory=Counter[str])
    spanning: int = 0
    lost: list[str] = field(default_factory=list[str])
    mislabelled: list[str] = field(default_factory=list[str])


def run_demo(*, replicas: int, versions: int, in_flight: int) -> int:
    """Run the demo and return its exit status."""
    problems = asyncio.run(_demo(replicas, versions, in_flight))
    for problem in problems:
        console.print(f"[red]check failed:[/red] {problem}")
    if not problems:
        console.print("[green]every check held[/green]")
    return 1 if problems else 0


async def _demo(replicas: int, versions: int, in_flight: int) -> list[str]:
    rollouts = Rollouts()
    async with SimFleet(replicas=replicas, token_delay_ms=TOKEN_DELAY_MS) as fleet:
        console.print(f"{replicas} simulated vLLM servers: {', '.join(fleet.urls)}")
        settings = Settings(host="127.0.0.1", port=0, replicas=tuple(fleet.urls))
        async with _serving(settings) as url, aiohttp.ClientSession(url) as http:
            console.print(f"gateway: {url}   (trainers and rollouts need only this)")
            async with task_owner() as owner:
                stop = asyncio.Event()
                for number in range(in_flight):
                    owner.create_task(_keep_asking(http, number, rollouts, stop))
                problems = await _train(url, http, versions)
                stop.set()
                await _until_quiet(http)
            rounds = (await _json(http, "/fleet/rounds"))["rounds"]
            deaths = [r.url for r in fleet.replicas if r.log.outcomes["killed"]]
    _show(rounds, replicas, rollouts)
    problems += [f"a server died: {url}" for url in deaths]
    problems += [f"lost: {text}" for text in rollouts.lost]
    problems += [f"mislabelled: {text}" for text in rollouts.mislabelled]
    if sum(rollouts.served.values()) < in_flight:
        problems.append("hardly any rollout was served")
    return problems


async def _train(url: str, http: aiohttp.ClientSession, versions: int) -> list[str]:
    """Sync several versions and compare every replica's weights with the trainer's own."""
    problems: list[str] = []
    trainer = SimTrainer(url)
    try:
        await asyncio.to_thread(trainer.init)
        console.print(f"trainer: joined a gloo group of {trainer.world_size} ranks")
        for version in range(1, versions + 1):
            await asyncio.sleep(BETWEEN_SYNCS_S)  # lets rollouts run, which the demo is about
            weights = build_state_dict(seed=1000 + version)
            await asyncio.to_thread(trainer.send_weights, weights)
            problems += await _check_version(http, str(version), replica_checksum(weights))
    finally:
        trainer.close()
    await asyncio.sleep(BETWEEN_SYNCS_S)
    return problems


async def _check_version(http: aiohttp.ClientSession, version: str, checksum: str) -> list[str]:
    committed = (await _json(http, "/weight_info"))["weight_version"]
    replicas = (await _json(http, "/fleet/replicas"))["replicas"]
    answer = await _complete(http, "what do you hold?", 1)
    console.print(f"version {committed} committed on {len(replicas)} replicas")
    problems = [f"{r['id']} is {r['state']}" for r in replicas if r["state"] != "ready"]
    if committed != version:
        problems.append(f"version is {committed}, not {version}")
    if answer["sim"]["checksum"] != checksum:
        problems.append(f"version {version}: the weights are not those that were sent")
    return problems


async def _keep_asking(
    http: aiohttp.ClientSession, number: int, rollouts: Rollouts, stop: asyncio.Event
) -> None:
    asked = 0
    while not stop.is_set():
        asked += 1
        tokens = TOKENS * (1 + (number + asked) % 4) // 4
        try:
            await _one_rollout(http, f"rollout {number}.{asked}", tokens, rollouts)
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            rollouts.lost.append(f"rollout {number}.{asked}: {error!r}")


async def _one_rollout(
    http: aiohttp.ClientSession, prompt: str, tokens: int, rollouts: Rollouts
) -> None:
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens}
    async with http.post("/v1/completions", json=body) as response:
        text = await response.text()
        headers = response.headers
    if response.status != 200:
        rollouts.lost.append(f"{prompt}: {response.status} {text[:200]}")
        return
    answer = json.loads(text)
    label = headers["X-Weight-Version"]
    last = headers.get("X-Weight-Version-End", label)
    rollouts.served[label] += 1
    rollouts.spanning += label != last
    if answer["usage"]["completion_tokens"] != tokens:
        rollouts.lost.append(f"{prompt}: {answer['usage']} of {tokens} tokens")
    if answer["sim"]["version"] != last:
        rollouts.mislabelled.append(f"{prompt}: {last}, made by {answer['sim']['version']}")


async def _complete(http: aiohttp.ClientSession, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens}
    async with http.post("/v1/completions", json=body) as response:
        return await response.json()


async def _json(http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with http.get(path) as response:
        return await response.json()


async def _until_quiet(http: aiohttp.ClientSession) -> None:
    """Wait until the rollouts that are under way have been answered."""
    async with asyncio.timeout(30):
        while (await _json(http, "/load"))["server_load"]:  # noqa: ASYNC110 — over a socket
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _serving(settings: Settings) -> AsyncGenerator[str]:
    server = uvicorn.Server(uvicorn_config(create_app(settings), settings))
    async with task_owner() as owner:
        serving = owner.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 — uvicorn sets no event
            await asyncio.sleep(0.01)
        port: int = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving


def _show(rounds: list[dict[str, Any]], replicas: int, rollouts: Rollouts) -> None:
    table = Table("version", "replicas", "pause", "transfer", "total", "rollouts served")
    table.add_row("default", str(replicas), "", "", "", str(rollouts.served["default"]))
    for found in reversed(rounds):
        version = found["version"] or ""
        table.add_row(
            version,
            str(replicas),
            milliseconds(phase_s(found, "pausing")),
            milliseconds(phase_s(found, "updating")),
            milliseconds(total_s(found)),
            str(rollouts.served[version]),
        )
    console.print(table)
    console.print(
        f"rollouts: {sum(rollouts.served.values())} served, {rollouts.spanning} of them across an "
        f"update, lost = {len(rollouts.lost)}, mislabelled = {len(rollouts.mislabelled)}"
    )
