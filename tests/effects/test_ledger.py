"""The ledger: one fleet's state, changed by several gateways, over both store engines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fleet.errors import StoreUnavailable, WrongPhase
from fleet.facts.calls import Seat
from fleet.facts.state import Phase, Round
from fleet.ledger import ROUNDS_KEPT, STATE, Ledger
from fleet.rules.events import InitRequested, ResetRequested, StartRequested
from fleet.rules.membership import add_replica
from fleet.rules.rounds import IllegalTransition
from fleet.store import Store, open_store
from tests.fleets import NOW, fleet_in, group_for, replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from fleet.facts.state import FleetState


@pytest.fixture
async def opening(store_url: str) -> AsyncIterator[Callable[[], Awaitable[Store]]]:
    """A way to open one shared store again and again, in process and on a real Redis."""
    async with AsyncExitStack() as stack:

        async def another() -> Store:
            return await stack.enter_async_context(open_store(store_url, "tests"))

        yield another


class Flaky:
    """A store whose next write fails: before it was done, or after, with the answer lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fails: str | None = None
        self.loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def load(self, key: str) -> Any:
        """Load, and count."""
        self.loads += 1
        return await self._store.load(key)

    async def swap(self, key: str, **words: Any) -> bool:
        """Swap, unless it is to fail."""
        fails, self.fails = self.fails, None
        if fails == "before":
            raise StoreUnavailable("the store did not answer")
        swapped = await self._store.swap(key, **words)
        if fails == "after":
            raise StoreUnavailable("the store did not answer")
        return swapped


def adds(name: str) -> Callable[[FleetState], FleetState]:
    """Return a change that adds one replica."""
    return lambda state: add_replica(state, f"http://{name}", name, NOW)


