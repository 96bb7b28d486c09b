"""The journal: what happened to the fleet, event by event, in a capped stream of the store.

It is written behind the round's back: an event waits in a short queue and is appended by a task of
its own, so that the trainer's GPUs never wait for a log. If the store does not take it, it is lost;
the state itself is the ledger's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

from fleet.errors import StoreUnavailable
from fleet.events import Answered, Event
from fleet.state import UNSET_VERSION, FleetState
from fleet.store import Record, Store

log = logging.getLogger(__name__)

STREAM = "events"
KEPT = 10_000
QUEUED = 1_000


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One entry: the event's name, where it left the fleet, and who failed if somebody did.

    `at` is in seconds since the epoch.
    """

    event: str
    at: float
    phase: str
    generation: int
    round: int | None
    weight_version: str
    failed: dict[str, str] = {}


class Journal:
    """Keeps events and lets them be followed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: asyncio.Queue[Happening] = asyncio.Queue(QUEUED)
        self._stopping = asyncio.Event()

    def note(self, event: Event, state: FleetState) -> None:
        """Take one event down; never waits, and drops it if the store is far behind."""
        happening = Happening(
            event=type(event).__name__,
            at=event.now,
            phase=state.phase,
            generation=state.generation,
            round=state.round.id if state.round else None,
            weight_version=state.weight_version or UNSET_VERSION,
            failed=_failed(event),
        )
        level = logging.WARNING if happening.failed else logging.INFO
        log.log(level, "round event", extra=msgspec.structs.asdict(happening))
        if self._queue.full():
            log.warning("event dropped", extra={"event": happening.event})
        else:
            self._queue.put_nowait(happening)

    async def run(self) -> None:
        """Append what was noted, for ever."""
        while True:
            happening = await self._queue.get()
            try:
                body = msgspec.json.encode(happening)
                await self._store.append(STREAM, {"event": body}, cap=KEPT)
            except StoreUnavailable as error:
                log.warning("event not written", extra={"error": error.message})

    def stop(self) -> None:
        """End every `follow`: the gateway stops."""
        self._stopping.set()

    async def follow(self, after: str | None) -> AsyncIterator[Record]:
        """Iterate over events after an id (None: from now on) until the gateway stops."""
        records = self._store.follow(STREAM, after)
        stopping = asyncio.ensure_future(self._stopping.wait())
        coming: asyncio.Future[Record] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(_next(records))
                await asyncio.wait((coming, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                yield coming.result()
        finally:
            stopping.cancel()
            if coming is not None:
                coming.cancel()


async def _next(records: AsyncIterator[Record]) -> Record:
    return await anext(records)


def _failed(event: Event) -> dict[str, str]:
    if not isinstance(event, Answered):
        return {}
    return {r: o.detail or o.outcome.value for r, o in event.outcomes.items() if o.bad}
