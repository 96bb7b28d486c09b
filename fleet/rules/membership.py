"""Who belongs to the fleet: joining, leaving, what probing saw, and the next group. Pure.

One observation of one replica in, the new state out; who may be in the next group and whether
the current one is still whole follow from the state alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fleet.errors import LayoutUnsupported, MembershipChanged
from fleet.facts.layout import Layout, count_workers
from fleet.facts.moments import utc
from fleet.facts.outcome import Outcome, Result, had_no_session
from fleet.facts.replica import UNKNOWN, Naming, Replica, Sleep, Topology, naming_of, why_left_out
from fleet.facts.state import (
    IN_COLLECTIVE,
    ROUND_OPEN,
    UNSET_VERSION,
    FleetState,
    Group,
    TrainerPause,
)
from fleet.rules.departed import recall, remember
from fleet.rules.doubles import is_doubled, let_in
from fleet.rules.wire import SPARSE_BACKENDS

change = msgspec.structs.replace


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe of one replica saw. None means that the probe did not ask or got no answer.

    `lost` is why the replica could not be reached, `silent` that it can but its engine does not
    answer; `refusal` why it can never be a member as it
    was started (a missing endpoint, say); `unwedged` that a silent one has answered again.
    """

    lost: str | None = None
    silent: str | None = None
    refusal: str | None = None
    topology: Topology | None = None
    backend: str | None = None
    instance: str | None = None
    version: str | None = None
    paused: bool | None = None
    asleep: bool = False
    unwedged: bool = False


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """How the current group compares with the replicas that are there now.

    `lost` are members that are gone, wedged or restarted, with the reason; only they block a
    start. `changed` says that the next init would give another group; `workers` are those the
    next init would find, `world_size` includes the current group's trainer ranks (1 without one).
    `obstacle` is why those that could join cannot be laid out (half a deployment, say); then no
    workers are counted.
    """

    lost: dict[str, str]
    changed: bool
    workers: int
    world_size: int
    obstacle: str | None = None

    @property
    def next_world(self) -> str:
        """What the next init must ask for, in words."""
        if self.obstacle is None:
            return f"world_size={self.world_size}"
        return f"the world_size of a repaired fleet (now {self.obstacle})"


def add_replica(state: FleetState, url: str, replica: str, now: float) -> FleetState:
    """Return the state with one more replica, not probed yet; adding it again changes nothing."""
    if replica in state.replicas:
        return state
    return state.with_replicas([Replica(id=replica, url=url, joined_at=now, since=now)])


def remove_replica(state: FleetState, replica: str) -> FleetState:
    """Return the state without one replica; removing a stranger changes nothing.

    What is true of its boot wherever that is listed, a fence above all, is remembered.
    """
    gone = state.replicas.get(replica)
    if gone is None:
        return state
    left = {r: facts for r, facts in state.replicas.items() if r != replica}
    return let_in(change(remember(state, gone), replicas=left))


def observe(state: FleetState, replica: str, seen: Observation, now: float) -> FleetState:
    """Return the state after one observation of one replica; the same object if nothing changed."""
    before = state.replicas.get(replica)
    if before is None or (before.same_as is not None and seen.silent is not None):
        return state  # a double is silent because its server is busy under the other name
    seen = _in_known_words(before, seen)
    if in_open_round(state, replica):
        # it may have looked just before the round's own pause
        seen = change(seen, paused=None, asleep=False)
    if seen.lost is not None:
        after = change(before, lost=before.lost or seen.lost)
    elif seen.silent is not None:
        after = change(before, lost=None, wedged=before.wedged or seen.silent)
    elif _restarted(before, seen):
        state = _for_its_double(state, before)
        after = _merge(_reborn(before, state), seen)
    elif _is_doubtful(before, seen, state):
        after = _merge(_doubted(before, state, now), seen)
    else:
        after = _merge(change(before, lost=None), seen)
        if not before.known:
            after = _first_seen(after, seen, state)
        elif _contradicts(before, seen, state):
            after = _unless_named_once(before, after)
    if after == before:
        return state
    is_news = change(after, named=before.named) != before
    return state.with_replicas([change(after, since=now) if is_news else after])


