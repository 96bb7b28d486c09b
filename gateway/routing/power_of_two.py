"""The less busy of two replicas drawn at random: nearly as even as looking at all of them, and
several gateways that do not see each other's counts do not all pick the same idle replica.

M. Mitzenmacher, The power of two choices in randomized load balancing, 2001.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import randbytes

from gateway.routing import least_inflight
from gateway.routing.policy import Asked, Policy


def draw(asked: Asked) -> bytes:
    """Return the key: the randomness of one choice, so that the choice itself is pure."""
    del asked
    return randbytes(8)


def choose(
    eligible: Sequence[str], inflight: Mapping[str, int], turn: int, key: bytes | None
) -> str:
    """Return the less busy of two different replicas that the key picks."""
    if not key or len(eligible) == 1:
        return least_inflight.choose(eligible, inflight, turn)
    rest, first = divmod(int.from_bytes(key, "big"), len(eligible))
    second = (first + 1 + rest % (len(eligible) - 1)) % len(eligible)
    one, other = eligible[first], eligible[second]
    return other if inflight.get(other, 0) < inflight.get(one, 0) else one


POLICY = Policy(choose, draw)
