"""The one message a trainer reads: who, what of the rest, what next. And the barrier behind it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import (
    DeadlinePassed,
    FleetError,
    MemberFailed,
    MembershipChanged,
    PauseNotReached,
    RoundOpen,
    WrongPhase,
)
from fleet.facts.calls import CallId, Holder
from fleet.facts.outcome import Outcome, Result, describe_failures, skipped
from fleet.facts.replica import Topology
from fleet.facts.state import FleetState, Phase
from fleet.rules.barrier import Barrier, arrivals, only_deadlines_passed
from fleet.rules.events import (
    Answered,
    Event,
    FinishFailed,
    FinishRequested,
    InitArrived,
    InitFailed,
    InitRequested,
    PauseFailed,
    ResetRequested,
    Resumed,
    ShutdownRequested,
    StartFailed,
    StartRequested,
    UpdateFailed,
    UpdateRequested,
)
from fleet.rules.explain import count_states, error_of, what_next
from fleet.rules.membership import marked
from fleet.rules.rounds import TRANSITIONS, advance
from tests.fleets import (
    FAILED,
    NOW,
    OK,
    TIMEOUT,
    UNREACHABLE,
    WEDGED,
    everyone,
    fleet_in,
    fleet_of,
    replica,
)


def failure(phase: Phase, kind: type[Answered], **outcomes: Outcome) -> FleetError:
    """Return the error that this failed phase means for the trainer."""
    state = fleet_in(phase)
    event = kind(now=NOW, outcomes=everyone(state, OK, **outcomes))
    state, _ = advance(state, event)
    error = error_of(event, state)
    assert error is not None
    return error


@pytest.mark.parametrize(
    ("phase", "kind", "word", "next_step"),
    [
        (Phase.INITIALIZING, InitFailed, "init", "re-init with world_size=8"),
        (Phase.STARTING, StartFailed, "start", "start again, or re-init if that fails again"),
        (Phase.UPDATING, UpdateFailed, "update", "re-init with world_size=8 and send a full"),
        (Phase.FINISHING, FinishFailed, "finish", "re-init with world_size=8 and send a full"),
    ],
)
def test_a_failed_phase_names_who_what_of_the_rest_and_what_next(
    phase: Phase, kind: type[Answered], word: str, next_step: str
) -> None:
    """One message and one hint tell the whole story; every replica's outcome is attached."""
    error = failure(phase, kind, b=FAILED)
    assert type(error) is MemberFailed
    assert error.message.startswith(f"{word} failed on b: failed (engine said no). Fleet now: ")
    assert error.message.endswith("; weight_version default.")
    assert next_step in (error.hint or "")
    assert set(error.outcomes) == {"a", "b", "c"}


def test_the_state_of_the_rest_is_counted_in_words() -> None:
    """After a failed update everyone is fenced, the silent one wedged."""
    error = failure(Phase.UPDATING, UpdateFailed, a=WEDGED, b=FAILED)
    assert "Fleet now: 2 fenced, 1 wedged" in error.message
    assert error.hint == (
        "let the trainer leave its group (or stop it) and POST /shutdown_weight_transfer_engine, "
        "so that a answers again; then re-init with world_size=8 and send a full update; restart "
        "who stays silent, or re-init with world_size=7 without it; rollouts wait meanwhile, each "
        "for at most FLEET_GATE__TIMEOUT_S"
    )


def test_who_waited_for_the_culprit_is_not_blamed() -> None:
    """The one that failed comes first, and is the one to restart if it fails there again."""
    error = failure(Phase.INITIALIZING, InitFailed, a=WEDGED, b=FAILED)
    assert error.message.startswith("init failed on b: failed (engine said no); a: wedged")
    assert (error.hint or "").endswith("; restart b if the init fails there again")
    assert "left out" not in (error.hint or "")


def test_who_is_silent_at_the_deadline_is_left_out_until_it_answers() -> None:
    """Nobody failed, so the silent ones are what is wrong."""
    error = failure(Phase.UPDATING, UpdateFailed, a=WEDGED)
    assert (error.hint or "").startswith(
        "re-init with world_size=7 and send a full update (left out until they answer again: a; "
        "let the trainer leave its group, then restart who does not)"
    )


@pytest.mark.parametrize("silence", [WEDGED, TIMEOUT])
def test_silence_alone_is_a_deadline(silence: Outcome) -> None:
    """504, not 424: nobody said no."""
    assert type(failure(Phase.UPDATING, UpdateFailed, b=silence)) is DeadlinePassed


