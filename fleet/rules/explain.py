"""The one message a trainer reads when something failed: who, what of the rest, what next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fleet.errors import (
    DeadlinePassed,
    FleetError,
    MemberFailed,
    MembershipChanged,
    PauseNotReached,
    RoundOpen,
    WrongPhase,
)
from fleet.facts.outcome import Outcome, Result, describe_failures
from fleet.facts.state import ON_THE_WAY, ROUND_OPEN, FleetState, Phase
from fleet.rules.barrier import only_deadlines_passed
from fleet.rules.events import (
    Answered,
    Event,
    FinishFailed,
    InitFailed,
    InitRequested,
    PauseFailed,
    ShutdownRequested,
    StartFailed,
    StartRequested,
    UpdateFailed,
)
from fleet.rules.holding import story
from fleet.rules.membership import marked, membership
from fleet.rules.rounds import TRANSITIONS

_PHASE_OF: dict[type[Answered], str] = {
    InitFailed: "init",
    PauseFailed: "pause",
    StartFailed: "start",
    UpdateFailed: "update",
    FinishFailed: "finish",
}


def error_of(event: Answered, state: FleetState) -> FleetError | None:
    """Return the error that a failed phase means for the trainer, or None if it did not fail.

    `state` is the fleet after everything that the failure led to.
    """
    phase = _PHASE_OF.get(type(event))
    if phase is None:
        return None
    kind = _kind_of(event)
    message = (
        f"{phase} failed on {describe_failures(event.outcomes)}. "
        f"Fleet now: {count_states(state)}; weight_version {state.weight_version or 'default'}."
    )
    return kind(message, hint=_hint(event, state), outcomes=event.outcomes)


def what_next(state: FleetState, event: type[Event], call: str, now: float) -> FleetError | None:
    """Return why a call does not follow in this phase and what would, or None if it may."""
    if event in TRANSITIONS[state.phase]:
        return None
    message = story(state, call, now)
    if state.phase is Phase.FAILED:
        hint = f"re-init with {_with_or_without(state, _waited_in_failed(state))}"
        return MembershipChanged(message, hint=hint)
    if event in (InitRequested, StartRequested, ShutdownRequested) and state.phase in _BUSY:
        return RoundOpen(
            message,
            hint="wait for its finish, or POST /fleet/reset to abandon it (members that may be "
            "mixed stay fenced until a full update)",
        )
    return WrongPhase(message, hint=_STEPS[state.phase])


_BUSY = ROUND_OPEN | {Phase.INITIALIZING}

_STEPS: dict[Phase, str] = dict.fromkeys(ON_THE_WAY, "wait for the call that is on its way") | {
    Phase.IDLE: "POST /init_weight_transfer_engine first",
    Phase.INITIALIZING: "wait for the init that is on its way",
    Phase.INITIALIZED: "POST /start_weight_update first",
    Phase.STARTED: "POST /update_weights, then /finish_weight_update",
}


def count_states(state: FleetState) -> str:
    """Return how many replicas are in which state, in words."""
    counts = Counter(found.value for _, found, _ in state.states())
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "no replicas"


def _kind_of(event: Answered) -> type[FleetError]:
    if isinstance(event, PauseFailed):
        return PauseNotReached
    return failure_kind(event.outcomes)


def failure_kind(outcomes: Mapping[str, Outcome]) -> type[MemberFailed | DeadlinePassed]:
    """Return the error for these outcomes: silence alone is a deadline, all else a failure."""
    return DeadlinePassed if only_deadlines_passed(outcomes) else MemberFailed


def _hint(event: Answered, state: FleetState) -> str:
    if isinstance(event, PauseFailed):
        if any(o.outcome is Result.UNREACHABLE for o in event.outcomes.values()):
            return f"what had been paused was resumed; re-init with {membership(state).next_world}"
        return "what had been paused was resumed; retry start"
    if isinstance(event, StartFailed):
        return "what had been started was taken back; retry start, or init again if it persists"
    again = _next_init(event, state)
    if not isinstance(event, InitFailed):
        again += " and send a full update"
    return f"{again}; rollouts wait for at most the gate's time meanwhile"


def _next_init(event: Answered, state: FleetState) -> str:
    """Say which init comes next, and what it takes; who merely waited for the culprit is in it."""
    again = f"init again with {_with_or_without(state, _waiting(event.outcomes))}"
    refused = [r for r, o in event.outcomes.items() if o.outcome is Result.FAILED]
    if refused and isinstance(event, InitFailed):
        again += f" (restart {', '.join(refused)} if that fails there again)"
    return again


def _with_or_without(state: FleetState, waiting: list[str]) -> str:
    """Say what the next init needs, with and without those who may answer again any moment."""
    still = [r for r in waiting if (known := state.replicas.get(r)) and known.wedged]
    whole = marked(state, still, wedged=None)
    told = membership(whole).next_world
    if still:
        without = membership(state).next_world
        told += f" once {', '.join(still)} answered ({without} without)"
    return told + _left_out(whole)


def _waiting(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return who sat in the collective when someone else failed it: no fault of theirs."""
    if only_deadlines_passed(outcomes):
        return []
    return [r for r, o in outcomes.items() if o.outcome is Result.WEDGED]


def _waited_in_failed(state: FleetState) -> list[str]:
    """Return who sat in the collective that somebody else failed, from the round's record."""
    records = state.round.records if state.round else ()
    collectives = [r for r in records if r.phase in (Phase.INITIALIZING, Phase.UPDATING)]
    if not collectives:
        return []
    found = {r: arrival.outcome for r, arrival in collectives[-1].replicas.items()}
    if not {Result.FAILED, Result.UNREACHABLE} & set(found.values()):
        return []
    return [r for r, outcome in found.items() if outcome is Result.WEDGED]


def _left_out(state: FleetState) -> str:
    silent = [r.id for r in state.replicas.values() if r.wedged or r.lost]
    if not silent:
        return ""
    return f" (left out until they answer again, a restart helps: {', '.join(silent)})"
