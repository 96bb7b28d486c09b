"""What a whole weight update costs through the gateway, beside a script that does it directly.

    make bench-rounds     or: python -m benchmarks.rounds [--replicas 1 8 64 256] [--rounds 30]

The replicas take as long for each phase as they took on a GPU (benchmarks/sinks.py), so what the
gateway does while they are at work costs nothing here either. *Directly* is the best that a script
can do: all replicas at once on kept connections (`aiohttp`, uvloop), a pause before the start, a
resume after the finish, and nothing looked at or written down. Both ways alternate in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from statistics import median

import aiohttp
import uvloop

from benchmarks.children import end_on_sigterm, gateway, redis_store, sinks
from benchmarks.fanout import BODY, post, until_ready
from benchmarks.sinks import raise_file_limit
from benchmarks.takeover import FINISH, START, UPDATE, added, init

PAUSE, RESUME = "/pause?mode=keep&clear_cache=true", "/resume"

Phase = Callable[[], Awaitable[None]]
Times = list[list[float]]


def directly(http: aiohttp.ClientSession, urls: list[str]) -> list[Phase]:
    """Return the phases of a round without a gateway."""

    async def everyone(*paths: str, body: bytes | None = None) -> None:
        for path in paths:
            await asyncio.gather(*(post(http, url, path, body) for url in urls))

    return [
        lambda: everyone(PAUSE, START),
        lambda: everyone(UPDATE, body=BODY),
        lambda: everyone(FINISH, RESUME),
    ]


def through(http: aiohttp.ClientSession, url: str) -> list[Phase]:
    """Return the phases of a round through the gateway."""
    return [
        lambda: post(http, url, START, None),
        lambda: post(http, url, UPDATE, BODY),
        lambda: post(http, url, FINISH, None),
    ]


async def one_round(phases: list[Phase]) -> list[float]:
    """Return how long each phase took, in seconds."""
    gc.collect()
    took: list[float] = []
    for phase in phases:
        began = time.perf_counter()
        await phase()
        took.append(time.perf_counter() - began)
    return took


async def measure(urls: list[str], stores: list[str], rounds: int) -> dict[str, Times]:
    """Alternate the ways over the same replicas; two rounds of each are not counted."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        ways = {"directly": directly(http, urls)}
        times: dict[str, Times] = {}
        for store in stores:
            with gateway(urls, store, logs=True) as server:
                await until_ready(http, server.url, len(urls))
                await init(http, server.url, len(urls))
                pair = ways | {store.partition(":")[0]: through(http, server.url)}
                for number in range(rounds + 2):
                    for name in list(pair)[:: 1 if number % 2 else -1]:
                        took = await one_round(pair[name])
                        if number > 1:
                            times.setdefault(name, []).append(took)
        return times


def rows(replicas: int, times: dict[str, Times]) -> list[str]:
    """Return the rows of one fleet size, in milliseconds; what is added to the direct way."""
    base = [median(phase) for phase in zip(*times["directly"], strict=True)]
    whole = median(sum(took) for took in times["directly"])
    found: list[str] = []
    for name, taken in times.items():
        phases = [median(phase) for phase in zip(*taken, strict=True)]
        total = median(sum(took) for took in taken)
        cells = [_cell(took, least) for took, least in zip(phases, base, strict=True)]
        cells += [_cell(total, whole), f"{total / whole:.3f}"]
        found.append(f"| {replicas} | {name} | {' | '.join(cells)} |")
    return found


def _cell(took: float, base: float) -> str:
    return f"{took * 1000:.1f}{added(took, base)}"


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    raise_file_limit()
    end_on_sigterm()
    print("| replicas | way | pause + start | update | finish + resume | round, ms | ratio |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    with redis_store() as redis:
        stores = ["memory://", *([redis] if redis else [])]
        for count in asked.replicas:
            with sinks(count, paced=True) as (urls, _):
                times = uvloop.run(measure(urls, stores, asked.rounds))
            print("\n".join(rows(count, times)), flush=True)


if __name__ == "__main__":
    main()
