"""The journal: what happened, written behind the round's back, over both store engines."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from fleet.errors import StoreUnavailable
from fleet.facts.state import Phase
from fleet.journal import QUEUED, STREAM, Journal
from fleet.rules.events import StartRequested, UpdateFailed
from fleet.store import Store, open_store
from tests.fleets import NOW, everyone, fleet_in
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

EVENT = StartRequested(now=NOW, by="t")
STATE = fleet_in(Phase.STARTED)


class Watched:
    """A store that counts writes of several records, and may refuse them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.writes: list[int] = []
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def extend(
        self, stream: str, records: Sequence[Mapping[str, str | bytes]], *, cap: int
    ) -> None:
        """Write, unless it is to refuse."""
        self.writes.append(len(records))
        if self.refuses:
            raise StoreUnavailable("the store did not answer")
        await self._store.extend(stream, records, cap=cap)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Watched]:
    """An empty store, in process and on a real Redis."""
    async with open_store(store_url, "tests") as opened:
        yield Watched(opened)


@asynccontextmanager
async def writing(journal: Journal) -> AsyncGenerator[None]:
    """Let the journal write until the block ends."""
    task = asyncio.ensure_future(journal.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def journal_on(store: Watched) -> Journal:
    """Return a journal over this store."""
    return Journal(cast("Store", store))


async def written(store: Watched) -> list[dict[str, Any]]:
    """Return what is in the stream, oldest first."""
    return [msgspec.json.decode(r.fields["event"]) for r in reversed(await store.tail(STREAM, 100))]


async def test_events_of_one_moment_go_out_together_and_in_order(store: Watched) -> None:
    """The phases of a start follow each other within milliseconds; each write takes CPU."""
    journal = Journal(cast("Store", store), linger_s=0.5)
    async with writing(journal):
        for number in range(5):
            journal.note(StartRequested(now=NOW + number, by="t"), STATE)
            await asyncio.sleep(0)

        async def all_there() -> bool:
            return len(await store.tail(STREAM, 100)) == 5

        await wait_until(all_there)
    assert [event["at"] for event in await written(store)] == [NOW + n for n in range(5)]
    assert store.writes == [5]


async def test_events_that_the_store_does_not_take_are_named_and_lost(
    store: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """The next ones are written as if nothing had been."""
    journal = journal_on(store)
    store.refuses = True

    async def refused() -> bool:
        return "events not written" in caplog.text

    async with writing(journal):
        journal.note(EVENT, STATE)
        await wait_until(refused)
        store.refuses = False
        journal.note(EVENT, STATE)

        async def one_there() -> bool:
            return len(await store.tail(STREAM, 100)) == 1

        await wait_until(one_there)


async def test_what_is_still_to_be_written_at_the_end_is_in_the_log(
    store: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks why a gateway stopped wants its last events first of all."""
    caplog.set_level(logging.INFO, "fleet.journal")
    journal = journal_on(store)
    async with writing(journal):
        journal.note(EVENT, STATE)
        await asyncio.sleep(0)  # it has been taken from the queue, and waits for others
        journal.note(UpdateFailed(now=NOW, outcomes=everyone(STATE)), STATE)
    told = [(vars(record)["event"], vars(record)["at"]) for record in caplog.records]
    at = "2023-11-14T22:13:20.000Z"  # for people; in the stream it is a number
    assert told == [("StartRequested", at), ("UpdateFailed", at)]


async def test_a_store_far_behind_costs_events_and_no_memory(
    store: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is bounded, and what is dropped is named."""
    journal = journal_on(store)
    for _ in range(QUEUED + 1):
        journal.note(EVENT, STATE)
    assert caplog.text.count("event dropped") == 1
