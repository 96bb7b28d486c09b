"""What a trainer or an operator should do next, as it follows from the fleet's state alone. Pure.

The one wording of it: errors, GET /fleet, the command line and the dashboard all say this. Nobody
is told a number with which an init would be refused, nor to wait for what may not come by itself.
"""

from __future__ import annotations

import msgspec

from fleet.facts.outcome import Result
from fleet.facts.replica import Replica, why_left_out
from fleet.facts.state import ON_THE_WAY, ROUND_OPEN, FleetState, Phase
from fleet.rules.membership import (
    Membership,
    candidates_for,
    common_backend,
    marked,
    may_run,
    membership,
)
from fleet.rules.parts import completed, ids_of

change = msgspec.structs.replace

WAIT_LIMIT = "each for at most FLEET_GATE__TIMEOUT_S"


def next_step(state: FleetState) -> str | None:
    """Return what brings the fleet, or all of it, back to serving; None if nothing is wrong."""
    parts = [part for part in (_step(state), _waits(state)) if part]
    return "; ".join(parts) or None


def next_init(state: FleetState) -> str:
    """Return which init comes next and how to bring it about, with and without the silent ones."""
    verb = "re-init" if state.group else "init"
    waiting, away = _silent(state)
    whole = marked(state, waiting, wedged=None)
    then = _counted(whole)
    if not then.workers and then.obstacle is None:
        return f"{_repair(whole)}, then {verb}"
    full = " and send a full update" if _needs_full(whole) else ""
    told = f"{verb} with {then.next_world}{full}"
    if waiting:
        now = _counted(state)
        other = f", or {verb} with {now.next_world}" if now.workers else ": no group can be formed"
        other += " without it" if len(waiting) == 1 else " without them"
        told = f"{_free(state, waiting)}; then {told}; restart who stays silent{other}"
    return told + _left_out(state, away)


def find_more(state: FleetState) -> str:
    """Return how an init finds the replicas that it lacks; who is left out is told beside it."""
    waiting = [r.id for r in state.replicas.values() if r.wedged and not r.lost]
    if waiting:
        return f"{_free(state, waiting)}, and restart who stays silent; then re-init"
    return "start or repair replicas, then re-init"


def _free(state: FleetState, ids: list[str]) -> str:
    """Return how those who are silent inside a collective get out of it.

    A peer that answers keeps the group open as well as the trainer does (gloo then fails only at
    its own timeout), and leaves it when it is asked to, or by joining another.
    """
    answer = "answers" if len(ids) == 1 else "answer"
    peers = any(r.reachable for r in state.members())
    dissolve = " and POST /shutdown_weight_transfer_engine" if peers else ""
    leave = f"let the trainer leave its group (or stop it){dissolve}"
    return f"{leave}, so that {', '.join(ids)} {answer} again"


# -- pieces ----------------------------------------------------------------------------------------


def _step(state: FleetState) -> str | None:
    if state.phase is Phase.FAILED:
        return next_init(state) + _blamed(state) + _commit(state)
    if state.phase in ROUND_OPEN | ON_THE_WAY:
        changed = membership(state).changed
        return f"membership changed: after this round, {next_init(state)}" if changed else None
    if membership(state).changed:
        return f"membership changed: {next_init(state)}"
    if not any(_needs_trainer(r, state) for r in state.replicas.values()):
        return None
    return "send a full update" if state.group else next_init(state)


def _waits(state: FleetState) -> str | None:
    """Say that nobody serves, where a pause or an open round does not say so already."""
    if state.ready():
        return None
    if not state.fleet_paused:
        return f"no replica is ready, so rollouts wait although the gate is open, {WAIT_LIMIT}"
    return f"rollouts wait meanwhile, {WAIT_LIMIT}" if state.phase is Phase.FAILED else None


def _needs_trainer(replica: Replica, state: FleetState) -> bool:
    """Whether only an init or a full update brings this replica to serve again."""
    return replica.wedged is not None or (replica.may_join_group() and not may_run(state, replica))


