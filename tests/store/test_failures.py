"""A real Redis that dies, hangs or loses an answer: named in time, and recovered from."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from fleet.errors import StoreUnavailable
from fleet.store import Entry, open_store, redis
from fleet.store.embedded import uptime_s
from fleet.store.redis import ANSWER_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from fleet.store import Store
    from tests.redis_server import RedisServer

CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "load": lambda s: s.load("state"),
    "swap": lambda s: s.swap("state", expected=None, stamp="1", body=b""),
    "drop": lambda s: s.drop("state", expected="1"),
    "add_members": lambda s: s.add_members("names", ["a"], 60),
    "members": lambda s: s.members("names"),
    "append": lambda s: s.append("events", {"n": "1"}, cap=3),
    "extend": lambda s: s.extend("events", [{"n": "1"}], cap=3),
    "tail": lambda s: s.tail("events", 1),
    "follow": lambda s: anext(s.follow("events", "0-0")),
    "publish": lambda s: s.publish("gates", "close"),
    "ping": lambda s: s.ping(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_dead_server_is_an_error_of_the_tree(call: str) -> None:
    """Whatever is asked, nothing of the client library comes out, and no password."""
    async with open_store("redis://:secret@127.0.0.1:1/0", "tests") as store:
        with pytest.raises(StoreUnavailable, match=r"at redis://127\.0\.0\.1:1/0") as caught:
            await CALLS[call](store)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is not None


async def test_subscribing_to_a_dead_server_is_an_error_of_the_tree() -> None:
    """The context is not entered as if all were well."""
    async with open_store("redis://127.0.0.1:1", "tests") as store:
        with pytest.raises(StoreUnavailable):
            async with store.subscribe("gates"):
                pass


async def test_a_killed_server_is_noticed_and_used_again_when_it_is_back(
    own_server: RedisServer,
) -> None:
    """No restart of the gateway is needed after a restart of Redis."""
    async with open_store(own_server.url, "tests") as store:
        await store.swap("state", expected=None, stamp="1", body=b"")
        own_server.kill()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.load("state")
            with pytest.raises(StoreUnavailable):
                await store.swap("state", expected="1", stamp="2", body=b"")
        own_server.start()
        assert await store.load("state") is None
        assert await store.swap("state", expected=None, stamp="2", body=b"")


async def test_a_write_right_after_a_restart_needs_no_second_try(own_server: RedisServer) -> None:
    """A pooled connection that died is found dead before a write is sent on it."""
    async with open_store(own_server.url, "tests") as store:
        await store.ping()
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
        assert await store.swap("state", expected=None, stamp="1", body=b"")


@pytest.mark.parametrize("call", ["load", "swap", "append", "follow"])
async def test_a_frozen_server_is_given_up_within_the_timeout(
    own_server: RedisServer, call: str
) -> None:
    """A server that accepts and says nothing must not hang a control call."""
    async with open_store(own_server.url, "tests") as store:
        await store.ping()
        own_server.freeze()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await CALLS[call](store)
        assert time.monotonic() - began < ANSWER_TIMEOUT_S + 1.5
        own_server.thaw()
        await store.ping()


async def test_an_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client's own timeouts do, a call has an end."""
    monkeypatch.setattr(redis, "ANSWER_TIMEOUT_S", 0.01)
    engine = cast("redis.Commands", _Silent())
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        await redis.RedisStore(engine, "tests", "nowhere", uptime_s).load("state")


async def test_a_subscriber_goes_on_after_an_outage_without_a_loss(
    own_server: RedisServer,
) -> None:
    """What was published between the error and the next step still arrives."""
    async with open_store(own_server.url, "tests") as store, store.subscribe("gates") as gates:
        await store.publish("gates", "one")
        assert await anext(gates) == b"one"
        own_server.kill()
        with pytest.raises(StoreUnavailable):
            await anext(gates)
        own_server.start()
        await store.publish("gates", "two")
        assert await anext(gates) == b"two"


async def test_a_wrong_password_is_an_error_of_the_tree(own_server: RedisServer) -> None:
    """The server has none, so any password is wrong."""
    url = own_server.url.replace("redis://", "redis://user:secret@")
    async with open_store(url, "tests") as store:
        with pytest.raises(StoreUnavailable) as caught:
            await store.ping()
    assert "secret" not in str(caught.value)


async def test_a_write_whose_answer_is_lost_is_not_sent_again(redis_url: str) -> None:
    """A repeated swap would be refused by its own first copy and reported as lost."""
    async with _losing_one_answer(redis_url, b"EVAL") as (url, seen):
        async with open_store(url, "tests") as store:
            with pytest.raises(StoreUnavailable):
                await store.swap("state", expected=None, stamp="1", body=b"done")
            assert await store.load("state") == Entry("1", b"done")
        assert len(seen) == 1


async def test_a_read_whose_answer_is_lost_is_asked_again(redis_url: str) -> None:
    """Reading twice harms nobody."""
    async with _losing_one_answer(redis_url, b"GET") as (url, seen):
        async with open_store(url, "tests") as store:
            assert await store.load("state") is None
        assert len(seen) == 2


class _Silent:
    """An engine whose answers never come."""

    async def get(self, name: str) -> bytes | None:
        await asyncio.Event().wait()
        raise AssertionError(name)


@asynccontextmanager
async def _losing_one_answer(
    redis_url: str, command: bytes
) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Stand before Redis and cut the connection instead of the first answer to `command`."""
    seen: list[bytes] = []
    port = int(redis_url.rpartition(":")[2].partition("/")[0])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        while request := await reader.read(65536):
            up_writer.write(request)
            answer = await up_reader.read(65536)
            if b"\r\n" + command + b"\r\n" in request:
                seen.append(request)
                if len(seen) == 1:
                    break
            writer.write(answer)
        for end in (writer, up_writer):
            end.close()
            await end.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", seen


@pytest.mark.parametrize("call", ["load", "publish", "swap"])
async def test_a_cancelled_caller_ends_in_whatever_moment_that_comes(
    call: str, redis_url: str
) -> None:
    """A task that loops over store calls is owned by somebody; a lost cancellation hangs its owner.

    The cancellation comes after 0, 1, 2, … turns of the event loop, so at every step of a call.
    """
    async with open_store(redis_url, "tests") as store:
        await CALLS[call](store)  # the connection is there

        async def go_on() -> None:
            while True:
                await CALLS[call](store)

        for turns in range(60):
            task = asyncio.ensure_future(go_on())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=2)
            assert done, f"still running after a cancellation in turn {turns}"
