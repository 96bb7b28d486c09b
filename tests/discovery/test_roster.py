"""What lists mean for the fleet: joining, leaving, coming back, and never undoing what is newer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import MembershipChanged
from fleet.facts.endpoint import Endpoint, Origin, Snapshot
from fleet.facts.replica import Replica, ReplicaState, Topology
from fleet.facts.state import FleetState, Phase
from fleet.rules.membership import (
    Observation,
    check_still_whole,
    membership,
    observe,
    remove_replica,
)
from fleet.rules.roster import (
    GONE,
    GRACE_S,
    View,
    acted_on,
    excuse,
    is_busy,
    next_due,
    see,
    settle,
    uids_from,
)
from tests.fleets import NOW, PATHS, fleet_of, follow, replica

change = msgspec.structs.replace

SOURCE = "kubernetes rl app=vllm"
NOT_READY = "its pod is not Ready"
BUSY = (
    Phase.INITIALIZING,
    Phase.PAUSING,
    Phase.STARTING,
    Phase.STARTED,
    Phase.UPDATING,
    Phase.FINISHING,
    Phase.COMMITTED,
    Phase.UNDOING,
)
FREE = (Phase.IDLE, Phase.INITIALIZED, Phase.FAILED)


def pod(name: str, uid: str = "", revision: int = 10, **facts: Any) -> Endpoint:
    """A pod that serves under `name:8000`; facts: unready, leaving, created."""
    address = f"{name}:8000"
    origin = Origin(
        source=SOURCE,
        uid=f"{uid or name}@{address}",
        name=name,
        created=facts.pop("created", "2026-01-01T00:00:00Z"),
        revision=revision,
    )
    return Endpoint(url=f"http://{address}", origin=origin, **facts)


def listed(*pods: Endpoint) -> Snapshot:
    """A whole list."""
    return Snapshot(source=SOURCE, endpoints={p.origin.uid: p for p in pods}, asked_at=1.0)


def watched(*pods: Endpoint) -> Snapshot:
    """The same, as events on top of a list have made it."""
    return change(listed(*pods), asked_at=None)


class Gateway:
    """One gateway's follower without its effects, over a state that others may share."""

    def __init__(self) -> None:
        self.view = View()

    def act(self, state: FleetState, now: float = NOW) -> FleetState:
        """Do what the view asks for."""
        self.view = excuse(self.view, state, now)
        state = settle(state, self.view, now)
        assert settle(state, self.view, now) is state, "acting twice must change nothing"
        self.view = acted_on(self.view, state)
        return state

    def take(self, state: FleetState, snapshot: Snapshot, now: float = NOW) -> FleetState:
        """See a snapshot and act on it; whole lists are asked for after all that is known."""
        before = uids_from(SOURCE, state.replicas)
        self.view = see(self.view, snapshot, before)
        return self.act(state, now)


def states(state: FleetState) -> dict[str, ReplicaState]:
    """Each replica's state, by the first word of its address."""
    return {r.id.partition(":")[0]: found for r, found, _ in state.states()}


def known(found: FleetState, *names: str) -> FleetState:
    """The state after probing has seen these replicas, which hold what is committed."""
    facts = [found.replicas[f"{name}:8000"] for name in names]
    holds = found.commit_index
    return found.with_replicas(
        change(r, topology=Topology(), instance=f"boot of {r.id}", backend="nccl", holds=holds)
        for r in facts
    )


def fleet_with(*pods: Endpoint) -> tuple[Gateway, FleetState]:
    """A gateway that has found these pods, all of them probed."""
    gateway = Gateway()
    state = gateway.take(fleet_of(), listed(*pods))
    return gateway, known(state, *(p.origin.name for p in pods if not p.unready))


def in_phase(phase: Phase, *pods: Endpoint) -> tuple[Gateway, FleetState]:
    """The same, and a group of all of them in this phase."""
    gateway, state = fleet_with(*pods)
    return gateway, gateway.act(follow(state, PATHS[phase]))


# ---- joining and leaving -----------------------------------------------------------------------


def test_a_pod_joins_when_it_is_ready_for_the_first_time() -> None:
    """Before, it loads its model, and nobody need know of it."""
    gateway, state = Gateway(), fleet_of()
    assert gateway.take(state, listed(pod("a", unready=NOT_READY))) is state
    state = gateway.take(state, watched(pod("a", revision=11)))
    assert list(state.replicas) == ["a:8000"]
    assert states(state) == {"a": ReplicaState.JOINING}


