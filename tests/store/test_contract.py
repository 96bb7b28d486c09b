"""The store contract, over the embedded engine and over a real Redis alike."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from fleet.errors import StoreUnavailable
from fleet.store import Entry, Record, Store, open_store
from tests.store.conftest import immortal_keys, raw
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY = b"two\nlines \x00\xff"


async def test_an_absent_key_loads_as_none(store: Store) -> None:
    """Absence is an answer, not an error."""
    assert await store.load("state") is None


async def test_a_swap_from_absence_stores_stamp_and_body_byte_for_byte(store: Store) -> None:
    """Bodies may hold newlines and any byte."""
    assert await store.swap("state", expected=None, stamp="g1:é", body=BODY)
    assert await store.load("state") == Entry("g1:é", BODY)


async def test_an_empty_body_is_a_body(store: Store) -> None:
    """Nothing after the stamp is not the same as no entry."""
    assert await store.swap("state", expected=None, stamp="1", body=b"")
    assert await store.load("state") == Entry("1", b"")


async def test_a_swap_from_absence_is_refused_when_the_key_is_held(store: Store) -> None:
    """`expected=None` claims; it never overwrites."""
    await store.swap("state", expected=None, stamp="1", body=b"first")
    assert not await store.swap("state", expected=None, stamp="2", body=b"second")
    assert await store.load("state") == Entry("1", b"first")


@pytest.mark.parametrize("expected", ["0", "10", "01", "1 ", "1\n", ""])
async def test_a_swap_with_another_stamp_changes_nothing(store: Store, expected: str) -> None:
    """Stamps are compared whole; a common beginning is no match."""
    await store.swap("state", expected=None, stamp="1", body=b"first")
    assert not await store.swap("state", expected=expected, stamp="2", body=b"second")
    assert await store.load("state") == Entry("1", b"first")


@pytest.mark.parametrize("expected", ["1", ""])
async def test_a_swap_that_expects_a_stamp_is_refused_on_absence(
    store: Store, expected: str
) -> None:
    """A lost entry is not silently written again."""
    assert not await store.swap("state", expected=expected, stamp="2", body=b"")
    assert await store.load("state") is None


async def test_a_swap_with_the_current_stamp_replaces_the_entry(store: Store) -> None:
    """The compare half and the swap half together."""
    await store.swap("state", expected=None, stamp="1", body=b"first")
    assert await store.swap("state", expected="1", stamp="2", body=b"second")
    assert await store.load("state") == Entry("2", b"second")


@pytest.mark.parametrize("stamp", ["", "1\n2", "\n"])
async def test_a_stamp_that_could_not_be_read_back_is_refused(store: Store, stamp: str) -> None:
    """The newline ends the stamp in the stored value."""
    with pytest.raises(ValueError, match="stamp"):
        await store.swap("state", expected=None, stamp=stamp, body=b"")
    assert await store.load("state") is None


async def test_of_twenty_concurrent_swaps_exactly_one_wins(store_url: str) -> None:
    """Twenty gateways, one expected stamp: the loser learns that it lost."""
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(store_url, "tests")) for _ in "x" * 20]
        await stores[0].swap("state", expected=None, stamp="0", body=b"")
        async with asyncio.TaskGroup() as group:
            swaps = [
                group.create_task(s.swap("state", expected="0", stamp=f"w{n}", body=b"%d" % n))
                for n, s in enumerate(stores)
            ]
        winners = [n for n, swap in enumerate(swaps) if swap.result()]
        assert len(winners) == 1
        assert await stores[0].load("state") == Entry(f"w{winners[0]}", b"%d" % winners[0])


async def test_a_drop_deletes_only_under_the_current_stamp(store: Store) -> None:
    """Whoever lost a lease cannot delete the new owner's."""
    await store.swap("state", expected=None, stamp="1", body=b"")
    assert not await store.drop("state", expected="2")
    assert await store.load("state") == Entry("1", b"")
    assert await store.drop("state", expected="1")
    assert await store.load("state") is None
    assert not await store.drop("state", expected="1")


