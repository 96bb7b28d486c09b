"""Many rollouts at once from one process: every answer is compared with what it must be.

    python -m benchmarks.crowd URL KIND CONNECTIONS [--requests 1] [--prompt-bytes 0] [--limit 60]

Each connection makes so many requests one after the other, each with a prompt of its own. While it
works it prints a line of JSON with the number of connections and of answers that have begun, each
quarter of a second; the last line counts right answers and describes the first few wrong ones.
Raw asyncio protocols on uvloop. KIND is one of those in benchmarks/answers.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from benchmarks.answers import DONE, event, json_answer, stream_answer
from benchmarks.sinks import raise_file_limit

CONNECTING_AT_ONCE = 200
TOLD_AT_MOST = 5
REPORT_S = 0.25


@dataclass
class Tally:
    """What has come of the crowd so far."""

    connected: int = 0
    begun: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)


class Visitor(asyncio.Protocol):
    """One connection; `done` is set when all its requests are answered, or one cannot be."""

    def __init__(self, kind: str, prompts: list[bytes], tally: Tally) -> None:
        self._kind = kind
        self._prompts = prompts
        self._tally = tally
        self._turn = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the first request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered
        self._tally.connected += 1
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Note what was not answered."""
        if not self.done.done():
            got = sum(map(len, self._body))
            self._end(f"connection lost after {got} bytes of a body: {exc}")

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        prompt = self._prompts[self._turn].decode()
        body = json.dumps({"model": self._kind, "prompt": prompt}).encode()
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (self._id(), len(body), body)
        )

    def _id(self) -> bytes:
        return self._prompts[self._turn].partition(b".")[0]

    # -- httptools ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin anew."""
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body."""
        if not self._body:
            self._tally.begun += 1
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Judge the answer, then make the next request."""
        complaint = self._complaint(self._parser.get_status_code(), b"".join(self._body))
        if complaint is not None:
            self._end(complaint)
            return
        self._tally.right += 1
        self._turn += 1
        if self._turn < len(self._prompts):
            self._ask()
        else:
            self._end(None)

    def _complaint(self, status: int, body: bytes) -> str | None:
        """Return what is wrong with the answer, if anything is."""
        headers = self._headers
        if status != 200:
            return f"{status} {body[:300]!r}"
        if not self._is_right(body):
            return f"another body: {body[:300]!r}… ({len(body)} bytes)"
        if headers.get(b"x-fleet-replica", headers[b"x-sink"]) != headers[b"x-sink"]:
            return f"labelled {headers[b'x-fleet-replica']!r}, made by {headers[b'x-sink']!r}"
        if headers.get(b"x-request-id", self._id()) != self._id():
            return f"request id {headers[b'x-request-id']!r}, asked with {self._id()!r}"
        self._tally.versions[headers.get(b"x-weight-version", b"none").decode()] += 1
        return None

    def _is_right(self, body: bytes) -> bool:
        prompt = self._prompts[self._turn]
        if self._kind == "json":
            return body == json_answer(prompt)
        if self._kind != "open":
            return body == stream_answer(prompt)
        events = body.removeprefix(event(prompt)).removesuffix(DONE)
        between = len(body) - len(event(prompt)) - len(DONE)
        return len(events) == between and events.replace(event(), b"") == b""

    def _end(self, complaint: str | None) -> None:
        if self.done.done():
            return
        if complaint is not None:
            self._tally.wrong.append(complaint)
        self.done.set_result(None)
        self._transport.close()


async def visit(asked: argparse.Namespace, number: int, tally: Tally, slot: asyncio.Semaphore):
    """Make one connection and wait until it is done."""
    loop = asyncio.get_running_loop()
    where = urlsplit(asked.url)
    prompts = [
        b"%d-%d." % (number, turn) + b"p" * asked.prompt_bytes for turn in range(asked.requests)
    ]
    try:
        async with slot:
            _, visitor = await loop.create_connection(
                lambda: Visitor(asked.kind, prompts, tally), where.hostname, where.port
            )
    except OSError as error:
        tally.wrong.append(f"cannot connect: {error}")
    else:
        await visitor.done


def tell(tally: Tally, *, is_last: bool = False) -> None:
    """Print how far it is."""
    told: dict[str, object] = {"connected": tally.connected, "begun": tally.begun}
    if is_last:
        told |= {
            "right": tally.right,
            "wrong": len(tally.wrong),
            "complaints": tally.wrong[:TOLD_AT_MOST],
            "versions": tally.versions,
        }
    print(json.dumps(told), flush=True)


async def crowd(asked: argparse.Namespace) -> None:
    """Let all come at once; give up at the limit."""
    tally, slot = Tally(), asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def report() -> None:
        while True:
            tell(tally)
            await asyncio.sleep(REPORT_S)

    try:
        async with asyncio.timeout(asked.limit), asyncio.TaskGroup() as group:
            reporter = group.create_task(report())
            visits = [
                group.create_task(visit(asked, number, tally, slot))
                for number in range(asked.connections)
            ]
            await asyncio.wait(visits)
            reporter.cancel()
    except TimeoutError:
        tally.wrong.append(f"not done after {asked.limit:g} s")
    tell(tally, is_last=True)


def main() -> None:
    """Run a crowd."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("kind", choices=["json", "burst", "paced", "open"])
    parser.add_argument("connections", type=int)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--prompt-bytes", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0)
    raise_file_limit()
    uvloop.run(crowd(parser.parse_args()))


if __name__ == "__main__":
    main()
