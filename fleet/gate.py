"""What the coordinator asks of whoever admits rollouts: the gate, seen from the control plane.

The gate itself lives with the rollouts (gateway/gate.py). Whether it stands open follows from
the fleet's state alone, so closing it means: the state says so, and nothing is under way any more.
"""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """The admission of rollouts on this gateway."""

    async def closed(self) -> None:
        """Return when no rollout is between its choice of a replica and its last byte sent."""
        ...

    async def drained(self) -> None:
        """Return when no rollout is being answered by any replica."""
        ...
