"""Which state follows from which facts, and what the fleet as a whole makes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleet.facts.replica import ReplicaState, Sleep, state_of
from fleet.facts.state import COMMITS_KEPT, FleetState, Phase, TrainerPause
from tests.fleets import NOW, OK, change, everyone, fleet_in, fleet_of, replica

GRAVEST_FIRST: list[tuple[dict[str, Any], str]] = [
    ({"lost": "refused"}, "gone"),
    ({"wedged": "silent"}, "wedged"),
    ({"refusal": "lacks it"}, "fenced"),
    ({"topology": None}, "joining"),
    ({"draining": True}, "draining"),
    ({}, "updating"),
    ({"sleep": Sleep(level=1)}, "asleep"),
    ({"fence": "mixed"}, "fenced"),
    ({"session_open": True}, "fenced"),
    ({"holds": None}, "stale"),
    ({"paused": True}, "paused"),
]


@pytest.mark.parametrize("first", range(len(GRAVEST_FIRST)))
def test_the_gravest_fact_decides_the_state(first: int) -> None:
    """Every fact below it may be true as well."""
    facts: dict[str, Any] = {}
    for fact, _ in reversed(GRAVEST_FIRST[first:]):
        facts |= fact
    updating = first <= [name for _, name in GRAVEST_FIRST].index("updating")
    found, why = state_of(
        replica("a", **facts), commit_index=0, updating=updating, fleet_paused=True
    )
    assert found == GRAVEST_FIRST[first][1]
    assert why


@pytest.mark.parametrize(
    ("holds", "commit_index", "expected"),
    [(0, 0, "ready"), (3, 3, "ready"), (2, 3, "stale"), (4, 3, "stale"), (None, 0, "stale")],
)
def test_only_who_holds_the_committed_version_is_ready(
    holds: int | None, commit_index: int, expected: str
) -> None:
    """Neither an older nor a newer one will do."""
    found, _ = state_of(
        replica("a", holds=holds), commit_index=commit_index, updating=False, fleet_paused=False
    )
    assert found == expected


@pytest.mark.parametrize(
    ("fleet_paused", "why"),
    [(True, "the fleet is paused"), (False, "its server is, though the fleet is not")],
)
def test_a_paused_replica_says_whether_the_whole_fleet_is(fleet_paused: bool, why: str) -> None:
    """«paused: paused» would tell nothing."""
    known = replica("a", paused=True)
    found = state_of(known, commit_index=0, updating=False, fleet_paused=fleet_paused)
    assert found == (ReplicaState.PAUSED, why)


def test_a_half_woken_replica_is_asleep_and_says_what_is_awake() -> None:
    """Case 21: weights alone are not enough."""
    found, why = state_of(
        replica("a", sleep=Sleep(level=1, awake=("weights",))),
        commit_index=0,
        updating=False,
        fleet_paused=False,
    )
    assert (found, why) == (ReplicaState.ASLEEP, "sleep level 1, awake: weights")


@pytest.mark.parametrize(
    ("level", "awake", "whole"),
    [
        (1, (), False),
        (1, ("weights",), False),
        (1, ("kv_cache",), False),
        (1, ("kv_cache", "weights"), True),
        (2, ("kv_cache", "weights"), True),
        (0, (), True),
    ],
)
def test_a_sleeper_is_whole_when_weights_and_cache_are_awake(
    level: int, awake: tuple[str, ...], whole: bool
) -> None:
    """Level 0 only pauses the scheduler."""
    assert Sleep(level=level, awake=awake).whole is whole


# phase -> whether rollouts wait. Written by hand.
WAITS = {
    "idle": False,
    "initializing": False,
    "initialized": False,
    "pausing": True,
    "starting": True,
    "started": True,
    "updating": True,
    "finishing": True,
    "committed": True,
    "undoing": True,
    "failed": True,
}


@pytest.mark.parametrize("phase", list(Phase))
def test_rollouts_wait_from_the_closing_of_the_gate_to_its_opening(phase: Phase) -> None:
    """And after a failed update until the next init; the table is written by hand."""
    assert fleet_in(phase).fleet_paused is WAITS[phase.value]
    assert (fleet_in(phase).ready() == []) is WAITS[phase.value]


def test_the_trainers_pause_makes_everyone_wait() -> None:
    """Whatever the phase."""
    pause = TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW)
    state = fleet_of(replica("a"), pause=pause)
    assert state.fleet_paused
    assert state.ready() == []


def test_order_comes_from_commits_and_the_newest_counts() -> None:
    """The string says nothing: «10» may come before «9»."""
    state = fleet_of()
    for version in ("10", "9", "10", None):
        state = state.with_commit(version)
    assert (state.order_of("9"), state.order_of("10"), state.order_of("default")) == (2, 3, 4)
    assert state.order_of("11") is None


def test_only_the_last_commits_stay_known() -> None:
    """The state must not grow for ever."""
    state = fleet_of()
    for number in range(COMMITS_KEPT + 5):
        state = state.with_commit(f"v{number}")
    assert len(state.commits) == COMMITS_KEPT
    assert state.commit_index == COMMITS_KEPT + 5
    assert state.order_of("v4") is None
    assert state.order_of("v5") == 6


@pytest.mark.parametrize("phase", list(Phase))
def test_a_state_survives_the_store_whole(phase: Phase) -> None:
    """What another gateway reads is what this one wrote, in every phase."""
    state = fleet_in(
        phase,
        replica("a", sleep=Sleep(level=2, awake=("weights",)), fence="mixed"),
        replica("b", 2, draining=False, version="7", paused=True),
    )
    pause = TrainerPause(mode="wait", clear_cache=False, by="t", since=NOW)
    state = change(state, pause=pause, commits=("1", "2"), commit_index=2, fullest="names:1:1")
    again = msgspec.json.decode(msgspec.json.encode(state), type=FleetState)
    assert again == state
    assert list(again.replicas) == list(state.replicas)


def test_the_calls_of_one_phase_add_up_in_one_record() -> None:
    """Two chunks are one phase: two calls, both times, the last outcome."""
    from fleet.rules.events import UpdateArrived, UpdateRequested
    from fleet.rules.rounds import advance

    state = fleet_in(Phase.UPDATING)
    outcomes = everyone(state)
    for _ in range(2):
        event = UpdateArrived(now=NOW, outcomes=outcomes, elapsed_s=2.0)
        state, _ = advance(state, event)
        state, _ = advance(state, UpdateRequested(now=NOW))
    assert state.round is not None
    record = next(r for r in state.round.records if r.phase == "updating")
    assert (record.calls, record.elapsed_s, record.started_at) == (2, 4.0, NOW - 2)
    assert record.replicas["a"].elapsed_s == 2 * OK.elapsed_s
    assert state.round.updates == 2


def test_facts_that_change_nothing_leave_the_very_same_state() -> None:
    """The ledger writes nothing then; a late answer must not cost a write in mid-round."""
    state = fleet_in(Phase.STARTED)
    assert state.with_replicas(state.replicas.values()) is state
    assert state.with_replicas([]) is state
    one = next(iter(state.replicas.values()))
    assert state.with_replicas([change(one, draining=True)]).replicas[one.id].draining
