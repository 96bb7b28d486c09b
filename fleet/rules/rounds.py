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
    an operator failed -> committed      (for those that finished, if others did not)
    a gateway   that dies on the way counts as a no; what it had committed is only resumed

The version moves in one place, `_finish_arrived`, and only when every member has arrived. A
failed update never resumes by itself: it is the phase `failed`, and the way out is a new init.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fleet.errors import WrongPhase
from fleet.facts.state import (
    FleetState,
    Phase,
    Round,
    RoundResult,
)
from fleet.rules.barrier import arrivals
from fleet.rules.events import (
    Action,
    Archive,
    CloseSessions,
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
    SendFinish,
    SendInit,
    SendPause,
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
from fleet.rules.holding import held, is_timely, may_report, story
from fleet.rules.parts import (
    archived,
    changed,
    committed,
    completed,
    failed,
    fenced_members,
    group_of,
    ids_of,
    member_ids,
    name_of,
    recorded,
    resume_action,
    round_of,
    to_pause,
    to_resume,
    wedged,
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
        CommitRequested: Phase.COMMITTED,
        ShutdownRequested: Phase.IDLE,
        ResetRequested: Phase.IDLE,
    },
}


class IllegalTransition(WrongPhase):
    """The event has no row in TRANSITIONS for this phase; the state is unchanged."""


def advance(state: FleetState, event: Event) -> Step:
    """Return the state after `event`, and what must be done about it.

    Raises IllegalTransition, which tells what the fleet is doing and how long already, if the event
    may not follow in this phase, or belongs to a call that does not hold the fleet any more.
    """
    phase = TRANSITIONS[state.phase].get(type(event))
    if phase is None:
        raise IllegalTransition(
            story(state, type(event).__name__.removesuffix("Requested").lower(), event.now)
        )
    if not may_report(state, event):
        raise IllegalTransition(f"{name_of(state)} is not held by this call any more")
    if not is_timely(state, event):
        raise IllegalTransition(
            "another call has changed what this one was made for; look at GET /fleet first"
        )
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
    left_open = ids_of(r for r in state.members() if r.session_open)
    actions = (CloseSessions(targets=left_open, wait=True), SendInit(targets=group.members))
    return state, (*archived(before.round, event), *actions)


def _init_arrived(state: FleetState, event: InitArrived) -> Step:
    return recorded(state, Phase.INITIALIZING, event), ()


def _init_failed(state: FleetState, event: InitFailed) -> Step:
    state = recorded(state, Phase.INITIALIZING, event)
    return wedged(failed(state, event, "init"), event, "init"), ()


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
    running = to_pause(state) if event.auto_pause else ()
    left_open = ids_of(r for r in members if r.session_open)
    state = changed(state, running, paused=True)  # from now on, for whoever must undo it
    return state, (CloseSessions(targets=left_open, wait=True), SendPause(targets=running))


def _pause_arrived(state: FleetState, event: PauseArrived) -> Step:
    state = recorded(state, Phase.PAUSING, event)
    state = changed(state, event.outcomes, paused=True)
    members = member_ids(state)
    state = changed(state, members, session_open=True)
    return state, (SendStart(targets=members, draft=round_of(state).draft),)


def _pause_failed(state: FleetState, event: PauseFailed) -> Step:
    """Take the pause back everywhere: who failed may have paused all the same."""
    state = recorded(state, Phase.PAUSING, event)
    asked = tuple(r for r in to_resume(state) if r in event.outcomes)
    return state, (SendUndo(resume=asked),)


def _start_arrived(state: FleetState, event: StartArrived) -> Step:
    """A member that was seen to restart just before its start has a session all the same."""
    state = changed(state, event.outcomes, session_open=True)
    return recorded(state, Phase.STARTING, event), ()


def _start_failed(state: FleetState, event: StartFailed) -> Step:
    """Close the sessions everywhere: who failed may have one, on some of its workers at least."""
    state = recorded(state, Phase.STARTING, event)
    return state, (SendUndo(targets=tuple(event.outcomes), resume=to_resume(state)),)


