"""What single steps of a weight update ask for and write down, beyond what the table says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import Sleep
from fleet.facts.state import FleetState, Phase, RoundResult, TrainerPause
from fleet.rules.events import (
    Action,
    Answered,
    Archive,
    CloseSessions,
    CommitRequested,
    FinishArrived,
    FinishFailed,
    FinishRequested,
    InitFailed,
    InitRequested,
    PauseArrived,
    PauseFailed,
    ResetRequested,
    Resumed,
    SendFinish,
    SendPause,
    SendResume,
    SendShutdown,
    SendStart,
    SendUndo,
    ShutdownRequested,
    StartArrived,
    StartFailed,
    StartRequested,
    Undone,
    Unpause,
    UpdateFailed,
    UpdateRequested,
)
from fleet.rules.membership import Observation, marked, observe
from fleet.rules.rounds import IllegalTransition, advance
from tests.fleets import (
    FAILED,
    NOW,
    OK,
    TIMEOUT,
    UNREACHABLE,
    WEDGED,
    change,
    everyone,
    fleet_in,
    group_for,
    replica,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

PAUSE = TrainerPause(mode="keep", clear_cache=True, by="trainer-1", since=NOW)


def only(actions: Iterable[Action], kind: type[Any]) -> Any:
    """Return the one action of this kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def answered(
    state: FleetState, kind: type[Answered], outcome: Outcome = OK, **others: Outcome
) -> tuple[FleetState, tuple[Action, ...]]:
    """Advance by one answer of every member."""
    return advance(state, kind(now=NOW, outcomes=everyone(state, outcome, **others)))


def fences(state: FleetState) -> set[str]:
    """Return who is fenced."""
    return {r.id for r in state.replicas.values() if r.fence}


def test_a_failed_update_fences_every_member_and_resumes_nobody() -> None:
    """One failure mixes the weights of all: siblings may have loaded what it has not."""
    state, actions = answered(fleet_in(Phase.UPDATING), UpdateFailed, b=FAILED)
    assert fences(state) == {"a", "b", "c"}
    assert not [a for a in actions if isinstance(a, SendResume | Unpause)]
    assert state.ready() == []
    assert "b: failed (engine said no)" in (state.replicas["a"].fence or "")


def test_who_is_silent_in_a_failed_update_is_wedged_and_the_others_sessions_are_closed() -> None:
    """A bare finish goes only to those that can answer it."""
    state, actions = answered(fleet_in(Phase.UPDATING), UpdateFailed, a=WEDGED, b=FAILED)
    assert state.replicas["a"].wedged == "silent inside update of round 1"
    assert only(actions, CloseSessions).targets == ("b", "c")
    assert not only(actions, CloseSessions).wait


def test_a_failed_init_wedges_the_silent_and_fences_nobody() -> None:
    """No weights have moved yet, so who answered still serves."""
    state, _ = answered(fleet_in(Phase.INITIALIZING), InitFailed, a=WEDGED, b=FAILED)
    assert state.replicas["a"].wedged == "silent inside init of round 1"
    assert fences(state) == set()
    assert {r.id for r in state.ready()} == {"b", "c"}


def test_a_failed_finish_commits_nothing_and_fences_also_who_completed() -> None:
    """Who completed holds a version that nobody committed; the record keeps which it is."""
    state, actions = answered(fleet_in(Phase.FINISHING), FinishFailed, b=FAILED)
    assert (state.commit_index, state.weight_version) == (0, None)
    assert fences(state) == {"a", "b", "c"}
    assert state.replicas["a"].version == "1"
    assert state.replicas["b"].version is None
    assert only(actions, CloseSessions).targets == ("b",)


