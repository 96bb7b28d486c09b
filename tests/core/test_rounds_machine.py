"""Promises that hold in every life of a fleet, whatever is answered, lost or restarted.

The machine plays the trainer, the operator and the probes against `advance` and `membership.py`,
and plays the servers (engines.py) beside them. So it sees what the fleet cannot: whether a replica
that counts as ready really has no open session, is not frozen, and holds the committed weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from fleet.errors import MembershipChanged
from fleet.facts.outcome import Outcome
from fleet.facts.replica import Sleep
from fleet.facts.state import ROUND_OPEN, Phase, TrainerPause
from fleet.rules.events import (
    Event,
    FinishRequested,
    InitRequested,
    ResetRequested,
    ShutdownRequested,
    StartRequested,
    UpdateRequested,
)
from fleet.rules.membership import (
    add_replica,
    answered_late,
    candidates_for,
    check_still_whole,
    marked,
    relabelled,
    remove_replica,
)
from fleet.rules.rounds import TRANSITIONS
from tests.core.engines import FATES, GONE, MIXED, OK, Engine, Engines
from tests.core.play import Play, boot_of
from tests.fleets import NOW, change, fleet_of, group_for, replica

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWERED_IN = ROUND_OPEN - {Phase.STARTED, Phase.UNDOING}
fates = st.sampled_from(FATES)


def fate_of(data: st.DataObject) -> Callable[[], str]:
    """Return what decides the fate of each call: mostly all goes well, or no round would end."""
    if data.draw(st.sampled_from([True, True, False]), "all goes well"):
        return lambda: "well"
    return lambda: data.draw(fates)


def may(kind: type[Event]) -> Callable[[FleetMachine], bool]:
    """Return the condition that the table lets this event follow."""
    return lambda machine: kind in TRANSITIONS[machine.state.phase] and machine.waiting is None


def outside_a_round(machine: FleetMachine) -> bool:
    """Whether the controls outside a round are open."""
    return machine.state.phase not in ROUND_OPEN


class FleetMachine(Play):
    """A trainer, an operator, probes and servers around one FleetState."""

    # -- the trainer -------------------------------------------------------------------------------

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def boot(self, sizes: list[int]) -> None:
        """A fresh fleet."""
        replicas = [replica(name, size) for name, size in zip("abcd", sizes, strict=False)]
        self.engines = Engines({r.id: Engine() for r in replicas})
        named = [change(r, instance=boot_of(r.id, self.engines.of[r.id])) for r in replicas]
        self.state = fleet_of(*named)

    @precondition(may(InitRequested))
    @rule(data=st.data())
    def trainer_inits(self, data: st.DataObject) -> None:
        """Form a group of whoever can join."""
        self.init(data)

    def init(self, data: st.DataObject) -> None:
        """Form a group of whoever can join."""
        self.verify()
        if candidates_for(self.state, None)[0]:
            event = InitRequested(now=NOW, group=group_for(self.state))
            self.apply(event, fate_of(data))

    @precondition(may(StartRequested))
    @rule(data=st.data(), draft=st.sampled_from([False, False, False, True]), auto=st.booleans())
    def trainer_starts(self, data: st.DataObject, draft: bool, auto: bool) -> None:
        """Open an update, unless a member was lost."""
        self.start(data, draft=draft, auto=auto)

    def start(self, data: st.DataObject, *, draft: bool, auto: bool) -> None:
        """Open an update, unless a member was lost."""
        self.verify()
        try:
            check_still_whole(self.state)
        except MembershipChanged:
            return
        event = StartRequested(now=NOW, by="trainer", draft=draft, auto_pause=auto)
        self.full = not draft and data.draw(st.booleans(), "full")
        self.apply(event, fate_of(data))

    @precondition(may(UpdateRequested))
    @rule(data=st.data())
    def trainer_updates(self, data: st.DataObject) -> None:
        """Send weights."""
        self.update(data)

    def update(self, data: st.DataObject) -> None:
        """Send weights."""
        self.apply(UpdateRequested(now=NOW, announces=True), fate_of(data))

    @precondition(may(FinishRequested))
    @rule(data=st.data(), version=st.sampled_from([None, "7", "step-3"]))
    def trainer_finishes(self, data: st.DataObject, version: str | None) -> None:
        """Close the update."""
        self.finish(data, version=version)

    def finish(self, data: st.DataObject, *, version: str | None) -> None:
        """Close the update."""
        opened = self.state.round
        assert opened is not None
        full = self.full and opened.updates > 0
        event = FinishRequested(now=NOW, full=full, version=None if opened.draft else version)
        self.apply(event, fate_of(data))

    @precondition(may(ShutdownRequested))
    @rule(data=st.data())
    def shutdown(self, data: st.DataObject) -> None:
        """Give the group back."""
        self.apply(ShutdownRequested(now=NOW), fate_of(data))

    @rule(data=st.data(), goal=st.sampled_from([p for p in Phase if p in ROUND_OPEN]))
    def go_on_well(self, data: st.DataObject, goal: Phase) -> None:
        """A trainer that knows what it does brings a round as far as `goal`, if all goes well."""
        self.go_on(data, goal=goal)

    def go_on(self, data: st.DataObject, *, goal: Phase) -> None:
        """A trainer that knows what it does brings a round as far as `goal`, if all goes well."""
        for _ in range(12):
            if self.state.phase is goal:
                return
            self._next_step(data)

    @rule(data=st.data(), goal=st.sampled_from(sorted(ANSWERED_IN)))
    def go_on_into_trouble(self, data: st.DataObject, goal: Phase) -> None:
        """All goes well up to one fan-out, and then nothing may."""
        self.go_on(data, goal=goal)
        if self.waiting is not None:
            self.apply(
                self._answer(self.waiting, lambda: data.draw(fates)), lambda: data.draw(fates)
            )

    def _next_step(self, data: st.DataObject) -> None:
        if self.waiting is not None:
            self.apply(self._answer(self.waiting, lambda: "well"), lambda: "well")
        elif self.state.phase is Phase.INITIALIZED:
            self.start(data, draft=False, auto=data.draw(st.booleans(), "auto"))
        elif self.state.phase is not Phase.STARTED:
            self.init(data)
        elif self.state.round and self.state.round.updates:
            self.finish(data, version=None)
        else:
            self.update(data)

    # -- the replicas answer -----------------------------------------------------------------------

    @precondition(lambda self: self.waiting is not None)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """The fan-out on its way comes to its end."""
        action = self.waiting
        assert action is not None
        fate = fate_of(data)
        self.apply(self._answer(action, fate), fate)

    # -- the world ---------------------------------------------------------------------------------

    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        """One replica is looked at: gone, back, restarted or as before."""
        self._probe(data.draw(st.sampled_from(list(self.state.replicas))))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """A server comes up again; it is looked at before anyone may use it (its gap is short)."""
        name = data.draw(st.sampled_from(list(self.state.replicas)))
        self.engines.of[name].restart()
        self.in_collective.discard(name)
        self._probe(name)

    @precondition(lambda self: bool(self.in_collective))
    @rule(data=st.data(), outcome=st.sampled_from([OK, GONE]))
    def late(self, data: st.DataObject, outcome: Outcome) -> None:
        """A silent member's call ends at last."""
        name = data.draw(st.sampled_from(sorted(self.in_collective)))
        self.in_collective.discard(name)
        self.take(answered_late(self.state, name, outcome))

    @rule(data=st.data(), draining=st.booleans())
    def drain(self, data: st.DataObject, draining: bool) -> None:
        """An operator takes a replica out, or back in."""
        name = data.draw(st.sampled_from(list(self.state.replicas)))
        self.take(marked(self.state, [name], draining=draining))

    @precondition(lambda self: len(self.state.replicas) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A replica is removed, even out of a round (the DELETE and the start cross)."""
        name = data.draw(st.sampled_from(list(self.state.replicas)))
        if data.draw(st.booleans(), "what is on its way reaches it"):
            self.overtake(name)
        self.take(remove_replica(self.state, name))

    @precondition(lambda self: bool(self.away()))
    @rule(data=st.data(), restarted=st.sampled_from([False, False, True]))
    def come_back(self, data: st.DataObject, restarted: bool) -> None:
        """It is added again, as the process that it was or as another one."""
        name = data.draw(st.sampled_from(self.away()))
        if restarted:
            self.engines.of[name].restart()
            self.in_collective.discard(name)
        self.take(add_replica(self.state, f"http://{name}", name, NOW))
        self._probe(name)

    @rule(data=st.data())
    def flap(self, data: st.DataObject) -> None:
        """Discovery lists nobody for a moment; whatever had gone wrong is then abandoned."""
        names = list(self.state.replicas)
        for name in names:
            self.take(remove_replica(self.state, name))
        for name in names:
            self.take(add_replica(self.state, f"http://{name}", name, NOW))
            self._probe(name)
        if self.state.phase is Phase.FAILED:
            self._reset(data, happened=True)

    def away(self) -> list[str]:
        """Return the servers that the fleet has forgotten."""
        return [name for name in self.engines.of if name not in self.state.replicas]

    @precondition(lambda self: "z" not in self.engines.of)
    @rule()
    def newcomer(self) -> None:
        """One more replica comes in with the weights it was started with."""
        self.engines.of["z"] = Engine()
        stranger = replica("z", topology=None, instance=None, holds=None)
        self.take(self.state.with_replicas([stranger]))
        self._probe("z")

    @precondition(may(ResetRequested))
    @rule(data=st.data(), happened=st.booleans())
    def reset(self, data: st.DataObject, happened: bool) -> None:
        """An operator abandons whatever is open."""
        self._reset(data, happened=happened)

    @precondition(lambda self: self.waiting is not None)
    @rule(data=st.data(), happened=st.booleans())
    def reset_in_mid_air(self, data: st.DataObject, happened: bool) -> None:
        """The gateway that waited for answers is gone; an operator abandons its round."""
        self._reset(data, happened=happened)

    def _reset(self, data: st.DataObject, *, happened: bool) -> None:
        fate = fate_of(data)
        if self.waiting is not None and happened:
            committed = self.committed
            self._answer(self.waiting, fate)
            self.committed = committed
        silent = tuple(self.in_collective)
        event = ResetRequested(now=NOW, by="operator", silent=silent)
        self.apply(event, fate)

    # -- controls outside a round ------------------------------------------------------------------

    @precondition(lambda self: outside_a_round(self) and self.state.pause is None)
    @rule(clear=st.booleans())
    def trainer_pauses(self, clear: bool) -> None:
        """The trainer pauses the fleet itself."""
        asked = TrainerPause(mode="keep", clear_cache=clear, by="trainer", since=NOW)
        self.take(change(self.state, pause=asked))
        alive = [r for r in self.state.replicas if self.engines.of[r].alive]
        reached = [r for r in alive if self.state.replicas[r].reachable]
        for name in reached:
            self.engines.of[name].pause()
        self.take(marked(self.state, reached, paused=True))

    @precondition(lambda self: outside_a_round(self) and self.state.pause is not None)
    @rule()
    def trainer_resumes(self) -> None:
        """The trainer resumes it; what is fenced or asleep stays as it is."""
        facts = self.state.replicas.values()
        running = [r.id for r in facts if r.reachable and not r.fence and not r.sleep]
        reached = [r for r in running if self.engines.of[r].alive]
        for name in reached:
            self.engines.of[name].resume()
        self.take(change(marked(self.state, reached, paused=False), pause=None))

    @precondition(outside_a_round)
    @rule(data=st.data(), level=st.sampled_from([1, 2]))
    def sleep(self, data: st.DataObject, level: int) -> None:
        """A replica is put to sleep; level 2 throws its weights away."""
        name = data.draw(st.sampled_from(list(self.state.replicas)))
        engine = self.engines.of[name]
        if not engine.alive or not self.state.replicas[name].reachable:
            return
        engine.paused = True
        self.take(marked(self.state, [name], sleep=Sleep(level=level)))
        if level == 2:
            engine.weights = MIXED
            self.take(marked(self.state, [name], fence="sleep level 2", holds=None))

    @precondition(outside_a_round)
    @rule(data=st.data())
    def wake_up(self, data: st.DataObject) -> None:
        """A sleeping replica wakes up; its scheduler goes on by itself."""
        names = [r.id for r in self.state.replicas.values() if r.sleep and r.reachable]
        awake = [r for r in names if self.engines.of[r].alive]
        if not awake:
            return
        name = data.draw(st.sampled_from(awake))
        self.engines.of[name].resume()
        self.take(marked(self.state, [name], sleep=None, paused=False))

    @precondition(outside_a_round)
    @rule(version=st.sampled_from(["3", "relabelled"]))
    def relabel(self, version: str) -> None:
        """The committed weights get another label on everyone who can be reached."""
        facts = [r for r in self.state.replicas.values() if r.reachable and not r.refusal]
        reached = [r.id for r in facts if self.engines.of[r.id].alive]
        self.take(relabelled(self.state, reached, version), why="relabel")

    # -- what must always hold ---------------------------------------------------------------------

    @invariant()
    def nobody_is_ready_while_the_fleet_is_paused(self) -> None:
        """Between closing the gate and opening it no rollout goes anywhere."""
        if self.state.fleet_paused or self.state.phase in ROUND_OPEN:
            assert self.state.ready() == []

    @invariant()
    def whoever_is_ready_holds_the_committed_version(self) -> None:
        """As far as the fleet knows."""
        for ready in self.state.ready():
            assert ready.holds == self.state.commit_index
            assert ready.fence is None
            assert ready.sleep is None
            assert ready.reachable

    @invariant()
    def whoever_is_ready_really_has_the_committed_weights(self) -> None:
        """No token from unknown weights, whatever was lost on the way."""
        for name, engine in self.ready_engines():
            assert engine.weights == self.committed, name

    @invariant()
    def whoever_is_ready_really_has_no_open_session(self) -> None:
        """A rollout between start and finish would kill the engine."""
        for name, engine in self.ready_engines():
            assert not engine.session, name

    @invariant()
    def whoever_is_ready_really_runs(self) -> None:
        """A rollout at a frozen engine would hang until somebody noticed."""
        for name, engine in self.ready_engines():
            assert not engine.paused, name

    def ready_engines(self) -> list[tuple[str, Engine]]:
        """Return the servers that rollouts would go to now, if they are there at all."""
        named = [(r.id, self.engines.of[r.id]) for r in self.state.ready()]
        return [(name, engine) for name, engine in named if engine.alive]


FleetMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_every_life_of_a_fleet_keeps_its_promises = pytest.mark.timeout(120)(FleetMachine.TestCase)
