"""Control calls outside a weight update: pausing, sleeping, labels, caches, adapters, checks.

Each reaches every replica that can answer, all at once, and fails if one of them fails. What a
call changes for routing (paused, asleep, which label) is written down before the first replica
hears of it, so that the gate and the router never lag behind the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from time import time
from typing import Any, cast
from urllib.parse import urlencode

import msgspec

from fleet.errors import (
    BadInput,
    DeadlinePassed,
    MemberFailed,
    PauseNotReached,
    Refused,
    StoreUnavailable,
    WrongPhase,
)
from fleet.facts.layout import count_workers
from fleet.facts.options import FleetOptions
from fleet.facts.outcome import Outcome, describe_failures, skipped
from fleet.facts.replica import SESSION_OPEN, Replica, Sleep
from fleet.facts.state import IN_SESSION, ROUND_OPEN, UNSET_VERSION, FleetState, Phase, TrainerPause
from fleet.gateways.gate import Gate
from fleet.ledger import Ledger
from fleet.performer import Performer
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import Call
from fleet.rules.bodies import check_version
from fleet.rules.explain import count_states, failure_kind
from fleet.rules.membership import (
    candidates_for,
    common_backend,
    is_current,
    marked,
    relabelled,
)
from fleet.rules.resting import (
    asleep_again,
    clears,
    got_up,
    laid_down,
    paused,
    runs_on,
    wakes_wholly,
    why_unread,
    woken,
)

change = msgspec.structs.replace

Outcomes = dict[str, Outcome]
Among = tuple[list[str], Outcomes]
"""Who is to be called, and why the others are skipped."""

PAUSE_MODES = ("abort", "wait", "keep")
NEAR_SESSION = IN_SESSION | {Phase.PAUSING}
"""Phases in which a member is between start and finish, or will be before a call is over."""
WAKE_TAGS = ("weights", "kv_cache", "scheduling")


class Controls:
    """Carries out control calls over the whole fleet."""

    def __init__(
        self,
        ledger: Ledger,
        performer: Performer,
        registry: Registry,
        gate: Gate,
        options: FleetOptions,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._performer = performer
        self._gate = gate
        self._options = options
        self.broadcasts = 0

    # -- pausing -----------------------------------------------------------------------------------

    async def pause(self, mode: str, *, clear_cache: bool, by: str) -> Outcomes:
        """Close the gate and pause every replica; those that paused are resumed if one did not.

        Raises PauseNotReached, after which the caller may simply retry. Inside an open round the
        replicas are paused already, so the pause only outlives the round.
        """
        _check_choice("mode", mode, PAUSE_MODES)
        before = self._ledger.state.pause
        now = time()
        since = before.since if before else now
        cleared = clears(self._ledger.state, clear_cache=clear_cache)
        asked = TrainerPause(mode=mode, clear_cache=cleared, by=by, since=since, renewed=now)
        await self._ledger.amend(lambda s: change(s, pause=asked))
        try:
            async with asyncio.timeout(self._options.deadlines.pause_s):
                await self._gate.closed()
                # Whom a round that has committed resumes now would otherwise run on.
                state = await self._ledger.until(lambda s: s.phase is not Phase.COMMITTED)
        except TimeoutError:
            await self._ledger.amend(lambda s: change(s, pause=before))
            raise self._still_open("pause") from None
        targets, outcomes = self._reachable(state)
        if state.phase in ROUND_OPEN:
            targets = [r for r in targets if not state.replicas[r].paused]
        outcomes |= await self._send_pause(state, targets, mode, clear_cache=clear_cache)
        if _failed(outcomes):
            ran = [r for r in targets if not state.replicas[r].paused]
            await self._undo_pause(before, ran, outcomes)
        await self._note("pause", lambda s: paused(s, targets, cleared=clear_cache))
        return outcomes

    async def _send_pause(
        self, state: FleetState, targets: list[str], mode: str, *, clear_cache: bool
    ) -> Outcomes:
        def call(replica: str) -> Call:
            told = "keep" if runs_on(state.replicas[replica], mode) else mode
            query = urlencode({"mode": told, "clear_cache": str(clear_cache).lower()})
            return Call("POST", "/pause", query)

        return await self._performer.ask(targets, call, self._performer.pause_deadline(mode))

    async def _undo_pause(
        self, before: TrainerPause | None, ran: list[str], outcomes: Outcomes
    ) -> None:
        """Leave the fleet as it was found, then say who did not pause.

        All that `ran` are resumed: who said no, or nothing, may have paused all the same.
        """
        resumed: Outcomes = {}
        with self._gate.acting():
            if before is None and self._ledger.state.phase not in ROUND_OPEN:
                resumed = await self._resume_calls(ran)
        await self._ledger.amend(lambda s: change(s, pause=before))
        told = f"pause failed on {describe_failures(outcomes)}"
        left = [r for r, o in resumed.items() if not o.ok]
        if left:
            told += f"; not resumed again: {', '.join(left)}"
        raise PauseNotReached(
            f"{told}. Fleet now: {count_states(self._ledger.state)}",
            hint="what had been paused was resumed; retry the pause",
            outcomes=outcomes,
        )

    async def resume(self) -> Outcomes:
        """Resume every replica whose weights are known, then open the gate; idempotent.

        Refused inside an open round: a running engine between start and finish dies.
        """
        with self._between(ROUND_OPEN, "resume", "the round resumes what it paused by itself"):
            state = self._ledger.state
            targets, outcomes = self._reachable(state)
            fenced = {r for r in targets if state.replicas[r].fence}
            outcomes |= {r: skipped("fenced: stays paused until a full update") for r in fenced}
            in_session = {r for r in targets if state.replicas[r].session_open} - fenced
            outcomes |= {r: skipped(f"stays paused: {SESSION_OPEN}") for r in in_session}
            fenced |= in_session
            asleep = {r for r in targets if state.replicas[r].sleep} - fenced
            outcomes |= {r: skipped("asleep: resumes when it wakes up") for r in asleep}
            running = [r for r in targets if r not in fenced | asleep]
            outcomes |= await self._resume_calls(running)
            resumed = [r for r in running if outcomes[r].ok]
            await self._note("resume", lambda s: marked(s, resumed, paused=False))
            self._raise_if_failed("resume", outcomes)
            await self._note("resume", lambda s: change(s, pause=None))
            return outcomes

    async def _resume_calls(self, targets: Iterable[str]) -> Outcomes:
        deadline_s = self._options.deadlines.control_s
        return await self._performer.ask(targets, lambda _: Call("POST", "/resume"), deadline_s)

    # -- sleeping ----------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: str) -> Outcomes:
        """Put every replica to sleep; from the first moment on none of them is routed to."""
        _check_choice("mode", mode, PAUSE_MODES)
        if level not in (0, 1, 2):
            raise BadInput(f"level must be 0, 1 or 2, not {level}")
        hint = "finish or reset the round first"
        with self._between(ROUND_OPEN, "sleep", hint):
            sleep = Sleep(level=level, at=time())
            before = self._ledger.state.replicas
            targets, outcomes = self._reachable(self._ledger.state)

            def lay_down(state: FleetState) -> FleetState:
                nonlocal before
                _refuse_in(ROUND_OPEN, state, "sleep", hint)
                before = state.replicas
                return laid_down(state, targets, sleep)

            def get_up(ids: Iterable[str]) -> Callable[[FleetState], FleetState]:
                return lambda s: got_up(s, [before[r] for r in ids], sleep)

            await self._ledger.amend(lay_down)
            await self._shut_gate("sleep", get_up(targets))
            outcomes |= await self._send_sleep(before, targets, level, mode)
            awake = await self._who_does_not_sleep(targets, outcomes)
            asleep = [r for r in targets if r not in awake]
            await self._note("sleep", lambda s: asleep_again(get_up(awake)(s), asleep, sleep))
            self._raise_if_failed("sleep", outcomes)
            return outcomes

    async def _send_sleep(
        self, before: Mapping[str, Replica], targets: list[str], level: int, mode: str
    ) -> Outcomes:
        def call(replica: str) -> Call:
            told = "abort" if runs_on(before[replica], mode) else mode
            return Call("POST", "/sleep", urlencode({"level": level, "mode": told}))

        return await self._performer.ask(targets, call, self._options.deadlines.control_s)

    async def _who_does_not_sleep(self, targets: list[str], outcomes: Outcomes) -> list[str]:
        """Return those whose sleep did not begin for certain: refused, or awake by their own words.

        A failure (5xx) may come after the sleep, from one worker of several or from something in
        between, so it tells nothing by itself.
        """
        refused = [r for r in targets if 400 <= (outcomes[r].status or 0) < 500]
        failed = [r for r in targets if (outcomes[r].status or 0) >= 500]
        told = await self._ask(failed, Call("GET", "/is_sleeping"))
        return refused + [r for r in failed if told[r].answer == {"is_sleeping": False}]

    async def wake_up(self, tags: tuple[str, ...]) -> Outcomes:
        """Wake parts of every replica; it serves again when all of its parts are awake.

        Refused inside start..finish, since a server that wakes up fully also resumes.
        """
        for tag in tags:
            _check_choice("tags", tag, WAKE_TAGS)
        with self._between(NEAR_SESSION, "wake_up", "finish the update first"):
            state = self._ledger.state
            targets, outcomes = self._reachable(state)
            barred = {r: why for r in targets if (why := state.replicas[r].barred)}
            sleepers = {r: state.replicas[r].sleep for r in targets}
            idle = {r: why for r, why in barred.items() if sleepers[r] is None}
            outcomes |= {r: skipped(f"stays paused: {why}") for r, why in idle.items()}
            waking = [r for r in barred if wakes_wholly(sleepers[r], tags)]
            outcomes |= await self._emptied(waking)
            ready = [r for r in targets if r not in outcomes]
            query = urlencode([("tags", tag) for tag in tags])
            outcomes |= await self._ask(ready, Call("POST", "/wake_up", query))
            awake = {r: outcomes[r].answer for r in ready if outcomes[r].ok}
            await self._note("wake_up", lambda s: woken(s, awake, tags, sleepers))
            self._raise_if_failed("wake_up", outcomes)
            return outcomes

    async def _emptied(self, targets: Iterable[str]) -> Outcomes:
        """Abort what is frozen in sleepers whose weights nobody knows; return who failed at it.

        An awake vLLM goes on with what it holds (v1/engine/core.py: wake_up, 0.32): such tokens
        would come from those weights.
        """
        aborted = await self._ask(targets, Call("POST", "/abort_requests", body=b"{}"))
        return {r: outcome for r, outcome in aborted.items() if not outcome.ok}

    # -- labels and numbers ------------------------------------------------------------------------

    async def relabel(self, version: str) -> Outcomes:
        """Give every current replica another version label and commit it, or none of them."""
        check_version(version)
        with self._between(ROUND_OPEN, "update_weight_version", "finish or reset the round first"):
            state = self._ledger.state
            targets, outcomes = self._reachable(state)
            current = [r for r in targets if is_current(state, state.replicas[r])]
            outcomes |= {
                r: skipped("not at the committed version") for r in set(targets) - set(current)
            }
            await self._ledger.amend(lambda s: change(s, naming=version))
            outcomes |= await self._ask(current, _relabel_call(version))
            if _failed(outcomes):
                # Who failed may have taken the label all the same.
                before = state.weight_version or UNSET_VERSION
                back = await self._ask(current, _relabel_call(before))
                lost = [r for r, o in back.items() if not o.ok]
                self._raise_if_failed("update_weight_version", outcomes, also=_not_set_back(lost))
            await self._note("update_weight_version", lambda s: relabelled(s, current, version))
            return outcomes

    async def count_workers(self, *, include_dp: bool) -> int:
        """Return the workers that the next init would find."""
        await self._registry.settle()
        state = self._ledger.state
        candidates, _ = candidates_for(state, None)
        candidates, _ = candidates_for(state, common_backend(candidates))
        if include_dp:
            return count_workers(candidates)
        call = Call("GET", "/get_world_size", "include_dp=false")
        outcomes = await self._ask([r.id for r in candidates], call)
        self._raise_if_failed("get_world_size", outcomes)
        sized = [_with_workers(r, outcomes[r.id].answer) for r in candidates]
        return count_workers(sized)

    # -- everything else ---------------------------------------------------------------------------

    async def broadcast(self, call: Call, what: str) -> Outcomes:
        """Make one call on every replica that can answer; MemberFailed if one of them fails."""
        with self._between(NEAR_SESSION, what, "finish or reset the round first"):
            return await self._broadcast(call, what)

    async def _broadcast(self, call: Call, what: str, among: Among | None = None) -> Outcomes:
        targets, others = among or self._reachable(self._ledger.state)
        self.broadcasts += 1  # what it changes at the replicas, no fact of the fleet tells
        outcomes = others | await self._ask(targets, call)
        self._raise_if_failed(what, outcomes)
        return outcomes

    async def check_weights(self, call: Call) -> Outcomes:
        """Make one call that reads weights where the committed ones must be; Refused if nowhere.

        Who holds others by design, or nobody knows which, would only raise a false alarm.
        """
        what = "weight_checker"
        with self._between(NEAR_SESSION, what, "finish or reset the round first"):
            return await self._broadcast(call, what, self._with_weights(what, _why_unlike))

    async def reset_weights(self, call: Call) -> Outcomes:
        """Let every replica throw its weights away; none serves again before a full update.

        One whose weights sleep is fenced as the others are, and not called: it would die of it.
        """
        what, hint = "weight_checker reset", "finish or reset the round first"
        with self._between(NEAR_SESSION, what, hint):
            among = self._with_weights(what, lambda _, r: why_unread(r))
            fenced, _ = self._reachable(self._ledger.state)
            why = "weight_checker has reset its weights"

            def fence(state: FleetState) -> FleetState:
                _refuse_in(NEAR_SESSION, state, what, hint)
                return marked(state, fenced, fence=why, holds=None)

            def undo(state: FleetState) -> FleetState:
                mine = [r for r in state.replicas.values() if r.id in fenced and r.fence == why]
                return state.with_replicas(
                    change(r, fence=before[r.id].fence, holds=before[r.id].holds) for r in mine
                )

            before = self._ledger.state.replicas
            await self._ledger.amend(fence)
            await self._shut_gate(what, undo)
            return await self._broadcast(call, what, among)

    def _with_weights(self, what: str, why_not: Callable[[FleetState, Replica], str]) -> Among:
        """Return whose weights a call is meant for, and why not the others'."""
        state = self._ledger.state
        targets, outcomes = self._reachable(state)
        unfit = {r: why for r in targets if (why := why_not(state, state.replicas[r]))}
        outcomes |= {r: skipped(why) for r, why in unfit.items()}
        if len(unfit) == len(targets):
            told = "; ".join(f"{r}: {outcome.detail}" for r, outcome in outcomes.items())
            raise Refused(
                f"{what}: there is no replica to ask ({told or 'no replicas'})",
                hint="wake up who sleeps; re-init and send a full update for the others",
                outcomes=outcomes,
            )
        return [r for r in targets if r not in unfit], outcomes

    async def ask_everyone(self, call: Call) -> Outcomes:
        """Make one harmless call on every replica that can answer, whatever the phase."""
        targets, outcomes = self._reachable(self._ledger.state)
        deadline_s = self._options.deadlines.control_s
        return outcomes | await self._performer.reach(targets, lambda _: call, deadline_s)

    async def abort(self, body_of: Callable[[str], bytes | None]) -> Outcomes:
        """Abort rollouts: on each replica those in its body, None leaves it alone.

        Needs no phase and no lease. A wedged replica is skipped: it would not answer.
        """
        targets, _ = self._reachable(self._ledger.state)
        bodies = {r: body for r in targets if (body := body_of(r)) is not None}
        outcomes = await self._performer.reach(
            bodies,
            lambda replica: Call("POST", "/abort_requests", body=bodies[replica]),
            self._options.deadlines.control_s,
        )
        self._raise_if_failed("abort_requests", outcomes)
        return outcomes

    async def caches_cleared(self) -> None:
        """Write down that no prefix cache rests on old weights any more."""
        await self._ledger.amend(lambda s: s if s.kv == "current" else change(s, kv="current"))

    async def _shut_gate(self, what: str, undo: Callable[[FleetState], FleetState]) -> None:
        """Wait for what is on its way to a replica; take the call back if that takes too long."""
        try:
            async with asyncio.timeout(self._options.deadlines.control_s):
                await self._gate.closed()
        except TimeoutError:
            await self._ledger.amend(undo)
            raise self._still_open(what) from None

    def _still_open(self, what: str) -> PauseNotReached:
        """Say whom a gate that did not close in time is waiting for."""
        held = "; ".join(f"{r}: {why}" for r, why in self._gate.holding().items())
        return PauseNotReached(
            f"{what} could not begin: the gate does not close ({held or 'a round is resuming'}). "
            f"Fleet now: {count_states(self._ledger.state)}",
            hint=f"no replica was called; retry {what}",
        )

    async def _note(self, what: str, news: Callable[[FleetState], FleetState]) -> None:
        """Write down what came of a call; DeadlinePassed if the store is away by then."""
        try:
            await self._ledger.amend(news)
        except StoreUnavailable as error:
            raise DeadlinePassed(
                f"outcome unknown: replicas were called for {what}, then the store failed "
                f"({error.message})",
                hint=f"look at GET /fleet/replicas, then repeat {what}: once more does no harm",
            ) from error

    async def _ask(self, targets: Iterable[str], call: Call) -> Outcomes:
        return await self._performer.ask(targets, lambda _: call, self._options.deadlines.control_s)

    @staticmethod
    def _reachable(state: FleetState) -> Among:
        """Return who can be called, and why the others are skipped."""
        targets: list[str] = []
        others: Outcomes = {}
        for replica in state.replicas.values():
            if replica.known and replica.reachable and replica.refused is None:
                targets.append(replica.id)
            else:
                why = replica.lost or replica.wedged or replica.refused or "not probed yet"
                others[replica.id] = skipped(why)
        return targets, others

    @contextmanager
    def _between(self, phases: Iterable[Any], call: str, hint: str) -> Generator[None]:
        """Refuse in these phases, and let no round start until the call is over."""
        with self._gate.acting():
            _refuse_in(phases, self._ledger.state, call, hint)
            yield

    def _raise_if_failed(self, what: str, outcomes: Outcomes, also: str = "") -> None:
        if not _failed(outcomes):
            return
        kind: type[MemberFailed | DeadlinePassed] = failure_kind(outcomes)
        raise kind(
            f"{what} failed on {describe_failures(outcomes)}{also}. "
            f"Fleet now: {count_states(self._ledger.state)}",
            hint="the other replicas did what was asked; retry, or look at GET /fleet/replicas",
            outcomes=outcomes,
        )


