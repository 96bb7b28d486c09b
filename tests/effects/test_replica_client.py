"""The one place that speaks vLLM's HTTP, over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web

from fleet.facts.outcome import Result
from fleet.replicas.replica_client import Call, ReplicaClient, judge, open_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable


@pytest.fixture
async def client() -> AsyncIterator[ReplicaClient]:
    """Both pools."""
    async with asyncio.timeout(30), open_client("secret") as opened:
        yield opened


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncGenerator[str]:
    """Serve this handler on a socket of its own."""
    runner = web.ServerRunner(web.Server(cast("Any", handler)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Connections:
    """A server below HTTP: each connection answers so many requests, and then ends like this."""

    def __init__(self, *, answers: int, end: str) -> None:
        self._answers = answers
        self._end = end
        self.requests = 0
        self.opened = 0

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Serve on a socket of its own."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        for number in range(self._answers + 1):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            lines = head.lower().split(b"\r\n")
            lengths = [line[15:] for line in lines if line.startswith(b"content-length:")]
            length = int(lengths[0]) if lengths else 0
            await reader.readexactly(length)
            self.requests += 1
            if number < self._answers:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
            elif self._end == "half":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{")
                await writer.drain()
        if self._end == "reset":
            endpoint = writer.get_extra_info("socket")
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


def answering(body: bytes, status: int = 200) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler with this answer."""

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, status=status, content_type="application/json")

    return handler


SHAPES_OF_ERROR = [
    b'{"error": {"message": "it broke", "type": "InternalServerError", "code": 500}}',
    b'{"error": "it broke"}',
    b'{"object": "error", "message": "it broke", "code": 500}',
    b'{"status": "error", "message": "it broke"}',
    b'{"detail": "it broke"}',
]


@pytest.mark.parametrize("body", SHAPES_OF_ERROR)
async def test_a_200_whose_body_says_error_is_failed(client: ReplicaClient, body: bytes) -> None:
    """Case 14, in every shape that vLLM and FastAPI use."""
    async with serving(answering(body)) as url:
        outcome = await client.call(url, Call("POST", "/update_weights", fresh=True))
    assert outcome.outcome is Result.FAILED
    assert (outcome.status, outcome.detail) == (200, "it broke")


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error": {}}', "{}"),
        (b'{"error": {"code": 5}}', "{'code': 5}"),
        (b'{"error": ["it broke"]}', "['it broke']"),
        (b'{"error": true}', "True"),
        (b'{"status": "error"}', "{'status': 'error'}"),
        (b'{"detail": [{"loc": ["body"]}]}', "[{'loc': ['body']}]"),
    ],
)
def test_an_error_without_a_message_is_told_as_it_came(body: bytes, detail: str) -> None:
    """Something is better than nothing."""
    assert (judge(200, body).outcome, judge(200, body).detail) == (Result.FAILED, detail)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"", None),
        (b"{}", {}),
        (b"plain text", "plain text"),
        (b"[1]", [1]),
        (b'{"error": null, "x": 1}', {"error": None, "x": 1}),
        (b'{"status": "paused"}', {"status": "paused"}),
        (b'{"detail": "more", "x": 1}', {"detail": "more", "x": 1}),
        (b'{"success": false}', {"success": False}),
    ],
)
def test_any_other_200_is_ok_and_brings_its_answer(body: bytes, answer: object) -> None:
    """`success: false` of a cache reset is an answer, not a failure."""
    outcome = judge(200, body)
    assert (outcome.outcome, outcome.status, outcome.answer) == (Result.OK, 200, answer)


@pytest.mark.parametrize(
    ("path", "result"),
    [("/update_weight_version", Result.FAILED), ("/reset_prefix_cache", Result.OK)],
)
async def test_no_success_is_an_answer_to_a_cache_reset_only(
    client: ReplicaClient, path: str, result: Result
) -> None:
    """Case 14 once more: a label that was not set must not be committed."""
    async with serving(answering(b'{"success": false, "message": "it broke"}')) as url:
        outcome = await client.call(url, Call("POST", path))
    assert outcome.outcome is result
    assert outcome.detail == (None if outcome.ok else "it broke")