def test_a_pod_that_is_gone_is_forgotten() -> None:
    """No zombie address stays in the fleet."""
    gateway, state = fleet_with(pod("a"), pod("b"))
    state = gateway.take(state, watched(pod("b")))
    assert list(state.replicas) == ["b:8000"]


@pytest.mark.parametrize("why", ["unready", "leaving"])
def test_a_pod_that_is_not_ready_or_terminating_leaves_at_once(why: str) -> None:
    """No rollouts and no place in the next group; what it is known to hold stays known."""
    gateway, state = fleet_with(pod("a"), pod("b"))
    before = state.replicas["a:8000"]
    state = gateway.take(state, watched(pod("a", revision=11, **{why: "because"}), pod("b")))
    assert states(state) == {"a": ReplicaState.DRAINING, "b": ReplicaState.READY}
    assert [r.id for r in state.ready()] == ["b:8000"]
    assert membership(state).workers == 1
    state = gateway.take(state, watched(pod("a", revision=12), pod("b")))
    after = state.replicas["a:8000"]
    assert change(after, origin=None) == change(before, origin=None)
    assert states(state) == {"a": ReplicaState.READY, "b": ReplicaState.READY}


def test_an_operators_drain_outlives_readiness() -> None:
    """Ready again does not readmit whom an operator has taken out."""
    gateway, state = fleet_with(pod("a"))
    state = state.with_replicas([change(state.replicas["a:8000"], draining=True)])
    state = gateway.take(state, watched(pod("a", revision=11, unready=NOT_READY)))
    state = gateway.take(state, watched(pod("a", revision=12)))
    assert states(state) == {"a": ReplicaState.DRAINING}


def test_a_pod_made_again_at_the_same_address_is_a_new_replica() -> None:
    """It booted with other weights; nothing that was known of the old one is true of it."""
    gateway, state = fleet_with(pod("a", "one"))
    state = state.with_commit("7")
    state = state.with_replicas([change(state.replicas["a:8000"], holds=1, fence="mixed")])
    state = gateway.take(state, watched(pod("a", "two", created="2026-01-01T00:00:05Z")))
    fresh = state.replicas["a:8000"]
    assert (fresh.known, fresh.holds, fresh.fence, fresh.instance) == (False, None, None, None)
    assert fresh.origin is not None
    assert fresh.origin.uid == "two@a:8000"


def test_a_pod_made_again_elsewhere_joins_and_the_old_one_leaves() -> None:
    """Both in one step."""
    gateway, state = fleet_with(pod("a", "one"))
    state = gateway.take(state, watched(pod("b", "two", created="2026-01-01T00:00:05Z")))
    assert list(state.replicas) == ["b:8000"]


def test_a_pod_with_a_new_address_is_found_there() -> None:
    """A node that restarted gives its pods new addresses; their uids stay."""
    gateway, state = fleet_with(pod("a", "one"))
    state = gateway.take(state, watched(pod("b", "one")))
    assert list(state.replicas) == ["b:8000"]


def test_what_an_operator_has_added_is_left_alone() -> None:
    """Only what discovery found can discovery take away."""
    gateway = Gateway()
    state = gateway.take(fleet_of(replica("x:8000")), listed(pod("a")))
    state = gateway.take(state, listed())
    assert list(state.replicas) == ["x:8000"]


def test_a_replica_that_was_known_by_its_address_becomes_its_pod() -> None:
    """Turning discovery on makes no replica stale, and it leaves with its pod from then on."""
    gateway = Gateway()
    state = fleet_of(replica("a:8000", holds=3), commit_index=3)
    state = gateway.take(state, listed(pod("a")))
    assert states(state) == {"a": ReplicaState.READY}
    assert not gateway.take(state, watched()).replicas


def test_a_replica_that_an_operator_has_removed_comes_back_with_the_next_list() -> None:
    """Not with the next event: a drain keeps a pod out, or another label."""
    gateway, state = fleet_with(pod("a"), pod("b"))
    state = remove_replica(state, "a:8000")
    state = gateway.take(state, watched(pod("a", revision=11), pod("b")))
    assert list(state.replicas) == ["b:8000"]
    state = gateway.take(state, listed(pod("a", revision=11), pod("b")))
    assert sorted(state.replicas) == ["a:8000", "b:8000"]