def _undone(state: FleetState, event: Undone) -> Step:
    """Return to `initialized`; a member that could not be put back stays paused, or is fenced."""
    session_was_open = state.session_was_open
    state = recorded(state, Phase.UNDOING, event)
    done = change(
        round_of(state),
        result=RoundResult.UNDONE,
        reason=f"{round_of(state).reason or 'a member refused'}; what had been done was taken back",
        closed_at=event.now,
    )
    ok = {r for r, o in event.outcomes.items() if o.ok}
    stuck = [r for r, o in event.outcomes.items() if not o.ok]
    state = changed(state, ok.intersection(to_resume(state)), paused=False)
    state = changed(state, event.closed, session_open=False)
    if session_was_open:
        state = changed(state, stuck, fence=f"{name_of(state)}: its start could not be undone")
    return change(state, round=None), (Archive(round=done),)


def _update_requested(state: FleetState, event: UpdateRequested) -> Step:
    group = group_of(state)
    if event.announces:
        state = change(state, group=change(group, announced_in=round_of(state).id))
    state = change(state, round=change(round_of(state), touched=True))
    return state, (SendUpdate(targets=group.members),)


def _update_arrived(state: FleetState, event: UpdateArrived) -> Step:
    state = recorded(state, Phase.UPDATING, event)
    done = change(round_of(state), updates=round_of(state).updates + 1)
    return change(state, round=done), ()


def _update_failed(state: FleetState, event: UpdateFailed) -> Step:
    state = recorded(state, Phase.UPDATING, event)
    state = fenced_members(state, event, "update")
    state = failed(wedged(state, event, "update"), event, "update")
    answered = ids_of(r for r in state.members() if r.reachable and r.session_open)
    return state, (CloseSessions(targets=answered, wait=False),)


def _finish_requested(state: FleetState, event: FinishRequested) -> Step:
    open_round = round_of(state)
    version = event.version
    if version is None and event.auto_version and not open_round.draft:
        version = str(state.counter + 1)
    full = event.full and not open_round.draft
    named = change(open_round, version=version, full=full, names_key=event.names_key, touched=True)
    state = change(state, round=named)
    return state, (SendFinish(targets=member_ids(state), version=version),)


def _finish_arrived(state: FleetState, event: FinishArrived) -> Step:
    """Commit: the only rule that moves the version, in the same write that leaves `finishing`."""
    if not arrivals(member_ids(state), event.outcomes).complete:
        raise IllegalTransition(f"{name_of(state)}: not every member has arrived")
    state = recorded(state, Phase.FINISHING, event)
    state = changed(state, event.outcomes, session_open=False)
    open_round = round_of(state)
    if not open_round.draft:
        state = committed(state, open_round)
        state = change(state, fullest=open_round.names_key or state.fullest)
    done = change(round_of(state), result=RoundResult.COMMITTED, closed_at=event.now)
    state = change(state, round=done)
    return state, (resume_action(state),)


def _finish_failed(state: FleetState, event: FinishFailed) -> Step:
    state = recorded(state, Phase.FINISHING, event)
    completed = [r for r, o in event.outcomes.items() if o.ok]
    state = fenced_members(state, event, "finish")
    state = changed(state, completed, session_open=False, version=round_of(state).version)
    state = failed(wedged(state, event, "finish"), event, "finish")
    left_open = ids_of(r for r in state.members() if r.reachable and r.session_open)
    return state, (CloseSessions(targets=left_open, wait=False),)


