"""What Redis costs a control phase, and how long a dead gateway keeps a trainer waiting.

    make bench-store      or: python -m benchmarks.takeover [--rounds 40] [--kills 5]

First: whole rounds (start, update, finish) over 4 replicas that answer at once, by turns through a
gateway on `memory://`, one on a real Redis, and one of two that share a Redis: there every start
asks the other gateway to close its gate, and every commit tells it. Times are a trainer's.

Then: a gateway is killed (SIGKILL) while an update hangs that it carries, and the trainer repeats
its call at another one. Measured is the time from the kill to the answer of the other gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from statistics import median

import aiohttp
import uvloop

from benchmarks.children import Server, end_on_sigterm, free_port, gateway, redis_store, sinks
from benchmarks.fanout import BODY, JSON, post, timed, until_ready
from fleet.sim import SimFleet, SimOptions

REPLICAS = 4
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
PHASES = {"start": START, "update": UPDATE, "finish": FINISH}
LEASES_S = (5.0, 1.5)

Times = dict[str, list[float]]


async def init(http: aiohttp.ClientSession, url: str, count: int) -> None:
    """Form a group of all replicas."""
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}
    body = {"init_info": info | {"world_size": 1 + count}}
    await post(http, url, INIT, json.dumps(body).encode())


async def measure_phases(urls: list[str], store: str, rounds: int) -> dict[str, Times]:
    """Return the times of each phase, in seconds, for each kind of store; rounds by turns."""
    with ExitStack() as stack:
        found = {
            "memory://": stack.enter_context(gateway(urls)),
            "Redis": stack.enter_context(gateway(urls, store)),
            "Redis, two gateways": stack.enter_context(
                gateway(urls, store, FLEET_NAME="takeover-two")
            ),
        }
        other = stack.enter_context(gateway(urls, store, FLEET_NAME="takeover-two"))
        times: dict[str, Times] = {name: {phase: [] for phase in PHASES} for name in found}
        async with aiohttp.ClientSession() as http:
            for server in (*found.values(), other):
                await until_ready(http, server.url, len(urls))
            for server in found.values():
                await init(http, server.url, len(urls))
            for number in range(rounds + 2):
                for name, server in found.items():
                    await one_round(http, server.url, times[name] if number > 1 else None)
        return times


async def one_round(http: aiohttp.ClientSession, url: str, times: Times | None) -> None:
    """One weight update; its times are kept unless it is one to warm up."""
    for phase, path in PHASES.items():
        took = await timed(post(http, url, path, BODY if phase == "update" else None))
        if times is not None:
            times[phase].append(took)


async def measure_takeovers(store: str, lease_s: float, kills: int) -> list[float]:
    """Return the seconds from each kill to the other gateway's answer."""
    async with SimFleet(SimOptions(replicas=2, backend="nccl")) as sim:
        return [await one_takeover(sim, store, lease_s) for _ in range(kills)]


async def one_takeover(sim: SimFleet, store: str, lease_s: float) -> float:
    """Kill the gateway that carries an update, and ask the other one for its result."""
    name, renew_s = f"takeover-{free_port()}", lease_s / 5

    def start() -> AbstractContextManager[Server]:
        return gateway(
            sim.urls,
            store,
            FLEET_NAME=name,
            FLEET_TIMEOUTS__LEASE_S=str(lease_s),
            FLEET_TIMEOUTS__LEASE_RENEW_S=str(renew_s),
        )

    with start() as here, start() as there:
        async with aiohttp.ClientSession() as http:
            for server in (here, there):
                await until_ready(http, server.url, len(sim.urls))
            await init(http, here.url, len(sim.urls))
            await post(http, here.url, PHASES["start"], None)
            async with hanging(sim):
                dying = asyncio.ensure_future(post(http, here.url, UPDATE, BODY))
                await until_called(sim)
                return await kill_and_ask(http, here, there, dying)


async def kill_and_ask(
    http: aiohttp.ClientSession, here: Server, there: Server, dying: asyncio.Future[None]
) -> float:
    """Return how long the trainer waits for an answer after its gateway was killed."""
    os.kill(here.pid, signal.SIGKILL)
    began = time.perf_counter()
    await asyncio.wait((dying,))
    assert dying.exception() is not None
    async with http.post(there.url + UPDATE, data=BODY, headers=JSON) as answer:
        text = await answer.text()
        took = time.perf_counter() - began
        if answer.status != 504 or "outcome unknown" not in text:
            raise SystemExit(f"an answer that was not expected: {answer.status} {text}")
    return took


async def until_called(sim: SimFleet) -> None:
    """Wait until every replica has got an update."""
    async with asyncio.timeout(30):
        # It happens in the replicas' own handlers, which set no event.
        while not all(UPDATE in replica.log.paths() for replica in sim.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def hanging(sim: SimFleet) -> AsyncGenerator[None]:
    """Let the second replica never answer an update; in the end all are as new."""
    sim.replicas[1].faults.add(UPDATE, "hang")
    yield
    for replica in sim.replicas:
        replica.faults.clear()
        replica.log.clear()
        await replica.restart()


def phase_rows(times: dict[str, Times]) -> list[str]:
    """Return the table of phases, in milliseconds."""
    rows = ["| store | start | update | finish |", "| --- | ---: | ---: | ---: |"]
    base = {phase: median(found) for phase, found in times["memory://"].items()}
    for name, found in times.items():
        medians = {phase: median(taken) for phase, taken in found.items()}
        cells = [f"{m * 1000:.1f} ms{added(m, base[phase])}" for phase, m in medians.items()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def added(took: float, base: float) -> str:
    """Return by how much one median is above another, in milliseconds; nothing, if it is that."""
    return "" if took == base else f" ({(took - base) * 1000:+.1f})"


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kills", type=int, default=5)
    asked = parser.parse_args()
    end_on_sigterm()
    with redis_store() as store:
        if store is None:
            raise SystemExit("no redis-server on the PATH: run `make redis`")
        with sinks(REPLICAS) as (urls, _):
            times = uvloop.run(measure_phases(urls, store, asked.rounds))
        print("\n".join(phase_rows(times)), end="\n\n", flush=True)
        print("| lease | kills | answer after: median | longest |")
        print("| ---: | ---: | ---: | ---: |")
        for lease_s in LEASES_S:
            took = asyncio.run(measure_takeovers(store, lease_s, asked.kills))
            row = f"{median(took):.2f} s | {max(took):.2f} s |"
            print(f"| {lease_s:g} s | {len(took)} | {row}", flush=True)


if __name__ == "__main__":
    main()