def test_a_pod_that_flaps_in_what_is_listed_keeps_its_fence() -> None:
    """Gone from one list and there in the next, it is the same process with the same weights."""
    gateway, state = in_phase(Phase.FAILED, pod("a"), pod("b"))
    state = gateway.take(state, watched(pod("b")))
    assert list(state.replicas) == ["b:8000"]
    state = gateway.take(state, watched(pod("a"), pod("b")))
    seen = Observation(topology=Topology(), instance="boot of a:8000", version="default")
    state = observe(state, "a:8000", seen, NOW)
    assert states(state) == {"a": ReplicaState.FENCED, "b": ReplicaState.FENCED}
    assert not gateway.take(state, watched(pod("b"))).ready()


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", BUSY)
def test_a_member_that_is_not_ready_in_a_round_is_not_disturbed(phase: Phase) -> None:
    """A busy engine may answer no readiness probe; in the grace after the round neither."""
    gateway, state = in_phase(phase, pod("a"), pod("b"))
    away = watched(pod("a", revision=11, unready=NOT_READY), pod("b"))
    assert gateway.take(state, away) is state
    later = change(state, phase=Phase.INITIALIZED)
    assert gateway.act(later, NOW + 500) is later
    assert next_due(gateway.view, NOW + 500) == GRACE_S
    after = gateway.act(later, NOW + 500 + GRACE_S + 0.1)
    assert after.replicas["a:8000"].leaving == NOT_READY
    assert next_due(gateway.view, NOW + 500 + GRACE_S + 0.1) is None


def test_a_member_that_is_told_not_ready_just_after_the_round_is_excused_too() -> None:
    """The kubelet needs several failures of its probe, so it tells late."""
    gateway, state = in_phase(Phase.UPDATING, pod("a"))
    state = gateway.act(change(state, phase=Phase.INITIALIZED), NOW + 100)
    away = watched(pod("a", revision=11, unready=NOT_READY))
    assert gateway.take(state, away, NOW + 110) is state
    assert gateway.take(state, watched(pod("a", revision=12)), NOW + 120) is state
    assert gateway.act(state, NOW + 200) is state


def test_an_outage_that_outlasts_its_round_is_not_excused_by_the_next() -> None:
    """Who trains all the time would never hear of a pod that is really ill."""
    gateway, state = in_phase(Phase.UPDATING, pod("a"), pod("b"))
    away = pod("a", revision=11, unready=NOT_READY)
    assert gateway.take(state, watched(away, pod("b"))) is state
    state = gateway.act(change(state, phase=Phase.INITIALIZED), NOW + 100)
    assert state.round is not None
    second = change(state.round, id=state.round.id + 1)
    state = gateway.act(change(state, phase=Phase.UPDATING, round=second), NOW + 110)
    assert state.replicas["a:8000"].leaving is None
    ill = watched(away, pod("b", revision=12, unready=NOT_READY))
    state = gateway.take(state, ill, NOW + 100 + GRACE_S + 0.1)
    assert state.replicas["a:8000"].leaving == NOT_READY
    assert state.replicas["b:8000"].leaving is None, "its outage began in this round"
    state = gateway.take(state, watched(pod("a", revision=13), pod("b")), NOW + 140)
    ill = watched(pod("a", revision=14, unready=NOT_READY), pod("b"))
    assert gateway.take(state, ill, NOW + 141) is state


@pytest.mark.parametrize("phase", FREE)
def test_outside_a_round_a_member_is_not_excused(phase: Phase) -> None:
    """It is marked, not lost: a start goes on with it."""
    gateway, state = in_phase(phase, pod("a"), pod("b"))
    away = watched(pod("a", revision=11, unready=NOT_READY), pod("b"))
    state = gateway.take(state, away)
    assert state.replicas["a:8000"].leaving == NOT_READY
    check_still_whole(state)


@pytest.mark.parametrize("phase", BUSY)
def test_a_terminating_member_stays_in_its_round(phase: Phase) -> None:
    """It may live to the end of it: marked at once, for the time after, and nothing else."""
    gateway, state = in_phase(phase, pod("a"), pod("b"))
    ends = watched(pod("a", revision=11, leaving="its pod is terminating"), pod("b"))
    after = gateway.take(state, ends)
    member = after.replicas["a:8000"]
    assert change(member, leaving=None, origin=None) == change(
        state.replicas["a:8000"], origin=None
    )
    assert (after.phase, after.group) == (state.phase, state.group)
    check_still_whole(after)


