"""Parts that the rules of a weight update share (rounds.py): facts in, changed state out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from fleet.facts.outcome import Result, describe_failures
from fleet.facts.replica import Replica
from fleet.facts.state import FleetState, Group, Phase, Round, RoundResult, record_outcomes
from fleet.rules.events import Action, Answered, Archive, Event, SendResume

change = msgspec.structs.replace


def resume_action(state: FleetState) -> SendResume:
    """Return how the round's own pause is lifted; caches are reset if somebody ran on."""
    ran_on = not all(r.paused or r.sleep for r in state.members())
    return SendResume(targets=to_resume(state), reset_caches=ran_on)


def committed(state: FleetState, done: Round) -> FleetState:
    """Move the version and say who holds it: everyone after a full round, else the current ones."""
    version = done.version if done.version is not None else state.weight_version
    before = state.commit_index
    holders = [r for r in state.members() if done.full or (r.holds == before and not r.fence)]
    state = state.with_commit(version)
    return changed(state, ids_of(holders), holds=state.commit_index, fence=None, version=version)


def fenced_members(state: FleetState, event: Answered, phase: str) -> FleetState:
    """Bar every member from rollouts: nobody knows who holds what."""
    why = f"{name_of(state)} failed in {phase}: {describe_failures(event.outcomes)}"
    return changed(state, member_ids(state), fence=why)


def wedged(state: FleetState, event: Answered, phase: str) -> FleetState:
    """Mark the members that are silent inside a collective until they answer again."""
    silent = [r for r, o in event.outcomes.items() if o.outcome is Result.WEDGED]
    return changed(state, silent, wedged=f"silent inside {phase} of {name_of(state)}")


def failed(state: FleetState, event: Answered, phase: str) -> FleetState:
    """Close the round as failed, with who did not do what it was asked."""
    reason = f"{phase}: {describe_failures(event.outcomes)}"
    done = change(round_of(state), result=RoundResult.FAILED, reason=reason, closed_at=event.now)
    return change(state, round=done)


def archived(over: Round | None, event: Event) -> tuple[Action, ...]:
    """Return the action that keeps a round which this event ends, if there is one."""
    if over is None:
        return ()
    if over.result is RoundResult.OPEN:
        over = change(over, result=RoundResult.ABANDONED, closed_at=event.now)
    return (Archive(round=over),)


def recorded(state: FleetState, phase: Phase, event: Answered) -> FleetState:
    """Write the outcomes down; who could not be reached at all is lost until probing sees it."""
    gone = {r: o for r, o in event.outcomes.items() if o.outcome is Result.UNREACHABLE}
    for replica, outcome in gone.items():
        state = changed(state, [replica], lost=outcome.detail or "unreachable")
    records = record_outcomes(
        round_of(state).records, phase, event.outcomes, now=event.now, elapsed_s=event.elapsed_s
    )
    return change(state, round=change(round_of(state), records=records))


def changed(state: FleetState, ids: Iterable[str], **changes: Any) -> FleetState:
    """Return the state with these facts about the replicas of these ids that it knows."""
    known = [state.replicas[replica] for replica in ids if replica in state.replicas]
    return state.with_replicas(change(replica, **changes) for replica in known)


def to_pause(state: FleetState) -> tuple[str, ...]:
    """Return whom the round must pause: all but sleepers, unless the trainer's own pause holds.

    Who is still paused from an earlier round is paused again, since this pause clears the caches.
    """
    awake = (r for r in state.members() if not r.sleep)
    return ids_of(r for r in awake if not r.paused or state.pause is None)


def to_resume(state: FleetState, among: Iterable[Replica] | None = None) -> tuple[str, ...]:
    """Return whom the round may resume: not over the trainer's pause, never mixed or asleep ones.

    `among` are its members, unless told otherwise. A sleeping server's scheduler is resumed by its
    own wake-up (vllm/v1/engine/core.py, 0.32).
    """
    if state.pause is not None:
        return ()
    among = state.members() if among is None else among
    return ids_of(r for r in among if r.paused and not r.fence and not r.sleep)


def may_resume(state: FleetState, ids: Iterable[str]) -> tuple[str, ...]:
    """Return whom of these a resume does no harm now.

    An engine that runs in a session dies, and one that sleeps is resumed by its own wake-up.
    """
    known = (state.replicas.get(replica) for replica in ids)
    return ids_of(r for r in known if r is not None and r.barred is None and not r.sleep)


def ids_of(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """Return the replicas' ids."""
    return tuple(replica.id for replica in replicas)


def member_ids(state: FleetState) -> tuple[str, ...]:
    """Return the ids of the group's members, in rank order."""
    return group_of(state).members


def group_of(state: FleetState) -> Group:
    """Return the group of a phase that has one."""
    return cast("Group", state.group)


def round_of(state: FleetState) -> Round:
    """Return the round of a phase that has one."""
    return cast("Round", state.round)


def name_of(state: FleetState) -> str:
    """Return what messages call the current round."""
    return f"round {state.round.id}" if state.round else "the round"


def completed(state: FleetState) -> list[Replica]:
    """Return the members that finished the current round, and are still as they were then."""
    records = round_of(state).records
    finishing = next((record for record in records if record.phase == Phase.FINISHING), None)
    arrived = finishing.replicas if finishing else {}
    return [
        r
        for r in state.members()
        if r.reachable
        and r.id in arrived
        and arrived[r.id].outcome is Result.OK
        and r.version == round_of(state).version
    ]
