"""What the control plane asks of whoever admits rollouts, seen from here.

The gate itself lives with the rollouts (gateway/gate.py). Whether it stands open follows from
the fleet's state alone, so closing it means: the state says so, and nothing is under way any more.
With several gateways each has a gate of its own; `peers.py` makes one of them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has in hand: rollouts held (and their bytes), in flight per replica.

    `unsent` counts, per replica, those in flight whose last byte is not on its way yet.
    """

    held: int = 0
    held_bytes: int = 0
    inflight: dict[str, int] = {}
    unsent: dict[str, int] = {}

    def holding(self) -> dict[str, str]:
        """Return which replicas keep a gate from being closed, each with the reason."""
        return {r: f"{_rollouts(n)} still being sent to it" for r, n in self.unsent.items()}

    def answering(self) -> dict[str, str]:
        """Return which replicas keep a gate from being drained, each with the reason."""
        return {r: f"{_rollouts(n)} still being answered by it" for r, n in self.inflight.items()}


def _rollouts(number: int) -> str:
    return "1 rollout is" if number == 1 else f"{number} rollouts are"


def add_up(loads: Iterable[Load]) -> Load:
    """Return what several gateways have in hand together."""
    held = held_bytes = 0
    inflight: Counter[str] = Counter()
    unsent: Counter[str] = Counter()
    for load in loads:
        held += load.held
        held_bytes += load.held_bytes
        inflight.update(load.inflight)
        unsent.update(load.unsent)
    return Load(held=held, held_bytes=held_bytes, inflight=dict(inflight), unsent=dict(unsent))


class LocalGate(Protocol):
    """The admission of rollouts on this gateway."""

    async def closed(self) -> None:
        """Return when no rollout is between its choice of a replica and its last byte sent."""
        ...

    async def drained(self) -> None:
        """Return when no rollout is being answered by any replica."""
        ...

    def renew(self, until: float) -> None:
        """Admit rollouts until this moment (monotonic clock), unless renewed again before."""
        ...

    def load(self) -> Load:
        """Return what this gateway has in hand."""
        ...


class Gate(Protocol):
    """The admission of rollouts on every gateway of the fleet, as one."""

    async def closed(self) -> None:
        """Return when no rollout is between its choice of a replica and its last byte sent."""
        ...

    async def drained(self) -> None:
        """Return when no rollout is being answered by any replica."""
        ...

    def holding(self) -> dict[str, str]:
        """Return which replicas keep `closed` waiting, each with the reason, for messages.

        What other gateways have in hand is as of their last heartbeat; empty if nobody knows.
        """
        ...

    def answering(self) -> dict[str, str]:
        """Return which replicas keep `drained` waiting, in the same way."""
        ...

    async def settled(self) -> None:
        """Return when no control call outside of rounds is on its way to replicas."""
        ...

    def acting(self) -> AbstractContextManager[None]:
        """Say that such a control call is on its way, for as long as the context lasts."""
        ...

    async def informed(self) -> None:
        """Return when every gateway follows the fleet's state as it is now; best effort."""
        ...

    def check(self) -> None:
        """Raise LeaseLost unless this gateway may still act for the fleet."""
        ...