def test_an_answer_before_the_answer_is_no_success() -> None:
    """101, from whatever wants to speak another protocol: nobody has loaded any weights."""
    assert judge(101, b"").outcome is Result.FAILED


@pytest.mark.parametrize("status", [300, 302, 400, 403, 404, 409, 422, 500, 502, 503])
@pytest.mark.parametrize(
    ("body", "detail"),
    [(SHAPES_OF_ERROR[0], "it broke"), (b"plain", "plain"), (b'{"x": 1}', '{"x": 1}')],
)
async def test_a_status_that_is_no_success_is_failed(
    client: ReplicaClient, status: int, body: bytes, detail: str
) -> None:
    """With what the body says."""
    async with serving(answering(body, status)) as url:
        outcome = await client.call(url, Call("GET", "/health"))
    assert (outcome.outcome, outcome.status, outcome.detail) == (Result.FAILED, status, detail)


def test_a_failure_without_a_body_tells_its_status_and_a_long_one_is_cut() -> None:
    """Details travel into records and messages."""
    assert judge(503, b"").detail == "HTTP 503"
    assert len(judge(500, b'{"error": "' + b"x" * 50_000 + b'"}').detail or "") == 2000


async def test_a_redirect_is_not_followed(client: ReplicaClient) -> None:
    """A call that must not be repeated must not be repeated elsewhere either."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    async with serving(handler) as url:
        outcome = await client.call(url, Call("POST", "/init", body=b"{}", fresh=True))
    assert (outcome.outcome, outcome.status, seen) == (Result.FAILED, 307, ["/init"])


async def test_a_server_that_compresses_on_request_is_still_understood(
    client: ReplicaClient,
) -> None:
    """An ingress between gateway and replica may zip what it is allowed to."""

    async def handler(_: web.Request) -> web.Response:
        response = web.json_response({"world_size": 4, "padding": "x" * 5000})
        response.enable_compression()
        return response

    async with serving(handler) as url:
        outcome = await client.call(url, Call("GET", "/get_world_size"))
        read = await client.read(url, "/get_world_size")
    assert isinstance(outcome.answer, dict)
    assert json.loads(read)["world_size"] == 4


@pytest.mark.parametrize("fresh", [True, False])
async def test_what_is_no_name_at_all_is_unreachable(client: ReplicaClient, fresh: bool) -> None:
    """A store may still have it; an error here would end the look at its siblings, and an init."""
    url = "http://vllm..svc:8000"
    await client.open_ahead(url)
    outcome = await client.call(url, Call("POST", "/update_weights", fresh=fresh))
    assert outcome.outcome is Result.UNREACHABLE
    assert await client.read(url, "/metrics") == b""


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_refused_connection_is_unreachable(client: ReplicaClient, fresh: bool) -> None:
    """With the reason, and no exception."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    outcome = await client.call(url, Call("POST", "/pause", fresh=fresh))
    assert outcome.outcome is Result.UNREACHABLE
    assert outcome.status is None
    assert "Connect" in (outcome.detail or "")
    assert await client.read(url, "/metrics") == b""


@pytest.mark.parametrize("end", ["closed", "reset", "half"])
async def test_a_fresh_call_is_made_once_however_its_connection_ends(
    client: ReplicaClient, end: str
) -> None:
    """A lost answer to a collective call cannot be told from a lost call: no second attempt."""
    server = Connections(answers=0, end=end)
    async with server.serving() as url:
        outcome = await client.call(url, Call("POST", "/update_weights", body=b"{}", fresh=True))
    assert outcome.outcome is Result.UNREACHABLE
    assert outcome.detail
    assert server.requests == 1


@pytest.mark.parametrize("end", ["closed", "reset"])
async def test_a_pooled_connection_that_has_ended_is_replaced_once(
    client: ReplicaClient, end: str
) -> None:
    """The server may close an idle connection in the moment in which it is used."""
    server = Connections(answers=1, end=end)
    async with server.serving() as url:
        outcomes = [await client.call(url, Call("POST", "/pause", body=b"{}")) for _ in range(3)]
    assert [o.outcome for o in outcomes] == [Result.OK] * 3
    assert server.requests == 5
    assert server.opened == 3


