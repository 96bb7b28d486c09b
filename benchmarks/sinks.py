"""Many of the cheapest possible replicas in one process: they read a request and say ok.

Raw asyncio protocols on uvloop, so that the measuring machine spends its time in what is measured.
They answer what probing asks, every control call, and completions (`benchmarks/answers.py`); they
hold no weights and know no phases.

    python -m benchmarks.sinks COUNT [--paced]    prints the ports as a JSON line, runs until killed

`--paced` lets the phases of a round take the time that they took on a GPU (docs/evidence, one
replica, 2 GB over NVLink), so that it shows what is done meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Mapping
from typing import cast

import uvloop

from benchmarks.answers import Answers

SERVER_INFO = {
    "vllm_config": {
        "instance_id": "sink",
        "parallel_config": {},
        "weight_transfer_config": {"backend": "nccl"},
    }
}
ANSWERS: dict[bytes, object] = {
    b"/server_info": SERVER_INFO,
    b"/get_world_size": {"world_size": 1},
    b"/weight_info": {"weight_version": "default"},
    b"/is_paused": {"is_paused": False},
    b"/pause": {"status": "paused"},
    b"/resume": {"status": "resumed"},
}
MEMBER_PATHS = (b"/init", b"/start", b"/update", b"/finish")
COMPLETIONS = b"/v1/completions"
PACE_S: dict[bytes, float] = {
    b"/pause": 0.024,
    b"/start_weight_update": 0.008,
    b"/update_weights": 0.045,
    b"/finish_weight_update": 0.008,
    b"/resume": 0.001,
}
END_STREAMS = b"/end_streams"


class Sink(asyncio.Protocol):
    """One connection to a sink."""

    def __init__(self, answers: Answers, pace_s: Mapping[bytes, float]) -> None:
        self._answers = answers
        self._pace_s = pace_s
        self._head = bytearray()
        self._missing = 0
        self._path = b""
        self._kept: list[bytes] | None = None
        self._close = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are not registered

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream whose client has left ends."""
        self._answers.forget(self._transport)

    def data_received(self, data: bytes) -> None:
        """Count the body down, keeping only that of a completion, then answer."""
        if self._missing:
            self._missing -= len(data)
            if self._kept is not None:
                self._kept.append(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(bytes(self._head[:end]))
            self._missing -= len(self._head) - end - 4
            is_completion = self._path == COMPLETIONS
            self._kept = [bytes(self._head[end + 4 :])] if is_completion else None
            self._head.clear()
        if self._missing == 0:
            self._answer_in_time()

    def _answer_in_time(self) -> None:
        takes_s = self._pace_s.get(self._path)
        if takes_s is None:
            self._answer()
        else:
            asyncio.get_running_loop().call_later(takes_s, self._answer)

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        method, target, _ = lines[0].split(b" ")
        self._path = target.partition(b"?")[0]
        is_member_call = method == b"GET" and self._path.startswith(MEMBER_PATHS)
        self._path = b"405" if is_member_call else self._path
        fields = {k.lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:])}
        self._missing = int(fields.get(b"content-length", b"0"))
        self._close = fields.get(b"connection", b"").lower() == b"close"

    def _answer(self) -> None:
        if self._kept is not None and self._transport is not None:
            self._answers.complete(self._transport, b"".join(self._kept))
            return
        if self._path == END_STREAMS:
            self._answers.end_streams()
        status = b"405 Method Not Allowed" if self._path == b"405" else b"200 OK"
        body = json.dumps(ANSWERS.get(self._path, {"message": "ok"})).encode()
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        if self._close:
            self._transport.close()


async def listen(count: int, pace_s: Mapping[bytes, float]) -> None:
    """Open `count` sinks on free ports and serve until killed."""
    loop = asyncio.get_running_loop()
    answers = Answers()
    servers = [
        await loop.create_server(lambda: Sink(answers, pace_s), "127.0.0.1", 0, backlog=2048)
        for _ in range(count)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def raise_file_limit() -> None:
    """Take as many file descriptors as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(listen(int(sys.argv[1]), PACE_S if "--paced" in sys.argv else {}))
