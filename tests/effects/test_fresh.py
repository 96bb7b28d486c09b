"""Connections for one call each, opened before their call is there: over real sockets."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from fleet.facts.outcome import Result
from fleet.replicas.fresh import AHEAD_S
from fleet.replicas.replica_client import Call, ReplicaClient, open_client
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

UPDATE = Call("POST", "/update_weights", body=b"{}", fresh=True)
OTHER = Call("POST", "/pause", body=b"{}")
LATE = "late"


@pytest.fixture
async def client() -> AsyncIterator[ReplicaClient]:
    """Both pools."""
    async with asyncio.timeout(30), open_client() as opened:
        yield opened


class Deaf:
    """A server that never closes a connection by itself, and counts what comes over each."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Serve on a socket of its own."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def opened(self, count: int) -> None:
        """Wait until that many connections have been opened."""

        async def are_there() -> bool:
            return len(self.requests) == count

        await wait_until(are_there)

    async def hang_up(self) -> None:
        """Close all connections, as a server that stops does."""
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests)
        self.requests.append(0)
        self._writers.append(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests[number] += 1
                await reader.readexactly(2)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


async def test_a_call_takes_the_connection_that_was_opened_ahead(client: ReplicaClient) -> None:
    """Nothing has been sent on it before; a second opening would be one too many."""
    server = Deaf()
    async with server.serving() as url:
        await client.open_ahead(url)
        await client.open_ahead(url)
        await server.opened(1)
        assert server.requests == [0]
        assert (await client.call(url, UPDATE)).ok
    assert server.requests == [1]
    assert client.fresh.used == {"ahead": 1}


async def test_every_fresh_call_has_a_connection_of_its_own(client: ReplicaClient) -> None:
    """Also if the server would keep it: a reset on it could not be told from a lost answer."""
    server = Deaf()
    async with server.serving() as url:
        for opens in (True, False, True):
            if opens:
                await client.open_ahead(url)
            assert (await client.call(url, UPDATE)).ok
    assert server.requests == [1, 1, 1]
    assert client.fresh.used == {"ahead": 2, "late": 1}


async def test_a_connection_that_the_server_has_closed_meanwhile_is_not_taken(
    client: ReplicaClient,
) -> None:
    """A server that was restarted answers on a new one."""
    server = Deaf()
    async with server.serving() as url:
        await client.open_ahead(url)
        await server.opened(1)
        await server.hang_up()
        assert (await client.call(url, OTHER)).ok  # whatever was sent before is here now
        assert (await client.call(url, UPDATE)).ok
    assert server.requests == [0, 1, 1]
    assert client.fresh.used == {"late": 1}


async def test_a_connection_that_has_waited_too_long_is_not_taken(
    client: ReplicaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between may have forgotten it, and would say so only after the call."""
    server = Deaf()
    async with server.serving() as url:
        await client.open_ahead(url)
        await server.opened(1)
        late = asyncio.get_running_loop().time() + AHEAD_S + 1
        monkeypatch.setattr("aiohttp.connector.monotonic", lambda: late)
        monkeypatch.setattr("fleet.replicas.fresh.monotonic", lambda: late)
        await client.open_ahead(url)
        await server.opened(2)
        assert (await client.call(url, UPDATE)).ok
    assert server.requests == [0, 1]


async def test_opening_ahead_says_nothing_of_a_server_that_is_not_there(
    client: ReplicaClient,
) -> None:
    """The call itself finds out, and each opening tries anew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        await client.open_ahead(url)
        assert (await client.call(url, UPDATE)).outcome is Result.UNREACHABLE
        await client.open_ahead(url)
        probe.listen()
        await client.open_ahead(url)
        probe.settimeout(10)
        accepted, _ = probe.accept()
        accepted.close()
