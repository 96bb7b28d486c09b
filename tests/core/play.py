"""What the machine of test_rounds_machine.py plays with: fleet and servers, kept side by side.

Every step goes through `Play.take`, which holds it against the promises that a single step can
break. Answers are made up as performer.py would report them, from what the servers did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis.stateful import RuleBasedStateMachine

from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import Topology
from fleet.facts.state import FleetState
from fleet.rules.barrier import arrivals
from fleet.rules.events import (
    Action,
    Answered,
    CloseSessions,
    Event,
    FinishArrived,
    FinishFailed,
    InitArrived,
    InitFailed,
    PauseArrived,
    PauseFailed,
    Resumed,
    SendFinish,
    SendInit,
    SendPause,
    SendResume,
    SendStart,
    SendUndo,
    SendUpdate,
    StartArrived,
    StartFailed,
    Undone,
    Unpause,
    UpdateArrived,
    UpdateFailed,
)
from fleet.rules.membership import (
    Observation,
    marked,
    observe,
    sessions_closed,
)
from fleet.rules.parts import may_resume
from fleet.rules.rounds import advance
from tests.core.engines import GONE, MIXED, OK, SILENT, Engine, Engines, Weights
from tests.fleets import NOW, fleet_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Outcomes = dict[str, Outcome]
WEDGED = Outcome(outcome=Result.WEDGED)
VERDICTS: dict[type[Action], tuple[type[Answered], type[Answered]]] = {
    SendInit: (InitArrived, InitFailed),
    SendPause: (PauseArrived, PauseFailed),
    SendStart: (StartArrived, StartFailed),
    SendUpdate: (UpdateArrived, UpdateFailed),
    SendFinish: (FinishArrived, FinishFailed),
}


def boot_of(name: str, engine: Engine) -> str:
    """What a server calls itself: no two boots share a name."""
    return f"boot {engine.boot} of {name}"


class Play(RuleBasedStateMachine):
    """One FleetState, the servers behind it, and the fan-out that is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = Engines()
        self.state: FleetState = fleet_of()
        self.waiting: Action | None = None
        self.committed: Weights = ()
        self.full = False
        self.in_collective: set[str] = set()

    # -- the checks on every single step -----------------------------------------------------------

    def take(self, state: FleetState, *, event: Event | None = None, why: str = "") -> None:
        """Take over the next state, if the step to it kept every promise."""
        before, self.state = self.state, state
        assert state.generation >= before.generation
        self._check_commit(before, event, why)
        self._check_fences(before, event, why)
        if event is not None:
            assert state.pause == before.pause, "a round touched the trainer's own pause"
        if isinstance(event, UpdateFailed):
            assert all(member.fence for member in state.members())

    def _check_commit(self, before: FleetState, event: Event | None, why: str) -> None:
        moved = self.state.commit_index - before.commit_index
        if why == "relabel":
            assert moved == 1
            return
        if not isinstance(event, FinishArrived):
            assert moved == 0
            assert self.state.weight_version == before.weight_version
            return
        assert before.round is not None
        assert before.group is not None
        assert moved == (0 if before.round.draft else 1)
        assert set(event.outcomes) == set(before.group.members)
        assert all(outcome.ok for outcome in event.outcomes.values())

    def _check_fences(self, before: FleetState, event: Event | None, why: str) -> None:
        lifted = {
            r.id
            for r in before.replicas.values()
            if r.fence and r.id in self.state.replicas and not self.state.replicas[r.id].fence
        }
        if not lifted or why == "restart":
            return
        assert isinstance(event, FinishArrived), f"{event} lifted the fence of {lifted}"
        assert before.round is not None
        assert before.round.full
        assert not before.round.draft
        assert lifted <= {member.id for member in before.members()}

    def apply(self, event: Event, draw: Callable[[], str]) -> None:
        """Advance by one event and do what it asks for, up to what must be answered."""
        state, actions = advance(self.state, event)
        self.take(state, event=event)
        self.waiting = None
        for action in actions:
            self._check_resumes(action)
            self._perform(action, draw)

    def _check_resumes(self, action: Action) -> None:
        resumed: tuple[str, ...] = getattr(action, "resume", ())
        if isinstance(action, SendResume | Unpause):
            resumed = action.targets
        facts = [self.state.replicas[r] for r in resumed if r in self.state.replicas]
        assert not [r.id for r in facts if r.fence], "a fenced replica was resumed"
        assert not [r.id for r in facts if r.sleep], "a sleeping replica was resumed"
        assert not (resumed and self.state.pause), "a round resumed over the trainer's pause"

    def _perform(self, action: Action, draw: Callable[[], str]) -> None:
        if isinstance(action, CloseSessions):
            outcomes = self.call(action.targets, Engine.finish, draw)
            self.take(sessions_closed(self.state, outcomes))
        elif isinstance(action, Unpause):
            finished = self.call(action.close, Engine.finish, draw)
            self.take(sessions_closed(self.state, finished))
            may_run = may_resume(self.state, action.targets)
            outcomes = self.call(may_run, Engine.resume, draw)
            ok = [r for r, o in outcomes.items() if o.ok]
            self.take(marked(self.state, ok, paused=False))
        elif type(action) in VERDICTS or isinstance(action, SendResume | SendUndo):
            self.waiting = action

    def call(
        self, targets: Iterable[str], act: Callable[[Engine], bool], draw: Callable[[], str]
    ) -> Outcomes:
        """Call these replicas, each with a fate of its own; who was removed is not called."""
        return {
            r: self.engines.call(r, draw(), act) if r in self.state.replicas else GONE
            for r in targets
        }

    def overtake(self, name: str) -> None:
        """What is on its way to one that leaves now reaches it all the same, and nobody hears."""
        engine, action = self.engines.of[name], self.waiting
        if action is None or name not in action.targets:
            return
        if isinstance(action, SendPause):
            engine.pause()
        elif isinstance(action, SendStart):
            engine.start()
        elif isinstance(action, SendUpdate) and self.state.round and not self.state.round.draft:
            engine.weights = MIXED

    def _collective(
        self, targets: Iterable[str], act: Callable[[Engine], bool], draw: Callable[[], str]
    ) -> Outcomes:
        """Everyone arrives, or somebody fails and who has not answered is wedged and mixed."""
        outcomes = self.call(targets, act, draw)
        if all(outcome.ok for outcome in outcomes.values()):
            return outcomes
        silent = {r for r, o in outcomes.items() if o.outcome is Result.TIMEOUT}
        self.in_collective |= silent
        return outcomes | dict.fromkeys(silent, WEDGED)

    def _answer(self, action: Action, draw: Callable[[], str]) -> Answered:
        if isinstance(action, SendUndo):
            return self._undo(action, draw)
        if isinstance(action, SendResume):
            outcomes = self.call(action.targets, Engine.resume, draw)
            return Resumed(now=NOW, outcomes=outcomes)
        outcomes = self._outcomes(action, draw)
        arrived, failed = VERDICTS[type(action)]
        complete = arrivals(action.targets, outcomes).complete or not action.targets
        event: Any = (arrived if complete else failed)(now=NOW, outcomes=outcomes)
        if isinstance(event, FinishArrived):
            self._commit_weights()
        return event

    def _undo(self, action: SendUndo, draw: Callable[[], str]) -> Undone:
        """As performer.py: close, then resume who is closed; «no session» counts as closed."""
        had_none = {r for r in action.targets if not self.engines.of[r].session}
        finished = self.call(action.targets, Engine.finish, draw)
        answered = {r for r, o in finished.items() if o.outcome is Result.FAILED}
        closed = {r for r, o in finished.items() if o.ok} | (had_none & answered)
        still_open = {r: o for r, o in finished.items() if r not in closed}
        resumed = self.call([r for r in action.resume if r not in still_open], Engine.resume, draw)
        outcomes = {r: OK for r in closed if finished[r].ok} | resumed | still_open
        return Undone(now=NOW, outcomes=outcomes, closed=tuple(closed))

    def _outcomes(self, action: Action, draw: Callable[[], str]) -> Outcomes:
        if isinstance(action, SendInit):
            return self._collective(action.targets, lambda _: True, draw)
        if isinstance(action, SendPause):
            return self._pause_outcomes(action, draw)
        if isinstance(action, SendStart):
            return self.call(action.targets, Engine.start, draw)
        if isinstance(action, SendFinish):
            return self.call(action.targets, Engine.finish, draw)
        return self._update_outcomes(action, draw)

    def _pause_outcomes(self, action: SendPause, draw: Callable[[], str]) -> Outcomes:
        if draw() == "ignored":  # the gate never closed, so nobody was asked (performer.py)
            assert self.state.group is not None
            return dict.fromkeys(self.state.group.members, SILENT)
        return self.call(action.targets, Engine.pause, draw)

    def _update_outcomes(self, action: Action, draw: Callable[[], str]) -> Outcomes:
        opened = self.state.round
        assert opened is not None

        def load(engine: Engine) -> bool:
            return engine.session if opened.draft else engine.load(opened.id, full=self.full)

        outcomes = self._collective(action.targets, load, draw)
        for name, outcome in outcomes.items():
            engine, is_here = self.engines.of[name], name in self.state.replicas
            if outcome.outcome is Result.FAILED:
                engine.session = False
            if is_here and not outcome.ok and not opened.draft:
                engine.weights = MIXED
        return outcomes

    def _commit_weights(self) -> None:
        opened = self.state.round
        assert opened is not None
        if opened.draft or not opened.updates:
            return
        self.committed = (opened.id,) if opened.full else (*self.committed, opened.id)

    def verify(self) -> None:
        """Look closely at everyone, as the coordinator does before an init and a start."""
        for name in self.state.replicas:
            self._probe(name)

    def _probe(self, name: str) -> None:
        engine = self.engines.of[name]
        if name in self.in_collective:
            return
        if not engine.alive:
            self.take(observe(self.state, name, Observation(lost="refused"), NOW))
            return
        seen = Observation(
            topology=self.state.replicas[name].topology or Topology(workers=2),
            instance=boot_of(name, engine),
            backend="nccl",
            paused=engine.paused,
            unwedged=True,
        )
        restarted = self.state.replicas[name].instance != boot_of(name, engine)
        why = "restart" if restarted else ""
        self.take(observe(self.state, name, seen, NOW), why=why)
