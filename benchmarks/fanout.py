"""What the gateway adds to one control phase: fan-out to N replicas beside a bare aiohttp gather.

    make bench            or: python -m benchmarks.fanout [--replicas 8 64 256 1024] [--rounds 15]

For each N: the same sinks, the same 1 KB update_weights body, alternating in one run: once a bare
`aiohttp` gather from this process straight to the sinks (on uvloop, as the gateway is), once the
same body through the gateway: one POST from here, fan-out there. The ratio of the medians is the
figure. `memory://` and, where a redis-server is on the PATH, a real Redis as the store.

Then memory: how much the gateway's peak resident size grows while a 5 MB body goes to 64 replicas,
as a multiple of the body.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop

from benchmarks.children import end_on_sigterm, gateway, kilobytes, redis_store, sinks
from benchmarks.sinks import raise_file_limit

BODY = json.dumps(
    {
        "update_info": {
            "names": [f"model.layers.{i}.mlp.down_proj.weight" for i in range(12)],
            "dtype_names": ["bfloat16"] * 12,
            "shapes": [[4096, 14336]] * 12,
        }
    }
).encode()
BIG = 5 * 1000 * 1000
JSON = {"content-type": "application/json"}


@dataclass
class Row:
    """The medians of one measurement, in seconds."""

    replicas: int
    store: str
    bare_s: float
    gateway_s: float

    @property
    def ratio(self) -> float:
        """How much longer the phase takes through the gateway."""
        return self.gateway_s / self.bare_s


async def until_ready(http: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until the gateway answers and knows all workers."""
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        try:
            async with http.get(f"{url}/get_world_size") as answer:
                if (await answer.json()).get("world_size") == count:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} does not see {count} replicas")


async def post(http: aiohttp.ClientSession, url: str, path: str, body: bytes | None) -> None:
    """Make one call; anything but 200 ends the benchmark."""
    async with http.post(url + path, data=body, headers=JSON) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {text[:500]}")


async def bare_gather(urls: list[str], body: bytes) -> None:
    """Post the body to every sink at once, as a script would: one session, no cap."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.gather(*(post(http, url, "/update_weights", body) for url in urls))


async def open_round(http: aiohttp.ClientSession, url: str, count: int) -> None:
    """Bring the gateway to the point where update_weights may be called again and again."""
    info = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 1 + count,
    }
    init = json.dumps({"init_info": info}).encode()
    await post(http, url, "/init_weight_transfer_engine", init)
    await post(http, url, "/start_weight_update", None)


async def timed(work: object) -> float:
    """Return how long an awaitable takes, in seconds."""
    gc.collect()
    started = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - started


async def measure(urls: list[str], store: str, rounds: int) -> Row:
    """Alternate a bare gather and the gateway over the same sinks."""
    no_limit = aiohttp.ClientTimeout(total=None)
    with gateway(urls, store) as server:
        url = server.url
        async with aiohttp.ClientSession(timeout=no_limit) as http:
            await until_ready(http, url, len(urls))
            await open_round(http, url, len(urls))
            bare: list[float] = []
            through: list[float] = []
            for _ in range(rounds + 2):
                bare.append(await timed(bare_gather(urls, BODY)))
                through.append(await timed(post(http, url, "/update_weights", BODY)))
    name = store.partition(":")[0]
    return Row(len(urls), name, median(bare[2:]), median(through[2:]))


async def measure_memory(urls: list[str]) -> float:
    """Return the growth of the gateway's peak size for one big body, in bodies."""
    body = b'{"update_info":{"ipc_handles_pickled":"' + b"A" * BIG + b'"}}'
    no_limit = aiohttp.ClientTimeout(total=None)
    with gateway(urls) as server:
        url, pid = server.url, server.pid
        async with aiohttp.ClientSession(timeout=no_limit) as http:
            await until_ready(http, url, len(urls))
            await open_round(http, url, len(urls))
            await post(http, url, "/update_weights", BODY)
            _forget_peak(pid)
            before = kilobytes(pid, "VmRSS")
            await post(http, url, "/update_weights", body)
            return (kilobytes(pid, "VmHWM") - before) * 1024 / len(body)


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    raise_file_limit()
    end_on_sigterm()
    print("| replicas | store | bare gather | through the gateway | ratio |")
    print("| ---: | --- | ---: | ---: | ---: |")
    with redis_store() as redis:
        for count in asked.replicas:
            with sinks(count) as (urls, _):
                for store in filter(None, ("memory://", redis)):
                    row = uvloop.run(measure(urls, store, asked.rounds))
                    print(
                        f"| {row.replicas} | {row.store} | {row.bare_s * 1000:.1f} ms | "
                        f"{row.gateway_s * 1000:.1f} ms | {row.ratio:.2f} |",
                        flush=True,
                    )
    with sinks(64) as (urls, _):
        bodies = uvloop.run(measure_memory(urls))
    print(f"\nA {BIG / 1e6:.0f} MB body to 64 replicas: peak memory grows by {bodies:.1f} bodies.")


if __name__ == "__main__":
    main()
