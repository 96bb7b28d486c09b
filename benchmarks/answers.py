"""What a sink answers to a completion: the field `model` in the body picks one of four kinds.

- `json`: one JSON object of 1 KB;
- `burst`: a stream of 50 events of 200 bytes, all written at once;
- `paced`: the same stream, one event each 4 ms;
- `open`: an event each second until POST /end_streams, or for 3 minutes.

Every answer names its sink in `X-Sink` and repeats the prompt of its request, so that a client can
tell an answer that was meant for another. Streams step together, all in one tick, as an engine
makes one token for every running sequence.
"""

from __future__ import annotations

import asyncio
import json

EVENTS = 50
EVENT_BYTES = 200
JSON_BYTES = 1024
PACE_S = 0.004
OPEN_PACE_S = 1.0
OPEN_EVENTS = 180

_EVENT = b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":"'
_EVENT_END = b'","finish_reason":null}]}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\nx-sink: %b\r\ncontent-type: "
_JSON_HEAD = _HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = _HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON = b'{"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":"'
_JSON_END = b'","finish_reason":"length"}],"usage":{"completion_tokens":1}}'


def event(text: bytes = b"") -> bytes:
    """Return one event of EVENT_BYTES, or of what the text needs."""
    return _EVENT + text.ljust(EVENT_BYTES - len(_EVENT) - len(_EVENT_END), b".") + _EVENT_END


def json_answer(prompt: bytes) -> bytes:
    """Return a JSON answer of JSON_BYTES, or of what the prompt needs."""
    return _JSON + prompt.ljust(JSON_BYTES - len(_JSON) - len(_JSON_END), b".") + _JSON_END


def stream_answer(prompt: bytes, events: int = EVENTS) -> bytes:
    """Return the body of a whole stream, without its chunks."""
    return event(prompt) + event() * (events - 1) + DONE


DONE = b"data: [DONE]\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_NEXT = _chunk(event())
_LAST = _chunk(DONE) + b"0\r\n\r\n"
_REST = _NEXT * (EVENTS - 1) + _LAST


class Steps:
    """Streams that get their events together, one per tick, until they had enough."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._left: dict[asyncio.WriteTransport, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, transport: asyncio.WriteTransport, events: int) -> None:
        """Let a stream take part from the next tick on."""
        self._left[transport] = events
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pace_s, self._tick)

    def forget(self, transport: asyncio.WriteTransport) -> None:
        """Write nothing more to a connection."""
        self._left.pop(transport, None)

    def end(self) -> None:
        """End all streams now."""
        for transport in self._left:
            transport.write(_LAST)
        self._left.clear()

    def _tick(self) -> None:
        self._timer = None
        for transport, left in tuple(self._left.items()):
            if left > 0:
                self._left[transport] = left - 1
                transport.write(_NEXT)
            else:
                del self._left[transport]
                transport.write(_LAST)
        if self._left:
            self._timer = asyncio.get_running_loop().call_later(self._pace_s, self._tick)


class Answers:
    """The answers of all sinks of one process."""

    def __init__(self) -> None:
        self._paced = Steps(PACE_S)
        self._open = Steps(OPEN_PACE_S)

    def complete(self, transport: asyncio.WriteTransport, body: bytes) -> None:
        """Answer one completion."""
        asked = json.loads(body)
        prompt, kind = str(asked["prompt"]).encode(), asked["model"]
        sink = b"127.0.0.1:%d" % transport.get_extra_info("sockname")[1]
        if kind == "json":
            answer = json_answer(prompt)
            transport.write(_JSON_HEAD % (sink, len(answer)) + answer)
            return
        start = _STREAM_HEAD % sink + _chunk(event(prompt))
        transport.write(start + _REST if kind == "burst" else start)
        if kind == "paced":
            self._paced.add(transport, EVENTS - 1)
        elif kind == "open":
            self._open.add(transport, OPEN_EVENTS)

    def forget(self, transport: asyncio.WriteTransport | None) -> None:
        """Give up the stream of a connection that is closed."""
        if transport is not None:
            self._paced.forget(transport)
            self._open.forget(transport)

    def end_streams(self) -> None:
        """End the streams that are open until told."""
        self._open.end()
