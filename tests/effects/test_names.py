"""Which tensors a round announced, and so whether it was a full one: over both store engines."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from fleet.events import StartRequested, UpdateArrived, UpdateRequested
from fleet.names import announce, covers, judge_round, key_of
from fleet.rounds import advance
from fleet.state import FleetState, Phase
from fleet.store import Store, open_store
from tests.fleets import NOW, change, everyone, fleet_in, follow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store, in process and on a real Redis."""
    memory = request.param == "memory"
    url = f"memory://{uuid.uuid4()}" if memory else request.getfixturevalue("redis_url")
    async with open_store(url, "tests") as opened:
        yield opened


async def updated(store: Store, state: FleetState, *chunks: list[str]) -> FleetState:
    """Return the state after these chunks have arrived everywhere."""
    for names in chunks:
        state, _ = advance(state, UpdateRequested(now=NOW, announces=bool(names)))
        await announce(store, state, names)
        state, _ = advance(state, UpdateArrived(now=NOW, outcomes=everyone(state)))
    return state


async def next_round(store: Store, state: FleetState) -> FleetState:
    """Return the state after a commit of this round and the start of the next."""
    from fleet.events import FinishArrived, FinishRequested, PauseArrived, Resumed, StartArrived

    full, key = await judge_round(store, state)
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
    assert await judge_round(store, state) == (True, key_of(state.generation, 1))
    assert await store.members(key_of(state.generation, 1)) == {"a", "b"}


async def test_a_round_without_an_update_is_not_full(store: Store) -> None:
    """Start and finish alone leave the weights as they were."""
    assert await judge_round(store, fleet_in(Phase.STARTED)) == (False, None)


async def test_no_round_is_no_full_round(store: Store) -> None:
    """Nothing is open."""
    assert await judge_round(store, fleet_in(Phase.IDLE)) == (False, None)


async def test_a_smaller_round_is_not_full_and_a_larger_one_is(store: Store) -> None:
    """Measured against the fullest so far, over all chunks together."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a"], ["b"])
    state = await next_round(store, state)
    smaller = await updated(store, state, ["a"])
    assert await judge_round(store, smaller) == (False, None)
    larger = await updated(store, smaller, ["b", "c"])
    assert await judge_round(store, larger) == (True, key_of(state.generation, 2))


async def test_empty_metadata_stands_for_the_previous_rounds(store: Store) -> None:
    """The stock trainer sends names once per generation."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    state = await updated(store, await next_round(store, state), [])
    assert await judge_round(store, state) == (True, key_of(state.generation, 1))
    state = await updated(store, await next_round(store, state), [])
    assert await judge_round(store, state) == (True, key_of(state.generation, 1))


async def test_empty_metadata_after_a_part_stands_for_the_part(store: Store) -> None:
    """«As before» means the call before, not the fullest ever."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    state = await updated(store, await next_round(store, state), ["a"])
    state = await updated(store, await next_round(store, state), [])
    assert await judge_round(store, state) == (False, None)


async def test_a_sparse_round_is_never_full(store: Store) -> None:
    """A patch replaces nothing."""
    state = await updated(store, fleet_in(Phase.STARTED), ["a", "b"])
    assert state.group is not None
    sparse = change(state, group=change(state.group, backend="sparse_nccl"))
    assert await judge_round(store, sparse) == (False, None)
