"""Init bodies, backend by backend: who gets which ranks, and what travels as it was written."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.errors import BadInput, LayoutUnsupported, WorldSizeMismatch
from fleet.facts.layout import Layout, lay_out
from fleet.facts.replica import Replica
from fleet.rules.wire import (
    Family,
    announced_in_init,
    base_of,
    check_init,
    family_of,
    init_info_for,
)
from tests.fleets import replica

RENDEZVOUS: dict[str, Any] = {"master_address": "10.0.0.1", "master_port": 4711, "x": {"y": [1]}}
UNEQUAL = [replica("a", 1), replica("b", 2), replica("c", 4)]
EQUAL = [replica("a", 2), replica("b", 2)]
ONE = [replica("a", 4)]


def bodies(
    backend: str | None, info: dict[str, Any], replicas: list[Replica]
) -> tuple[list[dict[str, Any]], Layout]:
    """Return what each replica would get, after the checks."""
    family = family_of(backend, info)
    layout = lay_out(replicas, base=base_of(family, info))
    check_init(family, info, layout)
    return [init_info_for(family, info, layout, slot) for slot in layout.slots], layout


@pytest.mark.parametrize(
    "backend", ["nccl", "sparse_nccl", "gloo", "sparse_gloo", "modelexpress", None]
)
def test_a_ranked_backend_gets_cumulative_offsets_and_one_world_size(backend: str | None) -> None:
    """Also one that nobody knows, if it sends both rank fields."""
    info = {**RENDEZVOUS, "rank_offset": 1, "world_size": 8}
    told, _ = bodies(backend, info, UNEQUAL)
    assert [body["rank_offset"] for body in told] == [1, 2, 4]
    assert {body["world_size"] for body in told} == {8}


def test_several_trainer_ranks_move_everyone_behind_them() -> None:
    """The offset in the trainer's own body is how many ranks it takes."""
    told, _ = bodies("nccl", {**RENDEZVOUS, "rank_offset": 4, "world_size": 11}, UNEQUAL)
    assert [body["rank_offset"] for body in told] == [4, 5, 7]


@pytest.mark.parametrize("backend", ["ipc", "modelexpress", "somebody_elses", None])
@pytest.mark.parametrize("extra", [{}, {"rank_offset": 1}, {"world_size": 9}])
def test_without_both_rank_fields_everyone_gets_the_same_body(
    backend: str | None, extra: dict[str, int]
) -> None:
    """What is not known to need rewriting travels as it was written."""
    info = {"packed": True, **extra}
    told, layout = bodies(backend, info, UNEQUAL)
    assert told == [info, info, info]
    assert layout.base == 0


def test_ipc_is_the_same_for_everyone_even_with_rank_fields() -> None:
    """Its handles are keyed by GPU, not by rank."""
    info = {"packed": True, "rank_offset": 1, "world_size": 99}
    told, _ = bodies("ipc", info, UNEQUAL)
    assert told == [info, info, info]


@pytest.mark.parametrize("backend", ["sharded_rdt", None])
@pytest.mark.parametrize("asked", [0, None, 4])
def test_sharded_rdt_gets_ordinals_and_counts(backend: str | None, asked: int | None) -> None:
    """replica_rank, num_replicas and num_consumers are ours to say."""
    info = {"names": ["w"], "num_consumers": asked, "replica_rank": 0, "num_replicas": 1}
    told, _ = bodies(backend, info, EQUAL)
    assert [body["replica_rank"] for body in told] == [0, 1]
    assert {(body["num_replicas"], body["num_consumers"]) for body in told} == {(2, 4)}
    assert all(body["names"] == ["w"] for body in told)


def test_sharded_rdt_over_unequal_replicas_is_refused() -> None:
    """It assumes equal replicas; the message gives the sizes and another backend."""
    with pytest.raises(LayoutUnsupported, match=r"\[1, 2, 4\] workers") as caught:
        bodies("sharded_rdt", {"num_consumers": 7}, UNEQUAL)
    assert "nccl" in (caught.value.hint or "")


def test_sharded_rdt_with_a_wrong_number_of_consumers_is_told_the_right_one() -> None:
    """Refused before anyone hangs in a rendezvous."""
    with pytest.raises(WorldSizeMismatch, match="this fleet has 4 workers") as caught:
        bodies("sharded_rdt", {"num_consumers": 5}, EQUAL)
    assert caught.value.hint == "re-init with num_consumers=4"


