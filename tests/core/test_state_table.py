"""The life of a weight update, cell by cell: every phase × every event."""

from __future__ import annotations

import re

import msgspec
import pytest

from fleet.facts.state import FleetState, Phase
from fleet.rules.events import Answered, Event, FinishFailed
from fleet.rules.rounds import IllegalTransition, advance
from tests.fleets import events_for, fleet_in, follow

# Written by hand, not taken from the production table. What is absent is illegal.
TABLE: dict[str, dict[str, str]] = {
    "idle": {
        "InitRequested": "initializing",
        "ShutdownRequested": "idle",
        "ResetRequested": "idle",
    },
    "initializing": {
        "InitArrived": "initialized",
        "InitFailed": "failed",
        "HolderLost": "failed",
        "ResetRequested": "idle",
    },
    "initialized": {
        "InitRequested": "initializing",
        "StartRequested": "pausing",
        "ShutdownRequested": "idle",
        "ResetRequested": "idle",
    },
    "pausing": {
        "PauseArrived": "starting",
        "PauseFailed": "undoing",
        "HolderLost": "undoing",
        "ResetRequested": "idle",
    },
    "starting": {
        "StartArrived": "started",
        "StartFailed": "undoing",
        "HolderLost": "undoing",
        "ResetRequested": "idle",
    },
    "started": {
        "UpdateRequested": "updating",
        "FinishRequested": "finishing",
        "ResetRequested": "idle",
    },
    "updating": {
        "UpdateArrived": "started",
        "UpdateFailed": "failed",
        "HolderLost": "failed",
        "ResetRequested": "idle",
    },
    "finishing": {
        "FinishArrived": "committed",
        "FinishFailed": "failed",
        "HolderLost": "failed",
        "ResetRequested": "idle",
    },
    "committed": {
        "Resumed": "initialized",
        "HolderLost": "committed",
        "ResetRequested": "idle",
    },
    "undoing": {
        "Undone": "initialized",
        "HolderLost": "undoing",
        "ResetRequested": "idle",
    },
    "failed": {
        "InitRequested": "initializing",
        "CommitRequested": "committed",
        "ShutdownRequested": "idle",
        "ResetRequested": "idle",
    },
}
EVENTS = [
    "InitRequested",
    "InitArrived",
    "InitFailed",
    "StartRequested",
    "PauseArrived",
    "PauseFailed",
    "StartArrived",
    "StartFailed",
    "Undone",
    "UpdateRequested",
    "UpdateArrived",
    "UpdateFailed",
    "FinishRequested",
    "FinishArrived",
    "FinishFailed",
    "Resumed",
    "CommitRequested",
    "ShutdownRequested",
    "HolderLost",
    "ResetRequested",
]
CELLS = [(phase, event) for phase in TABLE for event in EVENTS]
LEGAL = [(phase, event) for phase, event in CELLS if event in TABLE[phase]]
ILLEGAL = [(phase, event) for phase, event in CELLS if event not in TABLE[phase]]
WITHOUT_ROUND = {"idle"}


def cell(phase: str, event: str) -> tuple[FleetState, Event]:
    """Return a fleet in this phase and an event of this kind.

    A commit by an operator follows a finish that some have completed.
    """
    state = fleet_in(Phase(phase))
    if (phase, event) == ("failed", "CommitRequested"):
        state = follow(fleet_in(Phase.FINISHING), [FinishFailed])
    return state, next(e for e in events_for(state) if type(e).__name__ == event)


def test_the_table_has_a_row_for_every_phase_and_names_every_event() -> None:
    """A new phase or event must be written into the table by hand."""

    def leaves(kind: type[Event]) -> set[str]:
        below = kind.__subclasses__()
        return set[str]().union(*map(leaves, below)) if below else {kind.__name__}

    assert set(TABLE) == {phase.value for phase in Phase}
    assert set(EVENTS) == leaves(Event)
    assert len(CELLS) == 11 * 20


@pytest.mark.parametrize(("phase", "event"), LEGAL)
def test_a_legal_event_leads_to_the_phase_of_the_table(phase: str, event: str) -> None:
    """Each legal cell names the one phase that follows."""
    state, happened = cell(phase, event)
    after, _ = advance(state, happened)
    assert after.phase == TABLE[phase][event]


@pytest.mark.parametrize(("phase", "event"), LEGAL)
def test_a_legal_event_leaves_the_state_it_was_given_alone(phase: str, event: str) -> None:
    """A step returns a new state; the old one is still true of the moment before."""
    state, happened = cell(phase, event)
    before = msgspec.json.encode(state)
    advance(state, happened)
    assert msgspec.json.encode(state) == before


@pytest.mark.parametrize(("phase", "event"), ILLEGAL)
def test_an_illegal_event_is_refused_and_changes_nothing(phase: str, event: str) -> None:
    """What has no row raises IllegalTransition, and the state is what it was."""
    state, happened = cell(phase, event)
    before = msgspec.json.encode(state)
    with pytest.raises(IllegalTransition):
        advance(state, happened)
    assert msgspec.json.encode(state) == before


@pytest.mark.parametrize(("phase", "event"), ILLEGAL)
def test_a_refusal_tells_the_phase_and_whose_round_it_is(phase: str, event: str) -> None:
    """Whoever is refused reads what the fleet is doing, for whom, and for how long already."""
    state, happened = cell(phase, event)
    with pytest.raises(IllegalTransition) as caught:
        advance(state, msgspec.structs.replace(happened, now=happened.now + 200))
    told = caught.value.message
    assert f"in phase {phase}" in told
    if phase in WITHOUT_ROUND:
        return
    assert state.round is not None
    assert f"round {state.round.id} (generation {state.generation})" in told
    assert re.search(r"opened by trainer-\d 3 min 20 s ago", told)


def test_a_refusal_after_a_failure_says_what_failed() -> None:
    """In `failed` the message carries the reason, replica by replica."""
    state, happened = cell("failed", "FinishRequested")
    with pytest.raises(IllegalTransition, match=r"ended: update: a: failed \(engine said no\)"):
        advance(state, happened)


def test_a_refusal_in_a_session_says_that_the_round_is_still_open() -> None:
    """A second trainer must see that the first one has not finished."""
    state, happened = cell("started", "StartRequested")
    with pytest.raises(IllegalTransition, match="is still open"):
        advance(state, happened)


@pytest.mark.parametrize(("phase", "event"), LEGAL)
def test_every_answer_is_written_into_the_record_of_the_round(phase: str, event: str) -> None:
    """An operator can see afterwards what each replica made of each phase."""
    state, happened = cell(phase, event)
    if not isinstance(happened, Answered):
        return
    after, actions = advance(state, happened)
    archived = [getattr(action, "round", None) for action in actions]
    kept = after.round or next(r for r in archived if r is not None)
    record = next(r for r in kept.records if r.phase == phase)
    assert record.calls == 1
    assert {r: a.outcome for r, a in record.replicas.items()} == {
        r: o.outcome for r, o in happened.outcomes.items()
    }