def _commit_requested(state: FleetState, event: CommitRequested) -> Step:
    """Commit a failed finish for those that completed it; the others stay fenced."""
    done, holders = round_of(state), completed(state)
    if done.id != event.round or not holders or not done.full:
        raise IllegalTransition(
            f"round {event.round} cannot be committed: only the current round can, if it was a "
            f"full update and a member has finished it (it is {done.id}, "
            f"{'full' if done.full else 'not full'}, finished by "
            f"{', '.join(ids_of(holders)) or 'none'})",
            hint="GET /fleet/rounds says what became of each round, GET /fleet what to do next",
        )
    told = f"{done.reason}; committed by {event.by} for {', '.join(ids_of(holders))}"
    state = state.with_commit(done.version if done.version is not None else state.weight_version)
    state = changed(state, ids_of(holders), holds=state.commit_index, fence=None)
    done = change(done, result=RoundResult.COMMITTED, reason=told)
    state = change(state, round=done, fullest=done.names_key or state.fullest)
    return state, (resume_action(state),)


def _resumed(state: FleetState, event: Resumed) -> Step:
    """Say what the caches rest on from now on; the round is over."""
    state = recorded(state, Phase.COMMITTED, event)
    ok = [r for r, o in event.outcomes.items() if o.ok]
    state = changed(state, ok, paused=False)
    kept_old_kv = state.pause is not None and not state.pause.clear_cache
    mixed = kept_old_kv or not event.cleared
    kv = state.kv if round_of(state).draft else ("mixed" if mixed else "current")
    done = change(round_of(state), kv=kv)
    return change(state, round=None, kv=kv), (Archive(round=done),)


def _shutdown_requested(state: FleetState, event: ShutdownRequested) -> Step:
    members = ids_of(r for r in state.members() if r.reachable)
    archive = archived(state.round, event)
    return change(state, group=None, round=None), (*archive, SendShutdown(targets=members))


def _reset_requested(state: FleetState, event: ResetRequested) -> Step:
    """Abandon what is open; members that may be mixed are fenced and stay paused.

    Where nothing was sent since everyone has started, nothing is mixed: sessions are closed, and
    whose session is closed is resumed. A later reset tries again with those that were not.
    """
    archive = archived(state.round, event)
    if _may_be_mixed(state):
        in_session = [r.id for r in state.members() if r.session_open]
        state = changed(state, in_session, fence=f"{name_of(state)} was abandoned by {event.by}")
    state = changed(state, event.silent, wedged=f"silent when {name_of(state)} was abandoned")
    known = state.replicas.values()
    to_close = [r for r in known if r.session_open and r.reachable and not r.fence]
    without = [r for r in state.members() if not r.session_open]
    resume = to_resume(state, among=(*without, *to_close))
    fullest = None if event.new_model else state.fullest
    state = change(state, group=None, round=None, fullest=fullest)
    return state, (*archive, Unpause(targets=resume, close=ids_of(to_close)))


def _may_be_mixed(state: FleetState) -> bool:
    """Whether the open round may have changed members, or may do so by what is still on its way."""
    if state.round is None or state.round.result is not RoundResult.OPEN:
        return False
    is_touched = state.round.touched or state.round.updates > 0
    return is_touched or state.holder is not None or not state.session_was_open


def _holder_lost(state: FleetState, event: HolderLost) -> Step:
    """Nobody knows how far the lost gateway came: take back what can be, fence what cannot.

    A committed round is only resumed. What may have been updated in part is never finished by
    guess: its members are fenced, and the trainer's next call is told.
    """
    if state.phase is Phase.COMMITTED:
        return state, (resume_action(state),)
    if state.phase is Phase.UNDOING:
        state = change(state, round=change(round_of(state), reason=event.why))
        left_open = ids_of(r for r in state.members() if r.session_open)
        return state, (SendUndo(targets=left_open, resume=to_resume(state)),)
    done = change(round_of(state), result=RoundResult.FAILED, reason=event.why, closed_at=event.now)
    state = change(state, round=done)
    if not state.session_was_open:
        return state, ()
    state = changed(state, member_ids(state), fence=f"{name_of(state)}: {event.why}")
    left_open = ids_of(r for r in state.members() if r.reachable and r.session_open)
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
    CommitRequested: _commit_requested,
    Resumed: _resumed,
    ShutdownRequested: _shutdown_requested,
    HolderLost: _holder_lost,
    ResetRequested: _reset_requested,
}
