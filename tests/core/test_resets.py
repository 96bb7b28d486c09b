"""Abandoning a round that has sessions open and has sent no update: nothing is mixed."""

from __future__ import annotations

from typing import Any

from fleet.facts.calls import CallId, Holder
from fleet.facts.replica import ReplicaState, Sleep
from fleet.facts.state import FleetState, Phase, RoundResult, TrainerPause
from fleet.rules.events import (
    Archive,
    FinishRequested,
    InitArrived,
    InitRequested,
    PauseArrived,
    ResetRequested,
    StartArrived,
    StartFailed,
    StartRequested,
    Unpause,
    UpdateArrived,
)
from fleet.rules.membership import marked, sessions_closed
from fleet.rules.parts import may_resume
from fleet.rules.rounds import advance
from tests.fleets import (
    FAILED,
    NOW,
    OK,
    TIMEOUT,
    change,
    everyone,
    fleet_in,
    fleet_of,
    follow,
    replica,
)

RESET = ResetRequested(now=NOW, by="operator")


def reset(state: FleetState) -> tuple[FleetState, Unpause]:
    """The state after a reset, and what it asks for."""
    state, actions = advance(state, RESET)
    (unpause,) = [action for action in actions if isinstance(action, Unpause)]
    return state, unpause


def fences(state: FleetState) -> set[str]:
    """Return who is fenced for what it may hold."""
    return {r.id for r in state.replicas.values() if r.fence}


def test_a_reset_before_the_first_update_closes_the_sessions_and_then_resumes() -> None:
    """A start and a bare finish leave weights as they were, so there is nothing to fence."""
    state, unpause = reset(fleet_in(Phase.STARTED))
    assert fences(state) == set()
    assert (unpause.close, unpause.targets) == (("a", "b", "c"), ("a", "b", "c"))
    state = sessions_closed(state, dict.fromkeys(unpause.close, OK))
    assert may_resume(state, unpause.targets) == ("a", "b", "c")
    state = marked(state, unpause.targets, paused=False)
    assert {r.id for r in state.ready()} == {"a", "b", "c"}


def test_its_record_says_that_it_was_abandoned() -> None:
    """As of any other round."""
    _, actions = advance(fleet_in(Phase.STARTED), RESET)
    (archive,) = [action for action in actions if isinstance(action, Archive)]
    assert archive.round.result is RoundResult.ABANDONED


def test_who_does_not_answer_the_finish_is_not_resumed_and_takes_no_rollouts() -> None:
    """It may have its session open still, and a running engine would die of the next rollout."""
    state, unpause = reset(fleet_in(Phase.STARTED))
    state = sessions_closed(state, {"a": OK, "b": TIMEOUT, "c": OK})
    assert may_resume(state, unpause.targets) == ("a", "c")
    assert may_resume(marked(state, "a", sleep=Sleep(level=1)), unpause.targets) == ("c",)
    found = {r.id: (name, why) for r, name, why in state.states()}
    assert found["b"] == (ReplicaState.FENCED, "its update session may still be open")
    assert found["a"][0] is ReplicaState.PAUSED


def test_without_a_pause_it_takes_none_either_until_its_session_is_closed() -> None:
    """With FLEET_PAUSE_ON_UPDATE=off nothing else keeps it out."""
    state = follow(fleet_of(replica("a"), replica("b")), (InitRequested, InitArrived))
    for event in (
        StartRequested(now=NOW, by="t", auto_pause=False),
        PauseArrived(now=NOW, outcomes={}),
        StartArrived(now=NOW, outcomes=everyone(state)),
    ):
        state, _ = advance(state, event)
    state, unpause = reset(state)
    assert unpause.targets == ()
    assert not state.ready()
    assert [r.id for r in sessions_closed(state, {"a": OK, "b": TIMEOUT}).ready()] == ["a"]


def test_a_second_reset_asks_those_again_whose_session_is_still_open() -> None:
    """The first one named them; an operator has looked after them meanwhile."""
    state, _ = reset(fleet_in(Phase.STARTED))
    state = sessions_closed(state, {"a": OK, "b": OK, "c": TIMEOUT})
    state = marked(state, "ab", paused=False)
    _, unpause = reset(state)
    assert (unpause.close, unpause.targets) == (("c",), ("c",))


def test_it_heals_and_resumes_nobody_that_it_should_not() -> None:
    """Fenced before, asleep, or out of reach: they stay as they are."""
    facts: dict[str, dict[str, Any]] = {
        "a": {"fence": "mixed"},
        "b": {"sleep": Sleep(level=1)},
        "c": {},
        "d": {},
    }
    state = fleet_in(Phase.STARTED, *(replica(name, **more) for name, more in facts.items()))
    state, unpause = reset(marked(state, "d", lost="refused"))
    assert (unpause.close, unpause.targets) == (("b", "c"), ("c",))
    assert fences(state) == {"a"}


def test_it_resumes_nobody_over_the_trainers_own_pause() -> None:
    """That outlives the round, as always."""
    pause = TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW)
    _, unpause = reset(change(fleet_in(Phase.STARTED), pause=pause))
    assert (unpause.close, unpause.targets) == (("a", "b", "c"), ())


def test_once_an_update_was_sent_a_reset_fences_whatever_came_of_it() -> None:
    """Between two updates nothing is on its way, and half of the weights are new."""
    state = fleet_in(Phase.UPDATING)
    state, _ = advance(state, UpdateArrived(now=NOW, outcomes=everyone(state)))
    state, unpause = reset(state)
    assert fences(state) == {"a", "b", "c"}
    assert (unpause.close, unpause.targets) == ((), ())


def test_while_a_call_is_on_its_way_a_reset_fences_who_has_a_session() -> None:
    """A start that was refused is being undone: what reaches whom after the reset nobody knows."""
    state = fleet_in(Phase.STARTING)
    state, _ = advance(state, StartFailed(now=NOW, outcomes=everyone(state, b=FAILED)))
    call = Holder(gateway="g", token="t", what="start", call=CallId(by="t"), since=NOW)
    state, unpause = reset(change(state, holder=call))
    assert fences(state) == {"a", "b", "c"}
    assert (unpause.close, unpause.targets) == ((), ())


def test_once_a_finish_was_sent_a_reset_fences_even_if_no_update_was() -> None:
    """Some members may have taken the label of a version that was never committed."""
    state, _ = advance(fleet_in(Phase.STARTED), FinishRequested(now=NOW, full=False))
    state, unpause = reset(state)
    assert fences(state) == {"a", "b", "c"}
    assert unpause.close == ()
