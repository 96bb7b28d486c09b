"""Who belongs to the fleet: what one look at one replica changes, and what the next group is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fleet.errors import MembershipChanged
from fleet.facts.layout import lay_out
from fleet.facts.outcome import Outcome
from fleet.facts.replica import Replica, ReplicaState, Sleep, Topology, why_left_out
from fleet.facts.state import FleetState, Phase
from fleet.rules.membership import (
    Membership,
    Observation,
    add_replica,
    answered_late,
    candidates_for,
    check_still_whole,
    common_backend,
    form_group,
    membership,
    observe,
    relabelled,
    remove_replica,
    sessions_closed,
)
from tests.fleets import (
    FAILED,
    NOW,
    OK,
    TIMEOUT,
    UNREACHABLE,
    change,
    fleet_in,
    fleet_of,
    group_for,
    replica,
)

LATER = NOW + 5
SEEN = Observation(
    topology=Topology(workers=2), backend="nccl", instance="boot-1-of-a", version="default"
)


def state_names(state: FleetState) -> dict[str, ReplicaState]:
    """Return every replica's state."""
    return {found.id: name for found, name, _ in state.states()}


def after(state: FleetState, seen: Observation, name: str = "a") -> Replica:
    """Return one replica after one observation."""
    return observe(state, name, seen, LATER).replicas[name]


# -- observations ----------------------------------------------------------------------------------


def test_a_new_replica_is_joining_until_a_probe_has_seen_it() -> None:
    """Nobody knows yet how many workers it has."""
    state = add_replica(fleet_of(), "http://a", "a", NOW)
    assert state_names(state) == {"a": ReplicaState.JOINING}
    assert why_left_out(state.replicas["a"]) == "not probed yet"


def test_adding_a_replica_again_changes_nothing() -> None:
    """Not even its place in the order."""
    state = fleet_of(replica("a"))
    assert add_replica(state, "http://other", "a", NOW) is state


def test_the_first_contact_of_a_fresh_fleet_makes_a_replica_ready() -> None:
    """With no version committed yet, the weights it booted with are the fleet's."""
    state = observe(add_replica(fleet_of(), "http://a", "a", NOW), "a", SEEN, LATER)
    assert state.replicas["a"].holds == 0
    assert state.replicas["a"].since == LATER
    assert state_names(state) == {"a": ReplicaState.READY}


@pytest.mark.parametrize("version", ["default", "7"])
def test_the_first_contact_after_a_commit_makes_a_replica_stale(version: str) -> None:
    """Even if it names the same version: nobody has seen it take part."""
    fleet = fleet_of(commit_index=3, weight_version="7", commits=("5", "6", "7"))
    seen = change(SEEN, version=version)
    state = observe(add_replica(fleet, "http://a", "a", NOW), "a", seen, LATER)
    assert state.replicas["a"].holds is None
    assert state_names(state) == {"a": ReplicaState.STALE}


def test_a_lost_replica_is_gone_and_keeps_the_first_reason() -> None:
    """What came first says most."""
    state = observe(fleet_of(replica("a")), "a", Observation(lost="refused"), LATER)
    state = observe(state, "a", Observation(lost="no route"), LATER)
    assert state.replicas["a"].lost == "refused"
    assert state_names(state) == {"a": ReplicaState.GONE}


def test_a_replica_that_comes_back_with_the_same_instance_is_what_it_was() -> None:
    """A network hiccup costs no weights."""
    before = replica("a", holds=0)
    state = observe(fleet_of(before), "a", Observation(lost="refused"), LATER)
    assert after(state, SEEN).holds == 0
    assert after(state, SEEN).lost is None


@pytest.mark.parametrize(("commits", "holds"), [(0, 0), (3, None)])
def test_a_restart_forgets_everything_but_address_and_draining(
    commits: int, holds: int | None
) -> None:
    """It brings the weights it was started with: those of the fleet only if none was committed."""
    before = replica(
        "a",
        holds=commits,
        fence="mixed",
        wedged="silent",
        lost="refused",
        draining=True,
        paused=True,
        sleep=Sleep(level=1),
        session_open=True,
        version="7",
        joined_at=NOW,
    )
    fleet = fleet_of(before, commit_index=commits)
    reborn = after(fleet, change(SEEN, instance="boot-2", unwedged=True))
    assert reborn == Replica(
        id="a",
        url="http://a",
        joined_at=NOW,
        since=LATER,
        topology=SEEN.topology,
        backend="nccl",
        instance="boot-2",
        version="default",
        named="default",
        draining=True,
        holds=holds,
    )


