"""Connections that carry one call each, some of them opened before their call is there.

A call that must not be repeated goes out on a connection that has carried nothing before: a reset
on a used one could not be told from a lost answer. But opening one costs a round trip, and more CPU
than the call itself, and a fleet of hundreds pays that in every phase while the trainer waits. So
during one phase of a round the connections for the next are opened (`open_ahead`). Nothing is sent
on them: vLLM's server (uvicorn) waits for a first request as long as it takes.

aiohttp opens a connection only for a request. So `open_ahead` makes one that gives its connection
to the pool at the moment in which it would be sent; and a call's own request marks its connection,
so that it never comes back there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import aiohttp

if TYPE_CHECKING:
    from aiohttp.connector import Connection

AHEAD_S = 4.0
"""How long an open connection waits for its call; what lies between may forget idle ones."""

NO_WAY = (aiohttp.ClientError, OSError, UnicodeError)
"""What a call raises that cannot be made; the last is how a look-up refuses what is no name."""


class FreshConnections:
    """The way to replicas for calls that must not be repeated; open it with `open_fresh`.

    `used` counts the calls by when their connection was opened: ahead, or late, with the call.
    """

    def __init__(
        self, calls: aiohttp.ClientSession, openings: aiohttp.ClientSession, used: Counter[str]
    ) -> None:
        self._calls = calls
        self._openings = openings
        self._ahead: dict[str, float] = {}
        self.used = used

    def session_for(self, url: str) -> aiohttp.ClientSession:
        """Return what makes one call to this replica, on an open connection if there is one."""
        self._ahead.pop(url, None)
        return self._calls

    async def open_ahead(self, url: str) -> None:
        """Open a connection for the next call, if none waits for it; who cannot be reached is left.

        The call itself finds that out and says so.
        """
        if monotonic() - self._ahead.get(url, -AHEAD_S) < AHEAD_S:
            return
        self._ahead[url] = monotonic()
        try:
            await self._openings.get(url, allow_redirects=False)
        except _Opened:
            return
        except BaseException as error:  # also if it is given up
            self._ahead.pop(url, None)
            if not isinstance(error, NO_WAY):
                raise


class _Opened(Exception):
    """A connection is open and lies in the pool."""


def _requests(used: Counter[str]) -> tuple[type[aiohttp.ClientRequest], ...]:
    """Return the requests of calls, which count in `used` what they find, and those of openings.

    Not aiohttp's tracing: it made a call to hundreds of replicas a sixth dearer.
    """
    ready = WeakSet[object]()

    class Call(aiohttp.ClientRequest):
        """A request after which its connection is closed, whatever the server says."""

        async def send(self, conn: Connection) -> aiohttp.ClientResponse:
            if conn.protocol is not None:
                used["ahead" if conn.protocol in ready else "late"] += 1
                conn.protocol.force_close()
            return await super().send(conn)

    class Opening(aiohttp.ClientRequest):
        """A request that is never sent."""

        async def send(self, conn: Connection) -> aiohttp.ClientResponse:
            ready.add(conn.protocol)
            conn.release()
            raise _Opened

    return Call, Opening


@asynccontextmanager
async def open_fresh(**options: Any) -> AsyncGenerator[FreshConnections]:
    """Open the pool; `options` are those of aiohttp's sessions. Leaving closes everything."""
    used = Counter[str]()
    call, opening = _requests(used)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=AHEAD_S, ttl_dns_cache=30)
    async with (
        aiohttp.ClientSession(
            connector=connector, request_class=call, headers={"Connection": "close"}, **options
        ) as calls,
        aiohttp.ClientSession(
            connector=connector, connector_owner=False, request_class=opening, **options
        ) as openings,
    ):
        yield FreshConnections(calls, openings, used)
