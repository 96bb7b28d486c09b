"""What every source of replicas does: tell everything it lists, whenever that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleet.facts.endpoint import Snapshot

Tell = Callable[[Snapshot], None]


class Source(Protocol):
    """One question that is asked for as long as the gateway runs.

    `name` is that question, the same at every gateway that asks it. A source tells only what it
    was answered: an error is no snapshot, and neither is an empty answer until it was given twice.
    """

    name: str

    async def run(self, tell: Tell) -> None:
        """Tell snapshots for ever; failures are logged, and asked again after a while."""
        ...
