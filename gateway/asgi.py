"""Small pieces of ASGI that both the rollout path and the control routes need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from fleet.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of that (lower-case) name, or None."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


async def read_body(scope: Scope, receive: Receive, limit: int, what: str) -> bytearray:
    """Read the whole body into one buffer of at most `limit` bytes.

    Raises BodyTooLarge before reading it if its length says so, ClientGone if it never ends.
    """
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(int(length), limit, what)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(len(body), limit, what)
        if not message.get("more_body", False):
            return body


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    """Send a whole answer."""
    raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _too_large(size: int, limit: int, what: str) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes or more, {what} takes at most {limit}",
        hint="send less, or raise the limit (FLEET_LIMITS__…) on the gateway",
    )
