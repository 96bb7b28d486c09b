"""The rollout path: byte for byte both ways, streams as they come, disconnects upstream."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from fleet.sim import SimOptions
from gateway.exchange import Request
from gateway.settings_model import Settings
from tests.cases.conftest import Case, case_of, check_error, fast, nccl
from tests.cases.raw_http import (
    Message,
    RawReplica,
    Script,
    answer_of,
    answering,
    exchange,
    raw_replica,
    request_of,
)
from tests.gateway.serving import Served, serve
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"


class Way:
    """The way in that the tests of this file take; every rule holds for both."""

    asgi_only = False


@pytest.fixture(params=["front", "asgi"], autouse=True)
def _way(request: pytest.FixtureRequest) -> None:
    Way.asgi_only = request.param == "asgi"


BODIES = [
    b'{"prompt":"x","prompt":"y","n": 1.0,  "later":{"b":1,"a":2}}',
    '{"prompt":"é\\u00e9 🜚"}'.encode(),
    gzip.compress(b'{"prompt":"x"}', mtime=0),
    b"not json at all\x00\xff",
    b"",
    os.urandom(300_000),
]
TARGETS = [
    "/v1/completions?a=1&a=2&b=%20%2f+%C3%A9&c=",
    "/v1/responses/resp%2F1%20x/cancel",
    "/v1/files/a+b;c=d",
    "/inference/v1/generate?x=%7B%22y%22%3A1%7D",
    "/v1//double/../dots",
]


async def test_bodies_pass_unchanged_in_both_directions() -> None:
    """No decoding, no re-encoding, no (de)compression; the headers that describe them stay too."""

    async def reverse(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del reader
        described = ("Content-Type: a/b", "Content-Encoding: gzip", "ETag: x")
        writer.write(answer_of(request.body[::-1], *described))

    async with _behind(reverse) as (served, replica):
        for body in BODIES:
            raw = request_of(COMPLETIONS, body, "Content-Type: c/d", "Content-Encoding: gzip")
            answer = await exchange(served.url, raw)
            seen = replica.requests[-1]
            assert seen.body == body
            assert seen.values("content-type") == ["c/d"]
            assert seen.values("content-encoding") == ["gzip"]
            assert answer.body == body[::-1]
            assert answer.values("content-type") == ["a/b"]
            assert answer.values("content-encoding") == ["gzip"]
            assert answer.values("etag") == ["x"]


async def test_targets_pass_unchanged() -> None:
    """Query order, repetitions and percent-encoding are the client's."""
    async with _behind(answering(answer_of(b"{}"))) as (served, replica):
        for target in TARGETS:
            answer = await exchange(served.url, request_of(target, b"{}"))
            assert answer.first_line.endswith("200 OK")
            assert replica.requests[-1].target == target


async def test_methods_and_statuses_pass_unchanged() -> None:
    """What the replica says of a request is the answer, errors included."""
    reply = answer_of(b'{"detail":"no"}', "Content-Type: application/json", status="418 No")
    async with _behind(answering(reply)) as (served, replica):
        for method in ("GET", "DELETE", "PUT"):
            raw = request_of("/v1/responses/1", b"", method=method)
            answer = await exchange(served.url, raw)
            assert answer.first_line.split(" ")[1] == "418"
            assert answer.body == b'{"detail":"no"}'
            assert replica.requests[-1].first_line.startswith(f"{method} /v1/responses/1 ")


async def test_hop_by_hop_headers_are_dropped_in_both_directions() -> None:
    """Those of RFC 9110 and those that Connection names; the others keep their order."""
    reply = answer_of(
        b"{}",
        "Keep-Alive: timeout=5",
        "Connection: X-Private, keep-alive",
        "X-Private: 1",
        "Proxy-Authenticate: Basic",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "X-Forwarded-For: 10.0.0.1",
    )
    async with _behind(answering(reply)) as (served, replica):
        raw = request_of(
            COMPLETIONS,
            b"{}",
            "Connection: close, X-Mine",
            "X-Mine: 1",
            "Keep-Alive: 1",
            "Upgrade: x",
            "Proxy-Authorization: Basic eA==",
            "X-Kept: 1",
            "X-Kept: 2",
        )
        answer = await exchange(served.url, raw)
        [seen] = replica.requests
        for dropped in ("x-mine", "keep-alive", "upgrade", "proxy-authorization"):
            assert not seen.values(dropped)
        assert seen.values("x-kept") == ["1", "2"]
        for dropped in ("x-private", "proxy-authenticate", "keep-alive", "x-forwarded-for"):
            assert not answer.values(dropped)
        assert answer.values("set-cookie") == ["a=1", "b=2"]


async def test_nothing_is_added_to_a_request_but_its_id() -> None:
    """No User-Agent, Accept-Encoding or forwarding headers that the client did not send."""
    async with _behind(answering(answer_of(b"{}"))) as (served, replica):
        await exchange(served.url, request_of(COMPLETIONS, b"{}", "Content-Type: x/y"))
        names = sorted(name for name, _ in replica.requests[0].headers)
        assert names == ["content-length", "content-type", "host", "x-request-id"]


