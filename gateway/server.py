"""How the application is served: the one place that configures uvicorn."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import math
import resource
import socket
from collections.abc import Callable

import uvicorn

from fleet.errors import FleetError
from fleet.facts.address import url_host
from fleet.store import store_address
from gateway.app import Application, create_app
from gateway.auth import Right, authorise
from gateway.checks import check_what_is_named
from gateway.context import Gateway
from gateway.discovery import source_of
from gateway.front import Front
from gateway.logs import configure_logging
from gateway.settings_model import Settings
from gateway.version import gateway_version
from gateway.workers import FirstOfAll, supervise

log = logging.getLogger(__name__)

OPEN_TO_ALL = (
    "whoever reaches this port may update, reset and remove: no token is set; set "
    "FLEET_AUTH__TRAINER_TOKEN and FLEET_AUTH__OPERATOR_TOKEN, or --host 127.0.0.1"
)
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
        timeout_graceful_shutdown=math.ceil(settings.timeouts.drain_s),  # 0 or None: for ever
        access_log=False,
        log_config=None,
        date_header=False,
        server_header=False,
        proxy_headers=False,
    )


class FleetServer(uvicorn.Server):
    """uvicorn, but it says where it serves, and those who would wait for ever that it stops.

    `says_where` is asked once it serves: of several processes on one port, one is enough.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        application: Application,
        says_where: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(config)
        self._application = application
        self._says_where = says_where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the gateway and listen; then say where, and for which fleet."""
        await super().startup(sockets)
        if self.started and self._says_where():
            gateway = self._application.framework.state.gateway
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            log.info("serving", extra=_whereabouts(gateway, host, port))
            if _is_open(gateway.settings) and not ipaddress.ip_address(host).is_loopback:
                log.warning(OPEN_TO_ALL)

    async def on_tick(self, counter: int) -> bool:
        """Say whether to stop: also if the gateway behind the port has ended by itself."""
        return await super().on_tick(counter) or self._application.has_failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections and event streams; rollouts, also held ones, may end in time."""
        self._application.stop()
        await super().shutdown(sockets)


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status; running rollouts may end.

    Raises OSError if the port cannot be had, SettingsError if what a setting names cannot be used,
    or if replicas are to be found as pods and this is none.
    """
    configure_logging(settings.log, tells_process=settings.workers > 1)
    _raise_file_limit()
    asyncio.run(check_what_is_named(settings))
    source_of(settings)  # what it lacks is told here, in one line, and not while serving
    listening = _listen(settings)
    first = FirstOfAll()
    if settings.workers == 1:
        return _serve_on(listening, settings, first)
    listening.close()  # the port was free: from now on the workers share it
    shared = _listen(settings, is_shared=True)
    host, port = shared.getsockname()[:2]
    settings = settings.model_copy(update={"host": host, "port": port})
    return supervise(
        settings.workers, lambda: _serve_on(_listen(settings, is_shared=True), settings, first)
    )


def _serve_on(listening: socket.socket, settings: Settings, says_where: Callable[[], bool]) -> int:
    application = create_app(settings)
    server = FleetServer(uvicorn_config(application, settings), application, says_where)
    _relax_collector()
    server.run(sockets=[listening])
    return int(application.has_failed)


def _whereabouts(gateway: Gateway, host: str, port: int) -> dict[str, object]:
    """Return what whoever starts a gateway wants to see: its URL, and what is behind it.

    Nobody can open the address that stands for all of them: then the URL is this machine's own.
    """
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return {
        "url": f"http://{url_host(own)}:{port}",
        "listening": f"{url_host(host)}:{port}",
        "fleet": gateway.settings.name,
        "store": store_address(gateway.settings.store),
        "replicas": len(gateway.ledger.state.replicas),
        "discovery": gateway.settings.discovery.value,
        "version": gateway_version(),
    }


def _is_open(settings: Settings) -> bool:
    """Whether everyone has every right: none is guarded, for a guarded one guards the highest."""
    try:
        authorise((), Right.OPERATOR, settings.auth)
    except FleetError:
        return False
    return True


def _relax_collector() -> None:
    """Collect cycles less often, and never look again at what was loaded before the start.

    A fan-out to 1,024 replicas makes some 100,000 objects that die by themselves; with Python's
    default of 700 between two collections, a third of its time went into looking for cycles.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _raise_file_limit() -> None:
    """Take as many files as the system allows: every rollout in flight needs two of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(settings: Settings, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        where, other = f"{settings.host}:{settings.port}", "--port"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            other = "--host, an address of this machine"
        raise OSError(f"cannot listen on {where}: {error.strerror}; choose another {other}") from (
            error
        )
    listening.set_inheritable(True)
    return listening
