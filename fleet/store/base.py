"""The store contract: what the fleet may ask of the place where its state lives.

Why so small: rules stay in Python. A store compares one stamp and swaps one value; who may write
when, and what a stamp means (a generation, a lease holder), is decided by its callers.

What it does not do: it knows no rounds, replicas or leases, it never retries a write, and it has
no clock of its own beyond the time to live of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

PERMANENT_KEYS: Final = ("state", "state:*", "rounds", "events")
"""Patterns (fnmatch, without the fleet's prefix) of the keys that may live without a time to live.

Everything else must expire by itself; the tests look at every key after every test."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored value: `stamp` is what a swap compares, `body` is opaque to the store."""

    stamp: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a stream; ids grow within a stream and are compared by the store alone."""

    id: str
    fields: Mapping[str, bytes]


class Store(Protocol):
    """State shared by the gateways of one fleet; one instance belongs to one event loop.

    Every method raises `StoreUnavailable` when the store does not answer in time. After a write
    that raised, the outcome is unknown: load the key and look at its stamp. Keys, streams and
    channels are names within the fleet; a name means one of the three, never two.
    """

    async def load(self, key: str) -> Entry | None:
        """Return the current entry, or None if the key is absent or has expired."""
        ...

    async def swap(
        self,
        key: str,
        *,
        expected: str | None,
        stamp: str,
        body: bytes,
        ttl_s: float | None = None,
    ) -> bool:
        """Write the entry if the current stamp equals `expected`; say whether it did.

        `expected=None` means that the key must be absent. `ttl_s=None` makes the entry permanent,
        also if the one that it replaces was not. Stamps are not empty and hold no newline
        (ValueError). Of several concurrent swaps with one `expected`, exactly one succeeds,
        provided that each brings another stamp.
        """
        ...

    async def drop(self, key: str, *, expected: str) -> bool:
        """Delete the entry if its stamp equals `expected`; say whether it did."""
        ...

    async def add_members(self, key: str, members: Iterable[str], ttl_s: float) -> None:
        """Add strings to a set and let the whole set live for `ttl_s` from now, rounded up to 1 s.

        Adding nothing changes nothing, the time to live included.
        """
        ...

    async def members(self, key: str) -> frozenset[str]:
        """Return the set, empty if the key is absent."""
        ...

    async def append(self, stream: str, fields: Mapping[str, str | bytes], *, cap: int) -> str:
        """Append one record (at least one field), keep the newest `cap`, and return its id."""
        ...

    async def extend(
        self, stream: str, records: Sequence[Mapping[str, str | bytes]], *, cap: int
    ) -> None:
        """Append several records in one round trip, in their order; no records change nothing."""
        ...

    async def tail(self, stream: str, count: int) -> list[Record]:
        """Return at most `count` records, newest first."""
        ...

    def follow(self, stream: str, after: str | None) -> AsyncIterator[Record]:
        """Iterate over the records after id `after`, for ever, oldest first.

        `after=None` starts with what is appended after the first step of the iteration began.
        After `StoreUnavailable` the same iterator may be stepped again: it goes on where it was.
        """
        ...

    async def publish(self, channel: str, message: str | bytes) -> None:
        """Send one message to everyone who subscribes to the channel now."""
        ...

    def subscribe(self, channel: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Receive every message published after the context was entered, in order.

        After `StoreUnavailable` the iterator may be stepped again; messages published meanwhile
        arrive then, if no more than `CHANNEL_CAP` (fleet/store/redis.py) have been missed.
        """
        ...

    async def up_s(self) -> float:
        """Return for how long the store has been running at least, in seconds.

        What is absent from one that has just begun to run may have been lost. Infinity: it runs
        within this process. Zero: it does not tell.
        """
        ...

    async def ping(self) -> None:
        """Make one cheap round trip, for readiness probes."""
        ...
