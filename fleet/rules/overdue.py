"""What has lasted too long, and what the operator has asked to be done about it then. Pure.

Nothing here happens unless a limit is set: by default a forgotten pause, an abandoned round and a
wedged replica are shown and alarmed (metrics), and wait for somebody.
"""

from __future__ import annotations

import msgspec

from fleet.facts.state import FleetState, Phase


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long each may last, in seconds; None: for ever."""

    pause_s: float | None = None
    round_s: float | None = None
    wedged_s: float | None = None


class Overdue(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be ended now: the trainer's pause, the open round, and these wedged replicas."""

    pause: bool = False
    round: int | None = None
    wedged: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.pause or self.round is not None or bool(self.wedged)


def overdue(state: FleetState, limits: Limits, now: float) -> Overdue:
    """Return what has lasted longer than its limit.

    A pause counts from the last call that asked for it. A round counts from the end of its last
    call, and only between calls: a call on its way has a deadline of its own. A replica that was
    asked to restart gets the whole time again.
    """
    return Overdue(
        pause=_pause_is_over(state, limits, now),
        round=_abandoned(state, limits, now),
        wedged=_to_restart(state, limits, now),
    )


def _pause_is_over(state: FleetState, limits: Limits, now: float) -> bool:
    between_rounds = state.phase in (Phase.IDLE, Phase.INITIALIZED)
    if state.pause is None or limits.pause_s is None or not between_rounds:
        return False
    return now - max(state.pause.since, state.pause.renewed) > limits.pause_s


def _abandoned(state: FleetState, limits: Limits, now: float) -> int | None:
    if limits.round_s is None or state.phase is not Phase.STARTED or state.round is None:
        return None
    last = state.ended.at if state.ended else state.round.opened_at
    return state.round.id if now - last > limits.round_s else None


def _to_restart(state: FleetState, limits: Limits, now: float) -> tuple[str, ...]:
    if limits.wedged_s is None:
        return ()
    return tuple(
        r.id
        for r in state.replicas.values()
        if r.wedged and r.lost is None and now - max(r.since, r.restarted_at) > limits.wedged_s
    )