def test_a_commit_of_a_full_round_makes_every_member_current_and_lifts_fences() -> None:
    """The fleet's version, every member's and the list of commits move in the same step."""
    state = fleet_in(Phase.FINISHING)
    state = marked(state, ["b"], fence="mixed before", holds=None)
    state, _ = answered(state, FinishArrived)
    assert (state.commit_index, state.weight_version, state.commits) == (1, "1", ("1",))
    assert {(r.holds, r.version, r.fence) for r in state.replicas.values()} == {(1, "1", None)}


def test_a_commit_of_a_part_leaves_fenced_and_stale_members_out() -> None:
    """A partial update fits only the weights that it was made for."""
    state = marked(fleet_in(Phase.STARTED), ["b"], fence="mixed before")
    state = marked(state, ["c"], holds=None)
    state, _ = advance(state, FinishRequested(now=NOW, full=False))
    state, _ = answered(state, FinishArrived)
    held = {r.id: r.holds for r in state.replicas.values()}
    assert held == {"a": 1, "b": 0, "c": None}
    assert fences(state) == {"b"}


@pytest.mark.parametrize(
    ("counter", "asked", "auto", "committed", "next_counter"),
    [
        (4, None, True, "5", 5),
        (4, "100", True, "100", 100),
        (4, "2", True, "2", 4),
        (4, "step-9", True, "step-9", 4),
        (4, "٣", True, "٣", 4),
    ],
)
def test_the_version_is_the_trainers_or_the_next_number(
    counter: int, asked: str | None, auto: bool, committed: str, next_counter: int
) -> None:
    """A higher numeric label moves the counter, any other leaves it alone."""
    state = change(fleet_in(Phase.STARTED), counter=counter)
    event = FinishRequested(now=NOW, full=True, version=asked, auto_version=auto)
    state, actions = advance(state, event)
    assert only(actions, SendFinish).version == committed
    state, _ = answered(state, FinishArrived)
    assert (state.weight_version, state.counter) == (committed, next_counter)


def test_without_automatic_versions_a_commit_keeps_the_label() -> None:
    """FLEET_AUTO_VERSION=false: weights move, the label does not, the order does."""
    state = change(fleet_in(Phase.STARTED), weight_version="v1")
    state, actions = advance(state, FinishRequested(now=NOW, full=True, auto_version=False))
    assert only(actions, SendFinish).version is None
    state, _ = answered(state, FinishArrived)
    assert (state.weight_version, state.commit_index) == ("v1", 1)


def test_a_draft_round_changes_no_version_and_lifts_no_fence() -> None:
    """The draft model is not the model that is served."""
    state = marked(fleet_in(Phase.INITIALIZED), ["b"], fence="mixed before")
    state, _ = advance(state, StartRequested(now=NOW, by="t", draft=True))
    state, actions = answered(state, PauseArrived)
    assert only(actions, SendStart).draft
    state, _ = answered(state, StartArrived)
    state, actions = advance(state, FinishRequested(now=NOW, full=True))
    assert only(actions, SendFinish).version is None
    state, _ = answered(state, FinishArrived)
    state, actions = answered(state, Resumed)
    assert (state.commit_index, state.weight_version) == (0, None)
    assert fences(state) == {"b"}
    assert not only(actions, Archive).round.full


def test_start_pauses_everyone_awake_so_that_no_cache_keeps_old_kv() -> None:
    """Who is still paused from a failed round may have kept its cache; a sleeper has none."""
    state = marked(fleet_in(Phase.INITIALIZED), ["a"], paused=True)
    state = marked(state, ["b"], sleep=Sleep(level=1))
    _, actions = advance(state, StartRequested(now=NOW, by="t"))
    assert only(actions, SendPause).targets == ("a", "c")


def test_start_leaves_those_alone_whom_the_trainer_has_paused() -> None:
    """A second pause would be a second cache reset, which the trainer may not have wanted."""
    state = marked(fleet_in(Phase.INITIALIZED), ["a", "b"], paused=True)
    state = msgspec.structs.replace(state, pause=PAUSE)
    _, actions = advance(state, StartRequested(now=NOW, by="t"))
    assert only(actions, SendPause).targets == ("c",)


