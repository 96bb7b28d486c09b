"""A gateway's lease: a key of the store that lives for as long as its gateway shows signs of life.

Everything that a gateway may do rests on it: its gate admits rollouts and its calls reach replicas
only while the lease is sure to hold by the gateway's own clock. So whoever finds the key absent
knows that the gateway has stopped, even if it cannot be reached and cannot reach the store.

The key also carries what the gateway has in hand, so that any other can show the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from uuid import uuid4

import msgspec

from fleet.errors import LeaseLost, StoreUnavailable
from fleet.gateways.gate import Load
from fleet.store import Store

CLOCK_SLACK = 1.05
"""How much longer than a lease to wait for its end: two clocks never run at the same rate."""

LOOKS_AT_ONCE = 16
"""How many keys are looked up at the same time: each takes a connection, at every gateway."""


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway says of itself while it lives; `revision` is the newest state it follows."""

    where: str
    revision: int
    load: Load = Load()


class Lease:
    """This gateway's own lease, and a look at those of others."""

    def __init__(self, store: Store, gateway: str, ttl_s: float) -> None:
        self._store = store
        self._key = _key(gateway)
        self._stamp: str | None = None
        self._doubted_until = 0.0
        self._looking = asyncio.Semaphore(LOOKS_AT_ONCE)
        self.ttl_s = ttl_s
        self.until = 0.0

    @property
    def holds(self) -> bool:
        """Whether the lease is sure to hold at this moment."""
        return monotonic() < self.until

    def check(self) -> None:
        """Raise LeaseLost unless the lease is sure to hold at this moment."""
        if not self.holds:
            raise LeaseLost(
                "this gateway has lost its lease (the store has not answered in time), so it does "
                "not act for the fleet",
                hint="retry: another gateway may answer, or this one once the store is back",
            )

    async def renew(self, presence: Presence) -> tuple[float, bool]:
        """Write the key again; return until when it lives (monotonic), and whether it had lapsed.

        The caller extends `until` once it has seen what the fleet decided meanwhile.
        """
        body, stamp = msgspec.json.encode(presence), uuid4().hex
        began = monotonic()
        if await self._swap(self._stamp, stamp, body):
            lapsed = self._stamp is None
        else:  # it has expired, or the answer to the last write was lost
            entry = await self._store.load(self._key)
            began = monotonic()
            lapsed = entry is None
            if lapsed and self._stamp is not None:  # the store may have lost the others' as well
                self._doubted_until = began + self.ttl_s * CLOCK_SLACK
            if not await self._swap(entry.stamp if entry else None, stamp, body):
                raise LeaseLost("somebody else writes this gateway's lease")
        self._stamp = stamp
        return began + self.ttl_s, lapsed

    async def release(self) -> None:
        """Give the lease up at once."""
        self.until = 0.0
        if self._stamp is not None:
            await self._store.drop(self._key, expected=self._stamp)
            self._stamp = None

    async def presences(self, gateways: Iterable[str]) -> dict[str, Presence | None]:
        """Return what each of these gateways says of itself, None where its key is absent.

        They are looked up at once: a heartbeat must not wait one round trip per gateway.
        """
        async with asyncio.TaskGroup() as group:
            looks = {
                g: group.create_task(self._look_for(g), name=f"look for {g}") for g in gateways
            }
        found: dict[str, Presence | None] = {}
        for gateway, look in looks.items():
            if isinstance(seen := look.result(), StoreUnavailable):
                raise seen
            found[gateway] = seen
        return found

    async def _look_for(self, gateway: str) -> Presence | StoreUnavailable | None:
        """Load one key; a failure is returned, since a group would hide a cancellation behind it.

        (Before Python 3.13, a TaskGroup whose parent is cancelled raises what its tasks raised.)
        """
        try:
            async with self._looking:
                entry = await self._store.load(_key(gateway))
        except StoreUnavailable as error:
            return error
        return None if entry is None else msgspec.json.decode(entry.body, type=Presence)

    async def lapsed(self, gateways: Iterable[str]) -> set[str]:
        """Return whose leases have lapsed for certain."""
        seen = await self.presences(gateways)
        return await self.surely({g for g, presence in seen.items() if presence is None})

    async def surely(self, absent: set[str]) -> set[str]:
        """Return those whose absent keys mean that their leases have lapsed: all of them, or none.

        An absent key tells nothing if this gateway's own is absent too, or was a lease ago or less:
        then the store has lost keys (a Redis that came back empty), and others may still hold on.
        """
        if absent and self._stamp is not None and await self._store.load(self._key) is None:
            return set()
        return set() if monotonic() < self._doubted_until else absent

    async def _swap(self, expected: str | None, stamp: str, body: bytes) -> bool:
        return await self._store.swap(
            self._key, expected=expected, stamp=stamp, body=body, ttl_s=self.ttl_s
        )


def _key(gateway: str) -> str:
    return f"gateway:{gateway}"