def test_a_server_that_sleeps_when_it_is_found_gets_no_rollouts() -> None:
    """Case 20; inside an open round the pause of the round could be taken for it."""
    new, asleep = replica("a", topology=None), change(SEEN, asleep=True, paused=False)
    assert state_names(observe(fleet_of(new), "a", asleep, LATER)) == {"a": ReplicaState.ASLEEP}
    state = observe(fleet_in(Phase.STARTED, replica("a")), "a", asleep, LATER)
    assert state.replicas["a"].sleep is None


UNNAMED = Observation(topology=Topology(workers=2), version="default")


@pytest.mark.parametrize(
    ("label", "holds"),
    [("7", 3), ("default", None), ("6", None), (None, None)],
    ids=["the committed one", "none set", "an older one", "no such route"],
)
def test_a_server_without_an_instance_that_was_away_is_known_by_its_label(
    label: str | None, holds: int | None
) -> None:
    """Nobody knows what it holds unless it names the committed version; a fence stays."""
    before = replica("a", instance=None, holds=3, version="7", lost="refused", fence="mixed")
    fleet = fleet_of(before, commit_index=3, weight_version="7")
    back = after(fleet, change(UNNAMED, version=label))
    assert (back.holds, back.fence, back.lost) == (holds, "mixed", None)
    assert (back.instance is None) == (holds is not None)


def test_a_server_without_an_instance_that_forgets_its_version_was_restarted() -> None:
    """It need not have been seen to be away; one that never named a version proves nothing."""
    before = replica("a", instance=None, holds=3, version="7")
    fleet = fleet_of(before, commit_index=3, weight_version="7")
    assert after(fleet, UNNAMED).holds == 3
    named = observe(fleet, "a", change(UNNAMED, version="7"), LATER)
    assert after(named, UNNAMED).holds is None


FOREIGN = Observation(version="theirs")


def test_a_label_that_this_fleet_has_not_given_fences_at_the_second_look() -> None:
    """The first look may have begun before the server got the label that it has by now."""
    fleet = fleet_of(replica("a", holds=3, version="7"), commit_index=3, weight_version="7")
    once = observe(fleet, "a", FOREIGN, LATER)
    assert (once.replicas["a"].fence, once.replicas["a"].version) == (None, "7")
    twice = after(once, FOREIGN)
    assert twice.fence == "somebody else has updated it: it names version theirs, not 7"
    assert twice.holds is None


@pytest.mark.parametrize(
    "facts", [{"fence": "mixed"}, {"holds": 2}, {"holds": None}], ids=["fenced", "stale", "unknown"]
)
def test_who_may_not_serve_may_name_what_it_likes(facts: dict[str, Any]) -> None:
    """A member of a round that failed in its finish, say, names a version that never was."""
    current: dict[str, Any] = {"holds": 3, "version": "7"}
    before = replica("a", **(current | facts))
    fleet = fleet_of(before, commit_index=3, weight_version="7")
    twice = after(observe(fleet, "a", FOREIGN, LATER), FOREIGN)
    assert (twice.fence, twice.holds) == (before.fence, before.holds)


@pytest.mark.parametrize("where", [{"naming": "theirs"}, {"weight_version": "theirs"}])
def test_a_label_on_its_way_or_committed_is_no_foreign_one(where: dict[str, str]) -> None:
    """Probes see it at a replica before its fleet has committed it, or before its facts say so."""
    known = {"commit_index": 3, "weight_version": "7"} | where
    fleet = fleet_of(replica("a", holds=3, version="7"), **known)
    assert after(observe(fleet, "a", FOREIGN, LATER), FOREIGN).fence is None


