"""Holds the history of a chaos run against the promises of a fleet. Pure: no clock, no socket.

Each rule returns what it found wrong, in words, and knows nothing of how faults are made; it
excuses only what an outage on record explains. `test_checker.py` sees every rule red.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from fleet.facts.state import UNSET_VERSION, FleetState, Phase
from tests.chaos.history import Called, Did, History, Outage, Rollout, Written

START = "/start_weight_update"
FINISH = "/finish_weight_update"
AFTERMATH_S = 6.0
"""For how long after a fault its effects may still show (leases, probes, retries)."""


def check(history: History) -> dict[str, list[str]]:
    """Return the violations of each rule; a rule that holds has an empty list."""
    return {rule.__name__: list(rule(history)) for rule in RULES}


# ---- rollouts ----------------------------------------------------------------------------------


def a_rollout_is_served_by_the_weights_of_its_label(history: History) -> Iterator[str]:
    """Tokens come from committed weights, of the label's version or a later one."""
    commits = _order_of_commits(history)
    for rollout in history.rollouts:
        if rollout.status == 200 and not rollout.broken:
            found = _mislabelled(rollout, commits, history)
            yield from (f"{_told(rollout)}: {why}" for why in found)


def _mislabelled(rollout: Rollout, commits: dict[str, int], history: History) -> Iterator[str]:
    versions = [made.version for made in rollout.made]
    label = rollout.label or ""
    for made in rollout.made:
        if history.weights.get(made.version) != made.checksum:
            yield f"weights {made.checksum} under the name {made.version}"
    unknown = [v for v in {label, *versions} if v not in commits]
    if unknown:
        yield f"versions that were never committed: {unknown}"
        return
    if not versions:
        yield "it does not say who made it"
        return
    order = [commits[label], *(commits[version] for version in versions)]
    if order != sorted(order):
        yield f"label {label}, made by {versions}"
    updated = _was_updated(history, rollout)
    if not updated and set(versions) != {label}:
        yield f"label {label}, made by {versions}, and no update in between"
    told = commits.get(rollout.end_label or label, -1)
    stood_still = any(
        o.target == rollout.gateway and _overlaps(o, *_life(rollout)) for o in history.outages
    )
    if not rollout.is_stream and not stood_still and told < order[-1]:
        yield f"said to end with {rollout.end_label or label}, made by {versions}"


def _life(rollout: Rollout) -> tuple[float, float]:
    return rollout.began, rollout.ended


def labels_never_go_back(history: History) -> Iterator[str]:
    """Who asks after another's answer never gets older weights, whichever gateways both asked."""
    commits = _order_of_commits(history)
    ended = sorted(_labelled(history, commits), key=lambda r: r.ended)
    began = sorted(ended, key=lambda r: r.began)
    newest, at = -1, 0
    for rollout in began:
        while at < len(ended) and ended[at].ended < rollout.began:
            newest = max(newest, commits[ended[at].label or ""])
            at += 1
        if commits[rollout.label or ""] < newest:
            yield f"{_told(rollout)}: label {rollout.label} after commit {newest} had been seen"


def _labelled(history: History, commits: dict[str, int]) -> list[Rollout]:
    return [r for r in history.rollouts if r.status == 200 and r.label in commits]


def no_rollout_inside_start_and_finish(history: History) -> Iterator[str]:
    """A replica computes nothing between start and finish, and no engine dies of it."""
    yield from (f"{name}: its engine died at {at:.3f}" for name, at in history.engines_killed)
    sessions = _sessions(history)
    for served in history.served:
        for began, ended in sessions[served.replica]:
            if began < served.began and served.ended < ended and served.outcome == "finished":
                yield f"{served.replica}: served at {served.began:.3f}, session since {began:.3f}"


def every_rollout_is_answered(history: History) -> Iterator[str]:
    """Nothing is lost: an answer, and a good one unless a fault explains what went wrong."""
    for rollout in history.rollouts:
        good = rollout.status == 200 and not rollout.broken
        if good or _excused(history, rollout.began, rollout.ended, rollout.gateway):
            continue
        yield f"{_told(rollout)}: {rollout.status} {rollout.error}"


# ---- rounds ------------------------------------------------------------------------------------


def a_version_commits_only_when_every_member_has_arrived(history: History) -> Iterator[str]:
    """Each member's own log has the finish with this version before the commit."""
    arrived: dict[tuple[str, str], float] = {}
    for did in history.did:
        if did.path == FINISH and did.status == 200 and did.version and did.ended is not None:
            arrived.setdefault((did.replica, did.version), did.ended)
    for before, after in pairwise(_settled(history)):
        if not _commits(before.state, after.state):
            continue
        version = after.state.weight_version or ""
        for member in _members(before.state):
            at = arrived.get((member, version))
            if at is None or at > after.at:
                yield f"revision {after.revision}: {version} committed without {member}"


