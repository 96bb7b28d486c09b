"""Routing policies: which of the eligible replicas gets the next rollout. Pure.

Who is eligible is not decided here but by the gate. Each policy is one file with a `POLICY`; a new
one is such a file, its line here and its name in `RoutingPolicy`, the setting.
"""

from __future__ import annotations

from gateway.routing import (
    consistent_hash,
    least_inflight,
    power_of_two,
    prefix,
    round_robin,
)
from gateway.routing.policy import Asked, Policy

POLICIES: dict[str, Policy] = {
    "least_inflight": least_inflight.POLICY,
    "round_robin": round_robin.POLICY,
    "power_of_two": power_of_two.POLICY,
    "consistent_hash": consistent_hash.POLICY,
    "prefix": prefix.POLICY,
}

__all__ = ["POLICIES", "Asked", "Policy"]
