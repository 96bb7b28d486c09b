"""A fence is of a boot, not of a line in a list: who left with one comes back with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleet.facts.replica import Replica, ReplicaState, Sleep, Topology
from fleet.facts.state import FleetState, Phase
from fleet.rules.departed import KEPT
from fleet.rules.membership import Observation, add_replica, observe, relabelled, remove_replica
from tests.fleets import NOW, PATHS, change, fleet_in, fleet_of, follow, replica

LATER = NOW + 5
BOOT = "boot-1-of-a"
SEEN = Observation(
    topology=Topology(), backend="nccl", instance=BOOT, version="default", paused=False
)
NAMELESS = change(SEEN, instance=None)
BY_START = change(SEEN, instance="started at 1.0")


def away(found: Replica, *others: Replica, **facts: Any) -> FleetState:
    """A fleet that this replica has left."""
    return remove_replica(fleet_of(found, *others, **facts), found.id)


def back(state: FleetState, seen: Observation = SEEN, name: str = "a") -> FleetState:
    """The fleet after somebody was added and looked at for the first time."""
    state = add_replica(state, f"http://{name}", name, LATER)
    return observe(state, name, seen, LATER)


def state_of(state: FleetState, name: str = "a") -> ReplicaState:
    """One replica's state."""
    return next(found for r, found, _ in state.states() if r.id == name)


# ---- the boot that comes back --------------------------------------------------------------------


def test_a_fence_survives_that_its_replica_is_removed_and_added_again() -> None:
    """Before the first commit a newcomer is ready at once; the same boot is none."""
    state = back(away(replica("a", fence="round 1 failed in update")))
    assert state.replicas["a"].fence == "round 1 failed in update"
    assert state_of(state) is ReplicaState.FENCED


def test_the_same_boot_at_another_address_is_fenced_as_well() -> None:
    """A name instead of an IP address makes no other process of it."""
    assert state_of(back(away(replica("a", fence="mixed")), name="b"), "b") is ReplicaState.FENCED


def test_it_is_fenced_as_often_as_it_leaves_and_comes_back() -> None:
    """A name server that flaps flaps often."""
    state = away(replica("a", fence="mixed"))
    for _ in range(3):
        state = back(state)
        assert state.replicas["a"].fence == "mixed"
        state = remove_replica(state, "a")


def test_a_restarted_server_is_a_true_newcomer() -> None:
    """Another boot brings the weights that it was started with."""
    state = back(away(replica("a", fence="mixed", session_open=True)), change(SEEN, instance="2"))
    assert state_of(state) is ReplicaState.READY
    assert not state.replicas["a"].session_open


def test_who_comes_back_by_restarting_and_leaves_again_whole_owes_nothing() -> None:
    """What the boot before it did is not held against it, nor against anybody else."""
    state = back(away(replica("a", fence="mixed")), change(SEEN, instance="2"))
    state = back(remove_replica(state, "a"), change(SEEN, instance="2"))
    assert state_of(state) is ReplicaState.READY
    assert state_of(back(state, change(SEEN, instance="3"), "b"), "b") is ReplicaState.READY


def test_a_replica_that_leaves_whole_comes_back_as_a_newcomer() -> None:
    """Nothing is kept of it, so that nothing can be held against it."""
    state = away(replica("a"))
    assert not state.departed
    assert state_of(back(state)) is ReplicaState.READY


# ---- the siblings of a fence ---------------------------------------------------------------------


def test_who_left_with_an_open_session_comes_back_fenced_and_has_it_closed_first() -> None:
    """A rollout would kill it, and what was sent meanwhile nobody can tell."""
    state = back(away(replica("a", session_open=True)))
    assert state_of(state) is ReplicaState.FENCED
    assert state.replicas["a"].session_open


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.STARTED, Phase.UPDATING, Phase.FINISHING])
def test_who_left_in_the_middle_of_a_round_comes_back_fenced(phase: Phase) -> None:
    """The reason names the round; a round that is over says nothing of what it did there."""
    state = remove_replica(fleet_in(phase, replica("a"), replica("b")), "a")
    gone = change(state, phase=Phase.IDLE, round=None, group=None)
    state = back(gone)
    assert state_of(state) is ReplicaState.FENCED
    assert "round 1" in (state.replicas["a"].fence or "")


