"""The watchdog: ends what has lasted too long, if the operator has set limits (overdue.py).

One gateway acts, the one that has sat longest; the others see the same and wait.
"""

from __future__ import annotations

import asyncio
import logging
from time import time

from fleet.controls import Controls
from fleet.coordinator import Coordinator
from fleet.errors import FleetError
from fleet.ledger import Ledger
from fleet.replicas.registry import Registry
from fleet.replicas.restart import Restart
from fleet.rules.overdue import Limits, overdue

log = logging.getLogger(__name__)


class Watchdog:
    """Looks at the fleet once per interval and ends what is overdue."""

    def __init__(
        self,
        ledger: Ledger,
        coordinator: Coordinator,
        controls: Controls,
        registry: Registry,
        limits: Limits,
        restart: Restart | None,
    ) -> None:
        self._ledger = ledger
        self._coordinator = coordinator
        self._controls = controls
        self._registry = registry
        self._limits = limits
        self._restart = restart

    async def run(self, me: str, every_s: float) -> None:
        """Look once per interval, for ever, while this gateway is the first at the table."""
        while True:
            await asyncio.sleep(every_s)
            if next(iter(self._ledger.state.gateways), me) == me:
                await self.look()

    async def look(self) -> None:
        """End what is overdue now; what fails is told, and tried again at the next look."""
        late = overdue(self._ledger.state, self._limits, time())
        try:
            if late.pause:
                log.warning("the pause has lasted too long: resuming")
                await self._controls.resume()
            if late.round is not None:
                log.warning("the round was left open: abandoning it", extra={"round": late.round})
                await self._coordinator.reset(f"the round deadline ({self._limits.round_s:g} s)")
            if self._restart is not None:
                for replica in late.wedged:
                    await self._registry.restart(replica, self._restart)
        except FleetError as error:
            log.warning("watchdog", extra={"error": error.message})
        except Exception:  # what watches must not end what it watches
            log.exception("bug in the watchdog")
