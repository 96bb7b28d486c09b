"""What tells one boot from another: instances, and in which words servers name them."""

from __future__ import annotations

import pytest

from fleet.facts.replica import Naming, Replica, Topology, naming_of
from fleet.facts.state import FleetState
from fleet.rules.membership import Observation, observe
from tests.fleets import NOW, change, fleet_of, replica

SEEN = Observation(
    topology=Topology(workers=2), backend="nccl", instance="boot-1-of-a", version="default"
)


def after(state: FleetState, seen: Observation) -> Replica:
    """Return the one replica after one observation."""
    return observe(state, "a", seen, NOW + 5).replicas["a"]


@pytest.mark.parametrize(
    ("instance", "naming"),
    [
        (None, Naming.NOT),
        ("unknown since 2026-01-01T00:00:00Z", Naming.NOT),
        ("pod uid@a:8000", Naming.BY_POD),
        ("started at 1.5", Naming.BY_START),
        ("boot-1", Naming.BY_ITSELF),
    ],
)
def test_an_instance_says_in_which_words_it_is_told(instance: str | None, naming: Naming) -> None:
    """Only what a server tells in the same words twice can be compared."""
    assert naming_of(instance) is naming


STARTED = "started at 1700000000.12"


def test_a_start_time_in_the_place_of_an_instance_is_no_restart() -> None:
    """/server_info had no answer this once, and /metrics spoke for it: a fence stays."""
    before = replica("a", fence="mixed", session_open=True)
    found = after(fleet_of(before), change(SEEN, instance=STARTED))
    assert (found.fence, found.session_open, found.instance) == ("mixed", True, before.instance)


@pytest.mark.parametrize(("commits", "holds"), [(0, 0), (3, None)])
def test_an_instance_in_the_place_of_a_start_time_is_a_doubt(commits: int, holds: int) -> None:
    """It may be another boot: it serves no committed version, and a fence stays."""
    before = replica("a", instance=STARTED, fence="mixed", holds=commits)
    found = after(fleet_of(before, commit_index=commits), SEEN)
    assert (found.fence, found.holds, found.instance) == ("mixed", holds, SEEN.instance)


def test_another_start_time_is_a_restart() -> None:
    """In the same words it can be compared."""
    fleet = fleet_of(replica("a", instance="started at 1.0", fence="mixed"))
    assert after(fleet, change(SEEN, instance=STARTED)).fence is None
