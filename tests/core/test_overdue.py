"""What has lasted too long, from the state alone; nothing has, unless an operator set a limit."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.facts.calls import CallId, Ended, Holder
from fleet.facts.state import FleetState, Phase, TrainerPause
from fleet.rules.overdue import Limits, Overdue, overdue
from tests.fleets import NOW, change, fleet_in, fleet_of, replica

PAUSE = TrainerPause(mode="keep", clear_cache=True, by="t", since=NOW)
LIMITS = Limits(pause_s=10, round_s=10, wedged_s=10)
NOTHING = Overdue()


def ended(at: float) -> Ended:
    """A call of the round that was over at this time."""
    holder = Holder(gateway="g", token="t", what="update", call=CallId(by="t"), since=NOW)
    return Ended(holder=holder, at=at)


def with_wedged(**facts: Any) -> FleetState:
    """A fleet with one wedged replica and one that is well."""
    return fleet_of(replica("a", wedged="silent", since=NOW, **facts), replica("b", since=NOW))


def test_without_limits_nothing_is_ever_overdue() -> None:
    """Everything waits for somebody, as by default."""
    for state in (change(fleet_of(), pause=PAUSE), fleet_in(Phase.STARTED), with_wedged()):
        assert not overdue(state, Limits(), NOW + 1e9)


def test_a_pause_counts_from_the_last_call_that_asked_for_it() -> None:
    """Over only beyond the limit, not at it."""
    for pause, begun in ((PAUSE, NOW), (change(PAUSE, renewed=NOW + 5), NOW + 5)):
        state = change(fleet_of(), pause=pause)
        assert overdue(state, LIMITS, begun + 10) == NOTHING
        assert overdue(state, LIMITS, begun + 11) == Overdue(pause=True)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_pause_ends_between_rounds_only(phase: Phase) -> None:
    """A resume in a session would kill the engine, after a failed update serve mixed weights."""
    state = change(fleet_in(phase), pause=PAUSE)
    is_between = phase in (Phase.IDLE, Phase.INITIALIZED)
    assert overdue(state, LIMITS, NOW + 11).pause is is_between


def test_a_round_counts_from_the_end_of_its_last_call() -> None:
    """A trainer that sends a chunk now and then is not dead, however long its round lasts."""
    state = fleet_in(Phase.STARTED)
    assert overdue(state, LIMITS, NOW + 11) == Overdue(round=1)
    state = change(state, ended=ended(NOW + 5))
    assert overdue(state, LIMITS, NOW + 15) == NOTHING
    assert overdue(state, LIMITS, NOW + 16) == Overdue(round=1)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.STARTED])
def test_a_round_is_abandoned_between_its_calls_only(phase: Phase) -> None:
    """A call on its way has a deadline of its own, and what has failed is over."""
    assert overdue(fleet_in(phase), LIMITS, NOW + 1e9).round is None


def test_a_wedged_replica_is_restarted_once_in_a_limit() -> None:
    """Who was asked to restart gets the whole time again."""
    assert overdue(with_wedged(), LIMITS, NOW + 10) == NOTHING
    assert overdue(with_wedged(), LIMITS, NOW + 11) == Overdue(wedged=("a",))
    asked = with_wedged(restarted_at=NOW + 8)
    assert overdue(asked, LIMITS, NOW + 18) == NOTHING
    assert overdue(asked, LIMITS, NOW + 19) == Overdue(wedged=("a",))


def test_who_is_gone_is_not_restarted() -> None:
    """It is on its way back, or nobody can reach it."""
    assert overdue(with_wedged(lost="refused"), LIMITS, NOW + 11) == NOTHING