def test_who_comes_back_within_its_round_is_paused_as_it_was() -> None:
    """A look inside a round does not tell; forgotten, it would never be resumed."""
    for phase in (Phase.PAUSING, Phase.STARTED):
        state = remove_replica(fleet_in(phase, replica("a"), replica("b")), "a")
        assert back(state).replicas["a"].paused


def test_who_was_resumed_meanwhile_is_not_called_paused() -> None:
    """What a look sees counts, where it can tell."""
    state = remove_replica(fleet_in(Phase.PAUSING, replica("a"), replica("b")), "a")
    state = change(state, phase=Phase.IDLE, round=None, group=None)
    assert state_of(back(state)) is ReplicaState.READY


def test_a_pause_outside_of_any_round_is_not_remembered() -> None:
    """It was the trainer's, whose resume has not reached who was away: nobody would resume it."""
    paused = replica("a", paused=True)
    state = remove_replica(fleet_in(Phase.INITIALIZED, paused, replica("b")), "a")
    assert not state.departed
    assert not back(state, change(SEEN, paused=None)).replicas["a"].paused


def test_of_two_names_of_one_boot_the_fenced_one_counts() -> None:
    """Whichever left first: the other name has only seen it asleep."""
    asleep = replica("a", sleep=Sleep(level=1))
    mixed = replica("b", instance=BOOT, fence="mixed")
    for first, second in (("a", "b"), ("b", "a")):
        state = remove_replica(remove_replica(fleet_of(asleep, mixed), first), second)
        assert back(state).replicas["a"].fence == "mixed"


def test_weights_that_sleep_has_discarded_are_still_discarded() -> None:
    """Level 2: also if it left before its answer was written down, and so without a fence."""
    state = back(away(replica("a", sleep=Sleep(level=2))), change(SEEN, paused=True))
    assert state_of(state) is ReplicaState.ASLEEP
    awake = back(away(replica("a", sleep=Sleep(level=2))))
    assert awake.replicas["a"].sleep is None
    assert state_of(awake) is ReplicaState.FENCED


def test_a_light_sleep_is_no_reason_for_a_fence() -> None:
    """It sleeps on, or it was woken up meanwhile: its weights are what they were."""
    light = replica("a", sleep=Sleep(level=1))
    assert state_of(back(away(light), change(SEEN, paused=True))) is ReplicaState.ASLEEP
    assert state_of(back(away(light))) is ReplicaState.READY


def test_who_left_wedged_and_fenced_is_fenced_when_it_answers_again() -> None:
    """Silent at first, as it was when it left."""
    state = away(replica("a", fence="mixed", wedged="silent inside update"))
    state = back(state, Observation(silent="its engine is silent"))
    assert state_of(state) is ReplicaState.WEDGED
    state = observe(state, "a", change(SEEN, unwedged=True), LATER)
    assert state_of(state) is ReplicaState.FENCED


def test_a_silent_member_of_a_broken_init_has_lost_no_weights() -> None:
    """An init loads none."""
    state = back(away(replica("a", wedged="silent inside init of round 1")))
    assert state_of(state) is ReplicaState.READY


# ---- who tells no instance -----------------------------------------------------------------------


@pytest.mark.parametrize("known", [None, "unknown since 2026-01-01", "pod uid@a"])
@pytest.mark.parametrize("seen", [SEEN, NAMELESS, BY_START])
def test_of_a_boot_that_nobody_knew_its_address_speaks(known: str | None, seen: Any) -> None:
    """It may be the same one, so it is taken for that; another address is not."""
    state = away(replica("a", instance=known, fence="mixed"))
    assert state_of(back(state, seen)) is ReplicaState.FENCED
    assert state_of(back(state, seen, "b"), "b") is ReplicaState.READY


def test_a_boot_that_tells_no_instance_any_more_is_taken_for_the_one_that_left() -> None:
    """What a server does not tell proves no restart."""
    assert state_of(back(away(replica("a", fence="mixed")), NAMELESS)) is ReplicaState.FENCED


