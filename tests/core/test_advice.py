"""What to do next: advice that can be followed, in the same words wherever it is given."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import WrongPhase
from fleet.facts.layout import lay_out
from fleet.facts.outcome import Outcome
from fleet.facts.replica import Replica, Topology
from fleet.facts.state import FleetState, Phase
from fleet.rules.advice import find_more, next_init, next_step
from fleet.rules.events import (
    Answered,
    CommitRequested,
    FinishFailed,
    InitFailed,
    PauseFailed,
    ResetRequested,
    StartFailed,
    StartRequested,
    UpdateFailed,
)
from fleet.rules.explain import after_failure, error_of, what_next
from fleet.rules.membership import candidates_for, common_backend, marked
from fleet.rules.rounds import IllegalTransition, advance
from tests.fleets import (
    FAILED,
    NOW,
    OK,
    UNREACHABLE,
    WEDGED,
    everyone,
    fleet_in,
    fleet_of,
    replica,
)

WAIT = "; rollouts wait meanwhile, each for at most FLEET_GATE__TIMEOUT_S"
OPEN_GATE = (
    "no replica is ready, so rollouts wait although the gate is open, each for at most "
    "FLEET_GATE__TIMEOUT_S"
)


def after(
    phase: Phase, kind: type[Answered], *replicas: Replica, **outcomes: Outcome
) -> FleetState:
    """Return the fleet after this phase has failed, and check that its error gives this advice."""
    state = fleet_in(phase, *replicas)
    event = kind(now=NOW, outcomes=everyone(state, OK, **outcomes))
    state, _ = advance(state, event)
    error = error_of(event, state)
    assert error is not None
    if state.phase is Phase.FAILED:
        assert error.hint == next_step(state)
        refusal = what_next(state, StartRequested, "start", NOW)
        assert refusal is not None
        assert refusal.hint == next_step(state)
    return state


def test_where_all_survivors_wait_in_the_collective_nobody_is_told_a_world_without_replicas() -> (
    None
):
    """The way out is told, then the number; world_size=1 would be no replica at all."""
    state = after(Phase.UPDATING, UpdateFailed, a=WEDGED, b=UNREACHABLE, c=WEDGED)
    assert next_step(state) == (
        "let the trainer leave its group (or stop it), so that a, c answer again; then re-init "
        "with world_size=6 and send a full update; restart who stays silent: no group can be "
        "formed without them (left out until they answer again: b; restart who does not)" + WAIT
    )
    answered = marked(state, ["a", "c"], wedged=None)
    assert next_step(answered) == (
        "re-init with world_size=6 and send a full update "
        "(left out until they answer again: b; restart who does not)" + WAIT
    )


def test_who_is_silent_with_everyone_else_is_waited_for_although_nobody_said_no() -> None:
    """A trainer that never entered: leaving them out would leave nobody."""
    state = after(Phase.INITIALIZING, InitFailed, a=WEDGED, b=WEDGED, c=WEDGED)
    assert next_step(state) == (
        "let the trainer leave its group (or stop it), so that a, b, c answer again; then re-init "
        "with world_size=8; restart who stays silent: no group can be formed without them; "
        + OPEN_GATE
    )


def test_where_nobody_can_join_at_all_the_reasons_are_told_and_no_number() -> None:
    """Everyone is gone: an init can only be refused."""
    state = after(Phase.UPDATING, UpdateFailed, a=UNREACHABLE, b=UNREACHABLE, c=UNREACHABLE)
    gone = "; ".join(f"{r}: connection refused" for r in "abc")
    assert next_step(state) == f"start or repair replicas ({gone}), then re-init" + WAIT
    assert next_init(fleet_of()) == "start or repair replicas (there are none), then init"


def test_after_a_failed_init_that_left_others_ready_rollouts_are_not_said_to_wait() -> None:
    """They go on at the committed version, so no full update is asked for either."""
    state = after(Phase.INITIALIZING, InitFailed, a=UNREACHABLE)
    assert next_step(state) == (
        "re-init with world_size=7 (left out until they answer again: a; restart who does not)"
    )


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        ((), "init with world_size=8 and send a full update; "),
        (
            ("a", "c"),
            (
                "init with world_size=3 and send a full update (left out until they answer again: "
                "a, c; let the trainer leave its group, then restart who does not); "
            ),
        ),
    ],
)
def test_after_a_reset_with_everyone_fenced_the_way_out_and_the_waiting_are_told(
    silent: tuple[str, ...], told: str
) -> None:
    """Nothing is open, nor is the gate closed, and yet nobody serves."""
    reset = ResetRequested(now=NOW, by="operator", silent=silent)
    state, _ = advance(fleet_in(Phase.UPDATING), reset)
    assert next_step(state) == told + OPEN_GATE


def test_a_failed_finish_names_the_commit_of_its_round_as_the_other_way_out() -> None:
    """Only where that would be taken: a full round, and somebody has finished it."""
    state = after(Phase.FINISHING, FinishFailed, a=FAILED)
    assert next_step(state) == (
        "re-init with world_size=8 and send a full update; or commit it for those that finished it "
        "(b, c): POST /fleet/rounds/1/commit" + WAIT
    )
    advance(state, CommitRequested(now=NOW, by="operator", round=1))
    nobody = after(Phase.FINISHING, FinishFailed, a=FAILED, b=FAILED, c=FAILED)
    assert "commit" not in (next_step(nobody) or "")
    partial = fleet_in(Phase.FINISHING)
    assert partial.round is not None
    partial = msgspec.structs.replace(
        partial, round=msgspec.structs.replace(partial.round, full=False)
    )
    partial, _ = advance(partial, FinishFailed(now=NOW, outcomes=everyone(partial, OK, a=FAILED)))
    assert "commit" not in (next_step(partial) or "")


def test_a_sparse_fleet_whose_weights_are_in_doubt_is_not_told_to_patch_them() -> None:
    """No sparse group takes them in, neither now nor after a reset."""
    sparse = [replica(name, backend="sparse_nccl") for name in "ab"]
    state = after(Phase.UPDATING, UpdateFailed, *sparse, a=FAILED)
    told = "restart a, b from a checkpoint of the committed weights, which patches need, then "
    assert next_step(state) == told + "re-init" + WAIT
    state, _ = advance(state, ResetRequested(now=NOW, by="operator"))
    assert next_step(state) == told + "init; " + OPEN_GATE


@pytest.mark.parametrize(
    ("phase", "kind"), [(Phase.PAUSING, PauseFailed), (Phase.STARTING, StartFailed)]
)
def test_a_start_that_lost_a_member_is_not_told_to_be_repeated_as_it_is(
    phase: Phase, kind: type[Answered]
) -> None:
    """It would be refused: the group is not whole any more."""
    state = fleet_in(phase)
    event = kind(now=NOW, outcomes=everyone(state, OK, a=UNREACHABLE))
    state, _ = advance(state, event)
    error = error_of(event, state)
    assert error is not None
    assert "re-init with world_size=7" in (error.hint or "")
    assert (error.hint or "").endswith(", then start again")


def test_a_start_that_was_taken_back_with_its_gateway_is_begun_again() -> None:
    """Its group is as it was; only an update or a finish makes the weights doubtful."""
    state = fleet_in(Phase.INITIALIZED)
    assert after_failure(state, "start") == "what had been started was taken back; start again"
    assert after_failure(fleet_in(Phase.FAILED), "update").startswith("re-init with world_size=8")


def test_a_healthy_fleet_needs_no_advice() -> None:
    """Neither before the first init, nor in a group, nor inside a round."""
    assert next_step(fleet_of(replica("a"))) is None
    for phase in set(Phase) - {Phase.FAILED, Phase.COMMITTED}:
        assert next_step(fleet_in(phase)) is None, phase


def test_a_changed_membership_is_told_as_the_next_init_and_inside_a_round_as_the_one_after() -> (
    None
):
    """A newcomer blocks nothing."""
    newcomer = replica("d", holds=None)
    idle = fleet_in(Phase.INITIALIZED).with_replicas([newcomer])
    assert next_step(idle) == "membership changed: re-init with world_size=9 and send a full update"
    busy = fleet_in(Phase.STARTED).with_replicas([newcomer])
    assert (next_step(busy) or "").startswith("membership changed: after this round, re-init with")


def test_a_fence_in_a_whole_group_needs_no_init() -> None:
    """A full update heals it."""
    assert next_step(marked(fleet_in(Phase.INITIALIZED), ["a"], fence="by hand")) == (
        "send a full update"
    )


def test_an_init_without_enough_replicas_is_told_how_the_silent_ones_come_back() -> None:
    """They are there, only caught in a collective."""
    assert find_more(fleet_of()) == "start or repair replicas, then re-init"
    assert find_more(fleet_of(replica("a", wedged="silent"), replica("b", lost="gone"))) == (
        "let the trainer leave its group (or stop it), so that a answers again, and restart who "
        "stays silent; then re-init"
    )


# -- every number can be asked for -----------------------------------------------------------------

facts = st.fixed_dictionaries(
    {
        "wedged": st.sampled_from([None, None, "silent"]),
        "lost": st.sampled_from([None, None, "gone"]),
        "fence": st.sampled_from([None, "mixed"]),
        "draining": st.booleans(),
        "topology": st.sampled_from([None, Topology(workers=1), Topology(workers=4)]),
    }
)
words = st.sampled_from([OK, FAILED, UNREACHABLE, WEDGED])


def _would_be(state: FleetState) -> int:
    """Return the world size that an init of this fleet would need, 0 if it has no replicas."""
    everyone, _ = candidates_for(state, None)
    taken, _ = candidates_for(state, common_backend(everyone))
    base = state.group.layout.base if state.group else 1
    return lay_out(taken, base=base).world_size if taken else 0


@given(
    st.dictionaries(st.sampled_from("abcd"), facts, max_size=4),
    st.sampled_from([Phase.IDLE, Phase.FAILED]),
    st.sampled_from(["nccl", "sparse_nccl"]),
    st.dictionaries(st.sampled_from("abcd"), words),
)
def test_every_world_size_that_is_told_is_one_that_an_init_would_take(
    known: dict[str, dict[str, object]],
    phase: Phase,
    backend: str,
    said: dict[str, Outcome],
) -> None:
    """Once those have answered that it tells to wait for, and as it stands for «without»."""
    state = fleet_in(phase, *(replica(name, backend=backend) for name in "abcd"))
    if state.round is not None:
        event = UpdateFailed(now=NOW, outcomes=everyone(state, OK, **said))
        before = fleet_in(Phase.UPDATING, *(replica(name, backend=backend) for name in "abcd"))
        state, _ = advance(before, event)
    for name, changes in known.items():
        state = marked(state, [name], **changes)
    told = next_init(state)
    sizes = [int(size) for size in re.findall(r"init with world_size=(\d+)", told)]
    freed = re.search(r"so that ([a-d, ]+?) answers? again", told)
    waiting = freed.group(1).split(", ") if freed else []
    assert len(sizes) <= (2 if waiting else 1)
    expected = [_would_be(marked(state, waiting, wedged=None))]
    expected += [_would_be(state)] if waiting else []
    assert sizes == [size for size in expected if size]
    assert sizes or "restart" in told or "repair" in told


# -- a commit by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(set(Phase) - {Phase.FAILED}))
def test_a_commit_by_hand_that_cannot_be_is_told_when_it_can(phase: Phase) -> None:
    """Whatever the phase: the second time, too late, or for a round that did not fail."""
    refusal = what_next(fleet_in(phase), CommitRequested, "commit of round 7", NOW)
    assert type(refusal) is WrongPhase
    assert refusal.message.startswith(f"commit of round 7 does not follow in phase {phase}")
    assert "only a round whose finish failed" in (refusal.hint or "")
    assert "GET /fleet/rounds" in (refusal.hint or "")


@pytest.mark.parametrize("asked", [1, 99])
def test_a_commit_of_a_round_that_cannot_be_committed_names_the_round_that_was_asked_for(
    asked: int,
) -> None:
    """And says what the current one lacks."""
    with pytest.raises(IllegalTransition) as caught:
        advance(fleet_in(Phase.FAILED), CommitRequested(now=NOW, by="operator", round=asked))
    assert caught.value.message.startswith(f"round {asked} cannot be committed: only the current")
    assert "(it is 1, not full, finished by none)" in caught.value.message
    assert caught.value.hint
