"""The registry: keeps what the fleet believes of its replicas in line with what they say.

One step (`sweep`) looks at every replica that is not busy inside a collective and hands all
observations to the pure rules of `membership.py` in one write. The endless loop around it is
trivial on purpose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from time import time

import msgspec

from fleet.address import replica_id
from fleet.errors import StoreUnavailable, UnknownReplica
from fleet.fanout import FanOut
from fleet.ledger import Ledger
from fleet.membership import Observation, add_replica, adopt_versions, observe, remove_replica
from fleet.options import FleetOptions, Placement
from fleet.probe import glance, identify
from fleet.replica import Replica
from fleet.replica_client import ReplicaClient
from fleet.state import FleetState

log = logging.getLogger(__name__)


class Registry:
    """Probes replicas and writes what it sees into the ledger."""

    def __init__(
        self, ledger: Ledger, client: ReplicaClient, fan_out: FanOut, options: FleetOptions
    ) -> None:
        self._ledger = ledger
        self._client = client
        self._fan_out = fan_out
        self._options = options
        self._store_was_empty = not ledger.state.replicas and ledger.state.commit_index == 0
        self.swept = asyncio.Event()

    async def add(self, urls: Iterable[str]) -> list[str]:
        """Add replicas by URL and return their ids; they join once a probe has seen them."""
        known = {replica_id(url): url for url in urls}
        now = time()

        def change(state: FleetState) -> FleetState:
            for replica, url in known.items():
                state = add_replica(state, url, replica, now)
            return state

        await self._ledger.amend(change)
        return list(known)

    async def remove(self, replica: str) -> None:
        """Forget a replica; UnknownReplica if there is none."""
        self.find(replica)
        await self._ledger.amend(lambda state: remove_replica(state, replica))

    def find(self, replica: str) -> Replica:
        """Return one replica's facts; UnknownReplica names those there are."""
        found = self._ledger.state.replicas.get(replica)
        if found is None:
            known = ", ".join(self._ledger.state.replicas) or "none"
            raise UnknownReplica(f"no replica {replica!r}; there are: {known}")
        return found

    async def run(self) -> None:
        """Sweep for ever; a store that does not answer costs one sweep."""
        while True:
            try:
                await self.sweep()
            except StoreUnavailable as error:
                log.warning("sweep not written", extra={"error": error.message})
            await asyncio.sleep(self._options.deadlines.probe_interval_s)

    async def sweep(self) -> None:
        """Look once at every replica that is not busy inside a collective."""
        await self._look(self._ledger.state.replicas.values(), closely=False)
        if self._store_was_empty:
            self._store_was_empty = False
            await self._ledger.amend(adopt_versions)
        self.swept.set()

    async def verify(self, replicas: Iterable[str]) -> None:
        """Look closely at these replicas now, so that a decision rests on what is, not what was."""
        known = self._ledger.state.replicas
        await self._look([known[r] for r in replicas if r in known], closely=True)

    async def _look(self, replicas: Iterable[Replica], *, closely: bool) -> None:
        busy = self._fan_out.in_flight()
        seen = await self._fan_out.look(
            {r.id: partial(self._observe, r, closely) for r in replicas if r.id not in busy}
        )
        now = time()

        def change(state: FleetState) -> FleetState:
            for replica, observation in seen.items():
                state = observe(state, replica, observation, now)
            return state

        await self._ledger.amend(change)

    async def _observe(self, replica: Replica, closely: bool) -> Observation:
        limit = self._options.deadlines.probe_s
        try:
            async with asyncio.timeout(limit):
                if closely or _looks_new(replica):
                    return await self._identify(replica)
                return await self._glance(replica)
        except TimeoutError:
            return Observation(lost=f"unreachable: no answer to a probe within {limit:g} s")

    async def _glance(self, replica: Replica) -> Observation:
        seen = await glance(self._client, replica.url)
        if seen.lost is None and seen.version != replica.version:
            return await self._identify(replica)
        return seen

    async def _identify(self, replica: Replica) -> Observation:
        placement = self._options.placements.get(replica.id, Placement())
        seen = await identify(self._client, replica.url, placement)
        if replica.wedged and seen.lost is None and not self._is_busy(replica.id):
            return msgspec.structs.replace(seen, unwedged=True)
        return seen

    def _is_busy(self, replica: str) -> bool:
        return replica in self._fan_out.in_flight()


def _looks_new(replica: Replica) -> bool:
    return not replica.known or replica.lost is not None or replica.wedged is not None