def test_a_start_is_refused_after_a_server_without_an_instance_was_away() -> None:
    """Its group is gone if it was restarted; it may not have been, but a hang costs more."""
    state = fleet_in(Phase.INITIALIZED, replica("a", instance=None), replica("b"))
    state = observe(state, "a", Observation(lost="refused"), NOW)
    state = observe(state, "a", UNNAMED, NOW)
    with pytest.raises(MembershipChanged, match="a: restarted since init"):
        check_still_whole(state)


def test_an_instance_that_nobody_can_tell_is_called_unknown_since_when_in_utc() -> None:
    """Operators read it in the list of replicas and in the log."""
    before = replica("a", instance=None, lost="refused")
    back = after(fleet_of(before), UNNAMED)
    assert re.fullmatch(r"unknown since 2023-11-14T22:\d\d:\d\d\.\d{3}Z", back.instance or "")


@pytest.mark.parametrize(("known", "seen"), [(None, "x"), ("x", None), ("x", "x")])
def test_an_instance_that_was_not_told_is_no_restart(known: str | None, seen: str | None) -> None:
    """Silence about the instance says nothing."""
    fleet = fleet_of(replica("a", instance=known, fence="mixed"))
    assert after(fleet, change(SEEN, instance=seen)).fence == "mixed"


def test_a_wedged_replica_stays_wedged_until_its_own_call_has_ended() -> None:
    """An answer to /health is not an answer of the engine."""
    fleet = fleet_of(replica("a", wedged="silent inside update"))
    assert after(fleet, SEEN).wedged == "silent inside update"
    assert after(fleet, change(SEEN, unwedged=True)).wedged is None


def test_a_refusal_is_lifted_only_by_a_close_look() -> None:
    """A glance does not ask for endpoints."""
    fleet = fleet_of(replica("a", refusal="lacks POST /pause"))
    assert after(fleet, Observation(version="default")).refusal == "lacks POST /pause"
    assert after(fleet, SEEN).refusal is None
    refused = observe(fleet_of(replica("a")), "a", change(SEEN, refusal="lacks it"), LATER)
    assert state_names(refused) == {"a": ReplicaState.FENCED}
    assert candidates_for(refused, None) == ([], {"a": "lacks it"})


def test_an_observation_that_changes_nothing_returns_the_same_state() -> None:
    """So a quiet fleet writes nothing into the store, second by second."""
    fleet = observe(fleet_of(replica("a")), "a", SEEN, NOW)
    assert observe(fleet, "a", SEEN, LATER) is fleet
    assert observe(fleet, "a", Observation(version="default"), LATER) is fleet
    assert observe(fleet, "stranger", SEEN, LATER) is fleet


def test_inside_a_round_a_look_does_not_overrule_the_rounds_own_pause() -> None:
    """It may have been made just before the pause arrived."""
    seen = change(SEEN, paused=False)
    for phase in (Phase.PAUSING, Phase.STARTING, Phase.UPDATING, Phase.COMMITTED):
        assert after(fleet_in(phase), seen).paused
    assert not after(fleet_in(Phase.FAILED), seen).paused


# -- late answers, sessions, labels ----------------------------------------------------------------


@pytest.mark.parametrize("outcome", [OK, FAILED, TIMEOUT, UNREACHABLE])
def test_a_late_answer_ends_the_silence_and_lifts_no_fence(outcome: Outcome) -> None:
    """It may have loaded weights that nobody else has."""
    fleet = fleet_of(replica("a", wedged="silent inside update", fence="mixed"))
    late = answered_late(fleet, "a", outcome).replicas["a"]
    assert late.wedged is None
    assert late.fence == "mixed"
    assert late.lost == ("connection refused" if outcome is UNREACHABLE else None)


def test_a_late_answer_of_a_stranger_changes_nothing() -> None:
    """It was removed meanwhile."""
    fleet = fleet_of(replica("a"))
    assert answered_late(fleet, "b", OK) is fleet


NONE_OPEN = "finish_weight_update called without a matching start_weight_update."
NO_SESSION = [
    change(FAILED, detail=f"Call to collective_rpc method failed: {NONE_OPEN}"),
    change(FAILED, detail="No weight update in progress"),
    change(FAILED, detail="weight update not started"),
    change(FAILED, detail="finish before start"),
    change(FAILED, detail="call start_weight_update first"),
    change(FAILED, detail="conflict", status=409),
]


