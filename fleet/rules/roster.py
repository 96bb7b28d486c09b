"""What the lists of a discovery source mean for the fleet: who joins, who leaves, and when. Pure.

Several gateways on one store watch the same pods, each as far as its own connection got, and the
one whose watch is broken must not undo what the others see. So nobody compares the fleet with an
old list. What is taken over is

- who *arrived*: listed for the first time in this gateway's eyes, or by a whole new list;
- who is *gone*: seen by this gateway and listed no more. A pod never comes back, only another one
  in its place, so this stays true however late it is acted on;
- what a newer revision says of one that is there: Terminating, not Ready, Ready again.

To leave means: no new rollouts and no place in the next group, at once; what runs may end. It is
a mark (`Replica.leaving`), and lifting it loses nothing. Only a pod that is gone is removed, and a
member of an open round not before the round is over: until then it is marked lost, and the rules
of the round (`rounds.py`, `membership.py`) say what follows. A member that ceases to be Ready in a
round is excused until GRACE_S after that round (not after the next ones), for an engine that is
busy in a collective may answer no readiness probe, and the kubelet tells it late and takes it back
late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fleet.facts.address import replica_id
from fleet.facts.endpoint import Endpoint, Snapshot
from fleet.facts.replica import POD, Replica
from fleet.facts.state import FleetState, Phase
from fleet.rules.membership import add_replica, in_open_round, remove_replica

change = msgspec.structs.replace

GRACE_S = 30.0
"""How long after a round a pod may be not Ready because of it: a few periods of its probe."""
FORGET_S = 600.0
"""How long one that no list has may be unreachable before it is forgotten."""

GONE = "its pod is gone"


class Excuse(msgspec.Struct, frozen=True):
    """The round to which not being Ready is put down, and until when (seconds since the epoch)."""

    round: int
    until: float


NONE = Excuse(-1, 0.0)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway has seen of its source, and what of it has not been acted on yet.

    Keys are uids. `busy` has the open round in which each one was seen last time; `seats` the last
    round of each, as an excuse for who ceases to be Ready now; `outages` those who have ceased.
    """

    present: dict[str, Endpoint] = {}
    arrived: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    busy: dict[str, int] = {}
    seats: dict[str, Excuse] = {}
    outages: dict[str, Excuse] = {}
    has_looked: bool = False


def see(view: View, snapshot: Snapshot, known_before: Iterable[str] = ()) -> View:
    """Return the view after one more snapshot.

    `known_before` are the uids that the fleet had from this source when the question was asked,
    whichever gateway found them; those that a whole list lacks are gone.
    """
    now = snapshot.endpoints
    is_list = snapshot.asked_at is not None
    new = now.keys() if is_list else now.keys() - view.present.keys()
    missing = view.present.keys() | (set(known_before) if is_list else set[str]())
    return change(
        view,
        present=now,
        arrived=(view.arrived | new) & now.keys(),
        gone=(view.gone | missing) - now.keys(),
        has_looked=True,
    )


def excuse(view: View, state: FleetState, now: float) -> View:
    """Return the view in which it is known who may be not Ready because of a round."""
    names = {uid: replica_id(endpoint.url) for uid, endpoint in view.present.items()}
    number = state.round.id if state.round else 0
    busy = {uid: number for uid, name in names.items() if is_busy(state, name)}
    before = {uid: number for uid, number in view.busy.items() if uid in names}
    valid = {u: seat for u, seat in view.seats.items() if u in names and seat.until > now}
    fresh = {u: Excuse(number, now + GRACE_S) for u, number in (before | busy).items()}
    seats = valid | fresh
    outages: dict[str, Excuse] = {}
    for uid, endpoint in view.present.items():
        if endpoint.unready:
            outage = view.outages.get(uid) or seats.get(uid, NONE)
            goes_on = outage.round in (busy.get(uid), before.get(uid))
            outages[uid] = Excuse(outage.round, now + GRACE_S) if goes_on else outage
    return change(view, busy=busy, seats=seats, outages=outages)


def settle(state: FleetState, view: View, now: float) -> FleetState:
    """Return the state after acting on the view; the same object if there is nothing to do."""
    before = state
    for uid, endpoint in view.present.items():
        state = _attend(state, view, uid, endpoint, now)
    for replica in before.replicas.values():
        origin = replica.origin
        if origin is None or origin.uid in view.present:
            continue
        if origin.uid in view.gone or (view.has_looked and _is_forgotten(replica, now)):
            state = _take_away(state, replica.id, origin.uid)
    return state


