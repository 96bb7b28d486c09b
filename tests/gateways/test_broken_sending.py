"""A gateway that loses its lease, or its seat, while a rollout is still on its way to a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from fleet.sim import SimFleet
from tests.cases.conftest import Case, nccl
from tests.gateways.processes import gateways
from tests.waiting import wait_until

LARGE = 12_000_000
"""More bytes than the buffers between two processes take."""


@dataclass
class SlowReplica:
    """A port in front of a replica that reads no further in rollouts until the test says so."""

    target: int
    port: int = 0
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    stuck: int = 0

    async def link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        with suppress(OSError):
            first = await reader.read(1024)
            if first.startswith(b"POST /v1/") and not self.reads.is_set():
                self.stuck += 1
                await self.reads.wait()
            forth.write(first)
            await asyncio.gather(_pump(reader, forth), _pump(back, writer))
        writer.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()


@asynccontextmanager
async def slow_replica(url: str) -> AsyncGenerator[SlowReplica]:
    """Open such a port."""
    slow = SlowReplica(urlsplit(url).port or 0)
    server = await asyncio.start_server(slow.link, "127.0.0.1", 0, limit=1024)
    slow.port = server.sockets[0].getsockname()[1]
    try:
        yield slow
    finally:
        server.close()


async def test_what_an_expelled_gateway_has_not_sent_is_not_sent_into_the_session(
    redis_url: str, tmp_path: Path
) -> None:
    """It is taken back when the lease ends, held, and answered by the next weights as theirs."""
    async with SimFleet(nccl(1)) as sim, slow_replica(sim.urls[0]) as slow:
        front = SimpleNamespace(url=f"http://127.0.0.1:{slow.port}")
        seen = cast("SimFleet", SimpleNamespace(replicas=[front]))
        async with gateways(seen, redis_url, tmp_path) as several:
            here, there = (Case(sim, gateway) for gateway in several.all)
            await here.first_sync("1")
            body: Any = msgspec.json.encode({"prompt": "x" * LARGE, "max_tokens": 1})
            kind = {"Content-Type": "application/json"}
            rollout = asyncio.ensure_future(
                there.http.post("/v1/completions", content=body, headers=kind)
            )

            async def stuck() -> bool:
                return slow.stuck == 1

            await wait_until(stuck)
            assert (await here.start()).status_code == 200
            await there.await_held(1)
            slow.reads.set()
            await here.update()
            assert (await here.finish("2")).status_code == 200
            assert (await rollout).headers["X-Weight-Version"] == "2"
            assert sim.replicas[0].log.outcomes["killed"] == 0