@pytest.mark.parametrize("refusal", NO_SESSION, ids=lambda o: o.detail)
def test_a_bare_finish_closes_a_session_or_finds_none(refusal: Outcome) -> None:
    """Any other failure, like silence, means nothing: it is asked again before an init."""
    names = "abcde"
    fleet = fleet_of(*(replica(n, session_open=True) for n in names))
    outcomes = dict(zip(names, (OK, refusal, FAILED, TIMEOUT, UNREACHABLE), strict=True))
    closed = sessions_closed(fleet, {**outcomes, "stranger": OK})
    assert {r.id for r in closed.replicas.values() if r.session_open} == {"c", "d", "e"}


def test_a_new_label_goes_to_those_that_hold_the_committed_weights() -> None:
    """Who restarted or was fenced while the label was on its way gets no weights by it."""
    fleet = fleet_of(
        replica("a", holds=2),
        replica("b", holds=None),
        replica("c", holds=2, fence="mixed"),
        commit_index=2,
        weight_version="2",
    )
    state = relabelled(fleet, ["a", "b", "c", "stranger"], "best")
    assert (state.commit_index, state.weight_version) == (3, "best")
    assert {r.id for r in state.ready()} == {"a"}
    assert {r.id: r.holds for r in state.replicas.values()} == {"a": 3, "b": None, "c": 2}


# -- the next group --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"draining": True}, "draining"),
        ({"wedged": "silent inside init"}, "silent inside init"),
        ({"lost": "refused"}, "refused"),
        ({"refusal": "lacks POST /pause"}, "lacks POST /pause"),
        ({"topology": None}, "not probed yet"),
        ({"refusal": "lacks it", "lost": "refused", "draining": True}, "lacks it"),
    ],
)
def test_who_cannot_join_is_left_out_with_the_reason(facts: dict[str, Any], why: str) -> None:
    """The trainer reads why its group is smaller."""
    taken, left_out = candidates_for(fleet_of(replica("a"), replica("b", **facts)), "nccl")
    assert [r.id for r in taken] == ["a"]
    assert left_out == {"b": why}


@pytest.mark.parametrize("facts", [{"fence": "mixed"}, {"holds": None}, {"holds": 1}])
def test_stale_and_fenced_replicas_join_a_full_update_but_no_sparse_one(
    facts: dict[str, Any],
) -> None:
    """A patch fits only the weights it was made for."""
    fleet = fleet_of(replica("a", holds=2), replica("b", **{"holds": 2, **facts}), commit_index=2)
    assert [r.id for r in candidates_for(fleet, "nccl")[0]] == ["a", "b"]
    taken, left_out = candidates_for(fleet, "sparse_nccl")
    assert [r.id for r in taken] == ["a"]
    assert "does not hold" in left_out["b"]


def test_a_paused_or_sleeping_replica_joins() -> None:
    """It can receive weights."""
    fleet = fleet_of(replica("a", paused=True), replica("b", sleep=Sleep(level=1)))
    assert len(candidates_for(fleet, None)[0]) == 2


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(5, NOW, int(NOW)), (2**40, NOW, 2**40 + 1)]
)
def test_a_generation_only_grows_whatever_the_clock_says(
    before: int, now: float, expected: int
) -> None:
    """A store that came back empty starts it from the clock."""
    fleet = change(fleet_of(replica("a")), generation=before)
    taken, _ = candidates_for(fleet, None)
    group = form_group(fleet, taken, {}, lay_out(taken), "t", now)
    assert group.generation == expected
    assert group.instances == {"a": "boot-1-of-a"}


def test_a_group_has_a_backend_only_if_all_its_members_say_the_same() -> None:
    """None is not a backend, but it may be all that is known."""
    assert common_backend([replica("a"), replica("b")]) == "nccl"
    assert common_backend([replica("a"), replica("b", backend="gloo")]) is None
    assert common_backend([]) is None


# -- the current group -----------------------------------------------------------------------------


