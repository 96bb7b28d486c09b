"""The journal: what happened to the fleet, event by event, in a capped stream of the store.

It is written behind the round's back: events wait in a short queue, and a task of its own writes
them, to the stream and to the program's log. Events come in the moments in which the next calls to
the replicas go out, and those must not wait for a log; so the task lets `LINGER_S` pass first, and
takes what has come by then in one go. If the store does not take them, they are lost; the state
itself is the ledger's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

from fleet.errors import StoreUnavailable
from fleet.facts.moments import utc
from fleet.facts.state import UNSET_VERSION, FleetState
from fleet.rules.events import Answered, Event
from fleet.store import Record, Store

log = logging.getLogger(__name__)

STREAM = "events"
KEPT = 10_000
QUEUED = 1_000
LINGER_S = 0.005
"""How long the first event waits for others; replicas answer later than that, mostly."""


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

    def __init__(self, store: Store, *, linger_s: float = LINGER_S) -> None:
        self._store = store
        self._linger_s = linger_s
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
        if self._queue.full():
            log.warning("event dropped", extra={"event": happening.event})
        else:
            self._queue.put_nowait(happening)

    async def run(self) -> None:
        """Write what was noted, for ever; what is left when it is cancelled goes to the log."""
        happenings: list[Happening] = []
        try:
            while True:
                happenings = [await self._queue.get()]
                await asyncio.sleep(self._linger_s)
                happenings += self._take_all()
                for happening in happenings:
                    _tell(happening)
                ended, happenings = happenings, []
                await self._write(ended)
        finally:
            for happening in (*happenings, *self._take_all()):
                _tell(happening)

    def _take_all(self) -> list[Happening]:
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    async def _write(self, happenings: list[Happening]) -> None:
        try:
            records = [{"event": msgspec.json.encode(happening)} for happening in happenings]
            await self._store.extend(STREAM, records, cap=KEPT)
        except StoreUnavailable as error:
            told = ", ".join(happening.event for happening in happenings)
            log.warning("events not written", extra={"error": error.message, "events": told})

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


def _tell(happening: Happening) -> None:
    level = logging.WARNING if happening.failed else logging.INFO
    if log.isEnabledFor(level):
        fields = msgspec.structs.asdict(happening) | {"at": utc(happening.at)}
        log.log(level, "round event", extra=fields)


def _failed(event: Event) -> dict[str, str]:
    if not isinstance(event, Answered):
        return {}
    return {r: o.detail or o.outcome.value for r, o in event.outcomes.items() if o.bad}
