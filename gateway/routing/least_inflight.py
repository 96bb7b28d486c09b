"""The replica with the fewest requests in flight, since answers differ in length by magnitudes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.routing.policy import Policy


def choose(
    eligible: Sequence[str], inflight: Mapping[str, int], turn: int, key: bytes | None = None
) -> str:
    """Return the least busy replica; ties go round in turn."""
    del key
    start = turn % len(eligible)
    ordered = [*eligible[start:], *eligible[:start]]
    return min(ordered, key=lambda replica: inflight.get(replica, 0))


POLICY = Policy(choose)