def test_membership_without_a_group_counts_who_could_join() -> None:
    """One trainer rank is assumed; nothing has changed, since nothing was agreed."""
    fleet = fleet_of(replica("a", 2), replica("b", 4, fence="mixed"), replica("c", lost="refused"))
    assert membership(fleet) == Membership(lost={}, changed=False, workers=6, world_size=7)


def in_group(**facts: dict[str, Any]) -> FleetState:
    """Return an initialised fleet of a, b and c, after these facts about them."""
    state = fleet_in(Phase.INITIALIZED)
    return state.with_replicas(change(state.replicas[name], **f) for name, f in facts.items())


def test_an_unchanged_group_is_whole() -> None:
    """1 + 2 + 4 workers and one trainer."""
    state = in_group()
    assert membership(state) == Membership(lost={}, changed=False, workers=7, world_size=8)
    check_still_whole(state)


def test_several_trainer_ranks_count_in_the_next_world() -> None:
    """The next world size rests on the current group's trainer ranks."""
    state = fleet_of(replica("a", 2))
    state = change(state, group=group_for(state, base=4))
    assert membership(state).world_size == 6


@pytest.mark.parametrize(
    ("fact", "why", "workers"),
    [
        ({"lost": "refused"}, "refused", 5),
        ({"wedged": "silent inside init"}, "silent inside init", 5),
        ({"instance": "boot-2"}, "restarted since init", 7),
    ],
)
def test_a_member_that_was_lost_wedged_or_restarted_blocks_a_start(
    fact: dict[str, str], why: str, workers: int
) -> None:
    """Case 7: the answer names it, and the world size to init again with."""
    state = in_group(b=fact)
    now = membership(state)
    assert (now.lost, now.changed, now.workers) == ({"b": why}, True, workers)
    with pytest.raises(MembershipChanged, match=f"b: {why}") as caught:
        check_still_whole(state)
    assert f"re-init with world_size={workers + 1} ({workers} workers" in (caught.value.hint or "")


def test_a_start_that_has_lost_everybody_names_no_world_size() -> None:
    """A group of the trainer alone would be refused."""
    state = in_group(a={"wedged": "silent"}, b={"lost": "refused"}, c={"wedged": "silent"})
    with pytest.raises(MembershipChanged) as caught:
        check_still_whole(state)
    assert "world_size" not in (caught.value.hint or "")
    assert "restart replicas, then re-init, then start again" in (caught.value.hint or "")


def test_a_member_that_was_removed_blocks_a_start() -> None:
    """Its ranks are in the group, and nobody answers for them."""
    with pytest.raises(MembershipChanged, match="c: removed from the fleet"):
        check_still_whole(remove_replica(in_group(), "c"))


def test_a_newcomer_changes_the_next_group_but_blocks_no_start() -> None:
    """It is stale until the next init includes it."""
    state = in_group().with_replicas([replica("d", 8, holds=None)])
    assert membership(state) == Membership(lost={}, changed=True, workers=15, world_size=16)
    check_still_whole(state)


def test_a_draining_member_changes_the_next_group_but_blocks_no_start() -> None:
    """It still takes part in the group it is in."""
    state = in_group(c={"draining": True})
    assert membership(state) == Membership(lost={}, changed=True, workers=3, world_size=4)
    check_still_whole(state)


def deployment(**facts: Any) -> FleetState:
    """Return an initialised fleet of one expert-parallel deployment of two servers."""
    places = [
        Topology(workers=8, deployment="d:1", counts_deployment=True, servers=2, index=i)
        for i in (0, 1)
    ]
    state = fleet_of(replica("a", topology=places[0]), replica("b", topology=places[1]))
    state = change(state, group=group_for(state))
    return state.with_replicas([change(state.replicas["b"], **facts)])


def test_a_broken_deployment_is_still_named_and_not_an_error_of_the_looker() -> None:
    """The survivors of half a deployment cannot be laid out; that must not hide who was lost."""
    state = deployment(lost="refused")
    now = membership(state)
    assert now.lost == {"b": "refused"}
    assert now.changed
    with pytest.raises(MembershipChanged, match="b: refused") as caught:
        check_still_whole(state)
    assert "deployment d:1 has 2 servers, but 1 can join (a)" in (caught.value.hint or "")
