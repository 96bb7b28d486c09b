"""A port in front of a replica that stops reading or stands still while the test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LARGE = 12_000_000
"""More bytes than the buffers between two processes take."""


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class SlowPort:
    """Without `reads` no rollout is read further; without `lives` nothing passes at all."""

    target: int
    port: int = 0
    reads: asyncio.Event = field(default_factory=_set)
    lives: asyncio.Event = field(default_factory=_set)
    stuck: int = 0
    links: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def url(self) -> str:
        """Where the replica seems to be."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        """What the fleet calls it."""
        return f"127.0.0.1:{self.port}"

    async def is_stuck(self) -> bool:
        """Whether a rollout has come that is not read."""
        return self.stuck > 0

    async def link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        task = asyncio.current_task()
        assert task is not None
        self.links.add(task)
        task.add_done_callback(self.links.discard)
        back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        with suppress(OSError, asyncio.CancelledError):  # the test may be over
            first = await reader.read(1024)
            if first.startswith(b"POST /v1/") and not self.reads.is_set():
                self.stuck += 1
                await self.reads.wait()
            await self.lives.wait()
            forth.write(first)
            await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
        for end in (writer, forth):
            end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await self.lives.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@asynccontextmanager
async def slow_port(url: str) -> AsyncGenerator[SlowPort]:
    """Open such a port in front of the replica at this URL."""
    slow = SlowPort(urlsplit(url).port or 0)
    server = await asyncio.start_server(slow.link, "127.0.0.1", 0, limit=1024)
    slow.port = server.sockets[0].getsockname()[1]
    try:
        yield slow
    finally:
        server.close()
        for task in tuple(slow.links):
            task.cancel()
        await asyncio.gather(*slow.links)