def test_without_auto_pause_nobody_is_paused() -> None:
    """FLEET_PAUSE_ON_UPDATE=off only waits for rollouts to leave."""
    state = fleet_in(Phase.INITIALIZED)
    _, actions = advance(state, StartRequested(now=NOW, by="t", auto_pause=False))
    assert only(actions, SendPause).targets == ()


def test_a_session_that_was_left_open_is_closed_before_the_next_start_and_init() -> None:
    """A second start while a session is open is refused by the server."""
    state = marked(fleet_in(Phase.INITIALIZED), ["b"], session_open=True)
    for event in (
        StartRequested(now=NOW, by="t"),
        InitRequested(now=NOW, group=group_for(state)),
    ):
        _, actions = advance(state, event)
        first = actions[1] if isinstance(actions[0], Archive) else actions[0]
        assert isinstance(first, CloseSessions)
        assert (first.targets, first.wait) == (("b",), True)


def test_a_pause_that_half_failed_resumes_everyone_who_may_be_paused() -> None:
    """Also who refused, answered too late, or whose answer was lost on the way."""
    state, actions = answered(
        fleet_in(Phase.PAUSING), PauseFailed, a=TIMEOUT, b=FAILED, c=UNREACHABLE
    )
    assert only(actions, SendUndo).resume == ("a", "b", "c")
    assert only(actions, SendUndo).targets == ()
    state, _ = advance(state, Undone(now=NOW, outcomes={"a": OK, "b": OK, "c": UNREACHABLE}))
    assert {r.id: r.paused for r in state.replicas.values()} == {"a": False, "b": False, "c": True}
    assert fences(state) == set()


@pytest.mark.parametrize("fact", [{"fence": "mixed"}, {"sleep": Sleep(level=1)}])
@pytest.mark.parametrize("kind", [PauseFailed, StartFailed])
def test_undoing_resumes_no_fenced_and_no_sleeping_member(
    fact: dict[str, Any], kind: type[Answered]
) -> None:
    """Frozen requests of a fenced replica must not go on over mixed weights."""
    state = fleet_in(Phase.PAUSING if kind is PauseFailed else Phase.STARTING)
    state, actions = answered(marked(state, ["b"], **fact), kind, TIMEOUT)
    assert only(actions, SendUndo).resume == ("a", "c")
    state, _ = advance(state, Undone(now=NOW, outcomes=everyone(state), closed=("a", "b", "c")))
    assert {r.id: r.paused for r in state.replicas.values()} == {"a": False, "b": True, "c": False}


def test_a_refused_start_is_undone_on_everyone_who_may_have_started() -> None:
    """A lost answer is no refusal, and some workers of who refused may have started."""
    state, actions = answered(
        fleet_in(Phase.STARTING), StartFailed, a=FAILED, b=TIMEOUT, c=UNREACHABLE
    )
    assert only(actions, SendUndo).targets == ("a", "b", "c")
    outcomes = {"a": OK, "b": OK, "c": UNREACHABLE}
    state, _ = advance(state, Undone(now=NOW, outcomes=outcomes, closed=("a", "b")))
    assert fences(state) == {"c"}
    state = observe(state, "c", Observation(topology=state.replicas["c"].topology), NOW)
    assert {r.id for r in state.ready()} == {"a", "b"}


def test_an_undone_round_is_kept_and_the_next_start_opens_another() -> None:
    """Its record says that it was taken back."""
    state, _ = answered(fleet_in(Phase.STARTING), StartFailed, b=FAILED)
    state, actions = answered(state, Undone)
    assert only(actions, Archive).round.result is RoundResult.UNDONE
    state, _ = advance(state, StartRequested(now=NOW, by="trainer-9"))
    assert state.round is not None
    assert (state.round.id, state.round.opened_by) == (2, "trainer-9")


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.UPDATING, Phase.FINISHING])
def test_a_reset_inside_a_session_fences_the_members_and_resumes_nobody(phase: Phase) -> None:
    """Nobody knows what they hold; they stay paused."""
    state, actions = advance(fleet_in(phase), ResetRequested(now=NOW, by="operator"))
    assert fences(state) == {"a", "b", "c"}
    assert only(actions, Unpause).targets == ()
    assert only(actions, Archive).round.result is RoundResult.ABANDONED
    assert (state.group, state.round) == (None, None)


