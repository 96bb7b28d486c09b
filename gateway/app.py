"""The application: wiring only. `open_gateway` builds the parts, `create_app` adds the routes.

Rollouts bypass the framework: the outermost ASGI callable hands their paths to the proxy and
everything else to FastAPI.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from socket import gethostname

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fleet.controls import Controls
from fleet.coordinator import Coordinator
from fleet.errors import FleetError
from fleet.facts.options import Deadlines, FleetOptions, Placement
from fleet.follow import begin_to_follow
from fleet.gateways.peers import Peers
from fleet.gateways.retries import Calls
from fleet.journal import Journal
from fleet.ledger import Ledger
from fleet.owner import task_owner
from fleet.performer import Performer
from fleet.replicas.fanout import FanOut
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import ReplicaClient, open_client
from fleet.rules.overdue import Limits
from fleet.store import ANSWER_TIMEOUT_S, Store, open_store
from fleet.watchdog import Watchdog
from gateway.aborting import abort_here
from gateway.asgi import Receive, Scope, Send
from gateway.context import Gateway
from gateway.desk import Desk, position_of
from gateway.discovery import restart_of, source_of
from gateway.errors import body_of, headers_of, shape, status_of
from gateway.gate import RolloutGate
from gateway.metrics import Metrics
from gateway.proxy import RolloutProxy
from gateway.responses import json_response
from gateway.rollouts import Rollouts, is_rollout
from gateway.routes import admin, control, ops, pages
from gateway.settings_model import DeploymentKind, Settings
from gateway.single_flight import SingleFlight

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.5
"""How long before the end of the drain time those are answered who would wait beyond it."""


class Application:
    """The outermost ASGI callable."""

    def __init__(self, framework: FastAPI) -> None:
        self.framework = framework
        self.is_stopping = False

    @property
    def has_failed(self) -> bool:
        """Whether what the gateway rests on has ended by a bug: it can neither serve nor hold."""
        return getattr(self.framework.state, "has_failed", False)

    def stop(self) -> None:
        """End what would go on for ever, and answer what is not over when the drain time nearly is.

        Rollouts are held as before: another gateway may commit, or a call that is on its way here.
        """
        self.is_stopping = True
        gateway: Gateway | None = getattr(self.framework.state, "gateway", None)
        if gateway is None:
            return
        drain_s = gateway.settings.timeouts.drain_s
        log.info("stopping", extra={"held": gateway.gate.held, "drain_s": drain_s})
        gateway.journal.stop()
        loop, last_moment_s = asyncio.get_running_loop(), max(0.0, drain_s - LAST_WORDS_S)
        loop.call_later(last_moment_s, gateway.desk.give_up)
        if self.has_failed or _stays_closed(gateway):
            gateway.gate.stop()
        else:
            loop.call_later(last_moment_s, gateway.gate.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand rollouts to the proxy, everything else to FastAPI."""
        if scope["type"] == "http" and is_rollout(scope["path"].encode()):
            gateway: Gateway = self.framework.state.gateway
            await gateway.proxy(scope, receive, send)
            return
        await self.framework(scope, receive, send)


def _stays_closed(gateway: Gateway) -> bool:
    """Whether nobody can open the gate of a gateway that listens no more.

    A state in this process alone has no other gateway, and no call comes in any more.
    """
    is_alone = gateway.settings.store.startswith("memory:")
    return is_alone and gateway.ledger.state.fleet_paused and not gateway.desk.is_busy


