"""The desk: where the fleet stands, as far as a repeated control call must know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleet.facts.replica import Sleep
from fleet.facts.state import FleetState, Phase, TrainerPause
from fleet.rules.events import UpdateArrived, UpdateRequested
from fleet.rules.membership import marked
from gateway.desk import position_of
from tests.fleets import NOW, change, fleet_in, follow

PAUSE = TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW)


def marks(**facts: Any) -> Callable[[FleetState], FleetState]:
    """A call that changes these facts about one replica."""
    return lambda state: marked(state, ["b"], **facts)


CALLS: dict[str, Callable[[FleetState], FleetState]] = {
    "an init": lambda state: change(state, generation=state.generation + 1),
    "a start": lambda state: change(state, phase=Phase.PAUSING),
    "an update": lambda state: follow(state, (UpdateRequested, UpdateArrived)),
    "a label": lambda state: state.with_commit("best"),
    "the same label again": lambda state: state.with_commit(state.weight_version),
    "a pause": lambda state: change(state, pause=PAUSE),
    "a sleep": marks(sleep=Sleep(level=1)),
    "a drain": marks(draining=True),
    "a fence": marks(fence="an operator asked for it"),
    "a restart": marks(restarted_at=NOW),
}


@pytest.mark.parametrize("call", CALLS)
def test_whatever_a_control_call_changes_is_a_part_of_where_the_fleet_stands(call: str) -> None:
    """Or an answer that reached nobody would be given to an equal call that comes after it."""
    before = fleet_in(Phase.STARTED)
    assert position_of(CALLS[call](before)) != position_of(before)


def test_what_only_a_look_has_seen_leaves_the_fleet_where_it_stands() -> None:
    """Or a probe would take the answer away from the retry for which it waits."""
    before = fleet_in(Phase.STARTED)
    after = marked(before, ["b"], version="7", lost="refused", wedged="silent")
    assert position_of(after) == position_of(before)