def _refuse_in(phases: Iterable[Any], state: FleetState, call: str, hint: str) -> None:
    if state.phase in phases:
        opened = f" of round {state.round.id} ({state.round.opened_by})" if state.round else ""
        raise WrongPhase(f"{call} is refused in phase {state.phase}{opened}", hint=hint)


def _failed(outcomes: Outcomes) -> bool:
    return any(outcome.bad for outcome in outcomes.values())


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _why_unlike(state: FleetState, replica: Replica) -> str:
    """Return why a replica's weights need not be the committed ones, empty if they must be."""
    if replica.barred is not None:
        return replica.barred
    if not is_current(state, replica):
        return "does not hold the committed version"
    return why_unread(replica)


def _relabel_call(version: str) -> Call:
    body = msgspec.json.encode({"new_version": version})
    return Call("POST", "/update_weight_version", body=body)


def _not_set_back(replicas: list[str]) -> str:
    return f"; not set back: {', '.join(replicas)}" if replicas else "; the others were set back"


def _with_workers(replica: Replica, answer: Any) -> Replica:
    size = cast("dict[str, Any]", answer).get("world_size") if isinstance(answer, dict) else None
    if replica.topology is None or not isinstance(size, int):
        return replica
    return change(replica, topology=change(replica.topology, workers=size))
