"""The front: what it carries itself, what it hands to uvicorn, and how it treats both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from gateway import server
from gateway.settings_model import Gate, Limits, Settings
from tests.cases.raw_http import (
    Message,
    RawReplica,
    Script,
    answer_of,
    answering,
    exchange,
    raw_replica,
    read_message,
    request_of,
)
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

PATH = "/v1/completions"
OK = answer_of(b'{"ok":true}')


@asynccontextmanager
async def behind(script: Script, **settings: object) -> AsyncGenerator[tuple[Served, RawReplica]]:
    """A gateway in front of one scripted replica."""
    async with (
        raw_replica(script) as replica,
        serve(Settings(replicas=(replica.url,)).model_copy(update=settings)) as served,
    ):
        yield served, replica


@asynccontextmanager
async def connection(
    url: str,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One client connection to the gateway."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_requests_sent_in_one_breath_are_answered_in_order() -> None:
    """Pipelining: the next request waits until the one before is answered, and is not lost."""

    async def echo(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del reader
        writer.write(answer_of(request.body))

    async with behind(echo) as (served, _), connection(served.url) as (reader, writer):
        bodies = [f'{{"n":{n}}}'.encode() for n in range(20)]
        writer.write(b"".join(request_of(PATH, body) for body in bodies))
        assert [(await read_message(reader)).body for _ in bodies] == bodies


async def test_who_reads_no_answer_is_given_no_further_ones() -> None:
    """Requests in one breath may have answers of any size: none is asked for that nobody takes."""
    piece, asked = b"x" * 100_000, 200
    async with (
        behind(answering(answer_of(piece))) as (served, replica),
        connection(served.url) as (reader, writer),
    ):
        writer.write(request_of(PATH, b"{}") * asked)
        await reader.readexactly(1)
        stalled_at = -1

        async def stalled() -> bool:
            nonlocal stalled_at
            before, stalled_at = stalled_at, len(replica.requests)
            await asyncio.sleep(0.1)  # dozens could have been answered meanwhile
            return before == len(replica.requests)

        await wait_until(stalled)
        assert len(replica.requests) < asked // 2
        writer.write(request_of(PATH, b"{}"))
        before = len(replica.requests)
        await wait_until(stalled)
        assert len(replica.requests) == before
        first = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(piece)) == piece
        assert b"content-length: 100000" in first
        assert {(await read_message(reader)).body for _ in range(asked)} == {piece}


async def test_any_number_of_refusals_may_be_asked_for_in_one_breath() -> None:
    """Each is answered at once, and none while another one is."""
    asked = 2000
    async with (
        behind(answering(OK), limits=Limits(rollout_body_bytes=1)) as (served, _),
        connection(served.url) as (reader, writer),
    ):
        writer.write(request_of(PATH, b"{}") * asked)
        answers = [(await read_message(reader)).first_line.split()[1] for _ in range(asked)]
    assert set(answers) == {"413"}


async def test_a_client_that_sends_much_in_one_breath_is_stopped_until_it_is_its_turn() -> None:
    """What comes while a rollout is under way stays with the client: the gateway buffers little."""
    body, count = b"x" * 65536, 384
    answers = asyncio.Semaphore(0)

    async def one_by_one(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del reader
        assert request.body == body
        await answers.acquire()
        writer.write(OK)

    async with (
        behind(one_by_one) as (served, replica),
        connection(served.url) as (reader, writer),
    ):
        writer.write(request_of(PATH, body) * count)
        left = -1

        async def stalled() -> bool:
            nonlocal left
            before, left = left, writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.1)  # the gateway could have read megabytes meanwhile
            return before == left

        await wait_until(stalled)
        assert left > 0
        for _ in range(count):
            answers.release()
            assert (await read_message(reader)).body == b'{"ok":true}'
        assert len(replica.requests) == count


async def test_a_request_may_come_byte_by_byte() -> None:
    """Wherever the network cuts a request, it is the same request."""
    raw = request_of(PATH, b'{"prompt":"cut"}', "X-Request-Id: mine")
    async with behind(answering(OK)) as (served, replica), connection(served.url) as (r, w):
        for n in range(len(raw)):
            w.write(raw[n : n + 1])
            await w.drain()
            await asyncio.sleep(0)
        answer = await read_message(r)
    assert answer.body == b'{"ok":true}'
    assert replica.requests[0].body == b'{"prompt":"cut"}'
    assert answer.values("x-request-id") == ["mine"]


async def test_one_connection_may_carry_rollouts_and_control_calls() -> None:
    """A connection whose next request is not a rollout is handed over with that request whole."""
    async with behind(answering(OK)) as (served, _), connection(served.url) as (reader, writer):
        for _ in range(2):
            writer.write(request_of(PATH, b"{}"))
            assert (await read_message(reader)).body == b'{"ok":true}'
            calls = (request_of(path, b"", method="GET") for path in ("/weight_info", "/is_paused"))
            writer.write(b"".join(calls))
            assert b"default" in (await read_message(reader)).body
            assert b"is_paused" in (await read_message(reader)).body


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
        b"GET /v1/responses/1 HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["chunked", "expect", "get", "http10"],
)
async def test_what_is_not_plain_meets_the_same_gate_behind_uvicorn(raw: bytes) -> None:
    """Handed-over rollouts are answered and labelled like any other."""
    async with behind(answering(OK)) as (served, _), connection(served.url) as (reader, writer):
        writer.write(raw)
        answer = await read_message(reader)
        if answer.first_line.startswith("HTTP/1.1 100"):
            answer = await read_message(reader)
    assert answer.body == b'{"ok":true}'
    assert answer.values("x-weight-version") == ["default"]


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/a HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length : 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nX: a\r\n folded\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    ],
    ids=["two lengths", "length and chunked", "space", "sign", "folded", "null", "endless"],
)
async def test_an_ambiguous_head_is_never_passed_on(
    head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What two servers could read in two ways is refused, or rewritten without the doubt."""
    async with behind(answering(OK)) as (served, replica), connection(served.url) as (r, w):
        w.write(head)
        w.write_eof()
        await r.read()
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        for request in replica.requests:
            assert len(request.values("content-length")) <= 1
            assert request.values("transfer-encoding") == []
            assert request.body in (b"{}", b"")


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    """413 comes before the body does, and the connection ends."""
    limits = Limits(rollout_body_bytes=100)
    async with behind(answering(OK), limits=limits) as (served, replica):
        async with connection(served.url) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5000\r\n\r\n{")
            answer = await read_message(reader)
            assert answer.first_line.startswith("HTTP/1.1 413")
            assert await reader.read() == b""
        assert replica.requests == []


async def test_a_connection_is_closed_when_the_client_wants_it() -> None:
    """`Connection: close` is obeyed and said back."""
    raw = request_of(PATH, b"{}", "Connection: close")
    async with behind(answering(OK)) as (served, _), connection(served.url) as (reader, writer):
        writer.write(raw)
        answer = await read_message(reader)
        assert answer.values("connection") == ["close"]
        assert await reader.read() == b""


async def test_a_client_that_reads_slowly_stops_its_replica() -> None:
    """Back-pressure reaches from the client to the replica: the gateway does not buffer answers."""
    piece, pieces = b"x" * 65536, 800
    sent = 0

    async def pour(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal sent
        del request, reader
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(piece) * pieces))
        for number in range(pieces):
            writer.write(piece)
            await writer.drain()
            sent = number

    async with behind(pour) as (served, _), connection(served.url) as (reader, writer):
        writer.write(request_of(PATH, b"{}"))
        await reader.readuntil(b"\r\n\r\n")
        stalled_at = -1

        async def stalled() -> bool:
            nonlocal stalled_at
            before, stalled_at = stalled_at, sent
            await asyncio.sleep(0.1)  # the replica could have sent megabytes meanwhile
            return before == sent

        await wait_until(stalled)
        assert sent < pieces // 2
        assert len(await reader.readexactly(len(piece) * pieces)) == len(piece) * pieces


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK, b'{"ok":true}'),
        (b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["interim", "until close", "no content"],
)
async def test_answers_in_any_framing_arrive_whole(raw: bytes, body: bytes) -> None:
    """How a replica marks the end of an answer is its own business."""

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        writer.write(raw)
        if b"close" in raw:
            writer.close()

    async with behind(script) as (served, _):
        answer = await served.http.post(PATH, content=b"{}")
    assert answer.content == body