def collective_of(state: FleetState) -> object:
    """Return what tells the collective that is on its way from any other, and from none."""
    current = state.round
    where = (current.id, current.updates) if current else None
    return state.generation, state.phase, where


def answered_late(state: FleetState, replica: str, outcome: Outcome) -> FleetState:
    """Return the state after a wedged member's call has ended; a late answer lifts no fence."""
    before = state.replicas.get(replica)
    if before is None:
        return state
    gone = outcome.detail if outcome.outcome is Result.UNREACHABLE else None
    return state.with_replicas([change(before, wedged=None, lost=before.lost or gone)])


def sessions_closed(state: FleetState, outcomes: Mapping[str, Outcome]) -> FleetState:
    """Return the state after bare finishes; who failed otherwise is asked again before an init."""
    closed = [r for r, o in outcomes.items() if o.ok or had_no_session(o)]
    known = [state.replicas[r] for r in closed if r in state.replicas]
    return state.with_replicas(change(r, session_open=False) for r in known)


def marked(state: FleetState, replicas: Iterable[str], **facts: Any) -> FleetState:
    """Return the state with the given facts about these replicas."""
    known = [state.replicas[r] for r in replicas if r in state.replicas]
    return state.with_replicas(change(r, **facts) for r in known)


def relabelled(state: FleetState, replicas: Iterable[str], version: str) -> FleetState:
    """Commit another label for the committed weights, on those of these replicas that hold them.

    One that restarted while its label was on the way, say, does not hold them any more.
    """
    known = (state.replicas[r] for r in replicas if r in state.replicas)
    holders = [r.id for r in known if is_current(state, r)]
    state = change(state.with_commit(version), naming=None)
    return marked(state, holders, holds=state.commit_index, version=version)


def adopt(state: FleetState, now: float) -> FleetState:
    """Learn from the replicas what a store that knows nothing cannot tell: version and pause."""
    return _adopt_pause(_adopt_version(state), now)


def _adopt_pause(state: FleetState, now: float) -> FleetState:
    """A fleet that is paused as a whole was paused by somebody, whose resume must open the gate."""
    known = [r for r in state.replicas.values() if r.known and r.lost is None and not r.sleep]
    if state.pause is not None or not known or not all(r.paused for r in known):
        return state
    found = TrainerPause(mode="keep", clear_cache=False, by="found paused at start", since=now)
    return change(state, pause=found)


def _adopt_version(state: FleetState) -> FleetState:
    """Learn the committed version from the replicas when the store knows none.

    If every replica that answers has the same version, that is the fleet's; if they differ,
    nobody knows who holds what, and all of them are fenced until a full update.
    """
    known = [r for r in state.replicas.values() if r.known and r.lost is None]
    versions = {r.version for r in known}
    if state.commit_index or not known or versions <= {None, UNSET_VERSION}:
        return state
    if len(versions) > 1:
        told = ", ".join(f"{r.id} has {r.version}" for r in known)
        why = f"the replicas disagree on their version and the store knows none: {told}"
        return state.with_replicas(change(r, fence=why, holds=None) for r in known)
    state = state.with_commit(known[0].version)
    return state.with_replicas(change(r, holds=state.commit_index) for r in known)


def membership(state: FleetState) -> Membership:
    """Compare the current group with the replicas that are there now."""
    group = state.group
    backend = group.backend if group else None
    candidates, _ = candidates_for(state, backend)
    lost = _lost_members(state)
    workers, obstacle = _countable(candidates)
    base = group.layout.base if group else 1
    return Membership(
        lost=lost,
        changed=group is not None
        and (bool(lost) or {r.id for r in candidates} != set(group.members)),
        workers=workers,
        world_size=base + workers,
        obstacle=obstacle,
    )


