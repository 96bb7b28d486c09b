"""Everything one gateway is made of, and how a route reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from fleet.controls import Controls
from fleet.coordinator import Coordinator
from fleet.gateways.gate import Load
from fleet.gateways.peers import Peers
from fleet.journal import Journal
from fleet.ledger import Ledger
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import ReplicaClient
from fleet.replicas.restart import Restart
from fleet.store import Store
from fleet.watchdog import Watchdog
from gateway.desk import Desk
from gateway.gate import RolloutGate
from gateway.metrics import Metrics
from gateway.proxy import RolloutProxy
from gateway.rollouts import Rollouts
from gateway.settings_model import Settings


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """The parts of a running gateway, wired once at start."""

    settings: Settings
    store: Store
    ledger: Ledger
    peers: Peers
    journal: Journal
    registry: Registry
    coordinator: Coordinator
    controls: Controls
    restart: Restart | None
    watchdog: Watchdog
    gate: RolloutGate
    client: ReplicaClient
    proxy: RolloutProxy
    rollouts: Rollouts
    desk: Desk
    metrics: Metrics

    def load(self) -> Load:
        """Return what all gateways of the fleet have in hand, the others as of their last beat."""
        return self.peers.load()


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves this request."""
    return request.app.state.gateway