@pytest.mark.parametrize("backend", ["nccl_m2n", None])
def test_m2n_over_more_than_one_server_is_refused_and_says_why(backend: str | None) -> None:
    """One destination mesh cannot be split over independent servers."""
    info = {"rank_offset": 2, "world_size": 6, "dst_mesh_dims": [4, 1]}
    with pytest.raises(LayoutUnsupported, match="2 independent servers"):
        bodies(backend, info, EQUAL)


def test_m2n_on_one_server_travels_untouched() -> None:
    """The worker checks its mesh against rank_offset, so rewriting would break it."""
    info = {"rank_offset": 2, "world_size": 6, "dst_mesh_dims": [4, 1]}
    assert bodies("nccl_m2n", info, ONE)[0] == [info]


def test_m2n_with_a_wrong_world_size_is_told_the_right_one() -> None:
    """Its world, too, is the trainer's ranks and all workers; a wrong one hangs everyone."""
    info = {"rank_offset": 2, "world_size": 9, "dst_mesh_dims": [4, 1]}
    with pytest.raises(WorldSizeMismatch, match="needs 6"):
        bodies("nccl_m2n", info, ONE)


@pytest.mark.parametrize("backend", ["nccl", "gloo", "sharded_rdt", "ipc", "nccl_m2n", "else"])
def test_unknown_fields_are_kept(backend: str) -> None:
    """A newer vLLM may send what this gateway has not heard of."""
    info = {**RENDEZVOUS, "rank_offset": 1, "world_size": 5, "num_consumers": 4}
    told, _ = bodies(backend, info, ONE)
    assert told[0]["x"] == {"y": [1]}
    assert told[0]["master_port"] == 4711


def test_the_trainers_own_body_is_left_alone() -> None:
    """Rewriting makes a new body per replica."""
    info = {**RENDEZVOUS, "rank_offset": 1, "world_size": 8}
    bodies("nccl", info, UNEQUAL)
    assert info == {**RENDEZVOUS, "rank_offset": 1, "world_size": 8}


@pytest.mark.parametrize("asked", [32, 7, 9, 1, 0, -1])
def test_a_wrong_world_size_is_refused_with_the_right_one(asked: int) -> None:
    """Case 1: the answer names the number to use, and where it comes from."""
    with pytest.raises(WorldSizeMismatch) as caught:
        bodies("nccl", {**RENDEZVOUS, "rank_offset": 1, "world_size": asked}, UNEQUAL)
    assert f"world_size is {asked}, but this fleet needs 8" in caught.value.message
    assert "1 trainer ranks + 7 workers on 3 replicas" in caught.value.message
    assert "world_size=8" in (caught.value.hint or "")


@pytest.mark.parametrize("field", ["rank_offset", "world_size"])
@pytest.mark.parametrize("value", [None, "8", 8.0, True, [8], {}])
@pytest.mark.parametrize("backend", ["nccl", "gloo", "nccl_m2n"])
def test_a_rank_field_that_is_no_integer_is_bad_input(
    backend: str, field: str, value: object
) -> None:
    """A missing one as well."""
    info = {**RENDEZVOUS, "rank_offset": 1, "world_size": 5, field: value}
    if value is None:
        del info[field]
    with pytest.raises(BadInput, match=f"init_info.{field} must be an integer"):
        bodies(backend, info, ONE)


@pytest.mark.parametrize("value", ["4", 4.0, True, [4]])
def test_a_number_of_consumers_that_is_no_integer_is_bad_input(value: object) -> None:
    """`4.0 == 4` must not let a wrong type through to the replicas."""
    with pytest.raises(BadInput, match=r"init_info.num_consumers must be an integer"):
        bodies("sharded_rdt", {"num_consumers": value}, ONE)


@pytest.mark.parametrize("base", [0, -1])
def test_a_trainer_without_a_rank_is_bad_input(base: int) -> None:
    """Somebody has to broadcast."""
    with pytest.raises(BadInput, match="at least rank 0"):
        bodies("nccl", {"rank_offset": base, "world_size": 4 + base}, ONE)


def test_sharded_rdt_announces_its_tensors_in_init() -> None:
    """Its updates name none, so fullness rests on what init said."""
    info = {"names": ["a", "b"], "num_consumers": 2}
    assert announced_in_init(Family.SHARDED, info) == ["a", "b"]
    assert announced_in_init(Family.RANKED, info) == []
    with pytest.raises(BadInput):
        announced_in_init(Family.SHARDED, {"names": [1]})