@pytest.mark.parametrize("no", [FAILED, UNREACHABLE])
def test_one_clear_no_among_silence_is_a_failure(no: Outcome) -> None:
    """Its siblings are silent because of it."""
    assert type(failure(Phase.UPDATING, UpdateFailed, a=WEDGED, b=no)) is MemberFailed


@pytest.mark.parametrize("outcome", [FAILED, TIMEOUT])
def test_a_pause_that_was_not_reached_may_be_retried(outcome: Outcome) -> None:
    """Nothing was started, so the caller may simply come again."""
    error = failure(Phase.PAUSING, PauseFailed, b=outcome)
    assert type(error) is PauseNotReached
    assert error.hint == "what had been paused was resumed; start again"


@pytest.mark.parametrize("kind", [InitArrived, Resumed])
def test_what_did_not_fail_is_no_error(kind: type[Answered]) -> None:
    """Also a resume that a member refused: the version is committed all the same."""
    assert error_of(kind(now=NOW, outcomes={"a": FAILED}), fleet_of()) is None


def test_a_failure_inside_a_deployment_is_told_although_the_rest_cannot_be_laid_out() -> None:
    """The survivor of half a deployment must not turn the failure into a layout error."""
    places = [
        Topology(workers=8, deployment="d:1", counts_deployment=True, servers=2, index=i)
        for i in (0, 1)
    ]
    servers = [replica("a", topology=places[0]), replica("b", topology=places[1])]
    state = fleet_in(Phase.UPDATING, *servers)
    event = UpdateFailed(now=NOW, outcomes={"a": FAILED, "b": UNREACHABLE})
    state, _ = advance(state, event)
    error = error_of(event, state)
    assert type(error) is MemberFailed
    assert set(error.outcomes) == {"a", "b"}
    assert "deployment d:1 has 2 servers, but 1 can join (a)" in (error.hint or "")


# -- what would follow -----------------------------------------------------------------------------

TRAINER = (InitRequested, StartRequested, UpdateRequested, FinishRequested, ShutdownRequested)


@pytest.mark.parametrize("event", [*TRAINER, ResetRequested])
@pytest.mark.parametrize("phase", list(Phase))
def test_every_call_that_does_not_follow_is_told_what_does(
    phase: Phase, event: type[Event]
) -> None:
    """And a call that may follow gets no error."""
    refusal = what_next(fleet_in(phase), event, "call", NOW)
    if event in TRANSITIONS[phase]:
        assert refusal is None
        return
    assert refusal is not None
    assert f"call does not follow in phase {phase}" in refusal.message
    assert refusal.hint


@pytest.mark.parametrize(
    ("phase", "event", "kind", "hint"),
    [
        (Phase.IDLE, StartRequested, WrongPhase, "POST /init_weight_transfer_engine first"),
        (Phase.IDLE, FinishRequested, WrongPhase, "POST /init_weight_transfer_engine first"),
        (
            Phase.INITIALIZED,
            UpdateRequested,
            WrongPhase,
            "POST /start_weight_update first",
        ),
        (Phase.INITIALIZED, FinishRequested, WrongPhase, "the last one may be over"),
        (Phase.INITIALIZING, InitRequested, RoundOpen, "wait for the init that is on its way, or"),
        (Phase.INITIALIZING, UpdateRequested, WrongPhase, "wait for the init that is on its way"),
        (Phase.PAUSING, UpdateRequested, WrongPhase, "wait for the start that is on its way"),
        (Phase.PAUSING, InitRequested, RoundOpen, "wait for its finish, or POST /fleet/reset"),
        (Phase.UNDOING, FinishRequested, WrongPhase, "is being taken back, then start again"),
        (Phase.STARTED, StartRequested, RoundOpen, "if it is yours, POST /update_weights, then"),
        (Phase.STARTED, InitRequested, RoundOpen, "POST /fleet/reset to abandon it"),
        (Phase.UPDATING, ShutdownRequested, RoundOpen, "POST /fleet/reset to abandon it"),
        (Phase.UPDATING, UpdateRequested, WrongPhase, "wait for the update that is on its way"),
        (Phase.COMMITTED, UpdateRequested, WrongPhase, "wait for the finish that is on its way"),
        (Phase.COMMITTED, InitRequested, RoundOpen, "wait for the finish that is on its way"),
        (Phase.FAILED, StartRequested, MembershipChanged, "re-init with world_size=8"),
        (Phase.FAILED, FinishRequested, MembershipChanged, "re-init with world_size=8"),
    ],
)
def test_a_refusal_has_the_kind_and_the_next_step_of_its_moment(
    phase: Phase, event: type[Event], kind: type[FleetError], hint: str
) -> None:
    """Cases 8 and 9: who holds the round, or that there is nothing to finish."""
    refusal = what_next(fleet_in(phase), event, "call", NOW)
    assert refusal is not None
    assert type(refusal) is kind
    assert hint in (refusal.hint or "")


