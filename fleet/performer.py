"""The performer: turns one action of a round into calls to replicas, and their answers into the
next event.

Collectives (init, update) return at the first failure and keep watching the others; every other
phase waits for all members up to its deadline. Calls that must not be repeated go out on fresh
connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from fleet.errors import StoreUnavailable
from fleet.facts.options import FleetOptions
from fleet.facts.outcome import Outcome, Result, had_no_session, skipped
from fleet.facts.state import ROUND_OPEN
from fleet.gateways.gate import Gate
from fleet.ledger import Ledger
from fleet.names import Names
from fleet.replicas.fanout import FanOut
from fleet.replicas.replica_client import Call, ReplicaClient
from fleet.rules.barrier import arrivals
from fleet.rules.events import (
    Action,
    Answered,
    Archive,
    CloseSessions,
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
    SendShutdown,
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
from fleet.rules.membership import answered_late, collective_of, marked, sessions_closed
from fleet.rules.parts import may_resume, to_pause
from fleet.rules.rounds import IllegalTransition
from fleet.rules.wire import FINISH, INIT, SHUTDOWN, START, START_DRAFT, UPDATE

log = logging.getLogger(__name__)

A = TypeVar("A", bound=Answered)
Outcomes = dict[str, Outcome]
Body = bytes | memoryview | None


@dataclass(kw_only=True)
class Errand:
    """One trainer call on its way: what it brings along, and what has come of it so far."""

    body_of: Callable[[str], Body] | None = None
    names: Sequence[str] = ()
    token: str | None = None
    outcomes: dict[type[Action], Outcomes] = field(default_factory=dict[type[Action], Outcomes])
    answers: list[Answered] = field(default_factory=list[Answered])

    def body(self, replica: str) -> Body:
        """Return what this replica gets."""
        return self.body_of(replica) if self.body_of else None


class Performer:
    """Carries out actions against real replicas."""

    def __init__(
        self,
        ledger: Ledger,
        client: ReplicaClient,
        fan_out: FanOut,
        gate: Gate,
        options: FleetOptions,
    ) -> None:
        self._ledger = ledger
        self._client = client
        self._fan_out = fan_out
        self._gate = gate
        self._options = options
        self._deadlines = options.deadlines
        self._closing: set[asyncio.Task[None]] = set()
        self.names = Names(ledger.store)
        self._doers: dict[type[Action], Callable[[Any, Errand], Awaitable[Answered | None]]] = {
            Archive: self._archive,
            CloseSessions: self._close_sessions,
            SendInit: self._send_init,
            SendPause: self._send_pause,
            SendStart: self._send_start,
            SendUndo: self._send_undo,
            SendUpdate: self._send_update,
            SendFinish: self._send_finish,
            SendResume: self._send_resume,
            Unpause: self._unpause,
            SendShutdown: self._send_shutdown,
        }

    def check(self) -> None:
        """Raise LeaseLost if this gateway may not act; better before anything is written down."""
        self._gate.check()

    async def perform(self, action: Action, errand: Errand) -> Answered | None:
        """Do what the action says; return the event that came of it, if it leads to one.

        Raises LeaseLost before anything is done if this gateway may not act any more.
        """
        self._gate.check()
        return await self._doers[type(action)](action, errand)

    async def ask(
        self, replicas: Iterable[str], call_of: Callable[[str], Call], deadline_s: float
    ) -> Outcomes:
        """Make independent calls to these replicas, all at once; LeaseLost if it may not."""
        self._gate.check()
        return await self.reach(replicas, call_of, deadline_s)

    async def reach(
        self, replicas: Iterable[str], call_of: Callable[[str], Call], deadline_s: float
    ) -> Outcomes:
        """As `ask`, for calls that need no lease: they change nothing that gateways agree on."""
        attempts = {r: partial(self._call, r, call_of) for r in replicas}
        return await self._fan_out.ask(attempts, deadline_s)

    # -- the phases of a round --------------------------------------------------------------------

    async def _send_init(self, action: SendInit, errand: Errand) -> Answered:
        started = perf_counter()
        outcomes = await self._collective(action, INIT, errand, self._deadlines.init_s)
        return self._judge(InitArrived, InitFailed, action, outcomes, started)

    async def _send_pause(self, action: SendPause, errand: Errand) -> Answered:
        started = perf_counter()
        late = _CALLS_ON_THEIR_WAY
        holders: Callable[[], Mapping[str, str]] = dict[str, str]
        try:
            async with asyncio.timeout(self._deadlines.pause_s):
                await self._gate.settled()
                late, holders = _GATE_NOT_CLOSED, self._gate.holding
                await self._gate.closed()
            action = msgspec.structs.replace(action, targets=self._whom_to_pause(action))
            late, holders = _NOT_DRAINED, self._gate.answering
            outcomes = await self._pause(action.targets)
        except TimeoutError:
            outcomes = _gate_stays_open(self._ledger.state.member_ids, holders(), late)
            return PauseFailed(now=time(), outcomes=outcomes, elapsed_s=perf_counter() - started)
        errand.outcomes[SendPause] = outcomes
        return self._judge(PauseArrived, PauseFailed, action, outcomes, started)

    def _whom_to_pause(self, action: SendPause) -> tuple[str, ...]:
        """Add those to the round's own that a resume has set going since it was opened."""
        if self._options.pause_on_update == "off":
            return action.targets
        return tuple(dict.fromkeys((*action.targets, *to_pause(self._ledger.state))))

    async def _pause(self, targets: tuple[str, ...]) -> Outcomes:
        mode = self._options.pause_on_update
        if targets:
            query = urlencode({"mode": mode, "clear_cache": "true"})
            with self._opening_ahead(self._ledger.state.member_ids):
                return await self.ask(
                    targets, lambda _: Call("POST", "/pause", query), self.pause_deadline(mode)
                )
        if mode == "off" and self._ledger.state.pause is None:
            async with asyncio.timeout(self._deadlines.gate_s):
                await self._gate.drained()
        return {}

    def pause_deadline(self, mode: str) -> float:
        """Return how long a pause may take: mode `wait` lets running requests end first."""
        return self._deadlines.gate_s if mode == "wait" else self._deadlines.pause_s

    async def _send_start(self, action: SendStart, errand: Errand) -> Answered:
        started = perf_counter()
        path = START_DRAFT if action.draft else START
        with self._opening_ahead(action.targets):
            outcomes = await self._phase(action, path, errand, self._deadlines.start_s)
        return self._judge(StartArrived, StartFailed, action, outcomes, started)

    async def _send_update(self, action: SendUpdate, errand: Errand) -> Answered:
        started = perf_counter()
        with self._opening_ahead(action.targets):
            outcomes = await self._collective(action, UPDATE, errand, self._deadlines.update_s)
        return self._judge(UpdateArrived, UpdateFailed, action, outcomes, started)

    async def _send_finish(self, action: SendFinish, errand: Errand) -> Answered:
        started = perf_counter()
        label = {"weight_version": action.version} if action.version is not None else None
        body = msgspec.json.encode(label) if label else None
        call = Call("POST", FINISH, body=body, fresh=True)
        outcomes = await self.ask(action.targets, lambda _: call, self._deadlines.finish_s)
        errand.outcomes[SendFinish] = outcomes
        return self._judge(FinishArrived, FinishFailed, action, outcomes, started)

    async def _send_resume(self, action: SendResume, errand: Errand) -> Answered:
        started = perf_counter()
        await self._gate.informed()
        with self._gate.acting():
            self._check_held(errand)
            cleared = await self._reset_caches() if action.reset_caches else True
            outcomes = await self._resume(action.targets)
        errand.outcomes[SendResume] = outcomes
        elapsed = perf_counter() - started
        return Resumed(now=time(), outcomes=outcomes, elapsed_s=elapsed, cleared=cleared)

    async def _send_undo(self, action: SendUndo, errand: Errand) -> Answered:
        """Close, then resume; an engine that resumed with its session open would die."""
        started = perf_counter()
        with self._gate.acting():
            self._check_held(errand)
            finished = await self._bare_finish(action.targets)
            closed = tuple(r for r, o in finished.items() if o.ok or had_no_session(o))
            still_open = {r: o for r, o in finished.items() if r not in closed}
            resumed = await self._resume(tuple(r for r in action.resume if r not in still_open))
        outcomes = {r: finished[r] for r in closed if finished[r].ok} | resumed | still_open
        elapsed = perf_counter() - started
        return Undone(now=time(), outcomes=outcomes, elapsed_s=elapsed, closed=closed)

    def _check_held(self, errand: Errand) -> None:
        """Raise IllegalTransition if the fleet is not this call's any more.

        Its round was abandoned, and the next one may have begun: to close and to resume would break
        that. Within `acting`, since the next round waits for whoever comes to act before it.
        """
        holder = self._ledger.state.holder
        if (holder.token if holder else None) != errand.token:
            raise IllegalTransition("its members were let go meanwhile")

    # -- what surrounds a round --------------------------------------------------------------------

    async def _archive(self, action: Archive, errand: Errand) -> None:
        del errand
        await self._ledger.archive(action.round)

    async def _close_sessions(self, action: CloseSessions, errand: Errand) -> None:
        del errand
        if action.wait:
            if self._closing:  # a finish that comes late must not close what is opened next
                await asyncio.wait(self._closing)
            if action.targets:
                await self._close_now(action.targets)
        elif action.targets:
            work = self._close_later(action.targets)
            task = self._fan_out.spawn(work, name="close open sessions")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_now(self, targets: tuple[str, ...]) -> Outcomes:
        outcomes = await self._bare_finish(targets)
        await self._ledger.amend(lambda state: sessions_closed(state, outcomes))
        return outcomes

    async def _close_later(self, targets: tuple[str, ...]) -> None:
        try:
            await self._close_now(targets)
        except StoreUnavailable as error:
            log.warning("open sessions not written off", extra={"error": error.message})

    async def _unpause(self, action: Unpause, errand: Errand) -> None:
        """Close, then resume; whose session may still be open stays as it is, and is named.

        If the next round has begun before, its members are its own: it resumes them in the end.
        """
        with self._gate.acting():
            if self._ledger.state.phase in ROUND_OPEN:
                return
            finished = await self._close_now(action.close) if action.close else {}
            state = self._ledger.state
            targets = may_resume(state, action.targets) if state.pause is None else ()
            outcomes = await self._resume(targets)
            ok = [r for r, o in outcomes.items() if o.ok]
            await self._ledger.amend(lambda state: marked(state, ok, paused=False))
        still_open = {r: o for r, o in finished.items() if not (o.ok or had_no_session(o))}
        errand.outcomes[Unpause] = outcomes | still_open

    async def _send_shutdown(self, action: SendShutdown, errand: Errand) -> None:
        await self._phase(action, SHUTDOWN, errand, self._deadlines.control_s)

    async def _resume(self, targets: tuple[str, ...]) -> Outcomes:
        return await self.ask(targets, lambda _: Call("POST", "/resume"), self._deadlines.control_s)

    async def _bare_finish(self, targets: tuple[str, ...]) -> Outcomes:
        call = Call("POST", FINISH, fresh=True)
        return await self.ask(targets, lambda _: call, self._deadlines.control_s)

    async def _reset_caches(self) -> bool:
        """Drop the old weights' KV where nothing was paused; running requests are preempted."""
        call = Call("POST", "/reset_prefix_cache", query="reset_running_requests=true")
        outcomes = await self.ask(
            self._ledger.state.member_ids, lambda _: call, self._deadlines.control_s
        )
        return all(o.ok and _succeeded(o.answer) for o in outcomes.values())

    # -- pieces ------------------------------------------------------------------------------------

    async def _phase(
        self, action: Action, path: str, errand: Errand, deadline_s: float
    ) -> Outcomes:
        call = Call("POST", path, fresh=True)
        outcomes = await self.ask(action.targets, lambda _: call, deadline_s)
        errand.outcomes[type(action)] = outcomes
        return outcomes

    async def _collective(
        self, action: Action, path: str, errand: Errand, deadline_s: float
    ) -> Outcomes:
        def call_of(replica: str) -> Call:
            return Call("POST", path, body=errand.body(replica), fresh=True)

        attempts = {r: partial(self._call, r, call_of) for r in action.targets}
        async with self._announcing(errand.names):
            late = partial(self._late, collective_of(self._ledger.state))
            outcomes = await self._fan_out.gather_collective(attempts, deadline_s, late)
        errand.outcomes[type(action)] = outcomes
        return outcomes

    @asynccontextmanager
    async def _announcing(self, names: Sequence[str]) -> AsyncGenerator[None]:
        """Note the names down while the replicas are at work; they are needed at the finish only.

        Raises StoreUnavailable at the end of the context, so that the replicas are heard first.
        """
        if not names:
            yield
            return
        failed: list[StoreUnavailable] = []
        state = self._ledger.state

        async def note() -> None:
            try:
                await self.names.announce(state, names)
            except StoreUnavailable as error:
                failed.append(error)

        noting = self._fan_out.spawn(note(), name="note names")
        yield
        await noting
        if failed:
            raise failed[0]

    @contextmanager
    def _opening_ahead(self, targets: Iterable[str]) -> Generator[None]:
        """Open connections for the next phase while the replicas are at work on this one."""
        known, over = self._ledger.state.replicas, asyncio.Event()
        openings = {
            r: partial(self._client.open_ahead, known[r].url) for r in targets if r in known
        }
        work = self._fan_out.trickle(openings, over)
        self._fan_out.spawn(work, name="open connections ahead")
        try:
            yield
        finally:
            over.set()

    async def _call(self, replica: str, call_of: Callable[[str], Call]) -> Outcome:
        known = self._ledger.state.replicas.get(replica)
        if known is None:
            return Outcome(outcome=Result.UNREACHABLE, detail="removed from the fleet")
        return await self._client.call(known.url, call_of(replica))

    async def _late(self, collective: object, replica: str, outcome: Outcome) -> None:
        """A silent member has answered: it is not wedged any more, and its session is closed.

        First it is written down that the collective has failed, and who was silent then.
        """
        log.info("late answer", extra={"replica": replica, "outcome": outcome.outcome})
        await self._ledger.until(lambda s: collective_of(s) != collective)
        try:
            state = await self._ledger.amend(lambda s: answered_late(s, replica, outcome))
            known = state.replicas.get(replica)
            if known is not None and known.session_open and known.reachable:
                await self._close_now((replica,))
        except StoreUnavailable as error:
            log.warning("late answer not written", extra={"error": error.message})

    @staticmethod
    def _judge(
        arrived: type[Answered],
        failed: type[Answered],
        action: Action,
        outcomes: Mapping[str, Outcome],
        started: float,
    ) -> Answered:
        """Ask the barrier whether everyone who had to has arrived."""
        complete = arrivals(action.targets, outcomes).complete or not action.targets
        kind = arrived if complete else failed
        return kind(now=time(), outcomes=dict(outcomes), elapsed_s=perf_counter() - started)


def _succeeded(answer: Any) -> bool:
    """Older servers answer a cache reset with an empty 200 (protocol before vLLM 0.32)."""
    fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    return bool(fields.get("success", True))


def _gate_stays_open(members: Iterable[str], holders: Mapping[str, str], late: str) -> Outcomes:
    """Blame those for whom everyone has waited; every member is there, since all are resumed."""
    if not holders:
        return {r: Outcome(outcome=Result.TIMEOUT, detail=late) for r in members}
    held = {r: Outcome(outcome=Result.TIMEOUT, detail=why) for r, why in holders.items()}
    return {r: skipped("not paused yet") for r in members} | held


_CALLS_ON_THEIR_WAY = "other control calls were still on their way when the pause was due"
_GATE_NOT_CLOSED = "a gateway had not closed its gate when the pause was due"
_NOT_DRAINED = "a gateway had not told that its rollouts were answered when the start was due"