async def test_two_ledgers_on_one_store_never_lose_each_others_change(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """Sixty changes from two sides, all at once: all sixty are there."""
    one = await Ledger.open(await opening(), "tests")
    two = await Ledger.open(await opening(), "tests")
    async with asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(one.amend(adds(f"one-{number}")))
            group.create_task(two.amend(adds(f"two-{number}")))
    third = await Ledger.open(await opening(), "tests")
    assert len(third.state.replicas) == 60


async def test_a_change_from_a_stale_view_is_made_again_on_the_newer_state(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """The change is a function, so it can be applied twice; only one of them counts."""
    one = await Ledger.open(await opening(), "tests")
    two = await Ledger.open(await opening(), "tests")
    await one.amend(adds("a"))
    seen: list[list[str]] = []

    def change(state: FleetState) -> FleetState:
        seen.append(list(state.replicas))
        return adds("b")(state)

    after = await two.amend(change)
    assert seen == [[], ["a"]]
    assert list(after.replicas) == ["a", "b"]
    assert two.state == after


async def test_an_event_that_only_the_newer_state_allows_is_allowed(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """A gateway that is behind must not refuse what the fleet's true phase allows."""
    one = await Ledger.open(await opening(), "tests")
    two = await Ledger.open(await opening(), "tests")
    await one.amend(lambda s: s.with_replicas([replica("a")]))
    await two.apply(InitRequested(now=NOW, group=group_for(one.state)))
    assert (one.state.phase, two.state.phase) == (Phase.IDLE, Phase.INITIALIZING)
    with pytest.raises(IllegalTransition, match="in phase initializing"):
        await one.apply(StartRequested(now=NOW, by="t"))
    await two.apply(ResetRequested(now=NOW, by="o"))
    await one.apply(InitRequested(now=NOW, group=group_for(one.state)))
    assert one.state.phase is Phase.INITIALIZING


async def test_what_both_views_refuse_is_refused_and_writes_nothing(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """The stamp in the store is what it was."""
    store = await opening()
    ledger = await Ledger.open(store, "tests")
    await ledger.amend(adds("a"))
    before = await store.load(STATE)
    with pytest.raises(IllegalTransition):
        await ledger.apply(StartRequested(now=NOW, by="t"))
    assert await store.load(STATE) == before


async def test_a_change_that_changes_nothing_writes_nothing(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """A quiet fleet of a thousand replicas must not write every second."""
    store = await opening()
    ledger = await Ledger.open(store, "tests")
    await ledger.amend(adds("a"))
    before = await store.load(STATE)
    await ledger.amend(adds("a"))
    assert await store.load(STATE) == before


@pytest.mark.parametrize(("fails", "kept"), [("before", []), ("after", ["a"])])
async def test_after_a_store_failure_the_state_is_read_before_the_next_change(
    opening: Callable[[], Awaitable[Store]], fails: str, kept: list[str]
) -> None:
    """Nobody knows whether the write was done; the store does."""
    flaky: Any = Flaky(await opening())
    ledger = await Ledger.open(flaky, "tests")
    flaky.fails = fails
    with pytest.raises(StoreUnavailable):
        await ledger.amend(adds("a"))
    assert list(ledger.state.replicas) == []
    loads = flaky.loads
    await ledger.amend(adds("b"))
    assert flaky.loads == loads + 1
    assert list(ledger.state.replicas) == [*kept, "b"]


async def test_a_state_survives_reopening(opening: Callable[[], Awaitable[Store]]) -> None:
    """Any gateway may die in any phase."""
    store = await opening()
    ledger = await Ledger.open(store, "tests")
    state = fleet_in(Phase.UPDATING)
    await ledger.amend(lambda _: state)
    again = await Ledger.open(await opening(), "another name does not matter")
    assert again.state == state


async def test_an_empty_store_starts_its_generation_from_the_clock(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """So a store that was lost never gives an old generation out again."""
    ledger = await Ledger.open(await opening(), "tests")
    assert ledger.state.generation > 1_700_000_000


async def test_a_store_that_lost_its_state_gets_it_back_from_who_knows_it(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """The gateway that is still there writes what it knows, with the next change."""
    store = await opening()
    ledger = await Ledger.open(store, "tests")
    await ledger.amend(adds("a"))
    await lose(store)
    await ledger.amend(adds("b"))
    again = await Ledger.open(store, "tests")
    assert list(again.state.replicas) == ["a", "b"]


async def test_who_knows_the_same_takes_over_what_another_gateway_has_brought_back(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """Were each to write it in its turn, nobody could ever build on it."""
    one, two = [await Ledger.open(await opening(), "tests") for _ in range(2)]
    seats = {name: Seat(where=name, since=NOW) for name in ("one", "two")}
    await one.amend(lambda state: msgspec.structs.replace(state, gateways=seats))
    await two.refresh()
    await lose(one.store)
    await one.refresh()
    brought_back = await one.store.load(STATE)
    await two.refresh()
    await one.refresh()
    assert await one.store.load(STATE) == brought_back


async def test_stamps_of_a_lost_state_are_never_mistaken_for_newer_ones(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """A gateway that slept through the loss must not overwrite what was written after it."""
    store = await opening()
    one = await Ledger.open(store, "tests")
    await one.amend(adds("a"))
    two = await Ledger.open(await opening(), "tests")
    await two.amend(adds("b"))
    await lose(store)
    await one.amend(adds("c"))
    await one.amend(adds("d"))
    await two.amend(adds("e"))
    last = await Ledger.open(store, "tests")
    assert {"a", "c", "d", "e"} <= set(last.state.replicas)


def aged(store: Store, seconds: float) -> Any:
    """Return the store, which says that its server has been running for so long."""

    async def up_s() -> float:
        return seconds

    store.up_s = up_s
    return store


async def test_a_start_on_a_store_that_has_just_started_waits_for_who_knows_what_it_held(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """A fresh gateway would otherwise write a first state over one that is about to be restored."""
    knows = await Ledger.open(await opening(), "tests")
    fresh = await Ledger.open(aged(await opening(), 0.0), "tests")
    fresh.patience_s = 60.0
    waiting = asyncio.ensure_future(fresh.settled())
    await knows.amend(adds("a"))
    await asyncio.wait_for(waiting, 10)
    assert list(fresh.state.replicas) == ["a"]


async def test_an_empty_store_that_has_run_for_long_enough_is_a_new_one(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """Who might have known what it held would have brought it back by now."""
    ledger = await Ledger.open(aged(await opening(), 60.0), "tests")
    ledger.patience_s = 60.0
    await asyncio.wait_for(ledger.settled(), 10)
    assert not ledger.state.replicas


async def test_a_state_that_is_there_is_believed_however_young_its_store(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """A Redis that keeps its data over a restart has lost nothing."""
    await (await Ledger.open(await opening(), "tests")).amend(adds("a"))
    again = await Ledger.open(aged(await opening(), 0.0), "tests")
    again.patience_s = 60.0
    await asyncio.wait_for(again.settled(), 10)
    assert list(again.state.replicas) == ["a"]


async def test_whoever_watches_sees_the_state_now_and_every_change_in_order(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """The gate follows this; also what another gateway wrote arrives with the next change."""
    one = await Ledger.open(await opening(), "tests")
    two = await Ledger.open(await opening(), "tests")
    seen: list[list[str]] = []
    one.watch(lambda state: seen.append(list(state.replicas)))
    await one.amend(adds("a"))
    await two.amend(adds("b"))
    await one.amend(adds("c"))
    assert seen == [[], ["a"], ["a", "b"], ["a", "b", "c"]]


async def test_rounds_come_newest_first_and_the_open_one_before_them(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """At most as many as were asked for."""
    ledger = await Ledger.open(await opening(), "tests")
    state = fleet_in(Phase.STARTED)
    await ledger.amend(lambda _: state)
    for number in range(10, 15):
        await ledger.archive(Round(id=number, generation=1, opened_by="t", opened_at=NOW))
    assert [r.id for r in await ledger.rounds(4)] == [1, 14, 13, 12]
    assert [r.id for r in await ledger.rounds(100)] == [1, 14, 13, 12, 11, 10]


async def test_only_the_newest_rounds_are_kept(opening: Callable[[], Awaitable[Store]]) -> None:
    """A run of a million steps must not fill the store."""
    ledger = await Ledger.open(await opening(), "tests")
    for number in range(ROUNDS_KEPT + 3):
        await ledger.archive(Round(id=number, generation=1, opened_by="t", opened_at=NOW))
    kept = await ledger.rounds(ROUNDS_KEPT * 2)
    assert [r.id for r in kept] == list(range(ROUNDS_KEPT + 2, 2, -1))


async def test_a_state_that_nobody_can_read_says_what_to_do(
    opening: Callable[[], Awaitable[Store]],
) -> None:
    """Another version wrote it."""
    store = await opening()
    await store.swap(STATE, expected=None, stamp="1:1", body=b'{"name": 5}')
    with pytest.raises(WrongPhase, match="cannot read") as caught:
        await Ledger.open(store, "tests")
    assert "FLEET_NAME" in (caught.value.hint or "")


async def lose(store: Store) -> None:
    """Delete the state behind everyone's back."""
    entry = await store.load(STATE)
    assert entry is not None
    assert await store.drop(STATE, expected=entry.stamp)