def test_a_reset_while_the_pause_is_on_its_way_resumes_the_members() -> None:
    """Whoever sent the pause may be dead; nobody else would ever resume them."""
    state, actions = advance(fleet_in(Phase.PAUSING), ResetRequested(now=NOW, by="operator"))
    assert only(actions, Unpause).targets == ("a", "b", "c")
    assert state.ready() == []


def test_a_reset_while_a_start_is_being_undone_leaves_nobody_frozen() -> None:
    """What the undoing had not resumed yet, the reset resumes."""
    state, _ = answered(fleet_in(Phase.PAUSING), PauseFailed, TIMEOUT)
    _, actions = advance(state, ResetRequested(now=NOW, by="operator"))
    assert only(actions, Unpause).targets == ("a", "b", "c")


def test_a_reset_wedges_who_is_still_inside_a_collective() -> None:
    """Their calls cannot be taken back."""
    event = ResetRequested(now=NOW, by="operator", silent=("b",))
    state, _ = advance(fleet_in(Phase.UPDATING), event)
    assert state.replicas["b"].wedged == "silent when round 1 was abandoned"


def test_a_member_that_restarts_just_before_its_start_counts_as_in_session() -> None:
    """The start may have reached the new server, which a reset must then fence."""
    seen = Observation(instance="boot-2", topology=replica("a").topology)
    state = observe(fleet_in(Phase.STARTING), "a", seen, NOW)
    state, _ = advance(state, ResetRequested(now=NOW, by="operator"))
    assert state.replicas["a"].fence == "round 1 was abandoned by operator"


def test_a_member_that_restarts_just_before_its_pause_is_resumed_by_a_reset() -> None:
    """The pause may have reached the new server."""
    seen = Observation(instance="boot-2", topology=replica("a").topology, paused=False)
    state = observe(fleet_in(Phase.PAUSING), "a", seen, NOW)
    _, actions = advance(state, ResetRequested(now=NOW, by="operator"))
    assert "a" in only(actions, Unpause).targets


def test_a_commit_by_an_operator_leaves_out_who_is_not_as_it_was_when_it_finished() -> None:
    """A server that has restarted since holds what it was started with."""
    names = (replica(name) for name in "abcd")
    state, _ = answered(fleet_in(Phase.FINISHING, *names), FinishFailed, b=FAILED)
    seen = Observation(instance="boot-2", topology=replica("a").topology, version="default")
    state = marked(observe(state, "a", seen, NOW), "d", lost="refused")
    state, actions = advance(state, CommitRequested(now=NOW, by="operator", round=1))
    assert {r.id for r in state.replicas.values() if r.holds == state.commit_index} == {"c"}
    assert only(actions, SendResume).targets == ("c",)


def test_the_trainers_own_pause_survives_a_round() -> None:
    """What the trainer paused, the trainer resumes."""
    state = change(fleet_in(Phase.FINISHING), pause=PAUSE)
    state, actions = answered(state, FinishArrived)
    assert only(actions, SendResume).targets == ()
    state, _ = advance(state, Resumed(now=NOW, outcomes={}))
    assert state.pause == PAUSE
    assert state.ready() == []


def test_a_member_that_does_not_resume_stays_paused_after_a_commit() -> None:
    """It gets no rollouts; the others do."""
    state, _ = answered(fleet_in(Phase.COMMITTED), Resumed, b=FAILED)
    assert {r.id for r in state.ready()} == {"a", "c"}
    assert state.replicas["b"].paused