def acted_on(view: View, state: FleetState) -> View:
    """Return what is left to do after `state` has been saved."""
    there = {r.origin.uid for r in state.replicas.values() if r.origin is not None}
    waiting = frozenset(uid for uid in view.arrived if _why_not(view.present[uid]))
    return change(view, arrived=waiting - there, gone=view.gone & there)


def next_due(view: View, now: float) -> float | None:
    """Return in how many seconds an excuse ends; None if nobody has one."""
    ends = [outage.until - now for outage in view.outages.values() if outage.until > now]
    return min(ends, default=None)


def is_busy(state: FleetState, replica: str) -> bool:
    """Whether a replica is a member of an open round, or of a group that is being formed."""
    is_formed = state.phase is Phase.INITIALIZING and replica in state.member_ids
    return is_formed or in_open_round(state, replica)


def uids_from(source: str, replicas: Mapping[str, Replica]) -> set[str]:
    """Return the uids of the replicas that this very question has found."""
    origins = (replica.origin for replica in replicas.values())
    return {origin.uid for origin in origins if origin and origin.source == source}


def _attend(state: FleetState, view: View, uid: str, endpoint: Endpoint, now: float) -> FleetState:
    """Act on one endpoint that is listed."""
    name = replica_id(endpoint.url)
    replica = state.replicas.get(name)
    may_join = uid in view.arrived and _why_not(endpoint) is None
    if replica is None:
        return _join(state, endpoint, name, now) if may_join else state
    origin = replica.origin
    if origin is not None and origin.uid == uid:
        return _mark(state, replica, endpoint, is_excused=view.outages.get(uid, NONE).until > now)
    if origin is not None and origin.created and endpoint.origin.created:
        is_newer = (endpoint.origin.created, uid) > (origin.created, origin.uid)
        return _take_over(state, replica, endpoint, now) if is_newer else state
    if may_join:  # known by its address alone so far
        return state.with_replicas([change(replica, origin=endpoint.origin, leaving=None)])
    return state


def _why_not(endpoint: Endpoint) -> str | None:
    return endpoint.leaving or endpoint.unready


def _join(state: FleetState, endpoint: Endpoint, name: str, now: float) -> FleetState:
    state = add_replica(state, endpoint.url, name, now)
    return state.with_replicas([change(state.replicas[name], origin=endpoint.origin)])


def _mark(
    state: FleetState, replica: Replica, endpoint: Endpoint, *, is_excused: bool
) -> FleetState:
    """Write down whether a replica leaves or is back, unless somebody has seen newer."""
    origin, news = replica.origin, endpoint.origin
    why = endpoint.leaving or (replica.leaving if is_excused else endpoint.unready)
    if origin is None or why == replica.leaving or news.revision < origin.revision:
        return state
    seen = change(origin, revision=news.revision)
    return state.with_replicas([change(replica, leaving=why, origin=seen)])


def _take_over(state: FleetState, replica: Replica, endpoint: Endpoint, now: float) -> FleetState:
    """Put a new pod in the place of an older one that had its address.

    In an open round it counts as the same member restarted: a call of the round may have reached
    it, so what the round did to the old one is taken to be true of it, until the round undoes it.
    """
    fresh = Replica(
        id=replica.id,
        url=endpoint.url,
        joined_at=now,
        since=now,
        origin=endpoint.origin,
        leaving=_why_not(endpoint),
    )
    if is_busy(state, replica.id):
        fresh = change(
            fresh,
            instance=f"{POD}{endpoint.origin.uid}",
            holds=0 if state.commit_index == 0 else None,
            paused=replica.paused,
            session_open=replica.session_open,
        )
    return state.with_replicas([fresh])


def _take_away(state: FleetState, name: str, uid: str) -> FleetState:
    """Remove one that is gone; a member of an open round is marked lost until that is over."""
    replica = state.replicas.get(name)
    if replica is None or replica.origin is None or replica.origin.uid != uid:
        return state
    if not is_busy(state, name):
        return remove_replica(state, name)
    if replica.leaving == GONE:
        return state
    return state.with_replicas([change(replica, lost=replica.lost or GONE, leaving=GONE)])


def _is_forgotten(replica: Replica, now: float) -> bool:
    return replica.lost is not None and now - replica.since > FORGET_S
