"""One session, one replica, as long as that one is eligible and not overloaded.

Rendezvous hashing (D. G. Thaler and C. V. Ravishankar, Using name-based mappings to increase hit
rates, 1998): each key ranks all replicas, so a replica that leaves moves only its own sessions.
Bounded loads (V. Mirrokni, M. Thorup and M. Zadimoghaddam, Consistent hashing with bounded loads,
2016): a full replica passes its keys on to the next in their own ranking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import ceil

from gateway.routing import least_inflight
from gateway.routing.policy import Asked, Policy

BALANCE = 1.25
"""How far above the average a replica may be filled; lower is more even, higher more faithful."""


def session_of(asked: Asked) -> bytes | None:
    """Return the key: the session, if the rollout belongs to one."""
    return asked.session


def choose(
    eligible: Sequence[str], inflight: Mapping[str, int], turn: int, key: bytes | None
) -> str:
    """Return the replica that the key ranks highest among those with room."""
    if not key:
        return least_inflight.choose(eligible, inflight, turn)
    room = with_room(eligible, inflight)
    return max(room, key=lambda replica: blake2b(key + replica.encode(), digest_size=8).digest())


def with_room(eligible: Sequence[str], inflight: Mapping[str, int]) -> list[str]:
    """Return the replicas below the bound, ceil(BALANCE * average + 1) in flight; never none."""
    loads = [inflight.get(replica, 0) for replica in eligible]
    bound = ceil(BALANCE * sum(loads) / len(loads) + 1)
    return [replica for replica, load in zip(eligible, loads, strict=True) if load < bound]


POLICY = Policy(choose, session_of)
