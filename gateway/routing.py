"""Routing policies: which of the eligible replicas gets the next rollout. Pure.

Who is eligible is not decided here. A policy is a function of the eligible ids (never empty), how
many requests each has in flight, and how many were dispatched before; adding one is a function
and a line in POLICIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Policy = Callable[[Sequence[str], Mapping[str, int], int], str]


def least_inflight(eligible: Sequence[str], inflight: Mapping[str, int], turn: int) -> str:
    """Return the replica with the fewest requests in flight; ties go round in turn."""
    start = turn % len(eligible)
    ordered = [*eligible[start:], *eligible[:start]]
    return min(ordered, key=lambda replica: inflight.get(replica, 0))


def round_robin(eligible: Sequence[str], inflight: Mapping[str, int], turn: int) -> str:
    """Return the replicas one after the other."""
    del inflight
    return eligible[turn % len(eligible)]


POLICIES: dict[str, Policy] = {
    "least_inflight": least_inflight,
    "round_robin": round_robin,
}