def test_a_second_trainer_reads_who_holds_the_round_and_how_long_ago_it_was_opened() -> None:
    """Case 8: in the words of a reader, not in seconds since the epoch."""
    refusal = what_next(fleet_in(Phase.STARTED), StartRequested, "start", NOW + 4.24)
    assert refusal is not None
    assert "opened by trainer-2 4.2 s ago and is still open" in refusal.message


def test_a_call_that_is_on_its_way_is_told_with_its_age() -> None:
    """Which gateway carries it, and since when: a reader sees whether it hangs."""
    call = CallId(by="trainer-2")
    holder = Holder(gateway="g1", token="t", what="update", call=call, since=NOW + 60)
    state = msgspec.structs.replace(fleet_in(Phase.UPDATING), holder=holder)
    refusal = what_next(state, UpdateRequested, "update", NOW + 3_720)
    assert refusal is not None
    assert "opened by trainer-2 1 h 2 min ago" in refusal.message
    assert "its update is on its way at gateway g1, begun 1 h 1 min ago" in refusal.message


def test_after_a_failure_the_silent_ones_are_named_in_the_hint() -> None:
    """A re-init without them works; what brings them back is told."""
    state = marked(fleet_in(Phase.FAILED), ["b"], wedged="silent")
    refusal = what_next(state, StartRequested, "start", NOW)
    assert refusal is not None
    assert "(left out until they answer again: b; let the trainer" in (refusal.hint or "")


def test_an_empty_fleet_is_counted_as_no_replicas() -> None:
    """Not as an empty string."""
    assert count_states(FleetState(name="t", generation=1)) == "no replicas"


# -- barrier and outcomes --------------------------------------------------------------------------

names = st.sampled_from("abcdef")
results = st.sampled_from(list(Result))


@given(st.frozensets(names), st.dictionaries(names, results))
def test_a_barrier_is_complete_only_when_every_member_is_ok(
    members: frozenset[str], said: dict[str, Result]
) -> None:
    """Strangers do not count, and nobody awaited is nobody arrived."""
    outcomes = {r: Outcome(outcome=result) for r, result in said.items()}
    barrier = arrivals(members, outcomes)
    ok = {r for r, result in said.items() if result is Result.OK}
    assert barrier.missing == members - ok
    assert barrier.complete == (bool(members) and members <= ok)


def test_arriving_twice_counts_once_and_arrivals_add_up() -> None:
    """A barrier only fills."""
    barrier = Barrier(frozenset("ab")).arrive(["a", "z"]).arrive(["a"])
    assert barrier.arrived == {"a"}
    assert not barrier.complete
    assert barrier.arrive(["b"]).complete


@given(st.dictionaries(names, results))
def test_only_deadlines_passed_means_silence_and_nothing_else(said: dict[str, Result]) -> None:
    """Who arrived or was not asked does not matter."""
    bad = set(said.values()) - {Result.OK, Result.SKIPPED}
    outcomes = {r: Outcome(outcome=result) for r, result in said.items()}
    expected = bool(bad) and bad <= {Result.TIMEOUT, Result.WEDGED}
    assert only_deadlines_passed(outcomes) is expected


@pytest.mark.parametrize("result", list(Result))
def test_an_outcome_is_good_bad_or_not_asked(result: Result) -> None:
    """Exactly one word is good, and skipped is not bad."""
    outcome = Outcome(outcome=result)
    assert outcome.ok is (result.value == "ok")
    assert outcome.bad is (result.value not in ("ok", "skipped"))


def test_an_outcome_shows_four_fields_and_never_the_answer() -> None:
    """The shape is fixed by the interface."""
    outcome = Outcome(
        outcome=Result.FAILED, status=500, detail="no", elapsed_s=0.12345678, answer={"secret": 1}
    )
    told: dict[str, Any] = {
        "outcome": "failed",
        "status": 500,
        "detail": "no",
        "elapsed_s": 0.123457,
    }
    assert outcome.public() == told


def test_failures_are_told_in_one_line_without_those_that_did_well() -> None:
    """Replica, word, detail."""
    outcomes = {"a": OK, "b": FAILED, "c": skipped("draining"), "d": Outcome(outcome=Result.WEDGED)}
    assert describe_failures(outcomes) == "b: failed (engine said no); d: wedged"