@pytest.mark.parametrize("known", [BOOT, "started at 1.0"])
@pytest.mark.parametrize("seen", ["2", "started at 2.0"])
def test_only_what_is_told_in_the_same_words_proves_another_boot(known: str, seen: str) -> None:
    """A start time says nothing against an instance, nor the other way around."""
    state = away(replica("a", instance=known, fence="mixed"))
    is_told = known.startswith("started") == seen.startswith("started")
    expected = ReplicaState.READY if is_told else ReplicaState.FENCED
    assert state_of(back(state, change(SEEN, instance=seen))) is expected


@pytest.mark.parametrize("known", [None, BOOT, "started at 1.0"])
@pytest.mark.parametrize("seen", [SEEN, NAMELESS, BY_START])
@pytest.mark.parametrize("names", ["default", "6", "7"])
def test_an_address_alone_proves_no_committed_weights(known: Any, seen: Any, names: str) -> None:
    """Another boot may be there, with the weights it was started with: its label speaks for it."""
    was: dict[str, Any] = {"instance": known, "version": "7", "holds": 7, "sleep": Sleep(level=1)}
    state = back(
        away(replica("a", **was), commit_index=7, weight_version="7"), change(seen, version=names)
    )
    is_same = known is not None and known == seen.instance
    expected = ReplicaState.READY if is_same or names == "7" else ReplicaState.STALE
    assert state_of(state) is expected


def test_a_label_that_no_commit_gave_proves_nothing() -> None:
    """`default` is what every server says before its first version, and so after a restart."""
    was: dict[str, Any] = {
        "instance": None,
        "version": "default",
        "holds": 1,
        "sleep": Sleep(level=1),
    }
    for committed in (None, "default"):
        state = away(replica("a", **was), commit_index=1, weight_version=committed)
        assert state_of(back(state, NAMELESS)) is ReplicaState.STALE


def test_a_look_that_did_not_ask_decides_nothing() -> None:
    """One that was on its way when the replica was added again asked for the version alone."""
    state = back(away(replica("a", fence="mixed")), Observation(version="default"))
    assert state_of(state) is ReplicaState.JOINING
    assert state_of(observe(state, "a", change(SEEN, instance="2"), LATER)) is ReplicaState.READY


# ---- how long it is kept -------------------------------------------------------------------------


def test_a_full_update_heals_who_came_back() -> None:
    """As it heals everyone else."""
    state = back(away(replica("a", fence="mixed"), replica("b")))
    state = follow(state, PATHS[Phase.COMMITTED])
    assert state.replicas["a"].fence is None
    assert not state.departed


def test_after_a_commit_nothing_is_remembered_and_nobody_comes_back_ready() -> None:
    """Whoever joins then is stale until a full update, whatever it left with."""
    for committed in (
        follow(away(replica("a", fence="mixed"), replica("b")), PATHS[Phase.COMMITTED]),
        relabelled(away(replica("a", fence="mixed"), replica("b")), ["b"], "7"),
    ):
        assert not committed.departed
        assert state_of(back(committed)) is ReplicaState.STALE


def test_between_two_commits_it_comes_back_as_it_left() -> None:
    """Fenced, not only stale: the reason is the one that an operator looks for."""
    state = away(replica("a", fence="mixed", holds=3), commit_index=3, weight_version="3")
    assert state_of(back(state)) is ReplicaState.FENCED


def test_no_more_are_remembered_than_a_large_fleet_has() -> None:
    """The oldest go first: the state must not grow for ever."""
    state = fleet_of(*(replica(f"r{n}", fence="mixed") for n in range(KEPT + 1)))
    for n in range(KEPT + 1):
        state = remove_replica(state, f"r{n}")
    assert len(state.departed) == KEPT
    assert state_of(back(state, change(SEEN, instance="boot-1-of-r0"))) is ReplicaState.READY
    newest = back(state, change(SEEN, instance=f"boot-1-of-r{KEPT}"), "b")
    assert state_of(newest, "b") is ReplicaState.FENCED


def test_what_is_remembered_survives_the_store_and_older_states_can_be_read() -> None:
    """Gateways of both ages may share a store."""
    state = away(replica("a", fence="mixed", sleep=Sleep(level=2), session_open=True))
    raw = msgspec.json.encode(state)
    assert msgspec.json.decode(raw, type=FleetState) == state
    older = {k: v for k, v in msgspec.json.decode(raw).items() if k != "departed"}
    assert not msgspec.convert(older, FleetState).departed
