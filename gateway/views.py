"""What operators see of the fleet: the state as plain JSON, in the shapes that the design fixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from fleet.facts.replica import Replica, ReplicaState
from fleet.facts.state import UNSET_VERSION, FleetState, Round
from fleet.gateways.gate import Load
from fleet.gateways.outage import Outage
from fleet.rules.advice import next_step
from fleet.rules.membership import membership


def fleet_view(
    state: FleetState, load: Load, closed_since: float | None, outage: Outage
) -> dict[str, Any]:
    """Return the summary of GET /fleet; `closed_since` is when this gateway's gate closed.

    `hint` says what to do next, as in errors; None if nothing is wrong.

    What the store does not tell because of an `outage` is as it was before.
    """
    now = membership(state)
    counts = Counter(found.value for _, found, _ in state.states())
    return {
        "name": state.name,
        "generation": state.generation,
        "weight_version": state.weight_version or UNSET_VERSION,
        "phase": state.phase,
        "kv": state.kv,
        "gate": {
            "state": "open" if closed_since is None else "closed",
            "held": load.held,
            "closed_since": closed_since,
        },
        "membership": {
            "changed": now.changed,
            "world_size": now.world_size,
            "workers": now.workers,
            "lost": now.lost,
        },
        "store": {"since": outage.since, "reason": outage.why} if outage.since else None,
        "gateways": msgspec.to_builtins(state.gateways),
        "call": _call_view(state),
        "pause": msgspec.to_builtins(state.pause),
        "round": round_view(state.round) if state.round else None,
        "replicas": dict(counts),
        "hint": next_step(state),
    }


def _call_view(state: FleetState) -> dict[str, Any] | None:
    """Return the call that is on its way: what, for whom, since when, at which gateway."""
    holder = state.holder
    if holder is None:
        return None
    fields = {"what": holder.what, "by": holder.call.by, "since": holder.since}
    return fields | {"gateway": holder.gateway}


def replicas_view(state: FleetState, load: Load) -> list[dict[str, Any]]:
    """Return the list of GET /fleet/replicas."""
    offsets = {s.replica: s.rank_offset for s in state.group.layout.slots} if state.group else {}
    return [
        _replica_view(replica, found, reason, offsets.get(replica.id), load)
        for replica, found, reason in state.states()
    ]


def _replica_view(
    replica: Replica, found: ReplicaState, reason: str, offset: int | None, load: Load
) -> dict[str, Any]:
    topology = replica.topology
    return {
        "id": replica.id,
        "url": replica.url,
        "state": found,
        "reason": reason,
        "since": replica.since,
        "weight_version": replica.version,
        "world_size": topology.workers if topology else None,
        "rank_offset": offset,
        "inflight": load.inflight.get(replica.id, 0),
        "held": 0,
        "paused": replica.paused,
        "asleep": replica.sleep is not None,
        "instance": replica.instance,
        "backend": replica.backend,
        "deployment": topology.deployment if topology else None,
        "version_holds": replica.barred is None and replica.reachable,
    }


def layout_view(state: FleetState) -> dict[str, Any]:
    """Return the rank layout of GET /fleet/layout: the current group's, or none."""
    group = state.group
    if group is None:
        return {"generation": state.generation, "world_size": None, "base": None, "replicas": []}
    return {
        "generation": group.generation,
        "backend": group.backend,
        "world_size": group.layout.world_size,
        "base": group.layout.base,
        "replicas": [
            {"id": s.replica, "rank_offset": s.rank_offset, "world_size": s.workers}
            for s in group.layout.slots
        ],
        "left_out": group.left_out,
    }


def round_view(record: Round) -> dict[str, Any]:
    """Return one round with its phases, newest facts included."""
    view: dict[str, Any] = msgspec.to_builtins(record)
    del view["names_key"]
    view["phases"] = view.pop("records")
    return view
