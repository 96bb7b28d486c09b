"""Kept connections to replicas: what one rollout leaves behind must not touch the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import time

import msgspec
import pytest

from fleet.facts.state import TrainerPause
from gateway.settings_model import Settings
from gateway.upstream import Connection, Pool, Upstreams
from tests.cases.raw_http import Message, Script, answer_of, raw_replica, request_of
from tests.gateway.serving import serve
from tests.waiting import wait_until

change = msgspec.structs.replace

PATH = "/v1/completions"


class SlowClient:
    """Asks once over a pool, and stops reading at each piece, as a client that is slow does."""

    def __init__(self, body: bytes = b"") -> None:
        self._body = body
        self._connection: Connection | None = None
        self.answer = b""
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        connection.send(request_of(PATH, self._body)[: -len(self._body) or None], self._body, self)

    def request_sent(self) -> None:
        pass

    def answer_started(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        pass

    def answer_body(self, data: bytes) -> None:
        self.answer += data
        assert self._connection is not None
        self._connection.pause_reading()

    def answer_complete(self) -> None:
        self.over.set_result("complete")

    def answer_broken(self, reason: str) -> None:
        self.over.set_result(reason)


async def ask(pool: Pool, body: bytes = b"") -> SlowClient:
    """Ask over the pool and wait for the end."""
    client = SlowClient(body)
    pool.take(client)
    await asyncio.wait_for(client.over, 5)
    return client


def numbered(*, trailing: bytes = b"") -> Script:
    """Answer with the number of the request, and then more than was asked for."""
    count = 0

    async def script(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal count
        del request, reader
        count += 1
        writer.write(answer_of(b"%d" % count) + trailing)

    return script


async def test_a_client_that_was_slow_at_the_end_does_not_stop_the_next_one() -> None:
    """Its last piece stops the reading; nobody would start it again for a kept connection."""
    async with raw_replica(numbered()) as replica:
        pool = Pool(replica.url)
        assert [(await ask(pool)).answer for _ in range(3)] == [b"1", b"2", b"3"]
        pool.close()


async def test_connections_that_nobody_uses_any_more_are_closed_after_a_burst() -> None:
    """A proxy before the replica may keep them for hours; each costs a file on both sides."""
    async with raw_replica(numbered()) as replica:
        pool = Pool(replica.url, kept_s=0.2)
        await asyncio.gather(*(ask(pool) for _ in range(5)))
        assert not pool.is_idle

        async def all_closed() -> bool:
            return pool.is_idle

        await wait_until(all_closed)
        assert (await ask(pool)).answer == b"6"
        pool.close()


async def test_pools_of_replicas_that_are_gone_are_forgotten() -> None:
    """Pods come back under new addresses for months."""
    upstreams = Upstreams()
    for number in range(100):
        upstreams.pool(f"http://10.0.0.{number}:8000")
    assert len(upstreams) == 1
    async with raw_replica(numbered()) as replica:
        used = upstreams.pool(replica.url)
        await ask(used)
        upstreams.pool("http://10.0.0.1:8000")
        assert upstreams.pool(replica.url) is used
    upstreams.close()


@pytest.mark.parametrize("trailing", [answer_of(b"unasked"), answer_of(b"unasked")[:-4]])
async def test_an_answer_that_nobody_asked_for_is_nobodys(trailing: bytes) -> None:
    """Whole or begun, it never becomes the answer to the next rollout on that connection."""
    async with raw_replica(numbered(trailing=trailing)) as replica:
        pool = Pool(replica.url)
        assert [(await ask(pool)).answer for _ in range(3)] == [b"1", b"2", b"3"]
        pool.close()


async def test_an_answer_before_the_request_was_read_leaves_no_connection_behind() -> None:
    """A replica that refuses a body unread would otherwise hold on to it, and to the socket."""
    hold = asyncio.Event()
    closed = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_of(b"no", status="413 Too Large"))
        await hold.wait()
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=65536)
    pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = await ask(pool, b"x" * 30_000_000)
    assert client.answer == b"no"
    hold.set()
    await asyncio.wait_for(closed.wait(), 5)
    server.close()


async def test_after_a_kept_connection_that_breaks_comes_a_fresh_one_and_no_other_kept_one() -> (
    None
):
    """All of them may be as old, and a rollout is not to be sent once for each."""
    together = asyncio.Semaphore(0)

    async def answers_three(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del reader
        if request.body == b"late":
            writer.transport.abort()
            return
        await together.acquire()
        writer.write(answer_of(b"{}"))

    async with (
        raw_replica(answers_three) as replica,
        serve(Settings(replicas=(replica.url,))) as served,
    ):
        early = [asyncio.ensure_future(served.http.post(PATH, content=b"early")) for _ in range(3)]
        await wait_until(_async(lambda: len(replica.requests) == 3))
        for _ in early:
            together.release()
        assert [answer.status_code for answer in await asyncio.gather(*early)] == [200] * 3
        assert (await served.http.post(PATH, content=b"late")).status_code == 503
        assert [r.body for r in replica.requests].count(b"late") == 2


@pytest.mark.parametrize("asgi_only", [False, True], ids=["front", "asgi"])
async def test_a_kept_connection_that_breaks_sends_nothing_through_a_closed_gate(
    *, asgi_only: bool
) -> None:
    """The rollout that was on it is tried again, but first it meets the gate again."""
    broken = asyncio.Event()

    async def second_breaks(
        request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        del request, reader
        if len(replica.requests) == 2:
            await broken.wait()
            writer.transport.abort()
        else:
            writer.write(answer_of(b"{}"))

    async with (
        raw_replica(second_breaks) as replica,
        serve(Settings(replicas=(replica.url,)), asgi_only=asgi_only) as served,
    ):
        ledger = served.gateway.ledger
        assert (await served.http.post(PATH, content=b"1")).status_code == 200
        call = asyncio.ensure_future(served.http.post(PATH, content=b"2"))
        await wait_until(_async(lambda: len(replica.requests) == 2))
        pause = TrainerPause(mode="keep", clear_cache=True, by="test", since=time())
        await ledger.amend(lambda state: change(state, pause=pause))
        broken.set()
        await wait_until(_async(lambda: served.gateway.gate.held == 1))
        assert len(replica.requests) == 2
        await ledger.amend(lambda state: change(state, pause=None, weight_version="7"))
        answer = await call
        assert (answer.status_code, answer.headers["X-Weight-Version"]) == (200, "7")
        assert [request.body for request in replica.requests] == [b"1", b"2", b"2"]


def _async(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return condition()

    return check
