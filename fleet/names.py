"""Which tensors a round announced, and so whether it was a full update.

Only a full update lifts a fence or admits a stale replica. A round is full if the names it
announced cover those of the fullest round so far of this model; empty metadata stands for the
previous round's of the same generation. A sparse backend is never full.

The names live in the store, one set per round, so that any gateway can finish a round. A model with
many experts has tens of thousands of them, and a trainer waits while they are judged; so a round
that rests on the fullest one's own set is full without a look at it, and what has been read of that
set once is not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from fleet.errors import StoreUnavailable
from fleet.facts.state import FleetState, Group
from fleet.rules.wire import SPARSE_BACKENDS
from fleet.store import Store

KEPT_S = 30 * 24 * 3600.0
"""How long a set of names stays known after the last commit that rests on it, or a day less."""
PROLONGED_S = 24 * 3600.0
"""How often the life of a set is prolonged that rounds go on resting on."""

AWAY_S = 5.0
AGAIN_S = 0.2
"""For how long, and how often, names are noted again that the store did not take."""


def key_of(generation: int, round_id: int) -> str:
    """Return the store key of the names that one round announced."""
    return f"names:{generation}:{round_id}"


def covers(announced: Iterable[str], fullest: Iterable[str]) -> bool:
    """Whether a round that announced these names is as full as the fullest one so far."""
    return set(fullest) <= set(announced)


class Names:
    """The names that a fleet's rounds announce, noted down and judged; `clock` is in seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._prolonged: dict[str, float] = {}
        self._read: dict[str, frozenset[str]] = {}

    async def announce(self, state: FleetState, names: Sequence[str]) -> None:
        """Remember names that the open round has announced.

        A store that is away for a moment fails no round: noted twice, they are noted once.
        """
        if state.round is None:
            return
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=stop_after_delay(AWAY_S),
            wait=wait_fixed(AGAIN_S),
            reraise=True,
        ):
            with attempt:
                await self._add(key_of(state.generation, state.round.id), names)

    async def judge(self, state: FleetState) -> tuple[bool, str | None]:
        """Return whether the open round is full, and the key of the names that it rests on."""
        group, current = state.group, state.round
        if group is None or current is None or not current.updates:
            return False, None
        if group.backend in SPARSE_BACKENDS:
            return False, None
        key = _rests_on(group)
        if key is not None and key == state.fullest:
            await self._prolong(key)
            return True, key
        announced = await self._store.members(key) if key else frozenset[str]()
        full = covers(announced, await self._names_of(state.fullest))
        if full and announced and key:
            await self._prolong(key, announced)
            return True, key
        return full, None

    async def _names_of(self, fullest: str | None) -> frozenset[str]:
        """Read the fullest round's set; it is over, so nothing is added to it any more."""
        if fullest is None:
            return frozenset()
        if fullest in self._read:
            return self._read[fullest]
        names = await self._store.members(fullest)
        self._read = {fullest: names} if names else {}  # a store that lost it may get it back
        return names

    async def _prolong(self, key: str, names: frozenset[str] | None = None) -> None:
        """Let a set live on, once a day: its names must be sent for that."""
        if self._clock() - self._prolonged.get(key, -PROLONGED_S) >= PROLONGED_S:
            await self._add(key, await self._store.members(key) if names is None else names)

    async def _add(self, key: str, names: Iterable[str]) -> None:
        await self._store.add_members(key, names, KEPT_S)
        self._prolonged = {key: self._clock()}


def _rests_on(group: Group) -> str | None:
    """Return the key of the last set that was announced in this generation, this round included."""
    if group.announced_in is None:
        return None
    return key_of(group.generation, group.announced_in)