async def test_a_replica_that_does_not_speak_http_is_an_error_not_a_hang() -> None:
    """Two replicas' worth of nonsense is answered by one clear error."""
    nonsense = answering(b"SSH-2.0-OpenSSH\r\n\r\n")
    async with behind(nonsense, gate=Gate(timeout_s=0.3)) as (served, _):
        answer = await served.http.post(PATH, content=b"{}")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]


async def test_an_idle_connection_that_the_replica_closed_costs_nobody_anything() -> None:
    """A kept connection that is closed while idle is replaced; no replica is suspected for it."""

    async def once(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        writer.write(OK)
        await writer.drain()
        writer.close()

    async with behind(once) as (served, _):
        for _ in range(5):
            answer = await exchange(served.url, request_of(PATH, b"{}"))
            assert answer.body == b'{"ok":true}'
        assert set((await served.states()).values()) == {"ready"}


async def test_after_all_this_nothing_is_left_in_flight() -> None:
    """Every ticket comes back, whatever became of the rollout."""
    async with behind(answering(OK)) as (served, _):
        async with connection(served.url) as (reader, writer):
            writer.write(request_of(PATH, b"{}") * 3)
            await read_message(reader)
        gate = served.gateway.gate

        async def quiet() -> bool:
            return not gate.inflight and gate.held == 0

        await wait_until(quiet)
        await asyncio.wait_for(gate.closed(), 1)
        await asyncio.wait_for(gate.drained(), 1)


async def test_a_connection_is_kept_while_it_is_used_and_closed_when_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time counts from the last answer; a rollout may take longer than an idle connection."""
    kept_s = 0.8
    monkeypatch.setattr(server, "KEEP_ALIVE_S", kept_s)

    async def think(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del reader
        await asyncio.sleep(float(request.body))
        writer.write(OK)

    async with behind(think) as (served, _), connection(served.url) as (reader, writer):
        for thought_s in ("0", "0", "1"):
            await asyncio.sleep(0.6 * kept_s)  # idle, but not for long enough
            writer.write(request_of(PATH, thought_s.encode()))
            assert (await read_message(reader)).body == b'{"ok":true}'
        began = asyncio.get_running_loop().time()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert asyncio.get_running_loop().time() - began > 0.9 * kept_s


async def test_a_connection_taken_in_while_the_gateway_stops_is_served_once_and_closed() -> None:
    """Accepted in the moment in which the listening ended, it is nobody's whom uvicorn tells."""
    silence_is_over = asyncio.Event()

    async def answer_late(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        await silence_is_over.wait()
        writer.write(OK)

    async with behind(answer_late) as (served, _):
        served.app.stop()
        async with (
            connection(served.url) as (plain, sending),
            connection(served.url) as (chunked, sending_chunks),
            connection(served.url) as (silent, _),
        ):
            sending.write(request_of(PATH, b"{}"))
            head = f"POST {PATH} HTTP/1.1\r\nHost: gateway\r\nTransfer-Encoding: chunked\r\n\r\n"
            sending_chunks.write(head.encode() + b"2\r\n{}\r\n0\r\n\r\n")
            assert await silent.read() == b""
            silence_is_over.set()
            for reader in (plain, chunked):
                answer = await read_message(reader)
                assert answer.first_line.split()[1] == "200"
                assert answer.values("connection") == ["close"]
                assert await reader.read() == b""