def in_collective(state: FleetState) -> frozenset[str]:
    """Return the members that sit in a collective, whoever carries it, and answer nothing else."""
    return frozenset(state.member_ids if state.phase in IN_COLLECTIVE else ())


def _countable(candidates: list[Replica]) -> tuple[int, str | None]:
    try:
        return count_workers(candidates), None
    except LayoutUnsupported as error:
        return 0, error.message


def check_still_whole(state: FleetState) -> None:
    """Raise MembershipChanged if a member was lost, fenced off by a restart, or wedged."""
    now = membership(state)
    if not now.lost:
        return
    told = "; ".join(f"{replica}: {why}" for replica, why in now.lost.items())
    again = f"re-init with {now.next_world} ({now.workers} workers are there now)"
    if not now.workers and now.obstacle is None:
        again = "nobody could join a group now: start, repair or restart replicas, then re-init"
    raise MembershipChanged(
        f"the group changed since init ({told})", hint=f"{again}, then start again"
    )


def candidates_for(state: FleetState, backend: str | None) -> tuple[list[Replica], dict[str, str]]:
    """Return the replicas of the next group, and who is left out with the reason.

    A full update heals stale and fenced replicas, so they are in, except for a sparse backend:
    a patch fits only the weights it was made for.
    """
    taken: list[Replica] = []
    left_out: dict[str, str] = {}
    for replica in state.replicas.values():
        why = why_left_out(replica)
        if why is None and backend in SPARSE_BACKENDS and not is_current(state, replica):
            why = f"{backend} patches the committed weights, which this replica does not hold"
        if why is None:
            taken.append(replica)
        else:
            left_out[replica.id] = why
    return taken, left_out


def is_current(state: FleetState, replica: Replica) -> bool:
    """Whether a replica is known to hold the committed weights."""
    return replica.holds == state.commit_index and replica.fence is None


def may_run(state: FleetState, replica: Replica) -> bool:
    """Whether nothing but a pause, a sleep or a loss keeps a replica from serving what it holds."""
    return is_current(state, replica) and replica.barred is None


def form_group(
    state: FleetState,
    candidates: list[Replica],
    left_out: dict[str, str],
    layout: Layout,
    by: str,
    now: float,
) -> Group:
    """Freeze the membership of a new generation; the generation grows even over an empty store."""
    return Group(
        generation=max(state.generation + 1, int(now)),
        backend=common_backend(candidates),
        layout=layout,
        instances={r.id: r.instance for r in candidates},
        left_out=left_out,
        opened_by=by,
        opened_at=now,
    )


def common_backend(replicas: Iterable[Replica]) -> str | None:
    """Return the backend all replicas were started with, or None if they do not say or differ."""
    backends = {r.backend for r in replicas}
    return backends.pop() if len(backends) == 1 else None


def _lost_members(state: FleetState) -> dict[str, str]:
    lost: dict[str, str] = {}
    instances = state.group.instances if state.group else {}
    for member, instance in instances.items():
        replica = state.replicas.get(member)
        if replica is None:
            lost[member] = "removed from the fleet"
        elif replica.lost or replica.wedged:
            lost[member] = replica.lost or replica.wedged or ""
        elif instance != replica.instance:
            lost[member] = "restarted since init"
    return lost


def in_open_round(state: FleetState, replica: str) -> bool:
    """Whether a replica is a member of an open round."""
    return state.phase in ROUND_OPEN and replica in state.member_ids


def _for_its_double(state: FleetState, before: Replica) -> FleetState:
    """Remember a boot that another one has followed here, if it may live on under another name."""
    return remember(state, before) if is_doubled(state, before.id) else state


def _in_known_words(before: Replica, seen: Observation) -> Observation:
    """Leave out a start time where an instance was told before: this once the server told none."""
    told, tells = naming_of(before.instance), naming_of(seen.instance)
    tells_less = (told, tells) == (Naming.BY_ITSELF, Naming.BY_START)
    return change(seen, instance=None) if tells_less else seen


