"""Layout to request bodies: what each weight-transfer backend wants in init and update.

Pure: the trainer's body and a layout in, one body per replica out. What is not known to need
rewriting travels as the trainer wrote it. Sources: vllm/distributed/weight_transfer/*_engine.py,
0.32 and 0.33.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast

from fleet.errors import BadInput, LayoutUnsupported, WorldSizeMismatch
from fleet.facts.layout import Layout, Slot


class Family(StrEnum):
    """What a backend's init body needs from us."""

    RANKED = "ranked"  # rank_offset and world_size per replica
    SHARDED = "sharded"  # replica_rank, num_replicas, num_consumers
    SAME = "same"  # the same body for everyone
    SINGLE = "single"  # cannot span independent servers


FAMILIES: dict[str, Family] = {
    "nccl": Family.RANKED,
    "sparse_nccl": Family.RANKED,
    "gloo": Family.RANKED,
    "sparse_gloo": Family.RANKED,
    "ipc": Family.SAME,
    "sharded_rdt": Family.SHARDED,
    "nccl_m2n": Family.SINGLE,
}

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
START_DRAFT = "/start_draft_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
SHUTDOWN = "/shutdown_weight_transfer_engine"

SPARSE_BACKENDS = frozenset({"sparse_nccl", "sparse_gloo"})


def family_of(backend: str | None, init_info: Mapping[str, Any]) -> Family:
    """Return how to treat this init body; an unknown backend is judged by the fields it sends."""
    known = FAMILIES.get(backend or "")
    if known is not None:
        return known
    if "dst_mesh_dims" in init_info:
        return Family.SINGLE
    if "num_consumers" in init_info:
        return Family.SHARDED
    if "rank_offset" in init_info and "world_size" in init_info:
        return Family.RANKED
    return Family.SAME


def base_of(family: Family, init_info: Mapping[str, Any]) -> int:
    """Return how many ranks the trainer takes at the front of the group (0: it takes none).

    Raises BadInput when a ranked body lacks rank_offset or world_size, or they are no integers.
    """
    if family not in (Family.RANKED, Family.SINGLE):
        return 0
    base = _integer(init_info, "rank_offset")
    if base < 1:
        raise BadInput(f"init_info.rank_offset is {base}; the trainer needs at least rank 0")
    return base


def announced_in_init(family: Family, init_info: Mapping[str, Any]) -> list[str]:
    """Return the tensors that init itself announces: sharded_rdt plans the transfer there."""
    names: Any = init_info.get("names") if family is Family.SHARDED else None
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in cast("list[Any]", names)):
        raise BadInput("init_info.names must be a list of strings")
    return cast("list[str]", names)


def check_form(family: Family, init_info: Mapping[str, Any]) -> None:
    """Raise BadInput unless the numbers that this family needs are there; needs no layout."""
    base_of(family, init_info)
    announced_in_init(family, init_info)
    if family in (Family.RANKED, Family.SINGLE):
        _integer(init_info, "world_size")


def check_init(family: Family, init_info: Mapping[str, Any], layout: Layout) -> None:
    """Raise unless the trainer's numbers fit the layout; nothing has been sent yet.

    WorldSizeMismatch names the right number; LayoutUnsupported says why a backend cannot span
    these replicas.
    """
    if family is Family.RANKED:
        _check_world_size(_integer(init_info, "world_size"), layout)
    elif family is Family.SINGLE:
        _check_single(layout)
        _check_world_size(_integer(init_info, "world_size"), layout)
    elif family is Family.SHARDED:
        _check_sharded(init_info, layout)


def init_info_for(
    family: Family, init_info: Mapping[str, Any], layout: Layout, slot: Slot
) -> dict[str, Any]:
    """Return the init_info that one replica must get."""
    if family is Family.RANKED:
        return {**init_info, "rank_offset": slot.rank_offset, "world_size": layout.world_size}
    if family is Family.SHARDED:
        return {
            **init_info,
            "replica_rank": slot.ordinal,
            "num_replicas": layout.units,
            "num_consumers": layout.workers,
        }
    return dict(init_info)


def _check_world_size(asked: int, layout: Layout) -> None:
    if asked != layout.world_size:
        raise WorldSizeMismatch(
            f"world_size is {asked}, but this fleet needs {layout.world_size}: "
            f"{layout.base} trainer ranks + {layout.workers} workers on "
            f"{len(layout.slots)} replicas",
            hint=f"re-init with world_size={layout.world_size} "
            "(GET /get_world_size gives the workers)",
        )


def _check_single(layout: Layout) -> None:
    if layout.units > 1:
        raise LayoutUnsupported(
            f"nccl_m2n describes one destination mesh, but the fleet has {layout.units} "
            "independent servers; a mesh cannot be split over them",
            hint="use the nccl backend, or a fleet of one replica",
        )


def _check_sharded(init_info: Mapping[str, Any], layout: Layout) -> None:
    sizes = {slot.workers for slot in layout.slots}
    if len(sizes) > 1:
        raise LayoutUnsupported(
            f"sharded_rdt assumes equal replicas, but these have {sorted(sizes)} workers",
            hint="use the nccl backend for unequal replicas",
        )
    if init_info.get("num_consumers") is None:
        return
    asked = _integer(init_info, "num_consumers")
    if asked not in (0, layout.workers):
        raise WorldSizeMismatch(
            f"num_consumers is {asked}, but this fleet has {layout.workers} workers",
            hint=f"re-init with num_consumers={layout.workers}",
        )


def _integer(info: Mapping[str, Any], field: str) -> int:
    value = info.get(field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"init_info.{field} must be an integer, not {value!r}")
    return value
