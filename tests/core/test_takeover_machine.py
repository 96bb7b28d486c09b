"""The promises of test_rounds_machine.py, kept when gateways die in mid-call and others take over.

Every call carries a token here, as the coordinator's do. A gateway that dies leaves a ghost: what
it would have reported, had it lived, or will report once it wakes up. Whatever the fleet is doing
by then, nobody believes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from fleet.facts.calls import CallId, Holder
from fleet.facts.state import ON_THE_WAY, Phase
from fleet.rules.events import Answered, Event, HolderLost, Requested, ShutdownRequested
from fleet.rules.rounds import IllegalTransition, advance
from tests.core.play import VERDICTS
from tests.core.test_rounds_machine import ANSWERED_IN, FleetMachine, fate_of
from tests.fleets import NOW, OK, change, everyone

if TYPE_CHECKING:
    from collections.abc import Callable


class TakeoverMachine(FleetMachine):
    """The same lives, with two gateways that may both believe to hold the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.ghosts: list[Answered] = []

    def apply(self, event: Event, draw: Callable[[], str]) -> None:
        """Sign requests and answers as a coordinator does, then apply them."""
        if isinstance(event, Requested) and not isinstance(event, ShutdownRequested):
            event = event if event.holder else change(event, holder=self._holder("a"))
        elif isinstance(event, Answered):
            assert self.state.holder is not None
            event = change(event, token=self.state.holder.token)
        super().apply(event, draw)
        if isinstance(event, Answered):
            self._is_refused(event)  # an answer counts once

    def _holder(self, gateway: str) -> Holder:
        self.calls += 1
        call = CallId(by="trainer", name=f"call {self.calls}")
        return Holder(
            gateway=gateway, token=f"token {self.calls}", what="any", call=call, since=NOW
        )

    def _is_refused(self, event: Event) -> None:
        with pytest.raises(IllegalTransition):
            advance(self.state, event)

    def _ghost_of(self, data: st.DataObject, *, happened: bool) -> Answered:
        """Return what the dead gateway saw, or, if it saw nothing, the best it could claim."""
        action, holder = self.waiting, self.state.holder
        assert action is not None
        assert holder is not None
        committed = self.committed
        if happened or type(action) not in VERDICTS:
            ghost = self._answer(action, fate_of(data))
        else:
            ghost = VERDICTS[type(action)][0](now=NOW, outcomes=everyone(self.state, OK))
        self.committed = committed
        return change(ghost, token=holder.token)

    @precondition(lambda self: self.waiting is not None)
    @rule(data=st.data(), happened=st.booleans())
    def gateway_dies(self, data: st.DataObject, happened: bool) -> None:
        """Its lease lapses, and another gateway takes its call over; a third one comes too late."""
        self._die(data, happened=happened)

    @rule(data=st.data(), goal=st.sampled_from(sorted(ANSWERED_IN)), happened=st.booleans())
    def all_goes_well_until_a_gateway_dies(
        self, data: st.DataObject, goal: Phase, happened: bool
    ) -> None:
        """A round comes as far as this phase before."""
        self.go_on(data, goal=goal)
        if self.waiting is not None:
            self._die(data, happened=happened)

    def _die(self, data: st.DataObject, *, happened: bool) -> None:
        lost = self.state.holder
        assert lost is not None
        self.ghosts.append(self._ghost_of(data, happened=happened))
        event = HolderLost(
            now=NOW, why="gateway a was lost", lost=lost.token, holder=self._holder("b")
        )
        self.apply(event, fate_of(data))
        self._is_refused(change(event, holder=self._holder("c")))

    @precondition(lambda self: self.waiting is not None)
    @rule(data=st.data(), happened=st.booleans())
    def abandoned_gateway_lives_on(self, data: st.DataObject, happened: bool) -> None:
        """An operator abandons the round; the gateway that carried its call does not know."""
        self.ghosts.append(self._ghost_of(data, happened=happened))
        self._reset(data, happened=False)

    @precondition(lambda self: bool(self.ghosts))
    @rule(data=st.data())
    def ghost_reports(self, data: st.DataObject) -> None:
        """A gateway wakes up and reports what it had been waiting for."""
        self._is_refused(data.draw(st.sampled_from(self.ghosts)))

    @invariant()
    def a_call_on_its_way_has_one_holder(self) -> None:
        """And the fleet owes an answer to nobody otherwise."""
        on_the_way = self.state.phase in ON_THE_WAY
        assert (self.state.holder is not None) == on_the_way
        assert (self.waiting is not None) == on_the_way


TakeoverMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_every_life_of_a_fleet_survives_its_gateways = pytest.mark.timeout(120)(
    TakeoverMachine.TestCase
)
