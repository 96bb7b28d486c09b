"""How a call meets an earlier one: never sent twice, never swallowed if it may be new."""

from __future__ import annotations

import pytest

from fleet.facts.calls import KEPT_S, CallId, Ended, Holder, Meeting, earlier, is_overtaken
from fleet.facts.state import FleetState, Phase
from fleet.rules.events import Answered, FinishRequested, ResetRequested, UpdateRequested
from fleet.rules.holding import held, is_timely, may_report
from tests.fleets import NOW, fleet_in

CALL = CallId(by="trainer", name="/update_weights?#1")
OTHER = CallId(by="trainer", name="/update_weights?#2")


def holder(
    what: str = "update", gateway: str = "b", call: CallId = CALL, after: str | None = None
) -> Holder:
    """A call that gateway b carries, or has carried."""
    return Holder(gateway=gateway, token="t", what=what, call=call, since=NOW, after=after)


def ended(what: str = "update", *, undelivered: bool = False, call: CallId = CALL) -> Ended:
    """The same call once it is over."""
    return Ended(holder=holder(what, call=call), at=NOW, undelivered=undelivered)


def meet(
    last: Ended | None,
    now: Holder | None = None,
    *,
    call: CallId = CALL,
    me: str = "a",
    alive: tuple[str, ...] = ("a", "b"),
    at: float = NOW,
) -> Meeting:
    """Meet at gateway a."""
    return earlier(call, now, last, me=me, alive=alive, now=at)


def test_an_equal_call_on_its_way_elsewhere_is_joined() -> None:
    """Here, single flight does it; another body is no repetition."""
    assert meet(None, holder()) is Meeting.ON_ITS_WAY
    assert meet(None, holder(), call=OTHER) is Meeting.NONE
    assert meet(None, holder(gateway="a")) is Meeting.NONE


@pytest.mark.parametrize("what", ["init", "start", "update", "finish"])
def test_an_answer_that_reached_nobody_is_told_to_the_next_equal_call(what: str) -> None:
    """Whether or not its gateway lives, and not for ever."""
    for alive in ((), ("a", "b")):
        assert meet(ended(what, undelivered=True), alive=alive) is Meeting.ANSWERED
    later = NOW + KEPT_S + 1
    assert meet(ended(what, undelivered=True), at=later) is Meeting.NONE


@pytest.mark.parametrize("what", ["init", "start", "update", "finish"])
def test_an_equal_call_after_a_delivered_answer_is_a_new_one(what: str) -> None:
    """A live gateway would have said that nobody took delivery; so would this one."""
    assert meet(ended(what)) is Meeting.NONE
    assert meet(ended(what), me="b", alive=()) is Meeting.NONE


@pytest.mark.parametrize(
    ("what", "meeting"),
    [
        ("init", Meeting.IN_DOUBT),
        ("update", Meeting.IN_DOUBT),
        ("start", Meeting.ANSWERED),
        ("finish", Meeting.ANSWERED),
    ],
)
def test_what_a_dead_gateway_carried_is_told_only_if_it_cannot_be_meant_anew(
    what: str, meeting: Meeting
) -> None:
    """An equal chunk may be a new one: one that is not sent is worse than an error."""
    assert meet(ended(what), alive=("a",)) is meeting


def test_the_same_idempotency_key_is_the_same_call_wherever_it_was_carried() -> None:
    """Also where it was delivered; another key is another call."""
    keyed = CallId(by="trainer", name=CALL.name, key="k")
    other = CallId(by="trainer", name=CALL.name, key="l")
    assert meet(ended(call=keyed), call=keyed) is Meeting.ANSWERED
    assert meet(ended(call=keyed), call=keyed, me="b") is Meeting.ANSWERED
    assert meet(ended(call=keyed), call=other) is Meeting.NONE


def test_a_call_is_overtaken_by_an_equal_one_that_it_had_not_seen() -> None:
    """What was over when it was found to be new does not count, nor does another call."""
    assert is_overtaken(holder(after="before"), ended())
    assert not is_overtaken(holder(after="t"), ended())
    assert not is_overtaken(holder(after="before", call=OTHER), ended())
    assert not is_overtaken(holder(), None)


def test_answers_count_only_with_the_token_that_holds_the_fleet() -> None:
    """A gateway that stood still while another one took over reports into the void."""
    state = FleetState(name="f", generation=1, phase=Phase.UPDATING, holder=holder())
    for token, counts in (("t", True), ("old", False), (None, False)):
        assert may_report(state, Answered(now=NOW, outcomes={}, token=token)) is counts


def test_a_finish_counts_only_in_the_round_for_which_it_was_judged() -> None:
    """Another gateway may have finished that one and begun the next, in the same generation."""
    state = fleet_in(Phase.STARTED)
    assert state.round is not None
    for number, is_timely_then in ((state.round.id, True), (None, True), (7, False)):
        finish = FinishRequested(now=NOW, full=True, round=number, planned_on=state.generation)
        assert is_timely(state, finish) is is_timely_then


def test_a_call_counts_only_in_the_generation_on_which_it_was_planned() -> None:
    """Case 6: after another init its ranks and its members are those of a group that is over."""
    state = fleet_in(Phase.STARTED)
    for generation, is_timely_then in ((state.generation, True), (state.generation - 1, False)):
        update = UpdateRequested(now=NOW, planned_on=generation)
        assert is_timely(state, update) is is_timely_then


def test_a_reset_leaves_nothing_that_a_later_call_could_meet() -> None:
    """The next round's equal call is a new one."""
    state = FleetState(name="f", generation=1, holder=holder(), ended=ended())
    after = held(state, ResetRequested(now=NOW, by="operator"))
    assert (after.holder, after.ended, after.resets) == (None, None, 1)
