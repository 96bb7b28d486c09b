"""Rollouts that come through ASGI: the same `Exchange`, with an ASGI call as its client.

Most rollouts do not come here: `front.py` carries those that are plain. Here are the rest, and all
of them where another server than ours runs the application.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fleet.errors import FleetError
from gateway.asgi import ClientGone, Message, Receive, Scope, Send, read_body, respond, until_gone
from gateway.errors import body_of, headers_of, status_of
from gateway.exchange import Exchange, Request
from gateway.heads import Headers
from gateway.rollouts import Rollouts
from gateway.settings_model import Settings

QUEUED = 16
"""Pieces of an answer that may wait for a slow client before its replica is not read further."""


class RolloutProxy:
    """An ASGI application for rollout paths."""

    def __init__(self, rollouts: Rollouts, settings: Settings) -> None:
        self._rollouts = rollouts
        self._limit = settings.limits.rollout_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry one rollout from its client to a replica and back."""
        try:
            self._rollouts.authorise(scope["headers"])
            body = await read_body(scope, receive, self._limit, "a rollout")
        except FleetError as error:
            await respond(send, status_of(error), headers_of(error), body_of(error))
            return
        except ClientGone:
            return
        client = _AsgiClient(self._rollouts, _request_of(scope, body))
        await client.serve(receive, send)


class _AsgiClient:
    """One ASGI call as the client of an exchange; answers queue up until `send` takes them."""

    def __init__(self, rollouts: Rollouts, request: Request) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._exchange = Exchange(rollouts, request, self)
        self._is_paused = False
        self._is_over = False

    async def serve(self, receive: Receive, send: Send) -> None:
        """Carry the rollout to its end, or until the client leaves."""
        leaving = asyncio.ensure_future(until_gone(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        self._exchange.begin()
        try:
            await asyncio.wait((leaving, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            if not self._is_over:
                self._exchange.gone()
            for task in (leaving, sending):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send_all(self, send: Send) -> None:
        while (message := await self._messages.get()) is not None:
            await send(message)
            if self._is_paused and self._messages.qsize() < QUEUED // 2:
                self._is_paused = False
                self._exchange.resume()

    # -- the Client of an Exchange -----------------------------------------------------------------

    def start(self, status: int, headers: Headers) -> None:
        """Queue the head."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def body(self, data: bytes) -> None:
        """Queue a piece; a long queue stops the replica."""
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        if not self._is_paused and self._messages.qsize() >= QUEUED:
            self._is_paused = True
            self._exchange.pause()

    def end(self) -> None:
        """Queue the end."""
        self._put({"type": "http.response.body", "body": b"", "more_body": False})
        self._finish()

    def refuse(self, error: FleetError) -> None:
        """Queue the one error shape."""
        body = body_of(error)
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers_of(error)]
        self.start(status_of(error), [*headers, (b"content-length", b"%d" % len(body))])
        self._put({"type": "http.response.body", "body": body, "more_body": False})
        self._finish()

    def break_off(self, last: bytes) -> None:
        """Return without completing the answer, so that the server cuts the connection."""
        if last:
            self.body(last)
        self._finish()

    def _finish(self) -> None:
        self._is_over = True
        self._put(None)

    def _put(self, message: Message | None) -> None:
        self._messages.put_nowait(message)


def _request_of(scope: Scope, body: bytearray) -> Request:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    request = Request(
        method=scope["method"].encode("latin-1"),
        target=path + b"?" + query if query else path,
        headers=list(scope["headers"]),
        body=body,
    )
    for name, value in request.headers:
        request.note(name, value)
    return request