@pytest.mark.parametrize("phase", BUSY)
def test_a_member_that_is_gone_is_lost_and_removed_after_the_round(phase: Phase) -> None:
    """The rules of the round say what follows from a lost member; they need to find it."""
    gateway, state = in_phase(phase, pod("a"), pod("b"))
    state = gateway.take(state, watched(pod("b")))
    member = state.replicas["a:8000"]
    assert (member.lost, member.leaving) == (GONE, GONE)
    assert sorted(state.replicas) == ["a:8000", "b:8000"]
    with pytest.raises(MembershipChanged, match=GONE):
        check_still_whole(state)
    assert gateway.act(state) is state
    state = gateway.act(change(state, phase=Phase.FAILED))
    assert list(state.replicas) == ["b:8000"]


@pytest.mark.parametrize("phase", BUSY)
def test_a_member_made_again_in_a_round_counts_as_restarted(phase: Phase) -> None:
    """Also one that tells no instance: its pod's uid speaks for it. The round may undo its work."""
    gateway, state = in_phase(phase, pod("a", "one"), pod("b"))
    before = state.replicas["a:8000"]
    anew = pod("a", "two", created="2026-01-01T00:00:05Z", revision=20)
    state = gateway.take(state, watched(anew, pod("b")))
    member = state.replicas["a:8000"]
    assert (member.paused, member.session_open) == (before.paused, before.session_open)
    with pytest.raises(MembershipChanged, match="a:8000: restarted since init"):
        check_still_whole(state)
    nameless = Observation(topology=Topology(), version="default")
    state = observe(state, "a:8000", nameless, NOW)
    with pytest.raises(MembershipChanged, match="restarted since init"):
        check_still_whole(state)
    named = change(nameless, instance="boot 2")
    state = observe(state, "a:8000", named, NOW)
    assert state.replicas["a:8000"].origin == anew.origin
    assert state.replicas["a:8000"].instance == "boot 2"


def test_a_pods_uid_tells_a_restart_where_the_server_tells_no_instance() -> None:
    """Its group knows none either, so an unknown instance would look like the same boot."""
    gateway, state = fleet_with(pod("a", "one"))
    state = state.with_replicas([change(state.replicas["a:8000"], instance=None)])
    state = gateway.act(follow(state, PATHS[Phase.UPDATING]))
    check_still_whole(state)
    state = gateway.take(state, watched(pod("a", "two", created="2026-01-01T00:00:05Z")))
    state = observe(state, "a:8000", Observation(topology=Topology(), version="default"), NOW)
    with pytest.raises(MembershipChanged, match="restarted since init"):
        check_still_whole(state)


def test_a_container_that_restarts_stays_the_same_pod() -> None:
    """Probing tells the restart; the pod stays known, and so does that it is leaving."""
    gateway, state = fleet_with(pod("a"))
    ends = watched(pod("a", revision=11, leaving="its pod is terminating"))
    state = gateway.take(state, ends)
    seen = Observation(topology=Topology(), instance="boot 2", version="default")
    state = observe(state, "a:8000", seen, NOW)
    member = state.replicas["a:8000"]
    assert (member.instance, member.leaving) == ("boot 2", "its pod is terminating")
    assert not gateway.take(state, watched()).replicas


# ---- several gateways ----------------------------------------------------------------------------


def test_several_gateways_that_see_the_same_do_nothing_twice() -> None:
    """Applying is idempotent, whoever comes first."""
    first, second = Gateway(), Gateway()
    state = first.take(fleet_of(), listed(pod("a")))
    assert second.take(state, listed(pod("a"))) is state
    state = second.take(state, watched())
    assert not state.replicas
    assert first.take(state, watched()) is state


def test_a_gateway_whose_watch_is_broken_removes_nobody() -> None:
    """It never saw the newcomer; that it does not list it means nothing."""
    first, stale = Gateway(), Gateway()
    state = first.take(fleet_of(), listed(pod("a")))
    state = stale.take(state, listed(pod("a")))
    state = first.take(state, watched(pod("a"), pod("b")))
    assert stale.act(state) is state
    away = stale.take(state, watched(pod("a", revision=11, unready=NOT_READY)))
    assert sorted(away.replicas) == ["a:8000", "b:8000"]


def test_a_gateway_whose_watch_is_broken_brings_nobody_back() -> None:
    """Nor does it mark again whom others have seen Ready since."""
    first, stale = Gateway(), Gateway()
    state = first.take(fleet_of(), listed(pod("a"), pod("b")))
    away = (pod("a", revision=11, unready=NOT_READY), pod("b"))
    state = stale.take(state, listed(*away))
    state = first.take(state, watched(pod("a", revision=12)))
    assert list(state.replicas) == ["a:8000"]
    assert state.replicas["a:8000"].leaving is None
    assert stale.act(state) is state
    assert stale.take(state, watched(*away)) is state


