"""Small fleets for tests: replicas, groups, outcomes, and a state in every phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fleet.facts.layout import lay_out
from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import Replica, Topology
from fleet.facts.state import FleetState, Group, Phase
from fleet.rules.events import (
    CommitRequested,
    Event,
    FinishArrived,
    FinishFailed,
    FinishRequested,
    HolderLost,
    InitArrived,
    InitFailed,
    InitRequested,
    PauseArrived,
    PauseFailed,
    ResetRequested,
    Resumed,
    ShutdownRequested,
    StartArrived,
    StartFailed,
    StartRequested,
    Undone,
    UpdateArrived,
    UpdateFailed,
    UpdateRequested,
)
from fleet.rules.membership import candidates_for, form_group
from fleet.rules.rounds import advance

if TYPE_CHECKING:
    from collections.abc import Iterable

change = msgspec.structs.replace

NOW = 1_700_000_000.0
OK = Outcome(outcome=Result.OK, status=200, elapsed_s=0.25)
FAILED = Outcome(outcome=Result.FAILED, status=500, detail="engine said no", elapsed_s=0.5)
TIMEOUT = Outcome(outcome=Result.TIMEOUT, detail="no answer within 60 s")
UNREACHABLE = Outcome(outcome=Result.UNREACHABLE, detail="connection refused")
WEDGED = Outcome(outcome=Result.WEDGED, detail="still inside the collective")


def replica(name: str, workers: int = 1, **facts: Any) -> Replica:
    """Return a probed replica that holds the weights it booted with."""
    known: dict[str, Any] = {
        "url": f"http://{name}",
        "topology": Topology(workers=workers),
        "instance": f"boot-1-of-{name}",
        "backend": "nccl",
        "holds": 0,
    }
    return Replica(id=name, **{**known, **facts})


def fleet_of(*replicas: Replica, **facts: Any) -> FleetState:
    """Return an idle fleet of these replicas."""
    return FleetState(name="tests", generation=1, replicas={r.id: r for r in replicas}, **facts)


def group_for(state: FleetState, *, base: int = 1, by: str = "trainer-1") -> Group:
    """Return the group that the next init would freeze."""
    taken, left_out = candidates_for(state, None)
    layout = lay_out(taken, base=base)
    return form_group(state, taken, left_out, layout, by, NOW)


def everyone(state: FleetState, outcome: Outcome = OK, **others: Outcome) -> dict[str, Outcome]:
    """Return one outcome per member, some of them different."""
    members = state.group.members if state.group else ()
    return {member: others.get(member, outcome) for member in members}


def events_for(state: FleetState) -> list[Event]:
    """Return one event of each of the 20 kinds, fit for this state."""
    good = everyone(state)
    bad = good | dict.fromkeys(list(good)[:1], FAILED)
    return [
        InitRequested(now=NOW, group=group_for(state, by="trainer-2")),
        InitArrived(now=NOW, outcomes=good),
        InitFailed(now=NOW, outcomes=bad),
        StartRequested(now=NOW, by="trainer-2"),
        PauseArrived(now=NOW, outcomes=good),
        PauseFailed(now=NOW, outcomes=bad),
        StartArrived(now=NOW, outcomes=good),
        StartFailed(now=NOW, outcomes=bad),
        Undone(now=NOW, outcomes=good),
        UpdateRequested(now=NOW, announces=True),
        UpdateArrived(now=NOW, outcomes=good),
        UpdateFailed(now=NOW, outcomes=bad),
        FinishRequested(now=NOW, full=True),
        FinishArrived(now=NOW, outcomes=good),
        FinishFailed(now=NOW, outcomes=bad),
        Resumed(now=NOW, outcomes=good),
        CommitRequested(now=NOW, by="operator", round=state.round.id if state.round else 0),
        ShutdownRequested(now=NOW),
        HolderLost(now=NOW, why="gateway g was lost"),
        ResetRequested(now=NOW, by="operator"),
    ]


PATHS: dict[Phase, tuple[type[Event], ...]] = {
    Phase.IDLE: (),
    Phase.INITIALIZING: (InitRequested,),
    Phase.INITIALIZED: (InitRequested, InitArrived),
    Phase.PAUSING: (InitRequested, InitArrived, StartRequested),
    Phase.STARTING: (InitRequested, InitArrived, StartRequested, PauseArrived),
    Phase.UNDOING: (InitRequested, InitArrived, StartRequested, PauseFailed),
    Phase.STARTED: (InitRequested, InitArrived, StartRequested, PauseArrived, StartArrived),
}
PATHS[Phase.UPDATING] = (*PATHS[Phase.STARTED], UpdateRequested)
PATHS[Phase.FAILED] = (*PATHS[Phase.UPDATING], UpdateFailed)
PATHS[Phase.FINISHING] = (*PATHS[Phase.UPDATING], UpdateArrived, FinishRequested)
PATHS[Phase.COMMITTED] = (*PATHS[Phase.FINISHING], FinishArrived)


def follow(state: FleetState, kinds: Iterable[type[Event]]) -> FleetState:
    """Return the state after one event of each of these kinds."""
    for kind in kinds:
        event = next(e for e in events_for(state) if type(e) is kind)
        state, _ = advance(state, event)
    return state


def fleet_in(phase: Phase, *replicas: Replica) -> FleetState:
    """Return a fleet that came to this phase by the shortest way."""
    start = fleet_of(*(replicas or (replica("a"), replica("b", 2), replica("c", 4))))
    return follow(start, PATHS[phase])
