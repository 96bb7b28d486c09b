"""A replica that dies in the middle of an answer: the client is told, and nothing is replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.settings_model import Log, Settings
from tests.cases.conftest import case_of, fast, nccl
from tests.cases.raw_http import Message, RawReplica, raw_replica
from tests.gateway.serving import Served, serve

COMPLETIONS = "/v1/completions"
EVENTS = "Content-Type: text/event-stream; charset=utf-8"


class Way:
    """The way in that the tests of this file take; every rule holds for both."""

    asgi_only = False


@pytest.fixture(params=["front", "asgi"], autouse=True)
def _way(request: pytest.FixtureRequest) -> None:
    Way.asgi_only = request.param == "asgi"


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"data: 1\n\n",),
        (b"data: 1\n\ndata: 2\n\n", b"data: 3\n", b"\n"),
        (b"data: 1\r\n\r", b"\n"),
        (b"data: 1\r\r",),
    ],
    ids=["no event", "one", "in pieces", "crlf", "cr"],
)
async def test_a_stream_that_breaks_between_events_ends_with_one_that_says_why(
    pieces: tuple[bytes, ...],
) -> None:
    """In the one error shape, with the replica named; and the end is no normal end."""
    async with _breaking(*pieces) as (served, replica):
        sent, error = await _read(served)
        assert sent.startswith(b"".join(pieces))
        assert isinstance(error, httpx.RemoteProtocolError)
        assert len(replica.requests) == 1
        name = replica.url.removeprefix("http://")
        event = sent.removeprefix(b"".join(pieces))
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        told = json.loads(event.removeprefix(b"data: "))
        assert set(told) == {"error", "replicas", "hint"}
        assert told["error"]["code"] == 424
        assert name in told["error"]["message"]
        assert told["replicas"][name]["outcome"] == "unreachable"


@pytest.mark.parametrize(
    ("pieces", "headers"),
    [
        ((b'data: {"id": "cm',), (EVENTS,)),
        ((b"data: 1\n\n", b"data: 2\n"), (EVENTS,)),
        ((b'{"choices":',), ("Content-Type: application/json",)),
        ((b"\n\n",), ()),
        ((b"\x1f\x8b coded\n\n",), (EVENTS, "Content-Encoding: gzip")),
        ((b"data: 1\n\n",), (EVENTS, "Content-Length: 500")),
    ],
    ids=["in an event", "before its blank line", "json", "no type", "gzip", "with a length"],
)
async def test_nothing_is_added_where_it_could_pass_for_the_replicas_words(
    pieces: tuple[bytes, ...], headers: tuple[str, ...]
) -> None:
    """Half an event must not become a whole one; what is no plain stream is just broken off."""
    async with _breaking(*pieces, headers=headers) as (served, replica):
        sent, error = await _read(served)
        assert b"".join(pieces).startswith(sent)
        assert isinstance(error, httpx.RemoteProtocolError)
        assert len(replica.requests) == 1


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_openais_client_raises_what_the_gateway_says(kind: str) -> None:
    """After the tokens that came: an APIError with the gateway's words, not a short answer."""
    async with case_of(nccl(2, token_delay_ms=1), asgi_only=Way.asgi_only) as case:
        for replica in case.replicas:
            replica.faults.add("/v1/*", "drop", when="during", tokens=3)
        tokens: list[Any] = []
        with pytest.raises(openai.APIError) as raised:
            await _stream_with_openai(case.served.url, kind, tokens)
        assert len(tokens) == 3
        assert type(raised.value) is openai.APIError
        assert "broke off in the middle of this answer" in raised.value.message
        assert str(raised.value.code) == "424"
        assert any(replica.id in raised.value.message for replica in case.replicas)
        assert sum(len(replica.faults.as_json()) for replica in case.replicas) == 1


async def test_a_broken_rollout_is_accounted_for(tmp_path: Path) -> None:
    """In the access log with its replica and label, and in a counter."""
    file = tmp_path / "access.jsonl"
    async with _breaking(b"data: 1\n\n", log=Log(access=str(file))) as (served, replica):
        await _read(served)
        metrics = (await served.http.get("/metrics")).text
        [line] = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["outcome"], line["status"], line["version"]) == ("broken", 200, "default")
    assert line["replica"] == replica.url.removeprefix("http://")
    assert "fleet_rollouts_broken_total 1.0" in metrics


@asynccontextmanager
async def _breaking(
    *pieces: bytes, headers: tuple[str, ...] = (EVENTS,), **settings: Any
) -> AsyncGenerator[tuple[Served, RawReplica]]:
    """A gateway before a replica that sends these pieces, one by one, and hangs up."""
    is_chunked = not any("Content-Length" in header for header in headers)
    framing = ["Transfer-Encoding: chunked"] if is_chunked else []

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        writer.write("\r\n".join(["HTTP/1.1 200 OK", *framing, *headers, "", ""]).encode())
        for piece in pieces:
            await asyncio.sleep(0.01)  # that they arrive as pieces; nothing depends on it
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        await writer.drain()
        writer.close()

    async with raw_replica(script) as replica:
        chosen = Settings(replicas=(replica.url,), timeouts=fast(probe_s=60))
        chosen = chosen.model_copy(update=settings)
        async with serve(chosen, asgi_only=Way.asgi_only) as served:
            yield served, replica


async def _read(served: Served) -> tuple[bytes, Exception | None]:
    """Return what comes of one rollout, and how it ends."""
    pieces: list[bytes] = []
    try:
        async with served.http.stream("POST", COMPLETIONS, json={"stream": True}) as answer:
            async for piece in answer.aiter_raw():
                pieces.append(piece)  # noqa: PERF401 (what came before the break counts)
    except httpx.TransportError as error:
        return b"".join(pieces), error
    return b"".join(pieces), None


async def _stream_with_openai(url: str, kind: str, tokens: list[Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        if kind == "chat":
            stream = await client.chat.completions.create(
                model="sim",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=50,
                stream=True,
            )
            async for chunk in stream:
                tokens.append(chunk)  # noqa: PERF401
        else:
            async for chunk in await client.completions.create(
                model="sim", prompt="x", max_tokens=50, stream=True
            ):
                tokens.append(chunk)  # noqa: PERF401
