"""Rank layout: properties over random fleets, and the exact numbers of the known cases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import BadInput, LayoutUnsupported
from fleet.facts.layout import Layout, check_list_length, count_workers, lay_out, slice_update
from fleet.facts.replica import Replica, Topology
from tests.fleets import replica

sizes = st.integers(1, 8)


def independent(name: str, size: int) -> list[Replica]:
    """Return one server that stands alone, with the master that every server names."""
    topology = Topology(workers=size, master=f"{name}:29550", index=0)
    return [replica(name, topology=topology)]


def dense(name: str, size: int, servers: int, *, headless: bool) -> list[Replica]:
    """Return the servers of one dense deployment; `headless`: the first looks independent."""
    later = [
        Topology(
            workers=size, deployment=f"{name}:1", index=i, servers=None if headless else servers
        )
        for i in range(servers)
    ]
    if headless:
        later[0] = Topology(workers=size, master=f"{name}:1", index=0)
    return [replica(f"{name}-{i}", topology=topology) for i, topology in enumerate(later)]


def expert(name: str, size: int, servers: int) -> list[Replica]:
    """Return the servers of one expert-parallel deployment; each reports all workers."""
    whole = size * servers
    return [
        replica(
            f"{name}-{i}",
            topology=Topology(
                workers=whole,
                deployment=f"{name}:1",
                counts_deployment=True,
                servers=servers,
                index=i,
            ),
        )
        for i in range(servers)
    ]


@st.composite
def units(draw: st.DrawFn) -> list[tuple[int, list[Replica]]]:
    """Return units as (workers, servers): alone, dense with or without head, expert parallel."""
    found: list[tuple[int, list[Replica]]] = []
    kinds = draw(st.lists(st.sampled_from(["alone", "dense", "headless", "expert"]), max_size=6))
    for number, kind in enumerate(kinds):
        size, servers, name = draw(sizes), draw(st.integers(2, 4)), f"u{number}"
        if kind == "alone":
            found.append((size, independent(name, size)))
        elif kind == "expert":
            found.append((size * servers, expert(name, size, servers)))
        else:
            found.append((size * servers, dense(name, size, servers, headless=kind == "headless")))
    return found


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[tuple[int, list[Replica]]], list[Replica]]:
    """Return units, and all their servers in any order."""
    drawn = draw(units())
    servers = [server for _, members in drawn for server in members]
    return drawn, draw(st.permutations(servers))


def ranks_by_unit(layout: Layout) -> dict[int, range]:
    """Return the ranks of each unit."""
    return {s.ordinal: range(s.rank_offset, s.rank_offset + s.workers) for s in layout.slots}


@given(fleets(), st.integers(0, 4))
def test_ranks_are_disjoint_and_contiguous_behind_the_trainers(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]], base: int
) -> None:
    """Every rank from 0 to world_size - 1 belongs to the trainer or to exactly one unit."""
    layout = lay_out(fleet[1], base=base)
    taken = [rank for ranks in ranks_by_unit(layout).values() for rank in ranks]
    assert [*range(base), *sorted(taken)] == list(range(layout.world_size))


@given(fleets(), st.integers(0, 4))
def test_the_world_is_the_trainer_and_every_unit_once(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]], base: int
) -> None:
    """world_size = base + the workers of all units, a deployment counted once."""
    drawn, servers = fleet
    layout = lay_out(servers, base=base)
    workers = sum(size for size, _ in drawn)
    assert layout.world_size == base + workers
    assert layout.workers == workers == count_workers(servers)
    assert layout.units == len(drawn)


@given(fleets())
def test_the_servers_of_one_deployment_share_one_place(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]],
) -> None:
    """Each adds its own data-parallel index, so all get the same offset and size."""
    drawn, servers = fleet
    layout = lay_out(servers)
    for size, members in drawn:
        places = {(s.rank_offset, s.workers, s.ordinal) for s in map(layout.slot, ids(members))}
        assert len(places) == 1
        assert next(iter(places))[1] == size


@given(fleets())
def test_units_keep_the_order_in_which_they_were_given(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]],
) -> None:
    """The same fleet gets the same ranks on every gateway and at every init."""
    servers = fleet[1]
    layout = lay_out(servers)
    first_seen = {s.ordinal: ids(servers).index(s.replica) for s in reversed(layout.slots)}
    for slot in layout.slots:
        first_seen[slot.ordinal] = min(first_seen[slot.ordinal], ids(servers).index(slot.replica))
    offsets = {s.ordinal: s.rank_offset for s in layout.slots}
    by_appearance = sorted(offsets, key=lambda unit: first_seen[unit])
    assert by_appearance == sorted(offsets, key=lambda unit: offsets[unit])
    assert lay_out(servers) == layout
    assert {s.replica for s in layout.slots} == set(ids(servers))


@given(fleets(), st.integers(0, 4))
def test_the_slices_of_all_units_together_are_the_list(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]], base: int
) -> None:
    """A list-valued update_info is indexed by worker; nothing is lost, doubled or moved."""
    layout = lay_out(fleet[1], base=base)
    items = [f"worker {n}" for n in range(layout.workers)]
    of_unit = {slot.ordinal: slice_update(layout, slot, items) for slot in layout.slots}
    assert [item for unit in sorted(of_unit) for item in of_unit[unit]] == items


@given(fleets(), st.integers(-3, 3).filter(bool))
def test_a_list_of_another_length_is_refused_with_the_right_number(
    fleet: tuple[list[tuple[int, list[Replica]]], list[Replica]], off: int
) -> None:
    """One item per worker; the message tells how many."""
    layout = lay_out(fleet[1])
    with pytest.raises(BadInput, match=f"the group has {layout.workers} workers"):
        check_list_length(layout, layout.workers + off)


def test_case_1_sixteen_workers_make_a_world_of_seventeen() -> None:
    """Four servers of four: a trainer that computed 32 can be told 17."""
    layout = lay_out([r for name in "abcd" for r in independent(name, 4)])
    assert (layout.workers, layout.world_size) == (16, 17)


def test_case_2_servers_of_one_two_and_four_get_offsets_one_two_and_four() -> None:
    """One rank per URL is wrong; the group has 8."""
    layout = lay_out([replica("a", 1), replica("b", 2), replica("c", 4)])
    assert [s.rank_offset for s in layout.slots] == [1, 2, 4]
    assert layout.world_size == 8


def test_case_3_an_expert_parallel_deployment_counts_once() -> None:
    """Two servers that each report 8 workers are 8 workers, at the same offset."""
    layout = lay_out([*expert("moe", 4, 2), *independent("z", 2)])
    assert [s.rank_offset for s in layout.slots] == [1, 1, 9]
    assert layout.world_size == 11


def test_a_dense_deployment_takes_the_sum_at_one_offset() -> None:
    """--data-parallel-rank 0..2 with two workers each: six ranks, the same offset for all."""
    layout = lay_out([*independent("a", 1), *dense("dp", 2, 3, headless=True)])
    assert [s.rank_offset for s in layout.slots] == [1, 2, 2, 2]
    assert layout.world_size == 8


def test_independent_servers_that_name_the_same_master_stay_apart() -> None:
    """The default master address is the same in every pod."""
    same = Topology(workers=2, master="127.0.0.1:29550", index=0)
    layout = lay_out([replica("a", topology=same), replica("b", topology=same)])
    assert [s.rank_offset for s in layout.slots] == [1, 3]


def test_an_empty_fleet_is_the_trainer_alone() -> None:
    """No workers, no slots, no error."""
    assert lay_out([]) == Layout(base=1, world_size=1, slots=())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workers": 3}, "different sizes"),
        ({"counts_deployment": True}, "different sizes"),
        ({"servers": 3}, "different sizes"),
        ({"index": 0}, "indices"),
        ({"index": 2}, "indices"),
    ],
)
def test_servers_of_one_deployment_that_contradict_each_other_are_refused(
    changes: dict[str, Any], told: str
) -> None:
    """Ranks guessed from a contradiction would hang the rendezvous."""
    facts: dict[str, Any] = {"workers": 2, "deployment": "d:1", "servers": 2}
    first = replica("a", topology=Topology(**facts, index=0))
    other: dict[str, Any] = facts | {"index": 1} | changes
    second = replica("b", topology=Topology(**other))
    with pytest.raises(LayoutUnsupported, match=told):
        lay_out([first, second])


@given(sizes, st.integers(2, 4), st.data())
def test_a_deployment_with_a_missing_server_is_refused(
    size: int, servers: int, data: st.DataObject
) -> None:
    """Its ranks exist all the same, and nobody would take them."""
    kind = data.draw(st.sampled_from(["expert", "dense"]))
    members = (
        expert("d", size, servers)
        if kind == "expert"
        else dense("d", size, servers, headless=False)
    )
    del members[data.draw(st.integers(0, servers - 1))]
    with pytest.raises(LayoutUnsupported, match=f"has {servers} servers"):
        lay_out(members)


@given(sizes, st.integers(3, 5), st.data())
def test_a_headless_deployment_with_a_gap_is_refused(
    size: int, servers: int, data: st.DataObject
) -> None:
    """Without a count, a gap in the data-parallel indices shows that a server is missing."""
    members = dense("d", size, servers, headless=True)
    del members[data.draw(st.integers(0, servers - 2))]
    with pytest.raises(LayoutUnsupported, match="indices"):
        lay_out(members)


def ids(servers: list[Replica]) -> list[str]:
    """Return the ids."""
    return [server.id for server in servers]
