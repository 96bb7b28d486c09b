"""Which tensors a round announced, and so whether it was a full one: over both store engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from fleet.errors import StoreUnavailable
from fleet.facts.state import FleetState, Phase
from fleet.names import PROLONGED_S, Names, covers, key_of
from fleet.rules.events import StartRequested, UpdateArrived, UpdateRequested
from fleet.rules.rounds import advance
from fleet.store import Store, open_store
from tests.fleets import NOW, change, everyone, fleet_in, follow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An empty store, in process and on a real Redis."""
    async with open_store(store_url, "tests") as opened:
        yield opened


async def updated(store: Store, state: FleetState, *chunks: list[str]) -> FleetState:
    """Return the state after these chunks have arrived everywhere."""
    for names in chunks:
        state, _ = advance(state, UpdateRequested(now=NOW, announces=bool(names)))
        await Names(store).announce(state, names)
        state, _ = advance(state, UpdateArrived(now=NOW, outcomes=everyone(state)))
    return state


async def next_round(store: Store, state: FleetState, names: Names | None = None) -> FleetState:
    """Return the state after a commit of this round and the start of the next."""
    from fleet.rules.events import (
        FinishArrived,
        FinishRequested,
        PauseArrived,
        Resumed,
        StartArrived,
    )

    full, key = await (names or Names(store)).judge(state)
    state, _ = advance(state, FinishRequested(now=NOW, full=full, names_key=key))
    state = follow(state, (FinishArrived, Resumed))
    state, _ = advance(state, StartRequested(now=NOW, by="t"))
    return follow(state, (PauseArrived, StartArrived))


def test_a_round_covers_another_if_it_names_all_its_tensors() -> None:
    """More is fine, less is not."""
    assert covers(["a", "b", "c"], ["a", "b"])
    assert covers([], [])
    assert not covers(["a"], ["a", "b"])
    assert not covers([], ["a"])


async def test_the_first_round_is_full(store: Store) -> None:
    """There is nothing yet to compare it with."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a"], ["b"])
    assert await Names(store).judge(state) == (True, key_of(state.generation, 1))
    assert await store.members(key_of(state.generation, 1)) == {"a", "b"}


async def test_a_round_without_an_update_is_not_full(store: Store) -> None:
    """Start and finish alone leave the weights as they were."""
    assert await Names(store).judge(fleet_in(Phase.STARTED)) == (False, None)


async def test_no_round_is_no_full_round(store: Store) -> None:
    """Nothing is open."""
    assert await Names(store).judge(fleet_in(Phase.IDLE)) == (False, None)


async def test_a_smaller_round_is_not_full_and_a_larger_one_is(store: Store) -> None:
    """Measured against the fullest so far, over all chunks together."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a"], ["b"])
    state = await next_round(store, state)
    smaller = await updated(store, state, ["a"])
    assert await Names(store).judge(smaller) == (False, None)
    larger = await updated(store, smaller, ["b", "c"])
    assert await Names(store).judge(larger) == (True, key_of(state.generation, 2))


async def test_empty_metadata_stands_for_the_previous_rounds(store: Store) -> None:
    """The stock trainer sends names once per generation."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    state = await updated(store, await next_round(store, state), [])
    assert await Names(store).judge(state) == (True, key_of(state.generation, 1))
    state = await updated(store, await next_round(store, state), [])
    assert await Names(store).judge(state) == (True, key_of(state.generation, 1))


async def test_empty_metadata_after_a_part_stands_for_the_part(store: Store) -> None:
    """«As before» means the call before, not the fullest ever."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    state = await updated(store, await next_round(store, state), ["a"])
    state = await updated(store, await next_round(store, state), [])
    assert await Names(store).judge(state) == (False, None)