async def test_a_request_id_is_kept_or_made() -> None:
    """The replica and the client see the same one, and only one."""
    reply = answer_of(b"{}", "X-Request-Id: the-replicas-own")
    async with _behind(answering(reply)) as (served, replica):
        raw = request_of(COMPLETIONS, b"{}", "X-Request-Id: mine-1")
        assert (await exchange(served.url, raw)).values("x-request-id") == ["mine-1"]
        [made] = (await exchange(served.url, request_of(COMPLETIONS, b"{}"))).values("x-request-id")
        assert [r.values("x-request-id") for r in replica.requests] == [["mine-1"], [made]]
        assert len(made) >= 16


@pytest.mark.parametrize("nothing", ["", " ", "\t "])
async def test_an_empty_header_of_ours_is_none(nothing: str) -> None:
    """No version is asked for that nobody can commit, and an id is made."""
    async with _behind(answering(answer_of(b"{}"))) as (served, replica):
        named = ("X-Min-Weight-Version", "X-Request-Id", "X-Session-Id")
        raw = request_of(COMPLETIONS, b"{}", *(f"{name}:{nothing}" for name in named))
        answer = await asyncio.wait_for(exchange(served.url, raw), 5)
        assert answer.first_line == "HTTP/1.1 200 OK"
        (made,) = answer.values("x-request-id")
        assert made
        assert replica.requests[0].values("x-request-id") == [made]


@pytest.mark.parametrize("status", ["000 Odd", "042 Odd", "600 Odd", "999 Odd"])
async def test_a_status_that_is_none_is_an_answer_that_broke(status: str) -> None:
    """No client is sent what it cannot read; it is refused as with any nonsense."""
    async with _behind(answering(answer_of(b"odd", status=status))) as (served, replica):
        answer = await served.http.post(COMPLETIONS, content=b"{}")
        check_error(answer, 503, "broke the connection before answering")
        assert len(replica.requests) == 1


async def test_an_answer_says_which_replica_and_version_made_it_whatever_that_claims() -> None:
    """Labels are the gateway's own; a replica's are dropped."""
    reply = answer_of(b"{}", "X-Weight-Version: 99", "X-Fleet-Replica: someone")
    async with _behind(answering(reply)) as (served, replica):
        answer = await exchange(served.url, request_of(COMPLETIONS, b"{}"))
        assert answer.values("x-weight-version") == ["default"]
        assert answer.values("x-fleet-replica") == [replica.url.removeprefix("http://")]


async def test_chunks_arrive_as_they_come() -> None:
    """The first event is with the client before the replica has made the last."""
    go_on = asyncio.Event()

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        writer.write(f"{head}\r\n\r\n".encode() + _chunk(b"data: 1\n\n"))
        await writer.drain()
        await go_on.wait()
        writer.write(_chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async with _behind(script) as (served, _), served.http.stream("POST", COMPLETIONS) as answer:
        events = answer.aiter_raw()
        assert await anext(events) == b"data: 1\n\n"
        go_on.set()
        assert b"".join([piece async for piece in events]) == b"data: 2\n\n"
        assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("first_byte", [False, True])
async def test_a_client_that_leaves_takes_its_request_off_the_replica(first_byte: bool) -> None:
    """Before the first byte or in the middle of the stream: the connection upstream is closed."""
    left = asyncio.Event()

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request
        if first_byte:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _chunk(b"1"))
            await writer.drain()
        assert await reader.read() == b""
        left.set()

    async with _behind(script) as (served, replica):
        call = asyncio.ensure_future(_read_first(served) if first_byte else _post(served))
        await wait_until(lambda: _has_requests(replica, 1))
        if first_byte:
            await call
        else:
            call.cancel()
            await asyncio.wait([call])
        await asyncio.wait_for(left.wait(), 10)
        await wait_until(lambda: _is_idle(served))
        assert len(replica.requests) == 1


async def test_a_replica_that_dies_before_any_byte_is_replaced_once() -> None:
    """The client sees one good answer, from another replica."""
    async with _case_of(nccl(2)) as case:
        case.replicas[0].faults.add(COMPLETIONS, "drop", times=0)
        for _ in range(4):
            answer = await case.complete()
            assert answer.status_code == 200
            assert answer.headers["X-Fleet-Replica"] == case.replicas[1].id
        assert len(case.replicas[1].log.rollouts) == 4


async def test_a_rollout_is_tried_twice_and_no_more() -> None:
    """Two of three break off: 503, which may be retried, and the third is not asked."""
    async with _case_of() as case:
        for replica in case.replicas:
            replica.faults.add(COMPLETIONS, "drop")
        answer = await case.complete()
        check_error(answer, 503, "broke the connection before answering")
        assert "Retry-After" in answer.headers
        assert sum(len(replica.faults.as_json()) for replica in case.replicas) == 1


