"""What the coordinator may be told: the fleet's own options, free of any settings framework."""

from __future__ import annotations

import msgspec


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says about a replica's ranks where probing cannot tell.

    `explicit` says that the operator spoke at all. `workers` None: as probed. `deployment` None:
    an independent server.
    """

    explicit: bool = False
    workers: int | None = None
    deployment: str | None = None
    counts_deployment: bool = False


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long each kind of call may take, in seconds."""

    init_s: float = 300.0
    start_s: float = 60.0
    update_s: float = 1800.0
    finish_s: float = 300.0
    pause_s: float = 60.0
    control_s: float = 60.0
    gate_s: float = 600.0
    probe_interval_s: float = 1.0
    probe_s: float = 5.0


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How this fleet behaves. `placements` overrides what probing finds, by replica id.

    `lease_s` is for how many seconds a gateway that shows no sign of life still counts.
    """

    name: str = "fleet"
    pause_on_update: str = "keep"
    auto_version: bool = True
    deadlines: Deadlines = Deadlines()
    placements: dict[str, Placement] = {}
    replica_token: str | None = None
    min_replicas: int = 0
    lease_s: float = 5.0