async def test_an_entry_with_a_time_to_live_goes_by_itself(store: Store) -> None:
    """A lease ends without its owner; then absence may be claimed again."""
    assert await store.swap("lease", expected=None, stamp="a", body=b"", ttl_s=0.05)

    async def gone() -> bool:
        return await store.load("lease") is None

    await wait_until(gone)
    assert not await store.swap("lease", expected="a", stamp="b", body=b"", ttl_s=5)
    assert await store.swap("lease", expected=None, stamp="b", body=b"", ttl_s=5)


async def test_a_swap_sets_the_time_to_live_anew(store: Store) -> None:
    """Renewing a lease extends it; a swap without one makes the entry permanent."""
    await store.swap("state", expected=None, stamp="1", body=b"", ttl_s=1000)
    assert 990 < await raw(store).ttl("fleet:{tests}:state") <= 1000
    await store.swap("state", expected="1", stamp="2", body=b"", ttl_s=2000)
    assert 1990 < await raw(store).ttl("fleet:{tests}:state") <= 2000
    await store.swap("state", expected="2", stamp="3", body=b"")
    assert await raw(store).ttl("fleet:{tests}:state") == -1


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
async def test_a_time_to_live_that_makes_no_sense_is_refused(store: Store, ttl_s: float) -> None:
    """A lease of no time would be a lease that nobody holds."""
    with pytest.raises(ValueError, match="ttl_s"):
        await store.swap("lease", expected=None, stamp="1", body=b"", ttl_s=ttl_s)
    with pytest.raises(ValueError, match="ttl_s"):
        await store.add_members("names", ["a"], ttl_s)


async def test_members_add_up(store: Store) -> None:
    """A round's tensor names arrive in several updates."""
    assert await store.members("names") == frozenset()
    await store.add_members("names", ["a", "b"], 60)
    await store.add_members("names", (f"layer.{n}.é" for n in range(5000)), 60)
    assert await store.members("names") == {"a", "b"} | {f"layer.{n}.é" for n in range(5000)}


async def test_every_addition_prolongs_the_whole_set(store: Store) -> None:
    """The set lives as long as its last addition says, adding nothing changes nothing."""
    await store.add_members("names", ["a"], 100)
    await store.add_members("names", ["b"], 999.5)
    await store.add_members("names", [], 5)
    assert 990 < await raw(store).ttl("fleet:{tests}:names") <= 1000


async def test_the_tail_is_newest_first_and_no_longer_than_asked(store: Store) -> None:
    """Operators read the newest first."""
    for n in range(5):
        await store.append("events", {"n": str(n), "raw": BODY}, cap=100)
    tail = await store.tail("events", 3)
    assert [record.fields["n"] for record in tail] == [b"4", b"3", b"2"]
    assert tail[0].fields["raw"] == BODY
    assert await store.tail("nothing", 3) == []


async def test_a_stream_keeps_exactly_its_cap(store: Store) -> None:
    """Not about the cap: a log that grows by whole blocks would surprise whoever sizes it."""
    ids = [await store.append("events", {"n": str(n)}, cap=3) for n in range(10)]
    assert [record.id for record in await store.tail("events", 100)] == ids[:-4:-1]


async def test_a_record_without_fields_is_refused(store: Store) -> None:
    """Redis has none; the contract says so before Redis does."""
    with pytest.raises(ValueError, match="field"):
        await store.append("events", {}, cap=3)
    with pytest.raises(ValueError, match="field"):
        await store.extend("events", [{"n": "1"}, {}], cap=3)
    assert await store.tail("events", 1) == []


async def test_several_records_are_appended_in_their_order_and_capped(store: Store) -> None:
    """As if one by one."""
    await store.append("events", {"n": "0"}, cap=4)
    await store.extend("events", [{"n": str(n)} for n in range(1, 6)], cap=4)
    await store.extend("events", [], cap=1)
    tail = await store.tail("events", 100)
    assert [record.fields["n"] for record in tail] == [b"5", b"4", b"3", b"2"]


async def test_a_follower_gets_everything_after_an_id_in_order(store: Store) -> None:
    """A client of server-sent events comes back with its last id."""
    ids = [await store.append("events", {"n": str(n)}, cap=1000) for n in range(600)]
    follower = store.follow("events", ids[0])
    assert [(await anext(follower)).id for _ in range(599)] == ids[1:]


