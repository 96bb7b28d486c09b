"""A TCP proxy in front of Redis that knows which command writes the fleet's state.

So a test can say "just before the n-th state write reaches Redis" or "after Redis has done it, but
before the gateway hears so", and it can break, delay or swallow what passes. It parses no more of
RESP than commands (arrays of bulk strings), and looks into one kind of them: EVAL that sets the key
`fleet:{…}:state`; `heard` is told what Redis has confirmed. Heartbeats, leases and what gateways
tell each other pass unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fleet.facts.state import FleetState
from tests.waiting import wait_until

Moment = Literal["before", "after", "never"]
DONE = b":1\r\n"


@dataclass
class Trap:
    """Something that happens once, around the state write with this number (the first is 1)."""

    number: int
    moment: Moment
    act: Callable[[], None]


@dataclass
class StoreProxy:
    """One listening port in front of one Redis; everything passes unless it is told otherwise."""

    target: int
    port: int = 0
    writes: list[FleetState] = field(default_factory=list[FleetState])
    trap: Trap | None = None
    sprung: asyncio.Event = field(default_factory=asyncio.Event)
    heard: Callable[[str, FleetState], None] | None = None
    delay_s: float = 0.0
    deaf: bool = False
    is_cut: bool = False
    _links: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    @property
    def url(self) -> str:
        """What to give a gateway as its store."""
        return f"redis://127.0.0.1:{self.port}/0"

    def arm(self, number: int, moment: Moment, act: Callable[[], None]) -> None:
        """Count state writes anew, and spring at that number: act, then be cut for good."""
        self.writes.clear()
        self.trap = Trap(number, moment, act)

    async def reached(self, writes: int | None) -> None:
        """Return when the trap has sprung, or so many state writes have passed; or after 5 s."""

        async def far_enough() -> bool:
            return self.sprung.is_set() or (writes is not None and len(self.writes) >= writes)

        with suppress(TimeoutError):
            await wait_until(far_enough, timeout_s=5)

    def cut(self) -> None:
        """Break every connection; new ones may come."""
        for writer in tuple(self._links):
            writer.transport.abort()

    def due(self, moment: Moment) -> bool:
        """Whether the write that was counted last is the one that the trap waits for."""
        trap = self.trap
        return trap is not None and (trap.number, trap.moment) == (len(self.writes), moment)

    def spring(self) -> None:
        """Let the trap act; nothing passes any more, since whoever was behind it is dead."""
        assert self.trap is not None
        self.trap.act()
        self.trap = None
        self.is_cut = True
        self.sprung.set()
        self.cut()

    async def link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a gateway until either side ends it."""
        if self.is_cut:
            writer.transport.abort()
            return
        with suppress(OSError, asyncio.IncompleteReadError):
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
            self._links |= {writer, forth}
            try:
                await _Link(self, back, writer).run(reader, forth)
            finally:
                self._links -= {writer, forth}
                for each in (writer, forth):
                    each.transport.abort()


@dataclass
class _Link:
    """One connection through the proxy; `awaits` is the state write that the next answer is for."""

    proxy: StoreProxy
    back: asyncio.StreamReader
    writer: asyncio.StreamWriter
    awaits: tuple[str, FleetState] | None = None

    async def run(self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        tasks = [
            asyncio.ensure_future(self._ask(reader, forth)),
            asyncio.ensure_future(self._tell()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter) -> None:
        buffer = b""
        while chunk := await reader.read(1 << 16):
            buffer += chunk
            used = 0
            for words, end in commands(buffer):
                written = state_written(words)
                if written is not None:
                    self.proxy.writes.append(written[1])
                    if self.proxy.due("before"):
                        self.proxy.spring()
                        return
                    self.awaits = written
                forth.write(buffer[used:end])
                used = end
            buffer = buffer[used:]
            await forth.drain()

    async def _tell(self) -> None:
        while chunk := await self.back.read(1 << 16):
            written, self.awaits = self.awaits, None
            if written is not None:
                if chunk != DONE:  # somebody else was faster, so nothing was written
                    self.proxy.writes.pop()
                elif self.proxy.due("after"):
                    self.proxy.spring()
                    return
                elif self.proxy.heard is not None:
                    self.proxy.heard(*written)
            if self.proxy.delay_s:
                await asyncio.sleep(self.proxy.delay_s)
            if not self.proxy.deaf:
                self.writer.write(chunk)
                await self.writer.drain()


def commands(buffer: bytes) -> Iterator[tuple[list[bytes], int]]:
    """Yield each whole command at the start of the buffer, with the position behind it."""
    at = 0
    while buffer[at : at + 1] == b"*":
        words: list[bytes] = []
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return
        count, at = int(buffer[at + 1 : end]), end + 2
        for _ in range(count):
            end = buffer.find(b"\r\n", at)
            if end < 0:
                return
            size, at = int(buffer[at + 1 : end]), end + 2
            if len(buffer) < at + size + 2:
                return
            words.append(buffer[at : at + size])
            at += size + 2
        yield words, at


def state_written(words: list[bytes]) -> tuple[str, FleetState] | None:
    """Return stamp and state that a command writes, or None if it is any other command."""
    if len(words) < 8 or words[0].upper() != b"EVAL" or words[6] != b"set":
        return None
    if not (words[3].startswith(b"fleet:{") and words[3].endswith(b"}:state")):
        return None
    stamp, _, body = words[7].partition(b"\n")
    return stamp.decode(), msgspec.json.decode(body, type=FleetState)


@asynccontextmanager
async def store_proxy(target: int) -> AsyncGenerator[StoreProxy]:
    """Open a proxy in front of the Redis on this port."""
    proxy = StoreProxy(target)
    server = await asyncio.start_server(proxy.link, "127.0.0.1", 0, limit=1 << 22)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.is_cut = True
        await _close(server)
        proxy.cut()


async def _close(server: asyncio.Server) -> None:
    """Accept no more, see accepted sockets become connections, then close.

    Closing at once would drop a socket that was accepted in this very turn of the loop.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    server.close()
