"""Fan-out: the only place that starts one task per replica.

Every call is in flight at once, without a cap: a collective returns only when all have entered,
so a cap below the fleet's size would hang everyone. One outcome per replica comes back.

A collective answers at the first failure. Its other calls cannot be taken back (dropping the
connection frees nobody), so their tasks go on in the fan-out's own group, owned by the gateway's
lifespan, and report late. A replica's failure is an outcome; an exception is a bug, reaches the
caller, and does not bring down the group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from fleet.facts.outcome import Outcome, Result

log = logging.getLogger(__name__)

TRICKLE = 16
"""How many attempts are made at once where time must not be taken from others; 2 ms of CPU."""
NAP_S, BUSY_S = 0.001, 0.0025
"""How long to sleep before each of them, and from what lag on the event loop counts as busy. Timers
of uvloop are whole milliseconds, so a lag of one says nothing."""

Attempt = Callable[[], Awaitable[Outcome]]
Late = Callable[[str, Outcome], Awaitable[None]]
Seen = TypeVar("Seen")


class FanOut:
    """Runs one attempt per replica in a task group that outlives the request."""

    def __init__(self, owner: asyncio.TaskGroup) -> None:
        self._owner = owner
        self._flights: dict[tuple[str, _Gathering], asyncio.Task[None]] = {}
        self._left = asyncio.Event()

    def in_flight(self) -> frozenset[str]:
        """Return the replicas with a collective call that has not been answered."""
        return frozenset(replica for replica, _ in self._flights)

    async def settled(
        self, grace_s: float, can_come: Callable[[str], bool], at_work: Collection[str] = ()
    ) -> None:
        """Return once nobody is awaited whose call may still end: at once, mostly.

        A call is awaited for `grace_s` from when its collective was given up, whoever asks how
        often; not at all if its replica cannot come, or is `at_work` in one that goes on.
        """
        while (last := self._last_moment(grace_s, can_come, at_work)) > monotonic():
            self._left.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(last - monotonic()):
                    await self._left.wait()

    def _last_moment(
        self, grace_s: float, can_come: Callable[[str], bool], at_work: Collection[str]
    ) -> float:
        """Return until when calls are awaited, on the monotonic clock; 0 if none is."""
        moments = [0.0]
        for replica, gathering in self._flights:
            if not can_come(replica):
                continue
            if gathering.given_up_at is not None:
                moments.append(gathering.given_up_at + grace_s)
            elif replica not in at_work:  # a reset has abandoned it, at the latest now
                gathering.abandoned_at = gathering.abandoned_at or monotonic()
                moments.append(gathering.abandoned_at + grace_s)
        return max(moments)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Hang up on who has left the fleet inside a collective that was given up.

        That frees nobody; but a late answer would be taken for one of whoever has the name next.
        """
        for (replica, gathering), task in self._flights.items():
            is_over = gathering.given_up_at is not None and replica not in gathering.answered
            if is_over and is_gone(replica):
                task.cancel()

    async def ask(self, attempts: Mapping[str, Attempt], deadline_s: float) -> dict[str, Outcome]:
        """Make independent calls and wait for all of them; who is late is cancelled."""
        gathering = _Gathering(len(attempts), stop_at_failure=False)
        tasks = self._start(attempts, gathering)
        try:
            await gathering.wait(deadline_s)
        finally:
            for task in tasks.values():
                task.cancel()
        silence = Outcome(
            outcome=Result.TIMEOUT,
            detail=f"no answer within {deadline_s:g} s",
            elapsed_s=deadline_s,
        )
        return {replica: gathering.outcomes.get(replica, silence) for replica in attempts}

    async def gather_collective(
        self, attempts: Mapping[str, Attempt], deadline_s: float, late: Late
    ) -> dict[str, Outcome]:
        """Make the calls of one collective; return at the first failure or at the deadline.

        Members that have not answered by then are `wedged`, and stay watched: `late` hears of
        each one once. Cancelling the caller leaves them watched, too.
        """
        gathering = _Gathering(len(attempts), stop_at_failure=True, late=late)
        gathering.left = self._leave
        for replica, task in self._start(attempts, gathering).items():
            self._flights[replica, gathering] = task
        try:
            await gathering.wait(deadline_s)
        finally:
            gathering.given_up_at = monotonic()
        silence = Outcome(outcome=Result.WEDGED, detail="still inside the collective")
        return {replica: gathering.outcomes.get(replica, silence) for replica in attempts}

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Let something that nobody need wait for run in the fan-out's own group."""
        return self._owner.create_task(work, name=name)

    async def look(self, attempts: Mapping[str, Callable[[], Awaitable[Seen]]]) -> dict[str, Seen]:
        """Make independent look-ups that bound themselves; a bug in one cancels the others."""
        async with asyncio.TaskGroup() as group:
            tasks = {
                replica: group.create_task(_awaited(attempt), name=f"look at {replica}")
                for replica, attempt in attempts.items()
            }
        return {replica: task.result() for replica, task in tasks.items()}

    async def trickle(
        self, attempts: Mapping[str, Callable[[], Awaitable[None]]], over: asyncio.Event
    ) -> None:
        """Make attempts a few at a time, only while nobody else needs the event loop, until `over`.

        What is left then is not made: it was to save time, and must not cost any.
        """
        left = list(attempts)
        while left and not over.is_set():
            if await _lag_s() > BUSY_S:
                continue
            part, left = left[:TRICKLE], left[TRICKLE:]
            try:
                await self.look({replica: attempts[replica] for replica in part})
            except Exception:  # nobody waits for it, and a gateway must not end for saving time
                log.exception("bug in what was to save time")
                return

    def _start(
        self, attempts: Mapping[str, Attempt], gathering: _Gathering
    ) -> dict[str, asyncio.Task[None]]:
        return {
            replica: self._owner.create_task(
                gathering.follow(replica, attempt), name=f"call {replica}"
            )
            for replica, attempt in attempts.items()
        }

    def _leave(self, replica: str, gathering: _Gathering) -> None:
        del self._flights[replica, gathering]
        self._left.set()