def test_a_gateway_that_lags_does_not_put_the_old_pod_in_the_place_of_the_new() -> None:
    """Two pods with one address in two eyes: the one made later is the one that is there."""
    first, late = Gateway(), Gateway()
    state = first.take(fleet_of(), listed(pod("a", "two", created="2026-01-01T00:00:05Z")))
    assert late.take(state, watched(pod("a", "one"))) is state
    assert late.take(state, watched()) is state


def test_what_went_while_no_gateway_looked_goes_with_the_first_list() -> None:
    """Only a whole list, asked for after the fleet was known, can tell that."""
    _, state = fleet_with(pod("a"), pod("b"))
    assert Gateway().take(state, watched(pod("b"))) is state
    assert list(Gateway().take(state, listed(pod("b"))).replicas) == ["b:8000"]


def test_what_another_question_has_found_is_not_judged_by_this_one() -> None:
    """A gateway with a mistyped selector lists nobody, and takes nobody away."""
    _, state = fleet_with(pod("a"))
    other = uids_from("kubernetes rl app=vlm", state.replicas)
    view = see(View(), change(listed(), source="kubernetes rl app=vlm"), other)
    assert settle(state, view, NOW) is state


def test_who_is_in_no_list_and_answers_nobody_is_forgotten_in_the_end() -> None:
    """Found by a question that nobody asks any more."""
    _, state = fleet_with(pod("a"))
    lost = change(state.replicas["a:8000"], lost="unreachable", since=NOW)
    state = state.with_replicas([lost])
    view = see(View(), change(watched(), source="dns vllm"))
    assert settle(state, view, NOW + 599) is state
    assert not settle(state, view, NOW + 601).replicas
    assert settle(state, View(), NOW + 601) is state, "who has not looked knows nothing"


PODS = st.lists(
    st.builds(
        lambda name, incarnation, ready: (name, incarnation, ready),
        st.sampled_from("abc"),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=3,
    unique_by=lambda told: told[0],
)


@given(st.lists(PODS, min_size=1, max_size=6), st.data())
def test_gateways_that_read_at_different_speeds_agree_in_the_end(
    history: list[list[tuple[str, int, bool]]], data: st.DataObject
) -> None:
    """Whatever happened, in whichever order they acted: what is listed and Ready is the fleet."""
    newest: dict[str, int] = {}
    snapshots: list[Snapshot] = []
    for revision, told in enumerate(history, start=1):
        now: list[Endpoint] = []
        for name, incarnation, ready in told:
            newest[name] = max(newest.get(name, 0), incarnation)
            why = None if ready else NOT_READY
            made = f"2026-01-01T00:00:0{newest[name]}Z"
            uid = f"{name}{newest[name]}"
            now.append(pod(name, uid, revision * 10, created=made, unready=why))
        snapshots.append(watched(*now))
    gateways = [Gateway(), Gateway(), Gateway()]
    state, at = fleet_of(), [0, 0, 0]
    while min(at) < len(snapshots):
        who = data.draw(st.sampled_from([n for n in range(3) if at[n] < len(snapshots)]))
        state = gateways[who].take(state, snapshots[at[who]])
        at[who] += 1
    whole = change(snapshots[-1], asked_at=1.0)
    for gateway in gateways:
        state = gateway.take(state, whole)
    _check_agreement(state, whole)


def _check_agreement(state: FleetState, whole: Snapshot) -> None:
    ready = {e.origin.uid for e in whole.endpoints.values() if e.unready is None}
    serving = {r.origin.uid for r in state.replicas.values() if r.origin and not r.leaving}
    assert serving == ready
    assert {_uid(r) for r in state.replicas.values()} <= whole.endpoints.keys()


def _uid(found: Replica) -> str:
    return found.origin.uid if found.origin else ""


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_is_either_busy_or_free(phase: Phase) -> None:
    """A new phase must be put on one of the two lists above."""
    assert (phase in BUSY) != (phase in FREE)
    _, state = in_phase(phase, pod("a")) if phase is not Phase.IDLE else fleet_with(pod("a"))
    assert is_busy(state, "a:8000") == (phase in BUSY)
    assert not is_busy(state, "b:8000")
