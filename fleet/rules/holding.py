"""Which call holds the fleet: who may report, and what is written down when an event counts. Pure.

`rounds.py` asks before a rule is applied and writes after it; `calls.py` has the values.
"""

from __future__ import annotations

import msgspec

from fleet.facts.calls import Ended, Past, is_overtaken
from fleet.facts.moments import ago
from fleet.facts.state import IN_SESSION, ON_THE_WAY, FleetState
from fleet.rules.events import (
    Answered,
    Event,
    FinishRequested,
    HolderLost,
    Requested,
    ResetRequested,
)

change = msgspec.structs.replace


def may_report(state: FleetState, event: Event) -> bool:
    """Whether the event belongs to the call that holds the fleet, if it belongs to one at all.

    A gateway that was silent for so long that another one took over reports into the void.
    """
    holds = state.holder.token if state.holder else None
    if isinstance(event, Answered):
        return event.token == holds
    return event.lost == holds if isinstance(event, HolderLost) else True


def is_timely(state: FleetState, event: Event) -> bool:
    """Whether the fleet stands as it did when the call was planned, wherever others brought it."""
    if not isinstance(event, Requested) or isinstance(event, HolderLost):
        return True
    if event.planned_on not in (None, state.generation):
        return False
    current = state.round.id if state.round else None
    if isinstance(event, FinishRequested) and event.round not in (None, current):
        return False
    return event.holder is None or not is_overtaken(event.holder, state.ended)


def held(state: FleetState, event: Event) -> FleetState:
    """Write down whose call is on its way and what happened to it; over, it becomes the last."""
    if isinstance(event, ResetRequested):
        return change(state, holder=None, ended=None, resets=state.resets + 1)
    holder = event.holder if isinstance(event, Requested) else state.holder
    past = _past(event)
    if holder is not None and past is not None:
        holder = change(holder, story=(*holder.story, past))
    if state.phase in ON_THE_WAY:
        return change(state, holder=holder)
    ended = Ended(holder=holder, at=event.now) if holder is not None else state.ended
    return change(state, holder=None, ended=ended)


def is_told(state: FleetState, token: str | None, events: int) -> bool:
    """Whether the story of the call with this token already has so many events."""
    ended = state.ended.holder if state.ended else None
    stories = [h.story for h in (state.holder, ended) if h is not None and h.token == token]
    return bool(events) and any(len(story) >= events for story in stories)


def story(state: FleetState, asked: str, now: float) -> str:
    """Say what was asked, what the fleet is doing instead, who asked for that and how long ago."""
    told = f"{asked} does not follow in phase {state.phase}"
    if state.round is None:
        return told
    current = state.round
    told += (
        f"; round {current.id} (generation {current.generation}) was opened by "
        f"{current.opened_by} {ago(current.opened_at, now)}"
    )
    if current.reason:
        return f"{told} and ended: {current.reason}"
    if state.phase in IN_SESSION:
        told += " and is still open"
    if state.holder is not None:
        at = state.holder
        told += f"; its {at.what} is on its way at gateway {at.gateway}, begun {ago(at.since, now)}"
    return told


def _past(event: Event) -> Past | None:
    name = type(event).__name__
    if isinstance(event, HolderLost):
        return Past(event=name, why=event.why)
    if not isinstance(event, Answered):
        return None
    bad = {r: change(o, answer=None) for r, o in event.outcomes.items() if not o.ok}
    return Past(event=name, asked=tuple(event.outcomes), bad=bad, elapsed_s=event.elapsed_s)