def create_app(settings: Settings) -> Application:
    """Return the gateway as an ASGI application; its lifespan opens and closes everything."""

    @asynccontextmanager
    async def lifespan(framework: FastAPI) -> AsyncGenerator[None]:
        try:
            async with open_gateway(settings) as gateway:
                framework.state.gateway = gateway
                yield
        except BaseException:
            framework.state.has_failed = True
            raise

    framework = FastAPI(
        title="vLLM fleet gateway", lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for routes in (control.router, admin.router, ops.router, pages.router):
        framework.include_router(routes)
    framework.add_exception_handler(FleetError, _fleet_error)
    framework.add_exception_handler(RequestValidationError, _bad_query)
    framework.add_exception_handler(HTTPException, _no_route)
    framework.add_exception_handler(Exception, _bug)
    return Application(framework)


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncGenerator[Gateway]:
    """Open the store, the pools and the background tasks; leaving closes them in reverse."""
    options, source = options_of(settings), source_of(settings)
    async with (
        open_store(settings.store, settings.name) as store,
        open_client(options.replica_token) as client,
        task_owner() as owner,
    ):
        gateway = await _assemble(settings, options, store, client, owner)
        await gateway.peers.beat()
        await gateway.registry.add(settings.replicas)
        if source is None and not gateway.ledger.state.replicas:
            log.warning(
                "no replicas yet: --replica, FLEET_REPLICAS or POST /fleet/replicas adds them"
            )
        beating = gateway.peers.run(settings.timeouts.lease_renew_s)
        owner.create_task(beating, name="gateways")
        if source is not None:
            await begin_to_follow(source, gateway.ledger, owner)
        await gateway.registry.sweep()
        owner.create_task(gateway.registry.run(), name="probe replicas")
        owner.create_task(gateway.journal.run(), name="write events")
        watching = gateway.watchdog.run(gateway.peers.me, settings.timeouts.probe_s)
        owner.create_task(watching, name="watchdog")
        yield gateway
        gateway.rollouts.upstreams.close()
        gateway.rollouts.accounts.flush()
        await gateway.peers.leave()


async def _assemble(
    settings: Settings,
    options: FleetOptions,
    store: Store,
    client: ReplicaClient,
    owner: asyncio.TaskGroup,
) -> Gateway:
    ledger = await Ledger.open(store, settings.name)
    ledger.settle_s = options.lease_s + ANSWER_TIMEOUT_S
    # A heartbeat that is about to time out, its second attempt, and the next one.
    ledger.patience_s = settings.timeouts.lease_renew_s + 2 * ANSWER_TIMEOUT_S
    await ledger.settled()  # before anybody draws conclusions from an empty state
    gate = RolloutGate(settings.gate, settings.routing.policy, settings.min_replicas)
    ledger.watch(gate.follow)
    journal = Journal(store)
    ledger.listen(journal.note)
    metrics = Metrics()
    fan_out = FanOut(owner)
    registry = Registry(ledger, client, fan_out, options)
    where = f"{gethostname()}:{settings.port}"
    peers = Peers(ledger, gate, fan_out.spawn, where=where, lease_s=options.lease_s)
    in_hand = partial(peers.load, only_here=True)
    metrics.observe(lambda: ledger.state, gate, in_hand, client.fresh.used)
    performer = Performer(ledger, client, fan_out, peers, options)
    calls = Calls(ledger, peers.me)
    coordinator = Coordinator(ledger, performer, registry, fan_out, options, calls)
    peers.runs, peers.take_over = calls.carries, coordinator.take_over
    calls.hears = peers.hears

    def suspect(replica: str) -> None:
        fan_out.spawn(registry.suspect(replica), name=f"verify {replica}")

    rollouts = Rollouts(gate, metrics, settings, suspect)
    controls = Controls(ledger, performer, registry, peers, options)
    flights = SingleFlight(
        owner, lambda: (position_of(ledger.state), controls.broadcasts), calls.undelivered
    )
    desk = Desk(settings, ledger, flights, metrics)
    ledger.watch(desk.follow)
    peers.abort = partial(abort_here, rollouts, controls)
    restart = restart_of(settings)
    limits = Limits(
        pause_s=settings.timeouts.pause_lease_s,
        round_s=settings.timeouts.round_s,
        wedged_s=settings.restart.wedged_s,
    )
    return Gateway(
        settings=settings,
        store=store,
        ledger=ledger,
        journal=journal,
        registry=registry,
        peers=peers,
        coordinator=coordinator,
        controls=controls,
        restart=restart,
        watchdog=Watchdog(ledger, coordinator, controls, registry, limits, restart),
        gate=gate,
        client=client,
        rollouts=rollouts,
        proxy=RolloutProxy(rollouts, settings),
        desk=desk,
        metrics=metrics,
    )


def options_of(settings: Settings) -> FleetOptions:
    """Return what the coordinator needs of the settings."""
    times = settings.timeouts
    token = settings.auth.replica_token
    return FleetOptions(
        name=settings.name,
        pause_on_update=settings.pause_on_update,
        auto_version=settings.auto_version,
        deadlines=Deadlines(
            init_s=times.init_s,
            start_s=times.start_s,
            update_s=times.update_s,
            finish_s=times.finish_s,
            pause_s=times.pause_s,
            control_s=times.control_s,
            gate_s=settings.gate.timeout_s,
            probe_interval_s=times.probe_s,
            probe_s=times.probe_timeout_s,
        ),
        placements=_placements(settings),
        replica_token=token.get_secret_value() if token else None,
        min_replicas=settings.min_replicas,
        lease_s=times.lease_s,
    )


def _placements(settings: Settings) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    for number, entry in enumerate(settings.topology):
        shared = entry.kind is not DeploymentKind.INDEPENDENT
        placement = Placement(
            workers=entry.world_size,
            deployment=f"topology {number}" if shared else None,
            counts_deployment=entry.kind is DeploymentKind.EXPERT_PARALLEL,
            explicit=True,
        )
        placements |= dict.fromkeys(entry.replicas, placement)
    return placements


async def _fleet_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, FleetError)
    return Response(body_of(error), status_of(error), headers=dict(headers_of(error)))


async def _bad_query(request: Request, error: Exception) -> Response:
    """FastAPI answers 422 to a bad query; vLLM answers 400."""
    del request
    assert isinstance(error, RequestValidationError)
    told = "; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors())
    return _plain(400, told, "BadInput")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {error.detail}"
    return _plain(error.status_code, message, "NoRoute", dict(error.headers or {}))


async def _bug(request: Request, error: Exception) -> Response:
    log.error("bug", extra={"path": request.url.path}, exc_info=error)
    return _plain(500, f"{type(error).__name__}: {error}", "Bug")


def _plain(status: int, message: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    return json_response(shape(message, kind, status), status, headers)
