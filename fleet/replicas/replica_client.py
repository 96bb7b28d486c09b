"""The one place that speaks vLLM's HTTP: a call in, an answer or a typed failure out.

Two pools: `fresh` has a connection per call, for calls that must not be repeated (fresh.py);
`pooled` keeps connections, for the rest.
vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so pooled ones expire
before. There is no cap on connections: a collective below the fleet's size would deadlock.

It judges answers: a status of 400 or more is a failure, and so is a 200 whose body says error,
or, for the phases of a round, is no JSON object.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

from fleet.facts.outcome import Outcome, Result
from fleet.replicas.fresh import NO_WAY, FreshConnections, open_fresh
from fleet.rules.wire import FINISH, INIT, START, START_DRAFT, UPDATE

CHUNK_BYTES = 64 * 1024
"""How much of a body is handed to one connection at a time, so that a 5 MB body to 64 replicas
does not stand 64 times in write buffers."""

KEEP_ALIVE_S = 4.0
DETAIL_CHARS = 2000
ANSWER_BYTES = 64 * 1024 * 1024
"""How long an answer to a control call may be; checksums of a large model are a few megabytes."""


PHASES = frozenset({INIT, START, START_DRAFT, UPDATE, FINISH})
"""Calls that a round rests on: only a server that speaks the protocol can have done them."""

MAY_DECLINE = frozenset({"/reset_prefix_cache"})
"""Calls to which `"success": false` is an answer: blocks that are in use cannot be dropped."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a replica; `body` is JSON bytes, shared by every replica that gets them."""

    method: str
    path: str
    query: str = ""
    body: bytes | memoryview | None = None
    fresh: bool = False
    headers: dict[str, str] = field(default_factory=dict[str, str])


class SharedBody(aiohttp.Payload):
    """A body that many connections write in small pieces from one buffer, without a copy each."""

    def __init__(self, value: bytes | memoryview) -> None:
        super().__init__(value, content_type="application/json")
        self._view = memoryview(value).cast("B")
        self._length = len(self._view)
        self._size = self._length

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text, for aiohttp's debugging output."""
        return bytes(self._view).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole body."""
        await self.write_with_length(writer, None)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write at most `content_length` bytes, waiting for the socket between the pieces."""
        end = self._length if content_length is None else min(self._length, content_length)
        for start in range(0, end, CHUNK_BYTES):
            await writer.write(self._view[start : min(start + CHUNK_BYTES, end)])


class ReplicaClient:
    """Calls replicas and says what came of it; never raises for what a replica may do."""

    def __init__(
        self, fresh: FreshConnections, pooled: aiohttp.ClientSession, token: str | None
    ) -> None:
        self.fresh = fresh
        self.pooled = pooled
        self._headers: dict[str, str] = {"Authorization": f"Bearer {token}"} if token else {}
        self._asking = {"Accept-Encoding": "identity"} | self._headers  # answers are read as is

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every call to a replica carries."""
        return self._headers

    async def call(self, url: str, call: Call) -> Outcome:
        """Make one call and return its outcome; only cancellation and bugs raise.

        A pooled connection that the server closed while idle is replaced once: such calls are
        idempotent by choice of the pool.
        """
        started = perf_counter()
        try:
            outcome = await self._attempt(url, call)
        except aiohttp.ClientConnectorError as error:
            outcome = _unreachable(error)
        except (aiohttp.ServerDisconnectedError, ConnectionError, aiohttp.ClientOSError) as error:
            outcome = await self._again(url, call, error)
        except NO_WAY as error:
            outcome = _unreachable(error)
        return msgspec.structs.replace(outcome, elapsed_s=perf_counter() - started)

    async def open_ahead(self, url: str) -> None:
        """Open a connection for the next call that must not be repeated; never raises."""
        await self.fresh.open_ahead(url)

    async def read(self, url: str, path: str) -> bytes:
        """Return the body of a GET, empty if there is none to be had."""
        try:
            async with self.pooled.get(f"{url}{path}", headers=self._asking) as response:
                return await _read(response) if response.status == 200 else b""
        except NO_WAY:
            return b""

    async def _again(self, url: str, call: Call, error: Exception) -> Outcome:
        if call.fresh:
            return _unreachable(error)
        try:
            return await self._attempt(url, call)
        except (aiohttp.ClientError, OSError) as again:
            return _unreachable(again)

    async def _attempt(self, url: str, call: Call) -> Outcome:
        session = self.fresh.session_for(url) if call.fresh else self.pooled
        target = f"{url}{call.path}?{call.query}" if call.query else f"{url}{call.path}"
        body = SharedBody(call.body) if call.body is not None else None
        headers = {**self._asking, **call.headers}
        async with session.request(
            call.method, target, data=body, headers=headers, allow_redirects=False
        ) as response:
            body = await _read(response)
            said = judge(response.status, body, may_decline=call.path in MAY_DECLINE)
            return _must_be_json(said) if call.path in PHASES else said


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read a whole answer, or give its connection up if it does not end in time."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {ANSWER_BYTES} bytes")
    return bytes(body)


def judge(status: int, body: bytes, *, may_decline: bool = True) -> Outcome:
    """Return what an answer means: 2xx and no error in the body is ok, all else is failed.

    `may_decline`: that it had no success is an answer to this call, not a failure of it.
    """
    answer = _decode(body)
    complaint = _complaint(answer, may_decline=may_decline)
    if 200 <= status < 300 and complaint is None:
        return Outcome(outcome=Result.OK, status=status, answer=answer)
    detail = complaint or _text(body) or f"HTTP {status}"
    return Outcome(outcome=Result.FAILED, status=status, detail=detail[:DETAIL_CHARS])


def _must_be_json(said: Outcome) -> Outcome:
    """Let a 2xx of a phase count only if the server itself can have said it.

    A page in HTML comes from a proxy or a login in between; the replica may not have heard us.
    """
    if not said.ok or said.answer is None or isinstance(said.answer, dict):
        return said
    told = f"HTTP {said.status} with a body that is no JSON object: {said.answer}"
    return msgspec.structs.replace(
        said, outcome=Result.FAILED, detail=told[:DETAIL_CHARS], answer=None
    )


def _complaint(answer: Any, *, may_decline: bool) -> str | None:
    """Return what a body says went wrong, in any of the shapes that vLLM and FastAPI use."""
    if not isinstance(answer, dict):
        return None
    error: Any = answer.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    says_no = answer.get("success") is False and not may_decline
    if says_no or answer.get("object") == "error" or answer.get("status") == "error":
        return str(answer.get("message") or answer)
    detail: Any = answer.get("detail")
    return str(detail) if detail is not None and len(answer) == 1 else None


def _decode(body: bytes) -> Any:
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return _text(body)


def _text(body: bytes) -> str:
    return body[:DETAIL_CHARS].decode("utf-8", "replace").strip()


def _unreachable(error: BaseException) -> Outcome:
    detail = str(error) or type(error).__name__
    return Outcome(outcome=Result.UNREACHABLE, detail=detail[:DETAIL_CHARS])


@asynccontextmanager
async def open_client(token: str | None = None) -> AsyncGenerator[ReplicaClient]:
    """Open both pools; leaving the context closes every connection."""
    options: dict[str, Any] = {
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        "auto_decompress": False,
        "cookie_jar": aiohttp.DummyCookieJar(),
    }
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=30)
    async with (
        open_fresh(**options) as fresh,
        aiohttp.ClientSession(connector=connector, **options) as pooled,
    ):
        yield ReplicaClient(fresh, pooled, token)
