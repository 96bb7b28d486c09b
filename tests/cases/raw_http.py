"""A replica and a client that show and say every byte, for what the simulator and httpx tidy up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from fleet.replicas.probe import MEMBER_ENDPOINTS
from gateway.rollouts import is_rollout

PROBED = {
    "/health": {},
    "/get_world_size": {"world_size": 1},
    "/weight_info": {"weight_version": "default"},
    "/is_paused": {"is_paused": False},
}


@dataclass
class Message:
    """One request or answer as it came over the wire; header names are in lower case."""

    first_line: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    @property
    def target(self) -> str:
        """The request target, undecoded."""
        return self.first_line.split(" ")[1]

    def values(self, name: str) -> list[str]:
        """All values of one header."""
        return [value for key, value in self.headers if key == name]


Script = Callable[[Message, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawReplica:
    """A server that passes for a replica when probed and runs `script` for everything else."""

    url: str
    script: Script
    requests: list[Message] = field(default_factory=list[Message])

    open: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes on one connection until the other side closes it."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self.open.add(task)
        try:
            while True:
                await self._answer(await read_message(reader), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the connection is over, or the test is
        finally:
            self.open.discard(task)
            writer.close()

    async def _answer(
        self, request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = urlsplit(request.target).path
        if is_rollout(path.encode()):
            self.requests.append(request)
            await self.script(request, reader, writer)
        else:
            writer.write(_probe_answer(path))
        await writer.drain()


@asynccontextmanager
async def raw_replica(script: Script) -> AsyncGenerator[RawReplica]:
    """Serve on a free port."""
    replica = RawReplica("", script)
    server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
    replica.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield replica
    finally:
        server.close()
        for task in tuple(replica.open):
            task.cancel()
        await asyncio.gather(*replica.open)
        await server.wait_closed()


def answering(raw: bytes) -> Script:
    """Return a script that answers these bytes."""

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        writer.write(raw)

    return script


def answer_of(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return a whole answer as bytes."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Read one message with a Content-Length, or without a body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    split = [line.partition(":") for line in head[1:] if line]
    message = Message(head[0], [(key.lower(), value.strip()) for key, _, value in split])
    length = message.values("content-length")
    message.body = await reader.readexactly(int(length[0])) if length else b""
    return message


async def exchange(url: str, raw: bytes) -> Message:
    """Send these bytes to a server and read its one answer."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(raw)
        return await read_message(reader)
    finally:
        writer.close()
        await writer.wait_closed()


def request_of(target: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """Return a whole request as bytes."""
    lines = [f"{method} {target} HTTP/1.1", "Host: gateway", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


def _probe_answer(path: str) -> bytes:
    if path in MEMBER_ENDPOINTS:
        return answer_of(b"{}", "Allow: POST", status="405 Method Not Allowed")
    if path not in PROBED:
        return answer_of(b"{}", status="404 Not Found")
    return answer_of(json.dumps(PROBED[path]).encode(), "Content-Type: application/json")
