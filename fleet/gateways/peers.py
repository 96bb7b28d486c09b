"""The gateways of one fleet, among each other: who is there, and one gate out of all of theirs.

A gateway has a seat in the fleet's state and a lease in the store (lease.py). A heartbeat renews
the lease, reads what others have decided, and only then lets the gate admit rollouts for another
lease time. From this follows what makes a closed gate certain: whoever closes it has written so,
and a gateway that has not read it stops by itself when its lease ends. So `closed` waits for each
other gateway until it has acknowledged, or its lease has lapsed, or, if it goes on renewing but
does not acknowledge, until it has lost its seat and a lease time has passed since.

What this does not do: decide about rounds. A call whose gateway is gone is handed to `take_over`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic, time
from typing import Any
from uuid import uuid4

import msgspec

from fleet.errors import FleetError, StoreUnavailable
from fleet.facts.calls import Holder, Seat
from fleet.facts.state import FleetState
from fleet.gateways.gate import Load, LocalGate, add_up
from fleet.gateways.lease import CLOCK_SLACK, Lease, Presence
from fleet.gateways.outage import Outage
from fleet.gateways.talk import AGAIN_S, Message, Question, Talk
from fleet.ledger import Ledger

log = logging.getLogger(__name__)
change = msgspec.structs.replace

PATIENCE_S = 0.1
"""How long to wait for answers before looking whether those who owe them are still there."""

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class Peers:
    """This gateway among the others; as a `Gate` it speaks for all of them."""

    def __init__(
        self, ledger: Ledger, gate: LocalGate, spawn: Spawn, *, where: str, lease_s: float
    ) -> None:
        self.me = uuid4().hex[:12]
        self.others: Mapping[str, Presence] = {}
        self.outage = Outage("heartbeat")
        self._ledger = ledger
        self._gate = gate
        self._spawn = spawn
        self._where = where
        self._lease = Lease(ledger.store, self.me, lease_s)
        self._talk = Talk(ledger.store, self.me)
        self._seat: Seat | None = None
        self._acting = 0
        self._nothing_acts = asyncio.Event()
        self._nothing_acts.set()
        self._news = asyncio.Event()
        self._taking: str | None = None
        self._replying: set[str] = set()
        self.runs: Callable[[str], bool] = lambda _: False
        self.take_over: Callable[[Holder], Awaitable[None]] | None = None
        self.abort: Callable[[tuple[str, ...] | None], Awaitable[int]] | None = None
        ledger.on_save(self._news.set)

    # -- the gate of the whole fleet ---------------------------------------------------------------

    def check(self) -> None:
        """Raise LeaseLost unless this gateway may act for the fleet now."""
        self._lease.check()

    async def closed(self) -> None:
        """Return when no gateway has a rollout between its choice of a replica and its last byte.

        The fleet's state must say already that the gate is closed.
        """
        await self._ask_others("closed", expel=True)
        await self._gate.closed()

    async def drained(self) -> None:
        """Return when no gateway has a rollout that is being answered by any replica."""
        await self._ask_others("drained", expel=False)
        await self._gate.drained()

    async def settled(self) -> None:
        """Return when no gateway has a control call outside of rounds on its way to replicas.

        A resume that is on its way while a round starts would set engines going in the middle of
        their update. The state must say already that such calls are refused.
        """
        await self._ask_others("settled", expel=False)
        await self._nothing_acts.wait()
        if self._seats_of_others():
            await self._ledger.refresh()  # what those calls have changed

    @contextmanager
    def acting(self) -> Generator[None]:
        """Say that such a call is on its way, for as long as the context lasts.

        Who looks at the phase after entering is either refused or waited for.
        """
        self._acting += 1
        self._nothing_acts.clear()
        try:
            yield
        finally:
            self._acting -= 1
            if not self._acting:
                self._nothing_acts.set()

    async def informed(self) -> None:
        """Return when every gateway follows the state as it is now, after a lease at the latest.

        An answer that passes a gateway which has not heard of a commit yet ends under a version
        that it does not name. One that cannot be told must not keep the others waiting.
        """
        with suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(self._lease.ttl_s):
                await self._ask_others("informed", expel=False)

    def load(self, *, only_here: bool = False) -> Load:
        """Return what the gateways have in hand, the others as of their last heartbeat.

        `only_here` counts those that serve this gateway's address, as workers of one process do.
        """
        others = (p for p in self.others.values() if not only_here or p.where == self._where)
        return add_up([self._gate.load(), *(p.load for p in others)])

    def holding(self) -> dict[str, str]:
        """Return which replicas keep `closed` waiting, each with the reason, for messages."""
        return self.load().holding()

    def answering(self) -> dict[str, str]:
        """Return which replicas keep `drained` waiting, each with the reason, for messages."""
        return self.load().answering()

    async def abort_elsewhere(self, names: tuple[str, ...] | None, within_s: float) -> int:
        """Let the other gateways abort what they hold or carry; return how many rollouts that was.

        Best effort: a gateway that does not answer in time is not waited for.
        """
        others = self._seats_of_others()
        if not others:
            return 0
        with self._talk.question("abort", names=names) as question:
            await self._talk.put(question)
            await question.wait(others, within_s)
        return sum(question.answers.values())

    async def hears(self, gateway: str) -> bool:
        """Return whether another gateway is there: it answers, or its lease lapses.

        One that renews its lease and does not answer is there, too.
        """
        seats = {g: s for g, s in self._ledger.state.gateways.items() if g == gateway}
        if not seats:
            return False
        with self._talk.question("there") as question, suppress(TimeoutError):
            async with asyncio.timeout(2 * self._lease.ttl_s):
                await self._outwait(question, seats, expel=False)
                return gateway in question.answers
        return True

    def _seats_of_others(self) -> dict[str, Seat]:
        return {g: s for g, s in self._ledger.state.gateways.items() if g != self.me}

    async def _ask_others(self, what: str, *, expel: bool) -> None:
        others = self._seats_of_others()
        if not others:
            return
        with self._talk.question(what, revision=self._ledger.revision) as question:
            await self._outwait(question, others, expel=expel)

    async def _outwait(self, question: Question, others: dict[str, Seat], *, expel: bool) -> None:
        """Wait until each of the others has answered or cannot admit a rollout any more."""
        began = asked = monotonic()
        await self._talk.put(question)
        while waiting := await question.wait(others, PATIENCE_S):
            gone = await self._lease.lapsed(waiting)
            others = {g: s for g, s in others.items() if g not in gone}
            waiting -= gone
            now = monotonic()
            if expel and waiting and now - began > self._lease.ttl_s:
                await self._expel({g: others[g] for g in waiting}, question.message.what)
                await question.wait(waiting, self._lease.ttl_s * CLOCK_SLACK)
                return
            if waiting and now - asked > AGAIN_S:
                asked = now
                await self._talk.put(question)

    async def _expel(self, seats: Mapping[str, Seat], what: str) -> None:
        log.warning("gateways expelled", extra={"gateways": sorted(seats), "missing": what})
        await self._ledger.amend(lambda state: _without(state, seats))

    # -- signs of life -----------------------------------------------------------------------------

    async def beat(self) -> None:
        """Renew the lease, follow the fleet, and let the gate go on for another lease time."""
        presence = Presence(
            where=self._where, revision=self._ledger.revision, load=self._gate.load()
        )
        until, lapsed = await self._lease.renew(presence)
        await self._ledger.refresh()
        self._ledger.check_settled()
        if lapsed or self._ledger.state.gateways.get(self.me) != self._seat or not self._seat:
            await self._sit_down()
        self._lease.until = until
        self._gate.renew(until)
        await self._look_around()

    async def _sit_down(self) -> None:
        """Take a seat, with nothing under way that an earlier seat had let through."""
        self._lease.until = monotonic()
        self._gate.renew(self._lease.until)
        if self._seat is not None:
            log.warning("lease lost: the gate was closed", extra={"gateway": self.me})
            await self._gate.closed()
        seat = Seat(where=self._where, since=time())
        await self._ledger.amend(
            lambda state: change(state, gateways={**state.gateways, self.me: seat})
        )
        self._seat = seat

    async def _look_around(self) -> None:
        """See who is still there; give up the seats, and take over the call, of who is not."""
        seats = self._seats_of_others()
        seen = await self._lease.presences(seats)
        self.others = {g: presence for g, presence in seen.items() if presence is not None}
        absent = {g for g, presence in seen.items() if presence is None}
        dead = {g: seats[g] for g in await self._lease.surely(absent)}
        if dead:
            log.warning("gateways are gone", extra={"gateways": sorted(dead)})
            await self._ledger.amend(lambda state: _without(state, dead))
        self._look_for_orphans()

    def _look_for_orphans(self) -> None:
        """Have the call taken over that nobody carries any more."""
        state = self._ledger.state
        holder = state.holder
        if holder is None or holder.token == self._taking or self.take_over is None:
            return
        mine = holder.gateway == self.me
        if self.runs(holder.token) if mine else holder.gateway in state.gateways:
            return
        self._taking = holder.token
        self._spawn(self._take_over(holder, self.take_over), "take over a call")

    async def _take_over(self, holder: Holder, work: Callable[[Holder], Awaitable[None]]) -> None:
        try:
            await work(holder)
        except Exception:  # the gateway must go on carrying rollouts; the next beat tries again
            log.exception("bug in a take-over")
        finally:
            self._taking = None

    async def leave(self) -> None:
        """Give seat and lease back, so that nobody waits for this gateway."""
        self._gate.renew(monotonic())
        try:
            await self._ledger.amend(lambda state: _without(state, {self.me: self._seat}))
            await self._lease.release()
        except StoreUnavailable as error:
            log.warning("lease not given back", extra={"error": error.message})

    # -- running -----------------------------------------------------------------------------------

    async def run(self, every_s: float) -> None:
        """Beat, listen and tell news, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat_on(every_s), name="heartbeat")
            group.create_task(self._talk.listen(self._hear), name="listen to gateways")
            group.create_task(self._tell_news(), name="tell gateways")

    async def _beat_on(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.beat()
            except FleetError as error:
                self.outage.failed(error.message)
            except Exception:  # then the lease ends and the gate closes: loud, and safe
                log.exception("bug in the heartbeat")
            else:
                self.outage.over()

    async def _tell_news(self) -> None:
        """Say that the state has changed; several changes at once are one piece of news."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._seats_of_others():
                news = Message(sender=self.me, what="news", revision=self._ledger.revision)
                try:
                    await self._talk.say(news)
                except StoreUnavailable as error:
                    log.warning("news not told", extra={"error": error.message})

    async def _hear(self, message: Message) -> None:
        if message.what == "news":
            await self._catch_up(message.revision)
        elif message.ask not in self._replying:
            self._replying.add(message.ask)
            self._spawn(self._reply(message), f"answer {message.what}")

    async def _catch_up(self, revision: int) -> bool:
        if self._ledger.revision < revision:
            await self._ledger.refresh()
        return self._ledger.revision >= revision

    async def _reply(self, message: Message) -> None:
        """Do what another gateway asks for, then say so; who cannot stays silent."""
        try:
            if not await self._catch_up(message.revision):
                return
            count = await self._do(message)
            await self._talk.answer(message, count)
        except FleetError as error:
            log.warning("question not answered", extra={"error": error.message})
        except Exception:  # as above; the asker does without
            log.exception("bug in an answer")
        finally:
            self._replying.discard(message.ask)

    async def _do(self, message: Message) -> int:
        if message.what == "closed":
            await self._gate.closed()
        elif message.what == "drained":
            await self._gate.drained()
        elif message.what == "settled":
            await self._nothing_acts.wait()
        elif message.what == "abort" and self.abort is not None:
            return await self.abort(message.names)
        return 0


def _without(state: FleetState, seats: Mapping[str, Seat | None]) -> FleetState:
    """Take these seats away; who has sat down anew meanwhile keeps the new one."""
    left = {g: s for g, s in state.gateways.items() if seats.get(g) != s}
    return state if len(left) == len(state.gateways) else change(state, gateways=left)
