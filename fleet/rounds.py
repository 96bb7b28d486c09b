"""The life of a weight update: a state machine, events in, new state and actions out.

Read it from the top: TRANSITIONS says which event may follow in which phase, the rule of each
event (below the table) says what the event changes, and `advance` ties the two. Nothing here
waits, calls or looks at a clock; the coordinator carries out the actions and feeds what came of
them back in as the next event.

    init        idle -> initializing -> initialized
    one update  initialized -> pausing -> starting -> started -> updating -> started …
                … -> finishing -> committed -> initialized
    a no        pausing | starting -> undoing -> initialized       (as if nothing had been asked)
                initializing | updating | finishing -> failed      (named, fenced, init again)
    a gateway   that dies on the way counts as a no; what it had committed is only resumed

The version moves in one place, `_finish_arrived`, and only when every member has arrived. A
failed update never resumes by itself: it is the phase `failed`, and the way out is a new init.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from fleet.barrier import arrivals
from fleet.errors import WrongPhase
from fleet.events import (
    Action,
    Answered,
    Archive,
    CloseSessions,
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
    SendFinish,
    SendInit,
    SendPause,
    SendResume,
    SendShutdown,
    SendStart,
    SendUndo,
    SendUpdate,
    ShutdownRequested,
    StartArrived,
    StartFailed,
    StartRequested,
    Undone,
    Unpause,
    UpdateArrived,
    UpdateFailed,
    UpdateRequested,
)
from fleet.holding import held, may_report, story
from fleet.outcome import Result, describe_failures
from fleet.replica import Replica
from fleet.state import (
    FleetState,
    Group,
    Phase,
    Round,
    RoundResult,
    record_outcomes,
)

change = msgspec.structs.replace

Step = tuple[FleetState, tuple[Action, ...]]

# ---- the table ---------------------------------------------------------------------------------

TRANSITIONS: dict[Phase, dict[type[Event], Phase]] = {
    Phase.IDLE: {
        InitRequested: Phase.INITIALIZING,
        ShutdownRequested: Phase.IDLE,
        ResetRequested: Phase.IDLE,
    },
    Phase.INITIALIZING: {
        InitArrived: Phase.INITIALIZED,
        InitFailed: Phase.FAILED,
        HolderLost: Phase.FAILED,
        ResetRequested: Phase.IDLE,
    },
    Phase.INITIALIZED: {
        InitRequested: Phase.INITIALIZING,
        StartRequested: Phase.PAUSING,
        ShutdownRequested: Phase.IDLE,
        ResetRequested: Phase.IDLE,
    },
    Phase.PAUSING: {
        PauseArrived: Phase.STARTING,
        PauseFailed: Phase.UNDOING,
        HolderLost: Phase.UNDOING,
        ResetRequested: Phase.IDLE,
    },
    Phase.STARTING: {
        StartArrived: Phase.STARTED,
        StartFailed: Phase.UNDOING,
        HolderLost: Phase.UNDOING,
        ResetRequested: Phase.IDLE,
    },
    Phase.UNDOING: {
        Undone: Phase.INITIALIZED,
        HolderLost: Phase.UNDOING,
        ResetRequested: Phase.IDLE,
    },
    Phase.STARTED: {
        UpdateRequested: Phase.UPDATING,
        FinishRequested: Phase.FINISHING,
        ResetRequested: Phase.IDLE,
    },
    Phase.UPDATING: {
        UpdateArrived: Phase.STARTED,
        UpdateFailed: Phase.FAILED,
        HolderLost: Phase.FAILED,
        ResetRequested: Phase.IDLE,
    },
    Phase.FINISHING: {
        FinishArrived: Phase.COMMITTED,
        FinishFailed: Phase.FAILED,
        HolderLost: Phase.FAILED,
        ResetRequested: Phase.IDLE,
    },
    Phase.COMMITTED: {
        Resumed: Phase.INITIALIZED,
        HolderLost: Phase.COMMITTED,
        ResetRequested: Phase.IDLE,
    },
    Phase.FAILED: {
        InitRequested: Phase.INITIALIZING,
        ShutdownRequested: Phase.IDLE,
        ResetRequested: Phase.IDLE,
    },
}


class IllegalTransition(WrongPhase):
    """The event has no row in TRANSITIONS for this phase; the state is unchanged."""


def advance(state: FleetState, event: Event) -> Step:
    """Return the state after `event`, and what must be done about it.

    Raises IllegalTransition, which tells what the fleet is doing and since when, if the event may
    not follow in this phase, or belongs to a call that does not hold the fleet any more.
    """
    phase = TRANSITIONS[state.phase].get(type(event))
    if phase is None:
        raise IllegalTransition(
            story(state, type(event).__name__.removesuffix("Requested").lower())
        )
    if not may_report(state, event):
        raise IllegalTransition(f"{_name(state)} is not held by this call any more")
    following, actions = _RULES[type(event)](change(state, phase=phase), event)
    return held(following, event), actions


# ---- the rules ---------------------------------------------------------------------------------


def _init_requested(state: FleetState, event: InitRequested) -> Step:
    before, group = state, event.group
    opened = Round(
        id=state.next_round,
        generation=group.generation,
        opened_by=group.opened_by,
        opened_at=event.now,
    )
    state = change(
        state,
        generation=group.generation,
        group=group,
        round=opened,
        next_round=state.next_round + 1,
    )
    left_open = _ids(r for r in state.members() if r.session_open)
    actions = (CloseSessions(targets=left_open, wait=True), SendInit(targets=group.members))
    return state, (*_archive(before.round, event), *actions)


def _init_arrived(state: FleetState, event: InitArrived) -> Step:
    return _recorded(state, Phase.INITIALIZING, event), ()


def _init_failed(state: FleetState, event: InitFailed) -> Step:
    state = _recorded(state, Phase.INITIALIZING, event)
    return _wedge(_failed(state, event, "init"), event, "init"), ()


def _start_requested(state: FleetState, event: StartRequested) -> Step:
    opened = state.round or Round(
        id=state.next_round,
        generation=state.generation,
        opened_by=event.by,
        opened_at=event.now,
    )
    opened = change(opened, draft=event.draft, opened_by=event.by)
    state = change(state, round=opened, next_round=max(state.next_round, opened.id + 1))
    members = state.members()
    running = _to_pause(state) if event.auto_pause else ()
    left_open = _ids(r for r in members if r.session_open)
    state = _changed(state, running, paused=True)  # from now on, for whoever must undo it
    return state, (CloseSessions(targets=left_open, wait=True), SendPause(targets=running))


def _pause_arrived(state: FleetState, event: PauseArrived) -> Step:
    state = _recorded(state, Phase.PAUSING, event)
    state = _changed(state, event.outcomes, paused=True)
    members = _member_ids(state)
    state = _changed(state, members, session_open=True)
    return state, (SendStart(targets=members, draft=_round(state).draft),)


def _pause_failed(state: FleetState, event: PauseFailed) -> Step:
    """Take the pause back everywhere: who failed may have paused all the same."""
    state = _recorded(state, Phase.PAUSING, event)
    asked = tuple(r for r in _to_resume(state) if r in event.outcomes)
    return state, (SendUndo(resume=asked),)


def _start_arrived(state: FleetState, event: StartArrived) -> Step:
    """A member that was seen to restart just before its start has a session all the same."""
    state = _changed(state, event.outcomes, session_open=True)
    return _recorded(state, Phase.STARTING, event), ()


def _start_failed(state: FleetState, event: StartFailed) -> Step:
    """Close the sessions everywhere: who failed may have one, on some of its workers at least."""
    state = _recorded(state, Phase.STARTING, event)
    return state, (SendUndo(targets=tuple(event.outcomes), resume=_to_resume(state)),)


def _undone(state: FleetState, event: Undone) -> Step:
    """Return to `initialized`; a member that could not be put back stays paused, or is fenced."""
    session_was_open = state.session_was_open
    state = _recorded(state, Phase.UNDOING, event)
    done = change(
        _round(state),
        result=RoundResult.UNDONE,
        reason=f"{_round(state).reason or 'a member refused'}; what had been done was taken back",
        closed_at=event.now,
    )
    ok = {r for r, o in event.outcomes.items() if o.ok}
    stuck = [r for r, o in event.outcomes.items() if not o.ok]
    state = _changed(state, ok.intersection(_to_resume(state)), paused=False)
    state = _changed(state, event.closed, session_open=False)
    if session_was_open:
        state = _changed(state, stuck, fence=f"{_name(state)}: its start could not be undone")
    return change(state, round=None), (Archive(round=done),)


def _update_requested(state: FleetState, event: UpdateRequested) -> Step:
    group = _group(state)
    if event.announces:
        state = change(state, group=change(group, announced_in=_round(state).id))
    return state, (SendUpdate(targets=group.members),)


def _update_arrived(state: FleetState, event: UpdateArrived) -> Step:
    state = _recorded(state, Phase.UPDATING, event)
    done = change(_round(state), updates=_round(state).updates + 1)
    return change(state, round=done), ()


def _update_failed(state: FleetState, event: UpdateFailed) -> Step:
    state = _recorded(state, Phase.UPDATING, event)
    state = _fence_members(state, event, "update")
    state = _failed(_wedge(state, event, "update"), event, "update")
    answered = _ids(r for r in state.members() if r.reachable and r.session_open)
    return state, (CloseSessions(targets=answered, wait=False),)


def _finish_requested(state: FleetState, event: FinishRequested) -> Step:
    open_round = _round(state)
    version = event.version
    if version is None and event.auto_version and not open_round.draft:
        version = str(state.counter + 1)
    full = event.full and not open_round.draft
    named = change(open_round, version=version, full=full, names_key=event.names_key)
    state = change(state, round=named)
    return state, (SendFinish(targets=_member_ids(state), version=version),)


def _finish_arrived(state: FleetState, event: FinishArrived) -> Step:
    """Commit: the only rule that moves the version, in the same write that leaves `finishing`."""
    if not arrivals(_member_ids(state), event.outcomes).complete:
        raise IllegalTransition(f"{_name(state)}: not every member has arrived")
    state = _recorded(state, Phase.FINISHING, event)
    state = _changed(state, event.outcomes, session_open=False)
    open_round = _round(state)
    if not open_round.draft:
        state = _commit(state, open_round)
        state = change(state, fullest=open_round.names_key or state.fullest)
    done = change(_round(state), result=RoundResult.COMMITTED, closed_at=event.now)
    state = change(state, round=done)
    return state, (_resume_action(state),)


def _finish_failed(state: FleetState, event: FinishFailed) -> Step:
    state = _recorded(state, Phase.FINISHING, event)
    completed = [r for r, o in event.outcomes.items() if o.ok]
    state = _fence_members(state, event, "finish")
    state = _changed(state, completed, session_open=False, version=_round(state).version)
    state = _failed(_wedge(state, event, "finish"), event, "finish")
    left_open = _ids(r for r in state.members() if r.reachable and r.session_open)
    return state, (CloseSessions(targets=left_open, wait=False),)


def _resumed(state: FleetState, event: Resumed) -> Step:
    """Say what the caches rest on from now on; the round is over."""
    state = _recorded(state, Phase.COMMITTED, event)
    ok = [r for r, o in event.outcomes.items() if o.ok]
    state = _changed(state, ok, paused=False)
    kept_old_kv = state.pause is not None and not state.pause.clear_cache
    mixed = kept_old_kv or not event.cleared
    kv = state.kv if _round(state).draft else ("mixed" if mixed else "current")
    done = change(_round(state), kv=kv)
    return change(state, round=None, kv=kv), (Archive(round=done),)


def _shutdown_requested(state: FleetState, event: ShutdownRequested) -> Step:
    members = _ids(r for r in state.members() if r.reachable)
    archive = _archive(state.round, event)
    return change(state, group=None, round=None), (*archive, SendShutdown(targets=members))


def _reset_requested(state: FleetState, event: ResetRequested) -> Step:
    """Abandon what is open; members that may be mixed are fenced and stay paused."""
    archive = _archive(state.round, event)
    was_open = state.round is not None and state.round.result is RoundResult.OPEN
    in_session = [r.id for r in state.members() if r.session_open] if was_open else []
    state = _changed(state, in_session, fence=f"{_name(state)} was abandoned by {event.by}")
    state = _changed(state, event.silent, wedged=f"silent when {_name(state)} was abandoned")
    resume = _to_resume(state)
    fullest = None if event.new_model else state.fullest
    state = change(state, group=None, round=None, fullest=fullest)
    return state, (*archive, Unpause(targets=resume))


def _holder_lost(state: FleetState, event: HolderLost) -> Step:
    """Nobody knows how far the lost gateway came: take back what can be, fence what cannot.

    A committed round is only resumed. What may have been updated in part is never finished by
    guess: its members are fenced, and the trainer's next call is told.
    """
    if state.phase is Phase.COMMITTED:
        return state, (_resume_action(state),)
    if state.phase is Phase.UNDOING:
        state = change(state, round=change(_round(state), reason=event.why))
        left_open = _ids(r for r in state.members() if r.session_open)
        return state, (SendUndo(targets=left_open, resume=_to_resume(state)),)
    done = change(_round(state), result=RoundResult.FAILED, reason=event.why, closed_at=event.now)
    state = change(state, round=done)
    if not state.session_was_open:
        return state, ()
    state = _changed(state, _member_ids(state), fence=f"{_name(state)}: {event.why}")
    left_open = _ids(r for r in state.members() if r.reachable and r.session_open)
    return state, (CloseSessions(targets=left_open, wait=False),)


_RULES: dict[type[Event], Callable[[FleetState, Any], Step]] = {
    InitRequested: _init_requested,
    InitArrived: _init_arrived,
    InitFailed: _init_failed,
    StartRequested: _start_requested,
    PauseArrived: _pause_arrived,
    PauseFailed: _pause_failed,
    StartArrived: _start_arrived,
    StartFailed: _start_failed,
    Undone: _undone,
    UpdateRequested: _update_requested,
    UpdateArrived: _update_arrived,
    UpdateFailed: _update_failed,
    FinishRequested: _finish_requested,
    FinishArrived: _finish_arrived,
    FinishFailed: _finish_failed,
    Resumed: _resumed,
    ShutdownRequested: _shutdown_requested,
    HolderLost: _holder_lost,
    ResetRequested: _reset_requested,
}

# ---- pieces of the rules -----------------------------------------------------------------------


def _resume_action(state: FleetState) -> SendResume:
    ran_on = not all(r.paused or r.sleep for r in state.members())
    return SendResume(targets=_to_resume(state), reset_caches=ran_on)


def _commit(state: FleetState, done: Round) -> FleetState:
    """Move the version and say who holds it: everyone after a full round, else the current ones."""
    version = done.version if done.version is not None else state.weight_version
    before = state.commit_index
    holders = [r for r in state.members() if done.full or (r.holds == before and not r.fence)]
    state = state.with_commit(version)
    return _changed(state, _ids(holders), holds=state.commit_index, fence=None, version=version)


def _fence_members(state: FleetState, event: Answered, phase: str) -> FleetState:
    why = f"{_name(state)} failed in {phase}: {describe_failures(event.outcomes)}"
    return _changed(state, _member_ids(state), fence=why)


def _wedge(state: FleetState, event: Answered, phase: str) -> FleetState:
    """Mark the members that are silent inside a collective until they answer again."""
    silent = [r for r, o in event.outcomes.items() if o.outcome is Result.WEDGED]
    return _changed(state, silent, wedged=f"silent inside {phase} of {_name(state)}")


def _failed(state: FleetState, event: Answered, phase: str) -> FleetState:
    reason = f"{phase}: {describe_failures(event.outcomes)}"
    done = change(_round(state), result=RoundResult.FAILED, reason=reason, closed_at=event.now)
    return change(state, round=done)


def _archive(over: Round | None, event: Event) -> tuple[Action, ...]:
    """Return the action that keeps a round which this event ends, if there is one."""
    if over is None:
        return ()
    if over.result is RoundResult.OPEN:
        over = change(over, result=RoundResult.ABANDONED, closed_at=event.now)
    return (Archive(round=over),)


def _recorded(state: FleetState, phase: Phase, event: Answered) -> FleetState:
    """Write the outcomes down; who could not be reached at all is lost until probing sees it."""
    gone = {r: o for r, o in event.outcomes.items() if o.outcome is Result.UNREACHABLE}
    for replica, outcome in gone.items():
        state = _changed(state, [replica], lost=outcome.detail or "unreachable")
    records = record_outcomes(
        _round(state).records, phase, event.outcomes, now=event.now, elapsed_s=event.elapsed_s
    )
    return change(state, round=change(_round(state), records=records))


def _changed(state: FleetState, ids: Iterable[str], **changes: Any) -> FleetState:
    known = [state.replicas[replica] for replica in ids if replica in state.replicas]
    return state.with_replicas(change(replica, **changes) for replica in known)


def _to_pause(state: FleetState) -> tuple[str, ...]:
    """Return whom the round must pause: all but sleepers, unless the trainer's own pause holds.

    Who is still paused from an earlier round is paused again, since this pause clears the caches.
    """
    awake = (r for r in state.members() if not r.sleep)
    return _ids(r for r in awake if not r.paused or state.pause is None)


def _to_resume(state: FleetState) -> tuple[str, ...]:
    """Return whom the round may resume: not over the trainer's pause, never mixed or asleep ones.

    A sleeping server's scheduler is resumed by its own wake-up (vllm/v1/engine/core.py, 0.32).
    """
    if state.pause is not None:
        return ()
    return _ids(r for r in state.members() if r.paused and not r.fence and not r.sleep)


def _ids(replicas: Iterable[Replica]) -> tuple[str, ...]:
    return tuple(replica.id for replica in replicas)


def _member_ids(state: FleetState) -> tuple[str, ...]:
    return _group(state).members


def _group(state: FleetState) -> Group:
    return cast("Group", state.group)


def _round(state: FleetState) -> Round:
    return cast("Round", state.round)


def _name(state: FleetState) -> str:
    return f"round {state.round.id}" if state.round else "the round"
