"""A server that answers in its own words: what stands between a client and its gateway may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Listener:
    """Answers every request with the same bytes, or hangs up on it; counts them."""

    url: str = ""
    reply: bytes | None = None
    seen: list[bytes] = field(default_factory=list[bytes])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.seen.append(head.split(b"\r\n", 1)[0])
        writer.write(self.reply or b"")
        writer.close()


@asynccontextmanager
async def listener(reply: bytes | None, port: int = 0) -> AsyncGenerator[Listener]:
    """Serve until the context is left; `reply` None closes the connection without a word."""
    found = Listener(reply=reply)
    server = await asyncio.start_server(found._serve, "127.0.0.1", port)
    async with server:
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found


def reply(status: str, body: bytes, *headers: str) -> bytes:
    """A whole HTTP answer that closes its connection."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body