def _silent(state: FleetState) -> tuple[list[str], list[str]]:
    """Return whom the next init waits for, and who is left out until he is back.

    Who sat in a collective that somebody else failed is no fault of its own, and is worth waiting
    for; so is everyone, if nobody could join otherwise.
    """
    wanted = [r for r in state.replicas.values() if not r.draining and not r.leaving]
    away = ids_of(r for r in wanted if not r.reachable and r.refusal is None)
    wedged = [r for r in away if state.replicas[r].lost is None]
    if _counted(state).workers:
        innocent = _waited_for_others(state)
        wedged = [r for r in wedged if r in innocent]
    return wedged, [r for r in away if r not in wedged]


def _waited_for_others(state: FleetState) -> set[str]:
    records = state.round.records if state.round else ()
    collectives = [r for r in records if r.phase in (Phase.INITIALIZING, Phase.UPDATING)]
    if not collectives:
        return set()
    found = {r: arrival.outcome for r, arrival in collectives[-1].replicas.items()}
    if not {Result.FAILED, Result.UNREACHABLE} & set(found.values()):
        return set()
    return {r for r, outcome in found.items() if outcome is Result.WEDGED}


def _joinable(state: FleetState) -> tuple[list[Replica], dict[str, str]]:
    """Return who joins the next group, and who does not and why: as an init would find it."""
    everyone, _ = candidates_for(state, None)
    backend = state.group.backend if state.group else common_backend(everyone)
    return candidates_for(state, backend)


def _counted(state: FleetState) -> Membership:
    taken, _ = _joinable(state)
    return membership(change(state, replicas={r.id: r for r in taken}))


def _needs_full(state: FleetState) -> bool:
    taken, _ = _joinable(state)
    return any(not may_run(state, r) for r in taken)


def _left_out(state: FleetState, away: list[str]) -> str:
    """Name who is left out: silent or gone, or not fit for a patch."""
    told = ""
    if away:
        wedged = any(state.replicas[r].wedged for r in away)
        first = "let the trainer leave its group, then " if wedged else ""
        told = (
            f" (left out until they answer again: {', '.join(away)}; {first}restart who does not)"
        )
    unfit = _unfit(state)
    return f"{told} ({_from_checkpoint(unfit)})" if unfit else told


def _repair(state: FleetState) -> str:
    """Say what to do where nobody at all could join."""
    unfit = _unfit(state)
    if unfit:
        return _from_checkpoint(unfit)
    told = "; ".join(f"{r}: {why}" for r, why in _joinable(state)[1].items())
    return f"start or repair replicas ({told or 'there are none'})"


def _unfit(state: FleetState) -> list[str]:
    """Return whom a sparse backend leaves out although it could join."""
    _, left_out = _joinable(state)
    return [r for r in left_out if why_left_out(state.replicas[r]) is None]


def _from_checkpoint(unfit: list[str]) -> str:
    return (
        f"restart {', '.join(unfit)} from a checkpoint of the committed weights, which patches need"
    )


def _blamed(state: FleetState) -> str:
    """Name who refused to join: whoever does so again must be restarted."""
    records = {r.phase: r for r in state.round.records} if state.round else {}
    if Phase.INITIALIZING not in records or state.session_was_open:
        return ""
    joined = records[Phase.INITIALIZING].replicas
    refused = [r for r, arrival in joined.items() if arrival.outcome is Result.FAILED]
    return f"; restart {', '.join(refused)} if the init fails there again" if refused else ""


def _commit(state: FleetState) -> str:
    """Name the other way out of a finish that only some completed."""
    if state.round is None or not state.round.full or not (done := completed(state)):
        return ""
    holders, route = ", ".join(ids_of(done)), f"POST /fleet/rounds/{state.round.id}/commit"
    return f"; or commit it for those that finished it ({holders}): {route}"
