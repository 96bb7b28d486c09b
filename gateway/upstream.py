"""Connections to replicas for rollouts: one request at a time each, kept while they are fresh.

Callback to callback, without a task or a future per request, because this is the hot path. The
parser is httptools' (llhttp). A connection tells its receiver what comes; the receiver decides.

vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so kept ones are given up
before. What this does not do: choose replicas, retry, or look into bodies.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

KEPT_S = 4.0
CONNECT_S = 10.0
NO_FILE_S = 0.05
"""How long to wait for a file descriptor: that there is none says nothing about the replica."""
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is gone without a word is noticed after a minute, in seconds and tries. An answer may
be silent for as long as it takes: it is the other host's system that must say something."""


class Receiver(Protocol):
    """Whoever waits for the answer on a connection."""

    def connected(self, connection: Connection) -> None:
        """The connection is there; send the request."""
        ...

    def request_sent(self) -> None:
        """The last byte of the request is with the system."""
        ...

    def answer_started(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers have come."""
        ...

    def answer_body(self, data: bytes) -> None:
        """A piece of the body has come, its transfer coding removed."""
        ...

    def answer_complete(self) -> None:
        """The answer is whole; the connection is no longer the receiver's."""
        ...

    def answer_broken(self, reason: str) -> None:
        """The connection broke before the answer was whole, or could not be made."""
        ...


class Connection(asyncio.Protocol):
    """One connection to one replica."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._has_body_until_close = False
        self._sending = False
        self._is_headless = False
        self._is_whole = False
        self._has_surplus = False
        self._may_be_kept = False
        self.authority = pool.authority
        self.is_reused = False
        self.idle_since = 0.0

    # -- what the receiver does --------------------------------------------------------------------

    def send(
        self, head: bytes, body: bytes | bytearray, receiver: Receiver, *, headless: bool = False
    ) -> None:
        """Send one request; its answer goes to `receiver`. `headless`: it will have no body."""
        assert self._transport is not None
        self._receiver = receiver
        self._is_headless = headless
        self._sending = True
        if len(body) < 65536:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if self._sending and self._transport.get_write_buffer_size() == 0:
            self.resume_writing()

    def pause_reading(self) -> None:
        """Take no more of the answer for now."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on taking the answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Give the request up; the replica sees its connection close."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def is_usable(self, kept_s: float) -> bool:
        """Whether a connection that was idle for no longer than this may carry another request."""
        assert self._transport is not None
        return not self._transport.is_closing() and monotonic() - self.idle_since < kept_s

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered
        keep_watch(transport)
        self._transport.set_write_buffer_limits(high=0)  # resume_writing then means: all is sent

    def resume_writing(self) -> None:
        if self._sending and self._receiver is not None:
            self._sending = False
            self._receiver.request_sent()

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self.abort()  # nobody asked: it must not pass for the next one's answer
            return
        broken: str | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._has_surplus = True
            broken = f"not HTTP: {error.__context__ or error}"  # the former is ours
        self._deliver()
        if self._is_whole:
            self._finish()
        elif broken is not None:
            self._break(broken)

    def _deliver(self) -> None:
        """Pass on in one piece what came in one piece: a burst of events is one write."""
        pieces, self._pieces = self._pieces, []
        if pieces and self._receiver is not None:
            self._receiver.answer_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def eof_received(self) -> None:
        """Some answers end with their connection."""
        if self._has_body_until_close and self._receiver is not None:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        self._break(str(exc) if exc else "the replica closed the connection")

    def _break(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        if self._transport is not None:
            self._transport.abort()
        if receiver is not None:
            receiver.answer_broken(reason)

    # -- httptools ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = []
        self._has_surplus = self._is_whole  # an answer that nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:  # what that means, nobody knows (RFC 9110, 15)
            raise ValueError(f"status {status}")
        if status < 200 or self._receiver is None or self._is_whole:
            return  # an interim answer concerns this hop only
        names = {name.lower() for name, _ in self._headers}
        framed = b"content-length" in names or b"transfer-encoding" in names
        self._has_body_until_close = not framed and status not in (204, 304)
        self._receiver.answer_started(status, self._headers)
        if self._is_headless:
            self._has_body_until_close = True
            self.on_message_complete()

    def on_body(self, data: bytes) -> None:
        if not self._is_whole:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and not self._is_whole:
            self._is_whole = True
            self._may_be_kept = self._parser.should_keep_alive()  # later it does not know any more

    def _finish(self) -> None:
        """Part with the receiver; keep the connection if nothing of this answer is left on it."""
        receiver, self._receiver = self._receiver, None
        self._is_whole = False
        keep = self._may_be_kept and not self._has_body_until_close
        if keep and not self._sending and not self._has_surplus:
            self.resume_reading()  # the last piece may have found its client slow
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.abort()  # what is still to be sent has been answered already
        if receiver is not None:
            receiver.answer_complete()


def keep_watch(transport: asyncio.BaseTransport) -> None:
    """Let the system find out by itself when the other host is gone; not every system can."""
    peer: socket.socket = transport.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Pool:
    """The kept connections to one replica; after a burst they are closed, not left to the replica.

    Whatever stands between may keep idle ones for hours, each with a file on both sides.
    """

    def __init__(self, url: str, *, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._sweep: asyncio.TimerHandle | None = None
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = parts.scheme == "https"
        self.authority = parts.netloc.encode()
        self._kept: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def take(self, receiver: Receiver, *, fresh: bool = False) -> asyncio.Task[None] | None:
        """Give the receiver a connection: at once if one is kept, else when it is made.

        Returns the making of it; if that is cancelled, the receiver hears nothing more of it.
        """
        while self._kept and not fresh:
            connection = self._kept.pop()
            if connection.is_usable(self._kept_s):
                connection.is_reused = True
                receiver.connected(connection)
                return None
            connection.abort()
        task = asyncio.get_running_loop().create_task(self._connect(receiver))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer is whole."""
        connection.idle_since = monotonic()
        self._kept.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._kept_s, self._close_idle)

    @property
    def is_idle(self) -> bool:
        """Whether there is no connection at all, and none on its way."""
        return not (self._all or self._connecting)

    def _close_idle(self) -> None:
        """Close what has been idle for too long, the longest idle first; one timer does for all."""
        self._sweep = None
        kept = self._kept
        self._kept = [connection for connection in kept if connection.is_usable(self._kept_s)]
        for connection in set(kept).difference(self._kept):
            connection.abort()
        if self._kept:
            due_s = self._kept[0].idle_since + self._kept_s - monotonic()
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(max(0.0, due_s), self._close_idle)

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._all.discard(connection)
        if connection in self._kept:
            self._kept.remove(connection)

    def close(self) -> None:
        """Close everything."""
        if self._sweep is not None:
            self._sweep.cancel()
        for task in tuple(self._connecting):
            task.cancel()
        for connection in tuple(self._all):
            connection.abort()

    async def _connect(self, receiver: Receiver) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._open()
        except (OSError, TimeoutError) as error:
            receiver.answer_broken(f"cannot connect: {error or type(error).__name__}")
            return
        self._all.add(connection)
        receiver.connected(connection)

    async def _open(self) -> Connection:
        """Open a connection; if this process has no file left for it, wait until it has."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self.tls or None
                )
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                await asyncio.sleep(NO_FILE_S)
            else:
                return connection


class Upstreams:
    """One pool per replica that is in use; replicas come and go under ever new addresses."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}

    def pool(self, url: str) -> Pool:
        """Return the pool of a replica's URL."""
        pool = self._pools.get(url)
        if pool is None:
            self._pools = {u: found for u, found in self._pools.items() if not found.is_idle}
            pool = self._pools[url] = Pool(url)
        return pool

    def __len__(self) -> int:
        return len(self._pools)

    def close(self) -> None:
        """Close everything."""
        for pool in self._pools.values():
            pool.close()
