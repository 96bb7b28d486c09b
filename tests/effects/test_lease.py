"""A gateway's lease, over a store that is slow, that lapses keys, and that loses them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic

import pytest

from fleet.errors import StoreUnavailable
from fleet.gateways.lease import Lease, Presence
from fleet.store import Store, open_store
from fleet.store.base import Entry
from tests.waiting import wait_until

TTL_S = 0.4
HERE = Presence(where="here", revision=1)


@dataclass
class SlowStore:
    """The part of a store that a lease uses; each write takes a while after it is done."""

    inner: Store
    delay_s: float = 0.0

    async def load(self, key: str) -> Entry | None:
        """As the store."""
        return await self.inner.load(key)

    async def drop(self, key: str, *, expected: str) -> bool:
        """As the store."""
        return await self.inner.drop(key, expected=expected)

    async def swap(
        self, key: str, *, expected: str | None, stamp: str, body: bytes, ttl_s: float | None = None
    ) -> bool:
        """As the store, but late to say so."""
        done = await self.inner.swap(key, expected=expected, stamp=stamp, body=body, ttl_s=ttl_s)
        await asyncio.sleep(self.delay_s)
        return done


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """A store of its own."""
    async with open_store(f"memory://{uuid.uuid4()}", "tests") as opened:
        yield opened


async def lose(store: Store, gateway: str) -> None:
    """Let a key go, as a store does that comes back empty."""
    entry = await store.load(f"gateway:{gateway}")
    assert entry is not None
    assert await store.drop(f"gateway:{gateway}", expected=entry.stamp)


async def test_a_lease_counts_from_before_its_write(store: Store) -> None:
    """However long the answer takes: by then the key has lived for that long already."""
    slow = SlowStore(store)
    lease = Lease(slow, "a", TTL_S)  # type: ignore[arg-type]
    for delay_s in (0.0, TTL_S / 2):
        slow.delay_s = delay_s
        began = monotonic()
        until, _ = await lease.renew(HERE)
        assert until <= began + TTL_S + 0.05


async def test_a_lease_that_has_lapsed_says_so_once(store: Store) -> None:
    """Whoever found the key absent took its gateway for stopped."""
    lease = Lease(store, "a", TTL_S)
    assert (await lease.renew(HERE))[1]
    assert not (await lease.renew(HERE))[1]
    await lose(store, "a")
    assert (await lease.renew(HERE))[1]
    assert not (await lease.renew(HERE))[1]


async def test_a_released_lease_is_gone_at_once(store: Store) -> None:
    """Nobody waits for the end of its time."""
    lease = Lease(store, "a", TTL_S)
    lease.until, _ = await lease.renew(HERE)
    assert lease.holds
    await lease.release()
    assert not lease.holds
    assert await lease.presences(["a"]) == {"a": None}


@dataclass
class MeetingStore(SlowStore):
    """A store that answers for others than `a` only when so many of them are asked for at once."""

    meeting: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(3))
    silent: frozenset[str] = frozenset()

    async def load(self, key: str) -> Entry | None:
        """As the store, if it is not silent about this key."""
        if key != "gateway:a":
            await self.meeting.wait()
        if key in self.silent:
            raise StoreUnavailable(f"{key}: no answer")
        return await super().load(key)


async def test_others_are_looked_for_at_once(store: Store) -> None:
    """A heartbeat takes as long with 16 gateways as with two."""
    await Lease(store, "b", TTL_S).renew(HERE)
    lease = Lease(MeetingStore(store), "a", TTL_S)  # type: ignore[arg-type]
    await lease.renew(HERE)
    async with asyncio.timeout(5):
        assert await lease.presences(["b", "c", "d"]) == {"b": HERE, "c": None, "d": None}
        assert await lease.lapsed(["b", "c", "d"]) == {"c", "d"}


async def test_one_look_that_fails_is_the_stores_failure(store: Store) -> None:
    """It comes as itself, and tells nothing about who is gone."""
    silent = MeetingStore(store, silent=frozenset({"gateway:c"}))
    lease = Lease(silent, "a", TTL_S)  # type: ignore[arg-type]
    await lease.renew(HERE)
    async with asyncio.timeout(5):
        with pytest.raises(StoreUnavailable, match="gateway:c: no answer"):
            await lease.lapsed(["b", "c", "d"])


async def test_who_looks_can_be_cancelled_though_the_store_fails_then(store: Store) -> None:
    """Or a gateway would not stop whose store has gone away."""

    asked = asyncio.Event()

    class Leaving(SlowStore):
        async def load(self, key: str) -> Entry | None:
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise StoreUnavailable("the connection is closed") from None
            return None

    lease = Lease(Leaving(store), "a", TTL_S)  # type: ignore[arg-type]
    looking = asyncio.ensure_future(lease.presences(["b", "c"]))
    await asked.wait()
    looking.cancel()
    await asyncio.wait({looking})
    assert looking.cancelled()


async def test_an_absent_lease_has_lapsed_if_the_own_one_is_there(store: Store) -> None:
    """The usual case: a gateway has died."""
    lease = Lease(store, "a", TTL_S)
    await lease.renew(HERE)
    await Lease(store, "b", TTL_S).renew(HERE)
    assert await lease.lapsed(["b", "c"]) == {"c"}


async def test_an_absent_lease_proves_nothing_while_the_own_one_is_lost(store: Store) -> None:
    """The store has lost them all; the other gateway still counts on its own."""
    lease = Lease(store, "a", TTL_S)
    await lease.renew(HERE)
    await lose(store, "a")
    assert await lease.lapsed(["b"]) == set()


async def test_an_absent_lease_proves_nothing_for_a_lease_after_a_loss(store: Store) -> None:
    """The own one is there again, the others may not be yet; then they have had the time."""
    lease = Lease(store, "a", TTL_S)
    await lease.renew(HERE)
    await lose(store, "a")
    await lease.renew(HERE)
    lost_at = monotonic()
    assert await lease.lapsed(["b"]) == set()

    async def proved() -> bool:
        await lease.renew(HERE)
        return await lease.lapsed(["b"]) == {"b"}

    await wait_until(proved)
    assert monotonic() >= lost_at + TTL_S
