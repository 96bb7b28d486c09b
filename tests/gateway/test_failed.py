"""A gateway whose background work has ended by a bug: the process ends, so that it is replaced."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from fleet.rules.events import InitFailed
from gateway.app import create_app
from gateway.server import FleetServer, uvicorn_config
from gateway.settings_model import Settings
from tests.waiting import wait_until


async def test_a_gateway_that_has_failed_inside_stops_listening() -> None:
    """Nobody renews its lease any more: it could neither serve nor hold, and would hang callers."""
    settings = Settings()
    application = create_app(settings)
    server = FleetServer(uvicorn_config(application, settings), application)

    async def started() -> bool:
        return server.started

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        async with asyncio.timeout(20):
            await wait_until(started)
            gateway = application.framework.state.gateway
            unwritable = InitFailed(now=cast("Any", object()), outcomes={})
            gateway.journal.note(unwritable, gateway.ledger.state)
            await serving
    assert application.has_failed
