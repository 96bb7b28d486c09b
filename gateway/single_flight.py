"""A retry of a control call is not a second call.

Same path, same body, still on its way: the retry joins it. Already over: the stored answer is
replayed if the same Idempotency-Key came with both; or if every caller's connection was gone before
the answer could be handed over, and the fleet still stands where the call left it. Otherwise an
identical body is a new call: chunks may look alike, and a pause may be asked for again after a
resume. Nothing is ever fanned out twice for one call (a second collective would hang everyone).
What other gateways have carried is met deeper down (fleet/gateways/retries.py).

The work runs in the gateway's task group, so a caller that leaves does not stop it half way.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

from fleet.errors import FleetError
from gateway.asgi import ClientGone, Receive, until_gone

STORED_S = 600.0
STORED = 64
"""For how long, and how many, answers wait for a retry."""

Work = Callable[[], Awaitable[Any]]
Undelivered = Callable[[str], Awaitable[None]] | None
"""Who hears the names of calls whose answer reached nobody."""
Position = Callable[[], object]
"""Where the fleet stands: equal values mean that no control call has changed anything since."""


@dataclass(frozen=True)
class ControlCall:
    """What tells one control call from another."""

    path: str
    query: bytes
    body: bytes | bytearray
    idempotency_key: str | None = None

    @cached_property
    def name(self) -> str:
        """A name that two calls share only if they are the same call."""
        digest = hashlib.sha256(self.body).hexdigest()
        return f"{self.path}?{self.query.decode('latin-1')}#{digest}"


class SingleFlight:
    """Runs control calls so that a retry meets the call that it repeats."""

    def __init__(
        self, owner: asyncio.TaskGroup, position: Position, undelivered: Undelivered = None
    ) -> None:
        self._owner = owner
        self._position = position
        self._undelivered = undelivered
        self._flights: dict[str, _Flight] = {}

    async def run(self, call: ControlCall, work: Work, receive: Receive) -> Any:
        """Return what `work` returns or raise what it raises, once per call.

        Raises ClientGone when this caller left before the answer was there; the work goes on.
        """
        self._forget_old()
        flight = self._flights.get(call.name)
        if flight is None or not flight.answers(call):
            flight = _Flight(call, self._position)
            self._flights.pop(call.name, None)  # or it would keep the old one's place in the queue
            self._flights[call.name] = flight
            self._owner.create_task(self._fly(flight, call, work), name=f"control {call.path}")
        try:
            return await flight.wait(receive)
        finally:
            if flight.is_spent and self._flights.get(call.name) is flight:
                del self._flights[call.name]

    @property
    def are_any(self) -> bool:
        """Whether a call is on its way."""
        return any(flight.ended_at is None for flight in self._flights.values())

    async def _fly(self, flight: _Flight, call: ControlCall, work: Work) -> None:
        await flight.fly(work)
        if flight.reached_nobody and self._undelivered is not None:
            await self._undelivered(call.name)

    def give_up(self, error: FleetError) -> None:
        """Answer everyone who waits with this error; the calls themselves go on."""
        for flight in self._flights.values():
            flight.give_up(error)

    def forget(self) -> None:
        """Let no later call meet one from before: the round that those belonged to is abandoned."""
        self._flights.clear()

    def _forget_old(self) -> None:
        oldest = monotonic() - STORED_S
        over = [n for n, f in self._flights.items() if f.ended_at is not None]
        expired = [n for n in over if (self._flights[n].ended_at or 0.0) < oldest]
        for name in {*expired, *over[:-STORED]}:
            del self._flights[name]


class _Flight:
    """One call on its way, and those who wait for it; it keeps nothing of the call's body."""

    def __init__(self, call: ControlCall, position: Position) -> None:
        self._key = call.idempotency_key
        self._position = position
        self._landed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._landed_at: object = None
        self._delivered = False
        self._waiting = 0
        self.ended_at: float | None = None

    def answers(self, call: ControlCall) -> bool:
        """Whether a call that looks the same is a retry of this one."""
        if not self._landed.done():
            return True
        key = call.idempotency_key
        same_key = key is not None and key == self._key
        return same_key or not (self._delivered or self._landed_at != self._position())

    @property
    def is_spent(self) -> bool:
        """Whether it will never answer another call."""
        return self._landed.done() and self._delivered and self._key is None

    @property
    def reached_nobody(self) -> bool:
        """Whether the answer is there and everyone who had asked for it has left."""
        return self._landed.done() and not self._delivered and not self._waiting

    async def fly(self, work: Work) -> None:
        """Do the work; its errors belong to those who wait, not to the gateway's task group."""
        try:
            result = await work()
        except asyncio.CancelledError:
            self._landed.cancel()
            raise
        except Exception as error:  # every waiting caller gets it
            self.give_up(error)
        else:
            if not self._landed.done():
                self._landed.set_result(result)
        finally:
            self._landed_at = self._position()
            self.ended_at = monotonic()

    def give_up(self, error: Exception) -> None:
        """Land with an error, unless landed already."""
        if self._landed.done():
            return
        if isinstance(error, FleetError):
            error.__traceback__ = None  # its frames would keep the body for as long as itself
        self._landed.set_exception(error)
        self._landed.exception()  # nobody may be waiting: that is no reason to complain

    async def wait(self, receive: Receive) -> Any:
        """Return the result, unless the caller leaves before."""
        leaving = asyncio.ensure_future(until_gone(receive))
        self._waiting += 1
        try:
            await asyncio.wait((self._landed, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                raise ClientGone
            self._delivered = True
            return self._landed.result()
        finally:
            self._waiting -= 1
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