def _restarted(before: Replica, seen: Observation) -> bool:
    """Whether a server tells another instance; the first one that a new pod tells is another."""
    told, tells = naming_of(before.instance), naming_of(seen.instance)
    if Naming.NOT in (told, tells):
        return False
    return told is Naming.BY_POD or (told is tells and before.instance != seen.instance)


def _is_doubtful(before: Replica, seen: Observation, state: FleetState) -> bool:
    """Whether a server may be another boot than before, and no instance tells.

    Its label must speak for it then: one that was away must name the committed version, and one
    that has named a version never names none again. The first instance of a server that was known
    by its start time says nothing of the boot before.
    """
    if not before.known or seen.topology is None:
        return False
    if seen.instance is not None:
        told, tells = naming_of(before.instance), naming_of(seen.instance)
        return (told, tells) == (Naming.BY_START, Naming.BY_ITSELF)
    if before.lost is not None:
        return seen.version in (None, UNSET_VERSION) or seen.version != state.weight_version
    return seen.version == UNSET_VERSION and before.named not in (None, UNSET_VERSION)


def _contradicts(before: Replica, seen: Observation, state: FleetState) -> bool:
    """Whether a server that may serve names a version which this fleet has not given it."""
    given = (None, UNSET_VERSION, before.version, state.weight_version, state.naming)
    if not may_run(state, before) or in_open_round(state, before.id):
        return False
    return seen.version not in given


def _unless_named_once(before: Replica, after: Replica) -> Replica:
    """Fence it at the second look: the first may have begun before a label that it has by now."""
    if before.named != after.named:
        return change(after, version=before.version)
    why = f"somebody else has updated it: it names version {after.named}, not {before.version}"
    return change(after, fence=why, holds=None)


def _doubted(before: Replica, state: FleetState, now: float) -> Replica:
    """It may have been restarted, so nobody knows what it holds; a fence or a session stays."""
    holds = before.holds if state.commit_index == 0 else None
    return change(before, lost=None, holds=holds, instance=f"{UNKNOWN}{utc(now)}")


def _reborn(before: Replica, state: FleetState) -> Replica:
    """A restart forgets everything but the address; it brings the weights it was started with.

    A call of the open round may have reached the new server, so what the round did to the old one
    is taken to be true of the new one, until the round undoes it.
    """
    in_round = in_open_round(state, before.id)
    fresh = Replica(
        id=before.id,
        url=before.url,
        joined_at=before.joined_at,
        draining=before.draining,
        origin=before.origin,
        leaving=before.leaving,
        paused=in_round and before.paused,
        session_open=in_round and before.session_open,
    )
    return _first_weights(fresh, state)


def _first_seen(replica: Replica, seen: Observation, state: FleetState) -> Replica:
    """A newcomer holds what it was started with, unless it is a boot that has been here before."""
    fresh = _first_weights(replica, state)
    return recall(state, fresh, paused=seen.paused) if fresh.known else fresh


def _first_weights(replica: Replica, state: FleetState) -> Replica:
    return change(replica, holds=0 if state.commit_index == 0 else None)


def _merge(before: Replica, seen: Observation) -> Replica:
    """Take over what the probe asked for; a silent member of a collective stays wedged.

    A sleeping vLLM says that it is paused as well (vllm/v1/engine/core.py, 0.32), so its sleep, if
    not ordered here, shows as a pause. One that is seen asleep wakes up when that is ordered here.
    """
    fields = ("topology", "backend", "instance", "version", "paused")
    news = {f: getattr(seen, f) for f in fields if getattr(seen, f) is not None}
    news["named"] = seen.version or before.named
    if seen.asleep and before.sleep is None:
        news["sleep"] = Sleep(level=1)
    wedged = None if seen.unwedged else before.wedged
    return change(before, refusal=_refusal(before, seen), wedged=wedged, **news)


def _refusal(before: Replica, seen: Observation) -> str | None:
    """A glance does not ask for endpoints, so it does not lift a refusal either."""
    return seen.refusal if seen.topology is not None else before.refusal
