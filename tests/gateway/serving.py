"""A real gateway on a real socket, on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from gateway.app import Application, create_app
from gateway.context import Gateway
from gateway.server import uvicorn_config
from gateway.settings_model import Settings
from tests.reached import Reached


@dataclass(kw_only=True)
class Served(Reached):
    """A gateway that answers at `url`; `gateway` is what it is made of."""

    app: Application
    seen: list[Any] = field(default_factory=list[Any])

    @property
    def gateway(self) -> Gateway:
        """The parts of the running gateway."""
        return self.app.framework.state.gateway


@asynccontextmanager
async def serve(settings: Settings, *, asgi_only: bool = False) -> AsyncGenerator[Served]:
    """Serve until the context is left; the first sweep is over on entry.

    `asgi_only` leaves out the front, as another ASGI server than ours would.
    """
    app = create_app(settings)
    settings = settings.model_copy(update={"host": "127.0.0.1", "port": 0})
    config = uvicorn_config(app, settings)
    config.timeout_graceful_shutdown = 1
    if asgi_only:
        config.http = "httptools"
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    try:
        while not server.started:  # uvicorn sets no event
            assert not serving.done(), "the gateway did not start"
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            yield Served(url=url, app=app, http=http)
    finally:
        server.should_exit = True
        await serving