async def _lag_s() -> float:
    """Return how much later than asked for the event loop comes back to a task that sleeps."""
    began = monotonic()
    await asyncio.sleep(NAP_S)
    return monotonic() - began - NAP_S


async def _awaited(attempt: Callable[[], Awaitable[Seen]]) -> Seen:
    return await attempt()


class _Gathering:
    """What has come back so far; settles once, when everyone has answered or the first failed.

    `given_up_at` is when its caller went on, `abandoned_at` when it was first seen that nobody
    needs it any more; both in seconds of the monotonic clock.
    """

    def __init__(self, awaited: int, *, stop_at_failure: bool, late: Late | None = None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.answered: set[str] = set()
        self.given_up_at: float | None = None
        self.abandoned_at: float | None = None
        self.left: Callable[[str, _Gathering], None] | None = None
        self._awaited = awaited
        self._stop_at_failure = stop_at_failure
        self._late = late
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, deadline_s: float) -> None:
        """Return when settled or at the deadline; raise what a bug in an attempt raised."""
        if self._awaited == 0:
            return
        await asyncio.wait((self._settled,), timeout=deadline_s)
        if self._settled.done():
            self._settled.result()

    async def follow(self, replica: str, attempt: Attempt) -> None:
        """Run one attempt to its end and count it, or report it late; then it is in flight no more.

        The order matters: whoever waits for the last call in flight finds its lateness dealt with.
        """
        try:
            outcome = await attempt()
            self.answered.add(replica)
            if self.given_up_at is not None and self._late is not None:
                await self._late(replica, outcome)
            else:
                self._arrive(replica, outcome)
        except Exception as bug:  # the caller must see it; the owner's group must survive it
            if self._settled.done():
                log.exception("bug in a late call", extra={"replica": replica})
            self._settle(bug)
        finally:
            if self.left is not None:
                self.left(replica, self)

    def _arrive(self, replica: str, outcome: Outcome) -> None:
        self.outcomes[replica] = outcome
        if len(self.outcomes) == self._awaited or (self._stop_at_failure and not outcome.ok):
            self._settle(None)

    def _settle(self, bug: Exception | None) -> None:
        if self._settled.done():
            return
        if bug is None:
            self._settled.set_result(None)
        else:
            self._settled.set_exception(bug)