@pytest.mark.parametrize(
    ("paused", "cleared", "clear_cache", "reset", "kv"),
    [
        (("a", "b", "c"), True, None, False, "current"),
        ((), True, None, True, "current"),
        (("a",), True, None, True, "current"),
        ((), False, None, True, "mixed"),
        (("a", "b", "c"), True, False, False, "mixed"),
        (("a", "b", "c"), True, True, False, "current"),
    ],
)
def test_no_cache_of_old_weights_goes_unsaid(
    paused: tuple[str, ...], cleared: bool, clear_cache: bool | None, reset: bool, kv: str
) -> None:
    """Who ran on has its cache reset after the commit; what stays old is called mixed."""
    state = marked(fleet_in(Phase.FINISHING), "abc", paused=False)
    state = marked(state, paused, paused=True)
    if clear_cache is not None:
        state = change(state, pause=change(PAUSE, clear_cache=clear_cache))
    state, actions = answered(state, FinishArrived)
    assert only(actions, SendResume).reset_caches is reset
    state, actions = advance(state, Resumed(now=NOW, outcomes={}, cleared=cleared))
    assert (state.kv, only(actions, Archive).round.kv) == (kv, kv)


def test_a_new_init_grows_the_generation_and_abandons_the_old_round() -> None:
    """The old trainer's round is kept, and said to be abandoned."""
    before = fleet_in(Phase.INITIALIZED)
    state, actions = advance(before, InitRequested(now=NOW, group=group_for(before)))
    assert state.generation > before.generation
    assert only(actions, Archive).round.result is RoundResult.ABANDONED
    assert state.round is not None
    assert state.round.id == 2


def test_shutdown_reaches_the_members_that_can_answer_and_forgets_the_group() -> None:
    """A wedged member hears nothing before its collective ends."""
    state = marked(fleet_in(Phase.INITIALIZED), ["b"], wedged="silent")
    state, actions = advance(state, ShutdownRequested(now=NOW))
    assert only(actions, SendShutdown).targets == ("a", "c")
    assert (state.group, state.round) == (None, None)


def test_an_update_that_names_tensors_is_remembered_for_empty_metadata() -> None:
    """From the second round on the trainer sends its names empty: «as before»."""
    state = fleet_in(Phase.STARTED)
    told, _ = advance(state, UpdateRequested(now=NOW, announces=True))
    silent, _ = advance(state, UpdateRequested(now=NOW, announces=False))
    assert told.group is not None
    assert silent.group is not None
    assert (told.group.announced_in, silent.group.announced_in) == (1, None)


def test_who_cannot_be_reached_in_a_phase_is_lost_until_a_probe_sees_it() -> None:
    """The next init leaves it out at once."""
    state, _ = answered(fleet_in(Phase.INITIALIZING), InitFailed, b=UNREACHABLE)
    assert state.replicas["b"].lost == "connection refused"
    assert {r.id for r in state.ready()} == {"a", "c"}


def test_a_finish_that_not_everyone_reached_cannot_be_taken_for_one_that_all_did() -> None:
    """The barrier is asked again where the version moves, whoever brings the event."""
    state = fleet_in(Phase.FINISHING)
    some = {"a": Outcome(outcome=Result.OK), "b": Outcome(outcome=Result.FAILED)}
    with pytest.raises(IllegalTransition, match="not every member"):
        advance(state, FinishArrived(now=NOW, outcomes=some))


@pytest.mark.parametrize(("new_model", "remembered"), [(False, "names:1:1"), (True, None)])
def test_a_reset_remembers_what_a_full_update_has(new_model: bool, remembered: str | None) -> None:
    """A partial round after a reset must not pass for a full one, unless the model is another."""
    state = msgspec.structs.replace(fleet_in(Phase.FAILED), fullest="names:1:1")
    state, _ = advance(state, ResetRequested(now=NOW, by="op", new_model=new_model))
    assert state.fullest == remembered
