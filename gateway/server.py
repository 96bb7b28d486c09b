"""How the application is served: the one place that configures uvicorn."""

from __future__ import annotations

import uvicorn

from gateway.app import Application, create_app
from gateway.front import Front
from gateway.logs import configure_logging
from gateway.settings_model import Settings

KEEP_ALIVE_S = 75
BACKLOG = 4096


def uvicorn_config(app: Application, settings: Settings) -> uvicorn.Config:
    """Return a configuration that adds no header of its own to what replicas answer."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=Front,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.timeouts.drain_s) or None,
        access_log=False,
        log_config=None,
        date_header=False,
        server_header=False,
        proxy_headers=False,
    )


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; running rollouts may end within the drain time."""
    configure_logging(settings.log)
    uvicorn.Server(uvicorn_config(create_app(settings), settings)).run()
