"""One server under two names: what proves it, who stays, and when the other one is let in."""

from __future__ import annotations

import pytest

from fleet.facts.replica import STARTED, ReplicaState
from fleet.facts.state import FleetState, Phase
from fleet.rules.doubles import busy_with, claims, let_in, stands_for, told_apart
from fleet.rules.membership import (
    Observation,
    candidates_for,
    membership,
    observe,
    remove_replica,
)
from tests.fleets import NOW, change, fleet_in, fleet_of, replica

SAME = {("a", "boot"): "17.25", ("b", "boot"): "17.25", ("c", "boot"): "17.25"}


def pair(fence: str | None = None) -> FleetState:
    """Return a fleet in which b turned out to be the server of a."""
    state = fleet_of(replica("a", instance="boot", fence=fence), replica("b", instance="boot"))
    return told_apart(state, SAME)


def state_of(state: FleetState, name: str) -> tuple[ReplicaState, str]:
    """Return what operators see of a replica."""
    return next((found, why) for r, found, why in state.states() if r.id == name)


def test_a_double_is_fenced_with_the_reason_and_counts_nowhere() -> None:
    """No rollouts, no place in a group; the one that was there first goes on as it was."""
    state = pair()
    assert state_of(state, "b") == (ReplicaState.FENCED, "the same server as a")
    assert [r.id for r in state.ready()] == ["a"]
    taken, left_out = candidates_for(state, None)
    assert [r.id for r in taken] == ["a"]
    assert left_out == {"b": "the same server as a"}
    assert membership(state).workers == 1


@pytest.mark.parametrize(
    "starts",
    [
        {},
        {("a", "boot"): "17.25"},
        {("a", "boot"): "17.25", ("b", "boot"): "17.26"},
        {("a", "boot"): "", ("b", "boot"): ""},
        {("a", "boot"): "17.25", ("b", "another"): "17.25"},
    ],
)
def test_one_instance_alone_proves_nothing(starts: dict[tuple[str, str], str]) -> None:
    """Five hex digits meet by accident; without two equal starts both count."""
    state = fleet_of(replica("a", instance="boot"), replica("b", instance="boot"))
    assert told_apart(state, starts) is state


def test_one_start_alone_proves_nothing() -> None:
    """Pods start together, to the hundredth of a second."""
    state = fleet_of(replica("a", instance="1"), replica("b", instance="2"))
    starts = {("a", "1"): "17.25", ("b", "2"): "17.25"}
    assert told_apart(state, starts) is state
    started = f"{STARTED}17.25"
    assert claims({"a": started, "b": started, "c": None, "d": None}) == set()


def test_starts_are_wanted_only_where_two_tell_one_instance() -> None:
    """Nobody else is asked for its metrics."""
    told = {"a": "x", "b": "y", "c": "x", "d": None}
    assert claims(told) == {("a", "x"), ("c", "x")}


def test_the_member_of_the_group_stays_else_who_was_there_first() -> None:
    """A server is not thrown out of its group for a name that came back before it in the list."""
    a, b, c = (replica(name, instance="boot") for name in "abc")
    state = told_apart(fleet_of(a, b, c), SAME)
    assert [r.same_as for r in state.replicas.values()] == [None, "a", "a"]
    state = fleet_in(Phase.INITIALIZED, change(b, id="b"))
    state = change(state, replicas={"a": a, "b": b})
    state = told_apart(state, SAME)
    assert [r.same_as for r in state.replicas.values()] == ["b", None]
    assert told_apart(change(state, group=None), SAME).replicas == state.replicas


def test_who_was_left_out_is_let_in_as_a_newcomer_when_the_other_one_is_removed() -> None:
    """It is looked at before it counts, and given back what the other one left with."""
    state = remove_replica(pair(fence="mixed"), "a")
    assert state_of(state, "b")[0] is ReplicaState.JOINING
    known = replica("b", instance="boot")
    seen = Observation(topology=known.topology, instance="boot", version="default")
    state = observe(state, "b", seen, NOW)
    assert state_of(state, "b") == (ReplicaState.FENCED, "mixed")


def test_who_was_left_out_is_let_in_when_the_other_one_is_another_server_now() -> None:
    """What that server was fenced for stays with it, under the name that is left."""
    state = pair(fence="mixed")
    seen = Observation(topology=state.replicas["a"].topology, instance="other", version="default")
    state = let_in(observe(state, "a", seen, NOW))
    assert state_of(state, "a")[0] is ReplicaState.READY
    assert state_of(state, "b")[0] is ReplicaState.JOINING
    seen = change(seen, instance="boot")
    state = observe(state, "b", seen, NOW)
    assert state_of(state, "b") == (ReplicaState.FENCED, "mixed")


def test_who_was_left_out_is_let_in_when_it_is_another_server_itself() -> None:
    """Its restart forgets everything; who stands for it is looked at with it."""
    state = pair()
    seen = Observation(topology=state.replicas["b"].topology, instance="new", version="default")
    assert [r.id for r in stands_for(state, ["a", "b", "x"])] == ["a"]
    state = told_apart(let_in(observe(state, "b", seen, NOW)), SAME)
    assert [r.id for r in state.ready()] == ["a", "b"]


def test_nothing_changes_while_both_are_as_they_were() -> None:
    """The same object, so that no probe writes."""
    state = pair()
    assert told_apart(let_in(state), SAME) is state


def test_a_double_is_silent_for_its_server() -> None:
    """While that sits in a collective it answers under neither name, and is asked under none."""
    state = pair()
    assert busy_with(state, {"a"}) == {"a", "b"}
    assert observe(state, "b", Observation(silent="its engine is silent"), NOW) is state


def test_a_double_is_not_blamed_for_the_label_that_its_server_is_given() -> None:
    """In a finish the server names the next version before the fleet has committed it."""
    state = pair()
    for _ in range(3):
        state = observe(state, "b", Observation(version="next"), NOW)
    assert state.replicas["b"].fence is None
