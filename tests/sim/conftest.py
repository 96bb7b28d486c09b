"""A plain HTTP session for tests that drive simulated replicas on their own loop."""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest_asyncio

from fleet.sim import SimReplica


class Http:
    """Posts and gets, answers read to their end."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, replica: SimReplica, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON (or text) of a POST."""
        async with self.session.post(replica.url + path, json=body) as reply:
            return reply.status, await _content(reply)

    async def get(self, replica: SimReplica, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        async with self.session.get(replica.url + path) as reply:
            return reply.status, await _content(reply)

    async def complete(self, replica: SimReplica, prompt: str, max_tokens: int = 4) -> Any:
        """The JSON of a completion, which must succeed."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        status, answer = await self.post(replica, "/v1/completions", body)
        assert status == 200, answer
        return answer


async def _content(reply: aiohttp.ClientResponse) -> Any:
    if reply.content_type == "application/json":
        return await reply.json()
    return await reply.text()


@pytest_asyncio.fixture
async def http() -> AsyncGenerator[Http]:
    """A session that opens a fresh connection for each call: replicas die under their clients."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Http(session)
