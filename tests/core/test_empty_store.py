"""What an empty store learns from replicas that were there before it: version and pause."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.facts.replica import Sleep
from fleet.rules.membership import adopt
from tests.fleets import NOW, fleet_of, replica


def test_versions_on_which_all_agree_become_the_fleets() -> None:
    """The store is new, the servers are not."""
    fleet = fleet_of(replica("a", version="41"), replica("b", version="41"))
    state = adopt(fleet, NOW)
    assert (state.weight_version, state.commit_index, state.counter) == ("41", 1, 41)
    assert {r.id for r in state.ready()} == {"a", "b"}


@pytest.mark.parametrize("other", ["42", "default", None])
def test_versions_that_differ_fence_everyone(other: str | None) -> None:
    """Nobody knows who holds what; the reason quotes them all."""
    fleet = fleet_of(replica("a", version="41"), replica("b", version=other))
    state = adopt(fleet, NOW)
    assert (state.weight_version, state.commit_index) == (None, 0)
    assert state.ready() == []
    assert "a has 41, b has " in (state.replicas["b"].fence or "")


@pytest.mark.parametrize("versions", [("default", "default"), (None, None), ("default", None)])
def test_servers_without_a_version_are_a_fresh_fleet(versions: tuple[str | None, ...]) -> None:
    """«default» is what a server says before any version is set."""
    fleet = fleet_of(replica("a", version=versions[0]), replica("b", version=versions[1]))
    assert adopt(fleet, NOW) is fleet


def test_a_store_that_knows_a_version_is_believed() -> None:
    """The replicas' labels are only asked when there is nothing else."""
    fleet = fleet_of(replica("a", version="9"), commit_index=2, weight_version="8")
    assert adopt(fleet, NOW) is fleet


def test_who_is_gone_or_unknown_is_not_asked_for_its_version() -> None:
    """Its label is old; when it comes back it is stale."""
    gone = replica("b", version="3", lost="refused")
    stranger = replica("c", topology=None, holds=None)
    state = adopt(fleet_of(replica("a", version="41"), gone, stranger), NOW)
    assert state.weight_version == "41"
    assert {r.id for r in state.ready()} == {"a"}


@pytest.mark.parametrize(
    ("others", "is_paused"),
    [
        ({"paused": True}, True),
        ({"sleep": Sleep(level=1)}, True),
        ({"lost": "refused"}, True),
        ({}, False),
    ],
)
def test_a_fleet_of_which_all_that_could_run_are_paused_was_paused(
    others: dict[str, Any], is_paused: bool
) -> None:
    """Somebody's resume must open the gate; who sleeps or is gone says nothing of a pause."""
    state = adopt(fleet_of(replica("a", paused=True), replica("b", **others)), NOW)
    assert (state.pause is not None) is is_paused


def test_a_fleet_that_sleeps_as_a_whole_was_not_paused() -> None:
    """Its wake-up sets it going; nobody would think of a resume."""
    asleep = (replica(name, sleep=Sleep(level=1)) for name in "ab")
    assert adopt(fleet_of(*asleep), NOW).pause is None