async def test_a_rollout_that_broke_on_the_only_replica_is_refused_at_once() -> None:
    """Nobody else could take it over, however long it waited; a retry of its client finds it."""
    async with _case_of(nccl(2)) as case:
        await case.replicas[1].die()
        await case.await_states("ready", "gone")
        case.replicas[0].faults.add(COMPLETIONS, "drop")
        async with asyncio.timeout(5):
            answer = await case.complete()
        check_error(answer, 503, case.replicas[0].id, "broke the connection before answering")
        assert "Retry-After" in answer.headers
        assert (await case.complete()).status_code == 200


async def test_a_replicas_own_error_is_passed_on_and_not_retried() -> None:
    """A 500 is an answer: a rollout that failed may have had effects."""
    async with _case_of() as case:
        for replica in case.replicas:
            replica.faults.add(COMPLETIONS, "status", status=500)
        assert (await case.complete()).status_code == 500
        assert sum(len(replica.faults.as_json()) for replica in case.replicas) == 2


async def test_a_stream_that_breaks_is_broken_off_and_not_replayed() -> None:
    """After the first byte the client must see that the answer is not whole."""
    async with _case_of(nccl(3, token_delay_ms=1)) as case:
        for replica in case.replicas:
            replica.faults.add(COMPLETIONS, "drop", when="during", tokens=3)
        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        pieces: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await _read_into(pieces, case, body)
        assert pieces
        assert b"[DONE]" not in b"".join(pieces)
        await wait_until(lambda: _is_idle(case))
        assert sum(len(replica.faults.as_json()) for replica in case.replicas) == 2
        assert (await case.complete()).status_code == 200


async def test_a_replica_that_died_is_noticed_by_the_rollout_that_met_it() -> None:
    """Not only by the next probe: those that follow are not sent to it."""
    async with _case_of(nccl(2), timeouts=fast(probe_s=60)) as case:
        await case.replicas[0].die()
        for _ in range(2):
            assert (await case.complete()).status_code == 200
        await case.await_states("gone", "ready")


async def test_rollout_paths_that_are_not_completions_reach_one_replica() -> None:
    """Tokenising, chat and token-in token-out included."""
    async with _case_of() as case:
        asked = {
            "/tokenize": {"prompt": "abc"},
            "/detokenize": {"tokens": [97, 98]},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
        }
        for path, body in asked.items():
            answer = await case.post(path, body)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.headers["X-Weight-Version"] == "default"
            assert answer.headers["X-Fleet-Replica"] in {r.id for r in case.replicas}
        assert (await case.post("/v1/embeddings", {"input": "x"})).json() == {"detail": "Not Found"}


async def test_the_body_of_a_rollout_is_given_up_with_its_answer() -> None:
    """At once, not when the garbage is collected: that may be thousands of bodies later."""
    gc.disable()
    try:
        async with _behind(answering(answer_of(b"{}"))) as (served, _):
            for _ in range(3):
                await exchange(served.url, request_of(COMPLETIONS, b"x" * 100_000))
            kept = [found for found in gc.get_objects() if type(found) is Request]
            assert not [request for request in kept if request.body]
    finally:
        gc.enable()


async def test_rollouts_spread_over_the_replicas() -> None:
    """Fewest in flight first, in turn where they are equal."""
    async with _case_of(nccl(3, token_delay_ms=2)) as case:
        answers = await asyncio.gather(*(case.complete(max_tokens=20) for _ in range(9)))
        served = [answer.headers["X-Fleet-Replica"] for answer in answers]
        assert sorted(served.count(replica.id) for replica in case.replicas) == [3, 3, 3]


def _case_of(
    options: SimOptions | None = None, **settings: Any
) -> AbstractAsyncContextManager[Case]:
    return case_of(options, asgi_only=Way.asgi_only, **settings)


@asynccontextmanager
async def _behind(script: Script) -> AsyncGenerator[tuple[Served, RawReplica]]:
    """A gateway before one replica that does what the script says."""
    async with raw_replica(script) as replica:
        settings = Settings(replicas=(replica.url,), timeouts=fast(probe_s=60))
        async with serve(settings, asgi_only=Way.asgi_only) as served:
            assert list((await served.states()).values()) == ["ready"]
            yield served, replica


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _read_first(served: Served) -> None:
    async with served.http.stream("POST", COMPLETIONS) as answer:
        assert await anext(answer.aiter_raw()) == b"1"


async def _read_into(pieces: list[bytes], case: Case, body: Any) -> None:
    async with case.http.stream("POST", COMPLETIONS, json=body) as answer:
        async for piece in answer.aiter_raw():
            pieces.append(piece)  # noqa: PERF401 (what came before the break counts)


async def _post(served: Served) -> None:
    await served.http.post(COMPLETIONS)


async def _has_requests(replica: RawReplica, count: int) -> bool:
    return len(replica.requests) == count


async def _is_idle(served: Served | Case) -> bool:
    found = (await served.http.get("/fleet/replicas")).json()["replicas"]
    return not any(replica["inflight"] for replica in found)
