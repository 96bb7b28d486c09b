"""The front: takes connections, carries plain rollouts itself, hands everything else to uvicorn.

A rollout as clients send it (POST, a rollout path, a content length, HTTP/1.1) goes from callback
to callback without a task, a future or a framework; that is where the speed comes from. Whatever
is not plain (other methods and paths, chunked requests, Expect, odd heads) is uvicorn's: it gets
the connection for good, with every byte of the request at hand, and the rollouts among those meet
the same `Exchange` behind ASGI.

A head is taken only if it matches `_HEAD` whole, so nothing ambiguous is ever parsed here.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from fleet.errors import FleetError
from gateway.errors import body_of, headers_of, status_of
from gateway.exchange import NOTED, Exchange, Request
from gateway.heads import Headers
from gateway.rollouts import Rollouts, is_rollout
from gateway.upstream import keep_watch

_HEAD = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1\r\n"
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[ \t]*[^\r\n\x00]*\r\n)*\r\n"
)
_FIELD = re.compile(rb"([^:\r\n]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")
_UNPLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
_READ = _UNPLAIN | NOTED | {b"content-length", b"connection"}
_START = b"POST /"
MAX_HEAD = 64 * 1024
SILENT_S = 1.0
"""How long the client of a gateway that stops may take for the first byte after its connection."""
MAX_DIGITS = 18
"""Of a content length; Python refuses to read a number of thousands of digits."""


def _status_line(code: int) -> bytes:
    phrase = HTTPStatus(code).phrase if code in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {code} {phrase}\r\n".encode("latin-1")


STATUS_LINES = {code: _status_line(code) for code in range(100, 1000)}


class Front(asyncio.Protocol):
    """One client connection; uvicorn makes it through its `http` setting."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._for_uvicorn = (config, server_state, app_state, _loop)
        self._connections = cast("set[Any]", server_state.connections)
        application: Any = config.app
        self._application = application
        self._rollouts: Rollouts = application.framework.state.gateway.rollouts
        self._keep_alive_s = config.timeout_keep_alive
        self._buffer = b""
        self._request: Request | None = None
        self._missing = 0
        self._parts: list[bytes] = []
        self._exchange: Exchange | None = None
        self._idle_since: float | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self._keep = True
        self._head = b""
        self._chunked = False
        self._is_reading = True
        self._is_full = False

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered
        keep_watch(transport)
        self._connections.add(self)
        if self._application.is_stopping:  # taken in the very moment in which the listening ended
            self._keep = False
            loop = asyncio.get_running_loop()
            self._idle_check = loop.call_later(SILENT_S, self.shutdown)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._idle_check is not None:
            self._idle_check.cancel()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone()

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        self._buffer = self._buffer + data if self._buffer else data
        if self._request is not None:
            self._read_body()
        elif self._exchange is None and not self._is_full:
            self._read_head()
        elif len(self._buffer) > MAX_HEAD:
            self._is_reading = False
            self._transport.pause_reading()  # a pipelining client waits like any other

    def pause_writing(self) -> None:
        self._is_full = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._exchange is not None:
            self._exchange.resume()
        elif self._buffer and not self._transport.is_closing():
            self._go_on()

    def shutdown(self) -> None:
        """Close when what is under way is answered; uvicorn calls this when it stops.

        A request of which a part has come is under way: its client cannot know that we stop.
        """
        self._keep = False
        if self._exchange is None and self._request is None and not self._buffer:
            self._transport.close()

    # -- requests ----------------------------------------------------------------------------------

    def _read_head(self) -> None:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n") + 4
        if end < 4:
            if not _START.startswith(buffer[: len(_START)]) or len(buffer) > MAX_HEAD:
                self._hand_over()
            return
        match = _HEAD.fullmatch(buffer, 0, end)
        if match is None or not is_rollout(match[1].partition(b"?")[0]):
            self._hand_over()
            return
        request = self._plain_request(match[1], _FIELD.findall(buffer, match.end(1), end))
        if request is None:
            self._hand_over()
            return
        self._request = request
        self._buffer = buffer[end:]
        self._read_body()

    def _plain_request(self, target: bytes, fields: Headers) -> Request | None:
        """Return the request if it is plain, and note how long its body is."""
        request = Request(b"POST", target, fields, b"")
        length: bytes | None = None
        for field, value in fields:
            name = field.lower()
            if name not in _READ:
                continue
            if name == b"content-length":
                if length is not None or not value.isdigit() or len(value) > MAX_DIGITS:
                    return None
                length = value
            elif name == b"connection":
                if value.lower() not in (b"keep-alive", b"close"):
                    return None
                self._keep = self._keep and value.lower() != b"close"
            elif name in _UNPLAIN:
                return None
            else:
                request.note(name, value)
        if length is None:
            return None
        self._missing = int(length)
        return request

    def _read_body(self) -> None:
        data, missing = self._buffer, self._missing
        if len(data) < missing:
            self._parts.append(data)
            self._buffer = b""
            self._missing = missing - len(data)
            if len(self._parts) == 1:
                self._refuse_early(self._missing + len(data))
            return
        request = cast("Request", self._request)
        body = data if len(data) == missing else data[:missing]
        self._buffer = data[missing:]
        request.body = b"".join((*self._parts, body)) if self._parts else body
        self._request = None
        self._parts = []
        self._begin(request)

    def _refuse_early(self, size: int) -> None:
        """A body over the limit is not even read."""
        try:
            self._rollouts.check_size(size)
        except FleetError as error:
            self._keep = False
            self._request = None
            self.refuse(error)

    def _begin(self, request: Request) -> None:
        try:
            self._rollouts.check_size(len(request.body))
            self._rollouts.authorise(request.headers)
        except FleetError as error:
            self.refuse(error)
            return
        self._exchange = Exchange(self._rollouts, request, self)
        self._exchange.begin()

    def _hand_over(self) -> None:
        """Let uvicorn have the connection, from the first byte of this request on."""
        self._connections.discard(self)
        if self._idle_check is not None:
            self._idle_check.cancel()
        protocol = HttpToolsProtocol(*self._for_uvicorn)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._buffer)
        self._buffer = b""
        if self._application.is_stopping:  # it was not among those whom uvicorn has told
            protocol.shutdown()

    # -- answers: the Client of an Exchange --------------------------------------------------------

    def start(self, status: int, headers: Headers) -> None:
        """Write the head: at once for a stream, else together with the body."""
        parts = [STATUS_LINES[status]]
        is_framed = status in (204, 304)
        for name, value in headers:
            is_framed = is_framed or name == b"content-length"
            parts += (name, b": ", value, b"\r\n")
        self._chunked = not is_framed
        if self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self._keep:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        head = b"".join(parts)
        if self._chunked:
            self._transport.write(head)
        else:
            self._head = head

    def body(self, data: bytes) -> None:
        """Write a piece of the body, chunked if its length was not known."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._head:
            data = self._head + data
            self._head = b""
        self._transport.write(data)

    def end(self) -> None:
        """Write what is left, then go on with what the client has sent meanwhile."""
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        elif self._head:
            self._transport.write(self._head)
            self._head = b""
        self._next()

    def refuse(self, error: FleetError) -> None:
        """Answer with the one error shape."""
        body = body_of(error)
        parts = [STATUS_LINES[status_of(error)]]
        parts += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers_of(error)]
        if not self._keep:
            parts.append(b"connection: close\r\n")
        self._transport.write(
            b"%bcontent-length: %d\r\n\r\n%b" % (b"".join(parts), len(body), body)
        )
        self._next()

    def break_off(self, last: bytes) -> None:
        """Close without the last chunk, so that the client sees an answer that was cut short."""
        self._exchange = None
        if last:
            self.body(last)
            self._transport.close()  # once all is written
        else:
            self._transport.abort()

    def _next(self) -> None:
        self._exchange = None
        if not self._keep:
            self._transport.close()
        elif not (self._is_full and self._buffer):  # who does not read gets no further answer
            self._go_on()

    def _go_on(self) -> None:
        """Take the next request: what the client has sent meanwhile, or what is still to come."""
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        if self._buffer:
            loop.call_soon(self._read_on)  # not from here: refusals would pile up on the stack
            return
        self._idle_since = loop.time()
        if self._idle_check is None:  # one timer does for many requests: a timer each is dear
            self._idle_check = loop.call_later(self._keep_alive_s, self._close_if_idle)

    def _read_on(self) -> None:
        is_free = self._exchange is None and self._request is None
        if is_free and self._buffer and not self._transport.is_closing():
            self._read_head()

    def _close_if_idle(self) -> None:
        """Close if nothing has come for the time that a connection is kept, else look again."""
        self._idle_check = None
        if self._idle_since is None:
            return
        loop = asyncio.get_running_loop()
        left_s = self._idle_since + self._keep_alive_s - loop.time()
        if left_s > 0:
            self._idle_check = loop.call_later(left_s, self._close_if_idle)
        else:
            self._transport.close()
