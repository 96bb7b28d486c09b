"""The rollout path: one request to one eligible replica, byte for byte in both directions.

A bare ASGI application, since thousands of rollouts pass here: no framework work per request.
The body is read whole before a replica is chosen, so that nothing is between that choice and its
last byte but the socket, and so that a replica that dies before it answered can be replaced once.
Answers stream as they come. A client that leaves cancels its request upstream at once.

What it does not do: look into bodies, decompress, follow redirects, or replay an answer of which
a byte has been passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from fleet.errors import FleetError, NoEligibleReplica
from fleet.replica_client import ReplicaClient, SharedBody
from gateway.asgi import (
    ClientGone,
    RawHeaders,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    respond,
    until_gone,
)
from gateway.auth import Right, authorise
from gateway.errors import body_of, headers_of, status_of
from gateway.gate import RolloutGate, Ticket
from gateway.metrics import Metrics
from gateway.settings_model import Settings

log = logging.getLogger(__name__)

PREFIXES = (
    "/v1/",
    "/inference/v1/",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/classify",
    "/generative_scoring",
    "/invocations",
)

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""

OWN_REQUEST = frozenset({b"host", b"content-length", b"x-request-id", b"expect"})
OWN_ANSWER = frozenset(
    {
        b"x-forwarded-for",  # TRL would take it for the server's own address
        b"x-request-id",
        b"x-weight-version",
        b"x-weight-version-end",
        b"x-weight-version-kv",
        b"x-fleet-replica",
    }
)
NO_AUTO_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

ATTEMPTS = 2
"""How often a rollout may be tried: once more, on another replica, if no byte has come back."""


class _SentBody(SharedBody):
    """A request body that says when its last byte has been handed to the socket."""

    def __init__(self, body: bytearray, sent: Callable[[], None]) -> None:
        super().__init__(memoryview(body))
        self._sent = sent

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        await super().write_with_length(writer, content_length)
        self._sent()


class RolloutProxy:
    """Passes rollouts on; call it with an ASGI scope whose path `takes` accepted."""

    def __init__(
        self,
        gate: RolloutGate,
        client: ReplicaClient,
        settings: Settings,
        metrics: Metrics,
        on_unreachable: Callable[[str], None],
    ) -> None:
        self._gate = gate
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._on_unreachable = on_unreachable

    @staticmethod
    def takes(path: str) -> bool:
        """Whether a path belongs to the rollouts."""
        return path.startswith(PREFIXES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry one rollout from its client to a replica and back."""
        try:
            authorise(scope["headers"], Right.ROLLOUT, self._settings.auth)
            limit = self._settings.limits.rollout_body_bytes
            body = await read_body(scope, receive, limit, "a rollout")
            exchange = _Exchange(scope, body, send, self._settings)
            with suppress(ClientGone):
                await self._while_connected(exchange, receive)
        except FleetError as error:
            self._metrics.rollouts_refused.labels(type(error).__name__).inc()
            await respond(send, status_of(error), headers_of(error), body_of(error))
        except ClientGone:
            return

    async def _while_connected(self, exchange: _Exchange, receive: Receive) -> None:
        """Serve until done; if the client leaves first, cancel what runs upstream."""
        serving = asyncio.ensure_future(self._serve(exchange))
        watching = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                self._metrics.rollouts_cancelled.inc()
                raise ClientGone
            serving.result()
        finally:
            await _end(watching)
            await _end(serving)

    async def _serve(self, exchange: _Exchange) -> None:
        failed: list[str] = []
        while True:
            ticket = await self._gate.admit(len(exchange.body), exchange.min_version, failed)
            try:
                await self._attempt(exchange, ticket)
                return
            except (aiohttp.ClientError, OSError) as error:
                self._on_unreachable(ticket.replica.id)
                if exchange.answer_started:
                    raise  # the answer is broken off: no replay, and no clean ending either
                failed.append(ticket.replica.id)
                log.warning("rollout failed", extra={"replica": failed[-1], "error": str(error)})
                if len(failed) == ATTEMPTS:
                    raise NoEligibleReplica(
                        f"replicas {', '.join(failed)} broke the connection before answering",
                        hint="retry; GET /fleet/replicas tells which ones are gone",
                    ) from error
            finally:
                ticket.done()

    async def _attempt(self, exchange: _Exchange, ticket: Ticket) -> None:
        body = _SentBody(exchange.body, ticket.sent) if exchange.body else None
        if body is None:
            ticket.sent()
        async with self._client.pooled.request(
            exchange.method,
            URL(ticket.replica.url + exchange.target, encoded=True),
            data=body,
            headers=[*exchange.request_headers, *self._client.headers.items()],
            skip_auto_headers=NO_AUTO_HEADERS,
            allow_redirects=False,
        ) as response:
            self._metrics.rollouts.labels(ticket.version, response.status // 100 * 100).inc()
            await exchange.start(response, ticket, self._gate)
            async for chunk in response.content.iter_any():
                await exchange.pass_on(chunk)
            await exchange.end()


class _Exchange:
    """One rollout between its client and us: what was asked, and how far the answer has got."""

    def __init__(self, scope: Scope, body: bytearray, send: Send, settings: Settings) -> None:
        self.body = body
        self.method: str = scope["method"]
        self.request_id = header(scope, b"x-request-id") or uuid4().hex
        self.min_version = header(scope, b"x-min-weight-version")
        self.target = _target(scope)
        self.request_headers = self._upstream_headers(scope, settings)
        self.answer_started = False
        self._send = send

    async def start(
        self, response: aiohttp.ClientResponse, ticket: Ticket, gate: RolloutGate
    ) -> None:
        """Pass the status and the headers on, with ours added."""
        self.answer_started = True
        headers: RawHeaders = _without(response.raw_headers, OWN_ANSWER)
        headers.append((b"x-weight-version", ticket.version.encode("latin-1")))
        if gate.version != ticket.version:
            headers.append((b"x-weight-version-end", gate.version.encode("latin-1")))
        if gate.kv != "current":
            headers.append((b"x-weight-version-kv", gate.kv.encode("latin-1")))
        headers.append((b"x-fleet-replica", ticket.replica.id.encode("latin-1")))
        headers.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send(
            {"type": "http.response.start", "status": response.status, "headers": headers}
        )

    async def pass_on(self, chunk: bytes) -> None:
        """Pass one piece of the answer on as it came."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _upstream_headers(self, scope: Scope, settings: Settings) -> list[tuple[str, str]]:
        dropped = OWN_REQUEST
        if settings.auth.guards_anything:
            dropped |= {b"authorization"}  # it was meant for us; replicas have a token of their own
        kept = _without(scope["headers"], dropped)
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in kept]
        return [*headers, ("x-request-id", self.request_id)]


def _target(scope: Scope) -> str:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (path + b"?" + query if query else path).decode("latin-1")


def _without(
    headers: RawHeaders | tuple[tuple[bytes, bytes], ...], own: frozenset[bytes]
) -> RawHeaders:
    """Drop hop-by-hop headers, those that Connection names, and our own."""
    lowered = [(key.lower(), value) for key, value in headers]
    named = {
        token.strip().lower()
        for key, value in lowered
        if key == b"connection"
        for token in value.split(b",")
    }
    dropped = HOP_BY_HOP | own | named
    return [(key, value) for key, value in lowered if key not in dropped]


async def _end(task: asyncio.Future[None]) -> None:
    """Cancel a task unless it is done, and wait until it has let go of everything."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
