"""The coordinator: the trainer's calls of a weight update, each carried out on every member.

`rounds.py` decides, `performer.py` does, this file ties them: apply the event, save, run the
actions, and feed what came of them back in, until there is nothing left to do. Each method
returns one outcome per replica or raises one FleetError that tells the whole story.

It keeps nothing between calls that the ledger does not have. A call that repeats one which another
gateway carries, or has carried, gets the result of that one; a call whose gateway is gone is taken
over (`take_over`), which takes back or resumes what it can and never finishes by guess.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic, time
from typing import Any
from uuid import uuid4

import msgspec

from fleet.errors import (
    DeadlinePassed,
    FleetError,
    LayoutUnsupported,
    MembershipChanged,
    Refused,
    StoreUnavailable,
    WrongPhase,
)
from fleet.facts.calls import CallId, Holder
from fleet.facts.layout import Layout, lay_out
from fleet.facts.options import FleetOptions
from fleet.facts.outcome import Outcome
from fleet.facts.replica import Replica
from fleet.facts.state import Group
from fleet.gateways.retries import Calls
from fleet.ledger import Ledger
from fleet.performer import Errand, Performer
from fleet.replicas.fanout import FanOut
from fleet.replicas.registry import Registry
from fleet.rules import wire
from fleet.rules.advice import find_more
from fleet.rules.bodies import FinishBody, InitBody, UpdateBody, check_version
from fleet.rules.events import (
    Action,
    Answered,
    CommitRequested,
    Event,
    FinishRequested,
    HolderLost,
    InitRequested,
    PauseArrived,
    PauseFailed,
    Requested,
    ResetRequested,
    SendFinish,
    SendInit,
    SendResume,
    SendShutdown,
    SendStart,
    SendUpdate,
    ShutdownRequested,
    StartRequested,
    Unpause,
    UpdateRequested,
)
from fleet.rules.explain import error_of, what_next
from fleet.rules.holding import is_told
from fleet.rules.membership import (
    candidates_for,
    check_still_whole,
    common_backend,
    form_group,
    in_collective,
)
from fleet.rules.rounds import IllegalTransition, advance

log = logging.getLogger(__name__)

Outcomes = dict[str, Outcome]

_FAN_OUT: dict[type[Event], type[Action]] = {
    InitRequested: SendInit,
    StartRequested: SendStart,
    UpdateRequested: SendUpdate,
    FinishRequested: SendFinish,
    CommitRequested: SendResume,
}
"""The action whose outcomes each call answers with."""
STORE_AGAIN_S = 0.2
"""How long to wait before a write that the store did not take is made again."""


class Coordinator:
    """Runs weight updates over the fleet; one call of one trainer at a time per phase."""

    def __init__(
        self,
        ledger: Ledger,
        performer: Performer,
        registry: Registry,
        fan_out: FanOut,
        options: FleetOptions,
        calls: Calls,
    ) -> None:
        self._ledger = ledger
        self._performer = performer
        self._registry = registry
        self._fan_out = fan_out
        self._options = options
        self._calls = calls

    async def init(self, body: InitBody, call: CallId) -> Outcomes:
        """Freeze the membership and let every replica join the trainer's group at its own ranks.

        Raises Refused before anything is sent if the trainer's numbers do not fit, MemberFailed or
        DeadlinePassed after.
        """
        self._check_form(body.init_info)
        if (before := await self._calls.met(call)) is not None:
            return before
        holder = self._calls.hold("init", call)
        self._require(InitRequested, "init")
        await self._registry.settle()
        await self._registry.verify(
            r.id for r in self._ledger.state.replicas.values() if not r.lost
        )
        group, family = self._plan(body.init_info, call.by)
        slots = {slot.replica: slot for slot in group.layout.slots}

        def body_of(replica: str) -> bytes:
            info = wire.init_info_for(family, body.init_info, group.layout, slots[replica])
            return msgspec.json.encode({"init_info": info})

        errand = Errand(body_of=body_of, names=wire.announced_in_init(family, body.init_info))
        planned_on = self._ledger.state.generation
        event = InitRequested(now=time(), group=group, holder=holder, planned_on=planned_on)
        await self._drive(event, errand)
        return errand.outcomes[SendInit]

    async def start(self, call: CallId, *, draft: bool = False) -> Outcomes:
        """Close the gate, pause, and open a session on every member; undo it all if one refuses."""
        if (before := await self._calls.met(call)) is not None:
            return before
        holder = self._calls.hold("start", call)
        self._require(StartRequested, "start")
        await self._registry.verify(self._ledger.state.member_ids)
        check_still_whole(self._ledger.state)
        auto_pause = self._options.pause_on_update != "off"
        errand = Errand()
        event = StartRequested(
            now=time(),
            by=call.by,
            draft=draft,
            auto_pause=auto_pause,
            holder=holder,
        )
        await self._drive(event, errand)
        return errand.outcomes[SendStart]

    async def update(self, body: UpdateBody, call: CallId) -> Outcomes:
        """Send the trainer's bytes to every member at once; answer at the first failure."""
        if (before := await self._calls.met(call)) is not None:
            return before
        layout = self._check_update(body)
        slots = {slot.replica: slot for slot in layout.slots}
        errand = Errand(
            body_of=lambda replica: body.for_slot(layout, slots[replica]),
            names=body.names or (),
        )
        event = UpdateRequested(
            now=time(),
            announces=bool(body.names),
            holder=self._calls.hold("update", call),
            planned_on=self._ledger.state.generation,
        )
        await self._drive(event, errand)
        return errand.outcomes[SendUpdate]

    async def finish(self, body: FinishBody, call: CallId) -> Outcomes:
        """Close every session; when the last member has arrived, the version commits."""
        check_version(body.weight_version)
        if (before := await self._calls.met(call)) is not None:
            return before
        holder = self._calls.hold("finish", call)
        self._require(FinishRequested, "finish")
        state = self._ledger.state
        if state.round and state.round.draft and body.weight_version is not None:
            raise WrongPhase(
                "a draft-model update changes no version",
                hint="finish it without weight_version",
            )
        full, names_key = await self._performer.names.judge(state)
        errand = Errand()
        event = FinishRequested(
            now=time(),
            version=body.weight_version,
            auto_version=self._options.auto_version,
            full=full,
            names_key=names_key,
            round=state.round.id if state.round else None,
            planned_on=state.generation,
            holder=holder,
        )
        await self._drive(event, errand)
        return errand.outcomes[SendFinish]

    async def commit(self, round_id: int, call: CallId) -> Outcomes:
        """Commit a failed finish for those that completed it, and let them serve again.

        Raises WrongPhase unless the round is the current one, a full update, and finished by some.
        """
        if (before := await self._calls.met(call)) is not None:
            return before
        holder = self._calls.hold("commit", call)
        self._require(CommitRequested, f"commit of round {round_id}")
        errand = Errand()
        event = CommitRequested(now=time(), by=call.by, round=round_id, holder=holder)
        await self._drive(event, errand)
        return errand.outcomes.get(SendResume, {})

    async def shutdown(self) -> Outcomes:
        """Let the members leave the trainer's group; refused while a round is open."""
        self._require(ShutdownRequested, "shutdown")
        errand = Errand()
        await self._drive(ShutdownRequested(now=time()), errand)
        return errand.outcomes.get(SendShutdown, {})

    async def reset(self, by: str, *, new_model: bool = False) -> Outcomes:
        """Abandon whatever is open; members that may be mixed stay fenced and paused.

        `new_model` says that the next updates have other tensors, so that fullness starts anew.
        """
        state = self._ledger.state
        silent = self._fan_out.in_flight()
        if state.holder is not None and state.holder.gateway != self._calls.me:
            silent |= in_collective(state)  # who is in flight there, nobody knows here
        errand = Errand()
        await self._drive(
            ResetRequested(now=time(), by=by, silent=tuple(silent), new_model=new_model), errand
        )
        return errand.outcomes.get(Unpause, {})

    # -- a call whose gateway is gone -------------------------------------------------------------

    async def take_over(self, lost: Holder) -> None:
        """Carry on, as far as that is safe, a call whose gateway is gone; never raises."""
        why = f"gateway {lost.gateway} was lost while its {lost.what} was on its way"
        log.warning("call taken over", extra={"lost": lost.gateway, "call": lost.what})
        holder = msgspec.structs.replace(lost, gateway=self._calls.me, token=uuid4().hex)
        event = HolderLost(now=time(), why=why, lost=lost.token, holder=holder)
        try:
            await self._drive(event, Errand())
        except FleetError as error:
            log.warning("after a take-over", extra={"error": error.message})

    # -- planning ----------------------------------------------------------------------------------

    def _check_form(self, init_info: dict[str, Any]) -> None:
        """Tell a malformed body before anything else, as far as the replicas are known."""
        candidates, _ = candidates_for(self._ledger.state, None)
        wire.check_form(wire.family_of(common_backend(candidates), init_info), init_info)

    def _plan(self, init_info: dict[str, Any], by: str) -> tuple[Group, wire.Family]:
        """Lay the next group out and check the trainer's numbers; nothing is sent."""
        state = self._ledger.state
        candidates, left_out = candidates_for(state, None)
        backend = _one_backend(candidates)
        candidates, left_out = candidates_for(state, backend)
        self._check_enough(candidates, left_out)
        family = wire.family_of(backend, init_info)
        layout = lay_out(candidates, base=wire.base_of(family, init_info))
        try:
            wire.check_init(family, init_info, layout)
        except Refused as error:
            error.hint = _with_left_out(error.hint, left_out)
            raise
        group = form_group(state, candidates, left_out, layout, by, time())
        if wire.announced_in_init(family, init_info):
            group = msgspec.structs.replace(group, announced_in=state.next_round)
        return group, family

    def _check_enough(self, candidates: list[Replica], left_out: dict[str, str]) -> None:
        needed = max(1, self._options.min_replicas)
        if len(candidates) < needed:
            raise MembershipChanged(
                f"{len(candidates)} replicas can join a group, {needed} are needed",
                hint=_with_left_out(find_more(self._ledger.state), left_out),
            )

    def _check_update(self, body: UpdateBody) -> Layout:
        group = self._ledger.state.group
        if group is not None:
            body.check(group.layout)
        self._require(UpdateRequested, "update")
        if group is None:
            raise WrongPhase("update needs a group", hint="init first")
        if body.names is not None and not body.names and group.announced_in is None:
            raise WrongPhase(
                "the update names no tensors («as in the previous call»), but this generation "
                "has had no previous call",
                hint="send names, dtype_names and shapes in the first update after an init",
            )
        return group.layout

    # -- driving -----------------------------------------------------------------------------------

    def _require(self, event: type[Event], call: str) -> None:
        """Refuse early, before anything is looked up, what the table refuses anyway."""
        state = self._ledger.state
        refusal = what_next(state, event, call, time())
        if refusal is not None:
            raise refusal

    async def _drive(self, event: Event, errand: Errand) -> None:
        """Apply the event and everything that follows from it; raise what it means if it failed."""
        holder = event.holder if isinstance(event, Requested) else None
        errand.token = holder.token if holder else None
        with self._calls.carrying(holder):
            await self._carry_out(event, errand)

    async def _carry_out(self, event: Event, errand: Errand) -> None:
        self._performer.check()
        try:
            actions = await self._ledger.apply(event)
        except IllegalTransition:
            if not await self._was_overtaken(event, errand):
                raise
            return
        try:
            await self._follow(actions, errand)
        except StoreUnavailable as error:
            raise DeadlinePassed(
                f"outcome unknown: replicas were called, then the store failed ({error.message})",
                hint="look at GET /fleet; if the round is still open, POST /fleet/reset and "
                "re-init",
            ) from error
        except IllegalTransition as error:
            await self._take_back_pause(errand)
            raise WrongPhase(
                f"the round was taken over while this call was on its way ({error.message})",
                hint="look at GET /fleet, then re-init",
            ) from error
        failure = self._failure(errand)
        if failure is not None:
            raise failure

    async def _take_back_pause(self, errand: Errand) -> None:
        """Resume whom a pause has reached after its round was abandoned: nobody else would."""
        late = errand.answers[-1] if errand.answers else None
        if not isinstance(late, PauseArrived | PauseFailed):
            return
        try:
            await self._performer.perform(Unpause(targets=tuple(late.outcomes)), Errand())
        except FleetError as error:
            log.warning("late pause not taken back", extra={"error": error.message})

    async def _was_overtaken(self, event: Event, errand: Errand) -> bool:
        """Take over the result of an equal call that another gateway was faster with."""
        holder = event.holder if isinstance(event, Requested) else None
        kind = _FAN_OUT.get(type(event))
        if holder is None or kind is None:
            return False
        before = await self._calls.overtaken(holder)
        if before is not None:
            errand.outcomes[kind] = before
        return before is not None

    async def _follow(self, actions: tuple[Action, ...], errand: Errand) -> None:
        while actions:
            answers = [await self._performer.perform(action, errand) for action in actions]
            answered = next((answer for answer in answers if answer is not None), None)
            if answered is None:
                return
            answered = msgspec.structs.replace(answered, token=errand.token)
            errand.answers.append(answered)
            actions = await self._record(answered)

    async def _record(self, answered: Answered) -> tuple[Action, ...]:
        """Apply what replicas have answered; a store that is away for a moment fails no round."""
        before = self._ledger.state
        until = monotonic() + self._options.lease_s
        try:
            return await self._ledger.apply(answered)
        except StoreUnavailable:
            _, actions = advance(before, answered)
        told = len(before.holder.story) + 1 if before.holder else 0
        while True:
            await asyncio.sleep(STORE_AGAIN_S)
            try:
                await self._ledger.refresh()
                if not is_told(self._ledger.state, answered.token, told):
                    return await self._ledger.apply(answered)
            except StoreUnavailable:
                if monotonic() > until:
                    raise
            else:
                return actions

    def _failure(self, errand: Errand) -> FleetError | None:
        errors = (error_of(answer, self._ledger.state) for answer in errand.answers)
        return next((error for error in errors if error is not None), None)


def _one_backend(candidates: list[Replica]) -> str | None:
    backends = {replica.backend for replica in candidates}
    if len(backends) > 1:
        told = ", ".join(f"{r.id}: {r.backend}" for r in candidates)
        raise LayoutUnsupported(
            f"the replicas run different weight-transfer backends ({told})",
            hint="start all replicas with the same --weight-transfer-config",
        )
    return common_backend(candidates)


def _with_left_out(hint: str | None, left_out: dict[str, str]) -> str:
    told = "; ".join(f"{replica}: {why}" for replica, why in left_out.items())
    return f"{hint or ''}{f' (left out: {told})' if told else ''}"
