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
from fleet.facts.outcome import Outcome, describe_failures
from fleet.facts.state import ON_THE_WAY, ROUND_OPEN, FleetState, Phase
from fleet.rules.advice import next_init, next_step
from fleet.rules.barrier import only_deadlines_passed
from fleet.rules.events import (
    Answered,
    CommitRequested,
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
from fleet.rules.membership import membership
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
    if event is CommitRequested:
        return WrongPhase(message, hint=_ONLY_A_FAILED_FINISH)
    if state.phase is Phase.FAILED:
        return MembershipChanged(message, hint=next_step(state))
    wait = f"wait for the {_on_its_way(state)} that is on its way"
    if event in (InitRequested, StartRequested, ShutdownRequested) and state.phase in _BUSY:
        return RoundOpen(message, hint=_HELD[state.phase].format(wait=wait))
    return WrongPhase(message, hint=_STEPS[state.phase].format(wait=wait))


_BUSY = ROUND_OPEN | {Phase.INITIALIZING}
_ONLY_A_FAILED_FINISH = (
    "only a round whose finish failed on some members can be committed by hand, once, and only "
    "until the next init; GET /fleet/rounds says what became of each"
)
_ABANDON = (
    "POST /fleet/reset to abandon it (members that may be mixed stay fenced until a full update)"
)
_HELD: dict[Phase, str] = dict.fromkeys(_BUSY, f"wait for its finish, or {_ABANDON}") | {
    Phase.INITIALIZING: "{wait}, or POST /fleet/reset to abandon it",
    Phase.STARTED: "if it is yours, POST /update_weights, then /finish_weight_update; else wait "
    f"for its finish, or {_ABANDON}",
    Phase.UNDOING: f"{{wait}} and is being taken back, or {_ABANDON}",
    Phase.COMMITTED: "{wait}",
}
"""What to do about a round that somebody else holds; a member cannot be mixed before a start."""
_STEPS: dict[Phase, str] = dict.fromkeys(ON_THE_WAY, "{wait}") | {
    Phase.IDLE: "POST /init_weight_transfer_engine first, then /start_weight_update",
    Phase.INITIALIZED: "POST /start_weight_update first (no update is open, the last one may be "
    "over already)",
    Phase.UNDOING: "{wait} and is being taken back, then start again",
    Phase.COMMITTED: "{wait}, then POST /start_weight_update for the next update",
    Phase.STARTED: "POST /update_weights, then /finish_weight_update",
}
_CALLS: dict[Phase, str] = {
    Phase.INITIALIZING: "init",
    Phase.UPDATING: "update",
    Phase.FINISHING: "finish",
    Phase.COMMITTED: "finish",
}


def _on_its_way(state: FleetState) -> str:
    return state.holder.what if state.holder else _CALLS.get(state.phase, "start")


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
        return f"what had been paused was resumed; {_start_again(state)}"
    if isinstance(event, StartFailed):
        told = f"what had been started was taken back; {_start_again(state)}"
        return told if membership(state).lost else f"{told}, or re-init if that fails again"
    return after_failure(state)


def after_failure(state: FleetState, what: str = "") -> str:
    """Return what to do after a call that failed, also when that is told again later.

    `what` is the call if its gateway was lost: then a start has been taken back.
    """
    if what == "start" and state.phase is Phase.INITIALIZED:
        return f"what had been started was taken back; {_start_again(state)}"
    return (state.phase is Phase.FAILED and next_step(state)) or next_init(state)


def _start_again(state: FleetState) -> str:
    """Say how a start that was taken back is made good: by itself only if nobody was lost."""
    if membership(state).lost:
        return f"{next_init(state)}, then start again"
    return "start again"
