"""Rank layout: which ranks of one broadcast group each replica's workers take.

Pure: replicas with their topologies in, offsets out. Three cases have to be told apart, which
/get_world_size alone cannot do (vllm/distributed/weight_transfer/nccl_common.py, 0.32: a worker's
rank is rank_offset + data_parallel_index * (TP * PP) + its rank):

1. independent servers get cumulative offsets;
2. the servers of one dense deployment each add their own data_parallel_index, so all of them get
   the same offset, and the deployment takes the sum of their workers;
3. the servers of one expert-parallel deployment each report the whole deployment, so it is
   counted once, at one offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fleet.errors import BadInput, LayoutUnsupported
from fleet.facts.replica import Replica, Topology


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's place: the unit's first rank, its rank count and its ordinal among units."""

    replica: str
    rank_offset: int
    workers: int
    ordinal: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A whole group: `base` trainer ranks first, then every unit's workers without a gap."""

    base: int
    world_size: int
    slots: tuple[Slot, ...]

    @property
    def workers(self) -> int:
        """All inference workers of the group."""
        return self.world_size - self.base

    @property
    def units(self) -> int:
        """How many servers or deployments stand side by side."""
        return len({slot.ordinal for slot in self.slots})

    def slot(self, replica: str) -> Slot:
        """Return the place of one replica; KeyError if it has none."""
        return next(s for s in self.slots if s.replica == replica)


class _Unit(msgspec.Struct, frozen=True):
    """An independent server, or the servers of one deployment."""

    name: str
    members: tuple[tuple[str, Topology], ...]


def lay_out(replicas: Iterable[Replica], *, base: int = 1) -> Layout:
    """Give every replica its place behind `base` trainer ranks, in the order given.

    Raises LayoutUnsupported when the servers of one deployment contradict each other or some of
    them are missing.
    """
    slots: list[Slot] = []
    rank = base
    for ordinal, unit in enumerate(_units(replicas)):
        size = _unit_size(unit)
        slots.extend(
            Slot(replica=member, rank_offset=rank, workers=size, ordinal=ordinal)
            for member, _ in unit.members
        )
        rank += size
    return Layout(base=base, world_size=rank, slots=tuple(slots))


def count_workers(replicas: Iterable[Replica]) -> int:
    """Return the workers of all these replicas, each deployment counted once."""
    return sum(_unit_size(unit) for unit in _units(replicas))


def slice_update(layout: Layout, slot: Slot, items: Sequence[Any]) -> Sequence[Any]:
    """Return the part of a list-valued update_info that one replica must get.

    The list is indexed by global worker rank, [all workers] -> [this unit's workers], because
    each server indexes its own part from 0 (vllm/v1/worker/gpu_worker.py: update_weights, 0.32).
    Raises BadInput when the list does not have one item per worker.
    """
    check_list_length(layout, len(items))
    first = slot.rank_offset - layout.base
    return items[first : first + slot.workers]


def check_list_length(layout: Layout, length: int) -> None:
    """Raise BadInput unless a list-valued update_info has one item per worker."""
    if length != layout.workers:
        raise BadInput(
            f"update_info is a list of {length} items, but the group has {layout.workers} workers",
            hint=f"send one item per worker, {layout.workers} in all, or one object for everyone",
        )


def _units(replicas: Iterable[Replica]) -> list[_Unit]:
    known = [(replica.id, replica.topology or Topology()) for replica in replicas]
    headless = _headless_deployments(known)
    grouped: dict[str, list[tuple[str, Topology]]] = {}
    for name, topology in known:
        deployment = topology.deployment or (
            topology.master if topology.master in headless else None
        )
        key = f"deployment {deployment}" if deployment else name
        grouped.setdefault(key, []).append((name, topology))
    return [_Unit(name, tuple(members)) for name, members in grouped.items()]


def _headless_deployments(known: Iterable[tuple[str, Topology]]) -> frozenset[str]:
    """Return the dense deployments whose first server must be among the seemingly independent."""
    indices: dict[str, set[int | None]] = {}
    for _, topology in known:
        if topology.deployment and topology.servers is None and topology.index is not None:
            indices.setdefault(topology.deployment, set()).add(topology.index)
    return frozenset(name for name, found in indices.items() if 0 not in found)


def _unit_size(unit: _Unit) -> int:
    first = unit.members[0][1]
    if all(topology.deployment is None for _, topology in unit.members):
        return first.workers
    _check_deployment(unit)
    if first.counts_deployment:
        return first.workers
    return sum(topology.workers for _, topology in unit.members)


def _check_deployment(unit: _Unit) -> None:
    names = ", ".join(name for name, _ in unit.members)
    shapes = {(t.workers, t.counts_deployment, t.servers) for _, t in unit.members}
    if len(shapes) > 1:
        raise LayoutUnsupported(
            f"{unit.name}: its servers report different sizes ({names})",
            hint="give the topology explicitly in the settings (FLEET_TOPOLOGY)",
        )
    servers = unit.members[0][1].servers
    if servers is not None and servers != len(unit.members):
        raise LayoutUnsupported(
            f"{unit.name} has {servers} servers, but {len(unit.members)} can join ({names})",
            hint="every server of one deployment must be in the fleet and answering",
        )
    _check_indices(unit, names)


def _check_indices(unit: _Unit, names: str) -> None:
    indices = [topology.index for _, topology in unit.members if topology.index is not None]
    if indices and sorted(indices) != list(range(len(unit.members))):
        raise LayoutUnsupported(
            f"{unit.name}: data-parallel indices {sorted(indices)} are not 0.."
            f"{len(unit.members) - 1} ({names})",
            hint="every server of one deployment must be in the fleet and answering",
        )