async def test_a_follower_from_now_on_wakes_at_the_next_record(store: Store) -> None:
    """What was there before is not new."""
    await store.append("events", {"n": "old"}, cap=10)
    async with asyncio.TaskGroup() as group:
        step = group.create_task(_step(store.follow("events", None)))
        await _append_until(store, step)
    assert step.result() != b"old"


async def test_a_cancelled_follower_leaves_the_store_usable(store: Store) -> None:
    """A browser goes away in the middle of a wait."""
    follower = store.follow("events", "0-0")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(follower)
    id_ = await store.append("events", {"n": "1"}, cap=10)
    assert (await anext(follower)).id == id_


async def test_every_subscriber_gets_every_later_message_in_order(store: Store) -> None:
    """Gates close on all gateways: nothing lost, nothing old."""
    await store.publish("gates", "before")
    async with store.subscribe("gates") as one, store.subscribe("gates") as two:
        await store.publish("gates", "close")
        await store.publish("gates", b"\xff open")
        for messages in (one, two):
            assert await anext(messages) == b"close"
            assert await anext(messages) == b"\xff open"


async def test_channels_do_not_hear_each_other(store: Store) -> None:
    """Two names, two audiences."""
    async with store.subscribe("gates") as gates:
        await store.publish("other", "noise")
        await store.publish("gates", "close")
        assert await anext(gates) == b"close"


async def test_a_silent_channel_is_forgotten_in_the_end(store: Store) -> None:
    """Channels are no permanent keys."""
    await store.publish("gates", "close")
    assert await raw(store).ttl("fleet:{tests}:gates") > 0


async def test_fleets_on_one_store_do_not_see_each_other(store: Store, store_url: str) -> None:
    """The name is a prefix of every key, set and stream."""
    async with open_store(store_url, "other") as other:
        await store.swap("state", expected=None, stamp="1", body=b"")
        await store.append("events", {"n": "1"}, cap=10)
        await store.add_members("names", ["a"], 60)
        assert await other.load("state") is None
        assert await other.tail("events", 1) == []
        assert await other.members("names") == frozenset()


async def test_all_keys_of_a_fleet_share_one_hash_tag(store: Store) -> None:
    """Redis Cluster keeps in one slot what stands between the same braces."""
    await store.swap("state", expected=None, stamp="1", body=b"")
    await store.append("events", {"n": "1"}, cap=10)
    await store.publish("gates", "close")
    keys = await raw(store).keys("*")
    assert sorted(keys) == [f"fleet:{{tests}}:{k}".encode() for k in ("events", "gates", "state")]


async def test_a_name_used_for_two_kinds_is_an_error_of_the_tree(store: Store) -> None:
    """No error of the client library leaves the store."""
    await store.append("events", {"n": "1"}, cap=10)
    with pytest.raises(StoreUnavailable, match="load 'events'"):
        await store.load("events")
    with pytest.raises(StoreUnavailable, match="swap 'events'"):
        await store.swap("events", expected=None, stamp="1", body=b"")
    with pytest.raises(StoreUnavailable, match="add_members 'events'"):
        await store.add_members("events", ["a"], 60)


async def test_a_ping_is_answered_and_leaves_nothing(store: Store) -> None:
    """Readiness costs one round trip."""
    await store.ping()
    assert await raw(store).keys("*") == []


async def test_the_look_at_the_keys_finds_an_undocumented_permanent_one(store: Store) -> None:
    """The checker of this folder would notice."""
    await store.swap("forgotten", expected=None, stamp="1", body=b"")
    assert await immortal_keys(store) == ["fleet:{tests}:forgotten"]
    await store.drop("forgotten", expected="1")


async def _step(follower: AsyncIterator[Record]) -> bytes:
    return (await anext(follower)).fields["n"]


async def _append_until(store: Store, step: asyncio.Task[bytes]) -> None:
    async def stepped() -> bool:
        await store.append("events", {"n": "new"}, cap=10)
        return step.done()

    await wait_until(stepped)
