"""docs/architecture.md: the update that it tells is what the rules do."""

from __future__ import annotations

import re

from fleet.facts.state import UNSET_VERSION, FleetState, Phase
from fleet.rules import events
from fleet.rules.events import Action, Archive, UpdateFailed
from tests.docs.pages import ROOT, text_of
from tests.fleets import PATHS, advance, events_for, fleet_in, fleet_of, follow, replica

_ROW = re.compile(r"^\|([^|]*)\| `(\w+)` \| `(\w+)` \| (\w+) \| (\w+) \|(.*)\|$", re.MULTILINE)


def test_the_update_that_is_told_is_what_the_rules_do() -> None:
    """Row by row: the event, and then phase, gate, version and what is left to be done."""
    told = _ROW.findall(text_of(ROOT / "docs" / "architecture.md"))
    state = fleet_of(replica("a"), replica("b"))
    for call, name, *row in told:
        event = next(e for e in events_for(state) if type(e) is getattr(events, name))
        assert bool(call.strip()) == name.endswith("Requested"), name
        state, actions = advance(state, event)
        done = ", ".join(f"`{type(action).__name__}`" for action in actions if _matters(action))
        gate = "closed" if state.fleet_paused else "open"
        version = state.weight_version or UNSET_VERSION
        assert [cell.strip() for cell in row] == [state.phase.value, gate, version, done], name
    assert (state.phase, state.round) == (Phase.INITIALIZED, None)


def _matters(action: Action) -> bool:
    """Whether there is anybody to do it to; a record is kept whoever is there."""
    return bool(action.targets) or isinstance(action, Archive)


def test_a_failed_update_keeps_gate_and_version_and_fences_its_members() -> None:
    """What the page says of the other ending."""
    before = fleet_in(Phase.UPDATING)
    after: FleetState = follow(before, (UpdateFailed,))
    assert PATHS[Phase.FAILED][-1] is UpdateFailed
    assert (after.phase, after.fleet_paused) == (Phase.FAILED, True)
    assert after.weight_version == before.weight_version
    assert all(member.barred for member in after.members())