@pytest.mark.parametrize("end", ["closed", "reset"])
async def test_a_pooled_call_is_tried_no_more_than_twice(client: ReplicaClient, end: str) -> None:
    """Two lost connections in a row are a server in trouble."""
    server = Connections(answers=0, end=end)
    async with server.serving() as url:
        outcome = await client.call(url, Call("POST", "/pause"))
    assert outcome.outcome is Result.UNREACHABLE
    assert server.requests == 2


async def test_pooled_calls_share_a_connection_and_fresh_ones_do_not(
    client: ReplicaClient,
) -> None:
    """Collective calls go out on connections of their own."""
    server = Connections(answers=100, end="closed")
    async with server.serving() as url:
        for _ in range(3):
            await client.call(url, Call("POST", "/pause"))
        assert server.opened == 1
        for _ in range(3):
            await client.call(url, Call("POST", "/init", fresh=True))
        assert server.opened == 4


async def test_there_is_no_cap_on_calls_in_flight(client: ReplicaClient) -> None:
    """A hundred and fifty calls that wait for each other: a pool of a hundred would hang."""
    everyone = asyncio.Barrier(150)

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        await everyone.wait()
        return web.json_response({})

    call = Call("POST", "/init", body=b"{}", fresh=True)
    async with serving(handler) as url, asyncio.TaskGroup() as group:
        calls = [group.create_task(client.call(url, call)) for _ in range(150)]
    assert {c.result().outcome for c in calls} == {Result.OK}


@pytest.mark.parametrize("size", [0, 1, 64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1, 5_000_001])
@pytest.mark.parametrize("fresh", [True, False])
async def test_a_body_arrives_whole_identical_and_with_its_exact_length(
    client: ReplicaClient, size: int, fresh: bool
) -> None:
    """Written in pieces from one shared buffer, never chunked."""
    body = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.Response:
        content = await request.content.read()
        seen["digest"] = hashlib.sha256(content).hexdigest()
        seen["headers"] = request.headers
        return web.json_response({})

    async with serving(handler) as url:
        call = Call("POST", "/update_weights", body=memoryview(body), fresh=fresh)
        outcome = await client.call(url, call)
    assert outcome.outcome is Result.OK
    assert seen["digest"] == hashlib.sha256(body).hexdigest()
    assert seen["headers"]["content-length"] == str(size)
    assert seen["headers"]["content-type"] == "application/json"
    assert "transfer-encoding" not in seen["headers"]


async def test_every_call_carries_the_token_its_query_and_its_own_headers(
    client: ReplicaClient,
) -> None:
    """The path travels as it was given."""
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({})

    async with serving(handler) as url:
        await client.call(url, Call("POST", "/pause", "mode=keep&x=%20", headers={"X-A": "1"}))
        await client.read(url, "/metrics")
    assert seen[0].raw_path == "/pause?mode=keep&x=%20"
    assert [r.headers["Authorization"] for r in seen] == ["Bearer secret"] * 2
    assert seen[0].headers["X-A"] == "1"


async def test_reading_gives_nothing_for_anything_but_200(client: ReplicaClient) -> None:
    """Whoever reads takes what there is."""
    async with serving(answering(b"there", 404)) as url:
        assert await client.read(url, "/metrics") == b""
    async with serving(answering(b"there")) as url:
        assert await client.read(url, "/metrics") == b"there"


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("body", [b"<html>please log in</html>", b'"ok"', b"[1]"])
async def test_a_200_that_is_no_json_object_is_no_phase_of_a_round(
    client: ReplicaClient, path: str, body: bytes
) -> None:
    """A login page between us and the replica must not commit a version."""
    async with serving(answering(body)) as url:
        outcome = await client.call(url, Call("POST", path, fresh=True))
        assert outcome.outcome is Result.FAILED
        assert "no JSON object" in (outcome.detail or "")
        assert (await client.call(url, Call("POST", "/reset_mm_cache"))).ok


@pytest.mark.parametrize("body", [b"", b'{"message":"done"}'])
async def test_an_empty_200_and_an_object_are_answers_of_a_phase(
    client: ReplicaClient, body: bytes
) -> None:
    """Older servers say nothing at all."""
    async with serving(answering(body)) as url:
        assert (await client.call(url, Call("POST", "/finish_weight_update"))).ok
