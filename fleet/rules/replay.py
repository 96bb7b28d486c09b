"""The real result of a control call that is over, told again to a retry of it. Pure.

Rebuilt from the story that the fleet's state keeps of the last call (calls.py), so any gateway can
tell it, also one that never saw the call.
"""

from __future__ import annotations

from fleet.errors import DeadlinePassed, FleetError, Refused
from fleet.facts.calls import Ended, Past
from fleet.facts.outcome import Outcome, Result
from fleet.facts.state import FleetState
from fleet.rules.events import Answered, FinishArrived, InitArrived, StartArrived, UpdateArrived
from fleet.rules.explain import after_failure, count_states, error_of

_MAIN: dict[str, type[Answered]] = {
    "init": InitArrived,
    "start": StartArrived,
    "update": UpdateArrived,
    "finish": FinishArrived,
}
"""The event that makes each call a success."""


def answer_again(ended: Ended, state: FleetState) -> dict[str, Outcome]:
    """Return every replica's outcome of the call, or raise the error that it ended with."""
    main = _MAIN.get(ended.holder.what)
    for past in ended.holder.story:
        error = error_of(_event(past, ended.at), state) if past.why is None else None
        if error is not None:
            raise error
    done = next((p for p in ended.holder.story if main and p.event == main.__name__), None)
    if done is None and ended.was_lost:
        raise _lost(ended, state)
    return _outcomes(done) if done is not None else {}


def in_doubt(ended: Ended) -> FleetError:
    """Return what to say to a call of which nobody knows whether it is a retry or a new one."""
    what = ended.holder.what
    return Refused(
        f"an equal {what} was carried out by gateway {ended.holder.gateway}, which has died since, "
        "so nobody knows whether its answer was delivered: this may be a retry of it or a new one",
        hint="if it was a retry, go on with the next call; if it is a new one, send it with an "
        "Idempotency-Key header of its own, or re-init",
    )


def _lost(ended: Ended, state: FleetState) -> FleetError:
    why = next(past.why for past in ended.holder.story if past.why is not None)
    return DeadlinePassed(
        f"outcome unknown: {why}. Fleet now: {count_states(state)}; weight_version "
        f"{state.weight_version or 'default'}.",
        hint=after_failure(state, ended.holder.what),
    )


def _event(past: Past, now: float) -> Answered:
    kind = _KINDS[past.event]
    return kind(now=now, outcomes=_outcomes(past), elapsed_s=past.elapsed_s)


def _outcomes(past: Past) -> dict[str, Outcome]:
    fine = Outcome(outcome=Result.OK)
    return {replica: past.bad.get(replica, fine) for replica in past.asked}


_KINDS: dict[str, type[Answered]] = {kind.__name__: kind for kind in Answered.__subclasses__()}