def a_fence_is_lifted_only_by_a_full_update(history: History) -> Iterator[str]:
    """Or with the replica itself: another boot, or gone from the fleet."""
    for before, after in pairwise(_settled(history)):
        if after.revision != before.revision + 1:
            continue  # something was written between the two that nobody saw
        for name, replica in before.state.replicas.items():
            now = after.state.replicas.get(name)
            if not replica.fence or now is None or now.fence or now.instance != replica.instance:
                continue
            done = after.state.round
            full = _commits(before.state, after.state) and done is not None and done.full
            if not full or name not in _members(before.state):
                yield f"revision {after.revision}: the fence of {name} ({replica.fence}) is gone"


def the_version_never_goes_back(history: History) -> Iterator[str]:
    """Commits only add up, each version is committed once, and generations only grow."""
    for before, after in pairwise(_settled(history)):
        if after.state.generation < before.state.generation:
            yield f"revision {after.revision}: generation {after.state.generation} after {before}"
        if _number(after.state) < _number(before.state):
            told = f"{before.state.weight_version} -> {after.state.weight_version}"
            yield f"revision {after.revision}: {told}"
    for written in _settled(history)[-1:]:
        commits = [v for v in written.state.commits if v != UNSET_VERSION]
        if len(set(commits)) != len(commits):
            yield f"committed twice: {sorted(v for v in set(commits) if commits.count(v) > 1)}"


def every_call_is_answered_in_time(history: History) -> Iterator[str]:
    """A control call has an answer by its deadline, unless its gateway died or stood still."""
    for call in history.calls:
        too_late = call.ended - call.began > call.deadline_s
        if (too_late or call.status is None) and not _gateway_was_hit(history, call):
            took = call.ended - call.began
            yield f"{call.path} at {call.gateway}: {call.status} {call.error} after {took:.1f} s"


RULES: tuple[Callable[[History], Iterator[str]], ...] = (
    a_rollout_is_served_by_the_weights_of_its_label,
    labels_never_go_back,
    no_rollout_inside_start_and_finish,
    every_rollout_is_answered,
    a_version_commits_only_when_every_member_has_arrived,
    a_fence_is_lifted_only_by_a_full_update,
    the_version_never_goes_back,
    every_call_is_answered_in_time,
)


# ---- pieces ------------------------------------------------------------------------------------


def _order_of_commits(history: History) -> dict[str, int]:
    """Return every version that the store has ever had, by the order of its first appearance."""
    order = {UNSET_VERSION: 0}
    for written in history.states:
        if written.state.weight_version is not None:
            order.setdefault(written.state.weight_version, len(order))
    return order


def _commits(before: FleetState, after: FleetState) -> bool:
    """Whether a round committed between two states; a version learnt from replicas is none."""
    moved = after.weight_version != before.weight_version
    return moved and before.phase is Phase.FINISHING


def _settled(history: History) -> list[Written]:
    """Return the states that gateways acted on."""
    return [written for written in history.states if not written.restores]


def _members(state: FleetState) -> tuple[str, ...]:
    return state.group.members if state.group else ()


def _number(state: FleetState) -> int:
    version = state.weight_version
    return int(version) if version is not None and version.isdigit() else 0


def _sessions(history: History) -> defaultdict[str, list[tuple[float, float]]]:
    """Return when each replica surely had an open session: from a start's answer to a finish."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    opened: dict[str, tuple[int, float]] = {}
    for did in sorted(history.did, key=_order_of_calls):
        boot, began = opened.get(did.replica, (did.boot, 0.0))
        if boot != did.boot:
            opened.pop(did.replica, None)
        if did.path == START and did.status == 200 and did.ended is not None:
            opened[did.replica] = (did.boot, did.ended)
        elif did.path == FINISH and did.replica in opened:
            found[did.replica].append((began, did.began))
            del opened[did.replica]
    return found


def _order_of_calls(did: Did) -> float:
    return did.began


def _was_updated(history: History, rollout: Rollout) -> bool:
    """Whether the rollout's replica may have got new weights while the rollout was under way."""
    return any(
        did.path == FINISH
        and did.replica == rollout.replica
        and rollout.began <= (did.ended or did.began)
        and did.began <= rollout.ended
        for did in history.did
    )


def _excused(history: History, began: float, ended: float, gateway: str) -> bool:
    """Whether a fault of a replica, of the store or of this gateway falls into that time."""
    return any(
        _overlaps(outage, began, ended)
        for outage in history.outages
        if not outage.target.startswith("gateway") or outage.target == gateway
    )


def _gateway_was_hit(history: History, call: Called) -> bool:
    return any(
        outage.target == call.gateway and _overlaps(outage, call.began, call.ended)
        for outage in history.outages
        if outage.kind in ("gateway killed", "gateway frozen")
    )


def _overlaps(outage: Outage, began: float, ended: float) -> bool:
    return outage.began <= ended and began <= outage.ended + AFTERMATH_S


def _told(rollout: Rollout) -> str:
    return f"rollout at {rollout.gateway} ({rollout.replica}) {rollout.began:.3f}"


def written_in_order(states: list[Written]) -> list[Written]:
    """Return the states in the order in which Redis confirmed them."""
    return sorted(states, key=lambda written: written.at)