async def test_a_sparse_round_is_never_full(store: Store) -> None:
    """A patch replaces nothing."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    assert state.group is not None
    sparse = change(state, group=change(state.group, backend="sparse_nccl"))
    assert await Names(store).judge(sparse) == (False, None)


class Counting:
    """A store that counts how often a set is read or sent."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read: list[str] = []
        self.sent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def members(self, key: str) -> frozenset[str]:
        """Read, and count."""
        self.read.append(key)
        return await self._store.members(key)

    async def add_members(self, key: str, members: Iterable[str], ttl_s: float) -> None:
        """Add, and count."""
        self.sent.append(key)
        await self._store.add_members(key, members, ttl_s)


async def test_a_round_that_rests_on_the_fullest_ones_names_is_judged_without_them(
    store: Store,
) -> None:
    """Tens of thousands of names must not travel between a trainer's finish and its answer."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    counting = Counting(store)
    names = Names(cast("Store", counting))
    state = await updated(store, await next_round(store, state, names), [])
    counting.read.clear()
    counting.sent.clear()
    for _ in range(3):
        assert await names.judge(state) == (True, key_of(state.generation, 1))
        state = await updated(store, await next_round(store, state, names), [])
    assert not counting.read
    assert not counting.sent


async def test_the_fullest_rounds_names_are_read_once(store: Store) -> None:
    """Its round is over: nothing is added to them any more."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    counting = Counting(store)
    names = Names(cast("Store", counting))
    state = await next_round(store, state, names)
    counting.read.clear()
    for _ in range(3):
        state = await updated(store, state, ["a"])
        assert await names.judge(state) == (False, None)
        state = await next_round(store, state, names)
    assert counting.read.count(key_of(state.generation, 1)) == 1


async def test_names_that_rounds_go_on_resting_on_are_prolonged_once_a_day(store: Store) -> None:
    """A training that names its tensors once may go on for months."""
    now = [0.0]
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    counting = Counting(store)
    names = Names(cast("Store", counting), clock=lambda: now[0])
    key = key_of(state.generation, 1)
    for day in range(3):
        for minute in range(3):
            now[0] = day * PROLONGED_S + minute * 60
            assert await names.judge(state) == (True, key)
            state = await updated(store, await next_round(store, state, names), [])
    assert counting.sent == [key] * 3
    assert await store.members(key) == {"a", "b"}


async def test_names_that_a_store_has_lost_are_looked_for_again(store: Store) -> None:
    """An empty set is no measure that could be kept in mind."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    state = await updated(store, await next_round(store, state), ["a"])
    names, elsewhere = Names(store), change(state, fullest="names:0:0")
    assert await names.judge(elsewhere) == (True, key_of(state.generation, 2))
    await store.add_members("names:0:0", ["a", "b"], 60)
    assert await names.judge(elsewhere) == (False, None)


class Away:
    """A store that does not take the names so many times; `None`: never again."""

    def __init__(self, store: Store, times: int | None) -> None:
        self._store = store
        self._left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def add_members(self, key: str, members: Iterable[str], ttl_s: float) -> None:
        """Add, unless it is still away."""
        if self._left == 0:
            await self._store.add_members(key, members, ttl_s)
            return
        self._left = None if self._left is None else self._left - 1
        raise StoreUnavailable("the store did not answer")


async def test_a_store_that_is_away_for_a_moment_gets_the_names_afterwards(store: Store) -> None:
    """The replicas have the update by then: the round must not fail for that."""
    state = fleet_in(Phase.UPDATING)
    await Names(cast("Store", Away(store, times=2))).announce(state, ["a", "b"])
    assert await store.members(key_of(state.generation, 1)) == {"a", "b"}


async def test_names_that_cannot_be_noted_are_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round whose names are not all there would pass for a small one, or the first for full."""
    monkeypatch.setattr("fleet.names.AWAY_S", 0.3)
    with pytest.raises(StoreUnavailable):
        await Names(cast("Store", Away(store, times=None))).announce(
            fleet_in(Phase.UPDATING), ["a"]
        )
