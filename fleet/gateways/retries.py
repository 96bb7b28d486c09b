"""The calls that this gateway carries, and how a call meets an earlier one, wherever that was made.

`calls.py` decides from the state alone; here are the waiting, the telling and the noting down.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from time import time
from uuid import uuid4

import msgspec

from fleet.errors import FleetError
from fleet.facts.calls import CallId, Ended, Holder, Meeting, earlier, is_overtaken
from fleet.facts.outcome import Outcome
from fleet.facts.state import FleetState, Phase
from fleet.ledger import Ledger
from fleet.rules.replay import answer_again, in_doubt

log = logging.getLogger(__name__)
change = msgspec.structs.replace

Hears = Callable[[str], Awaitable[bool]]
"""Says whether another gateway is there; for one that is not, this takes as long as its lease."""


class Calls:
    """Knows which calls are on their way here, and tells retries what became of others."""

    def __init__(self, ledger: Ledger, me: str) -> None:
        self.me = me
        self._ledger = ledger
        self._carried: set[str] = set()
        self._told: dict[str, str] = {}
        self.hears: Hears | None = None

    def hold(self, what: str, call: CallId) -> Holder:
        """Return the claim of a new call on the fleet, with a token that nobody has had.

        Made right after `met`, with nothing awaited in between: `after` tells what that has seen.
        """
        last = self._ledger.state.ended
        after = last.holder.token if last else None
        token = uuid4().hex
        return Holder(gateway=self.me, token=token, what=what, call=call, since=time(), after=after)

    @contextmanager
    def carrying(self, holder: Holder | None) -> Generator[None]:
        """Say that a call is on its way here, for as long as the context lasts."""
        if holder is None:
            yield
            return
        self._carried.add(holder.token)
        self._told = {holder.call.name: holder.token}
        try:
            yield
        finally:
            self._carried.discard(holder.token)

    def carries(self, token: str) -> bool:
        """Whether the call that holds the fleet with this token is on its way here."""
        return token in self._carried

    async def overtaken(self, holder: Holder) -> dict[str, Outcome] | None:
        """Return the result of an equal call that came first, though `met` had seen none."""
        return await self.met(holder.call, holder)

    async def met(self, call: CallId, mine: Holder | None = None) -> dict[str, Outcome] | None:
        """Return the result of the call that this one repeats, or None if it is a new one.

        Waits while that is on its way at another gateway. Raises what it ended with, and Refused
        if nobody can know whether this is a repetition.
        """
        alive = await self._alive(call)
        state = self._ledger.state
        meeting = earlier(call, state.holder, state.ended, me=self.me, alive=alive, now=time())
        if meeting is Meeting.ON_ITS_WAY:
            state = await self._ledger.until(
                lambda s: s.holder is None or not call.repeats(s.holder.call)
            )
            is_over = state.ended is not None and call.repeats(state.ended.holder.call)
            meeting = Meeting.ANSWERED if is_over else Meeting.NONE
        elif mine is not None and is_overtaken(mine, state.ended):
            meeting = Meeting.ANSWERED
        if state.ended is None or meeting is Meeting.NONE:
            return None
        if meeting is Meeting.IN_DOUBT:
            raise in_doubt(state.ended)
        if _was_taken_back(state.ended, state):
            return None
        return await self._tell(call, state.ended)

    async def undelivered(self, name: str) -> None:
        """Note that the answer to the last call, if it has this name, reached nobody; no raise."""
        token = self._told.get(name)
        try:
            await self._ledger.amend(lambda s: _noted(s, token, undelivered=True))
        except FleetError as error:
            log.warning("undelivered answer not noted", extra={"error": error.message})

    async def _tell(self, call: CallId, ended: Ended) -> dict[str, Outcome]:
        """Answer as it was; from here on it counts as delivered, so that an equal call is new."""
        token = ended.holder.token
        self._told = {call.name: token}
        if ended.undelivered:
            await self._ledger.amend(lambda s: _noted(s, token, undelivered=False))
        return answer_again(ended, self._ledger.state)

    async def _alive(self, call: CallId) -> set[str]:
        """Return the gateways that live; whoever carried an equal call is asked, and waited for.

        It may have died a moment ago, and its seat does not tell yet. Were a retry taken for a new
        call then, it would be sent to the replicas twice, or refused though it was carried out.
        """
        state = self._ledger.state
        seated = set(state.gateways)
        if state.holder is None and state.ended and call.repeats(state.ended.holder.call):
            carrier = state.ended.holder.gateway
            others = seated - {self.me}
            if self.hears is not None and carrier in others and not await self.hears(carrier):
                seated.discard(carrier)
        return seated


def _was_taken_back(ended: Ended, state: FleetState) -> bool:
    """Whether a start is as if it had never been asked for, so that its retry starts anew."""
    is_start = ended.holder.what == "start"
    return is_start and ended.was_lost and state.phase is Phase.INITIALIZED


def _noted(state: FleetState, token: str | None, *, undelivered: bool) -> FleetState:
    if state.ended is None or state.ended.holder.token != token:
        return state
    return change(state, ended=change(state.ended, undelivered=undelivered))
