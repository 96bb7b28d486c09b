"""Following a discovery source: one task that takes over what it tells into the ledger.

Sources tell whenever they like; what they told last is acted on as soon as the store can be
written. What cannot be done yet (a member of an open round that is gone) is tried again with every
change of the fleet's state. The rules are in `roster.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import time

from fleet.discovery.base import Source
from fleet.errors import StoreUnavailable
from fleet.facts.endpoint import Snapshot
from fleet.facts.replica import Replica
from fleet.facts.state import FleetState
from fleet.ledger import Ledger
from fleet.rules.roster import View, acted_on, excuse, next_due, see, settle, uids_from

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""After the store did not answer, or after a bug."""


FIRST_S = 10.0
"""How long a gateway that knows nothing waits for the first list before it serves."""


async def begin_to_follow(source: Source, ledger: Ledger, owner: asyncio.TaskGroup) -> None:
    """Start `follow`; where no version is known, return when it has acted on its first snapshot.

    What an empty store does not know is learnt from all replicas at once, before serving
    (`Registry.sweep`), so they must have been found by then. Later ones are newcomers.
    """
    acted = asyncio.Event()
    owner.create_task(follow(source, ledger, acted), name="follow discovery")
    if ledger.state.commit_index == 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await acted.wait()


async def follow(source: Source, ledger: Ledger, acted: asyncio.Event | None = None) -> None:
    """Keep the fleet in line with what the source lists, for ever.

    `acted` is set once a first snapshot has been acted on.
    """
    follower = _Follower(source.name, ledger, acted or asyncio.Event())
    ledger.watch(follower.note)
    async with asyncio.TaskGroup() as group:
        group.create_task(_for_ever(lambda: source.run(follower.tell)), name="discover replicas")
        group.create_task(_for_ever(follower.run), name="follow discovery")


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # a bug in discovery must not end the gateway that carries the rollouts
            log.exception("bug in discovery")
        await asyncio.sleep(RETRY_S)


class _Follower:
    """What has been told, and since when this gateway knows what it knows."""

    def __init__(self, source: str, ledger: Ledger, acted: asyncio.Event) -> None:
        self._source = source
        self._ledger = ledger
        self._acted = acted
        self._view = View()
        self._known_since: dict[str, float] = {}
        self._news = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def note(self, state: FleetState) -> None:
        """Hear that the fleet has changed."""
        uids = uids_from(self._source, state.replicas)
        now = self._clock()
        self._known_since = {uid: self._known_since.get(uid, now) for uid in uids}
        self._news.set()

    def tell(self, snapshot: Snapshot) -> None:
        """Hear what the source lists."""
        asked_at = snapshot.asked_at
        before = {u for u, since in self._known_since.items() if asked_at and since < asked_at}
        self._view = see(self._view, snapshot, before)
        self._news.set()

    async def run(self) -> None:
        """Act on what has been told whenever there is news, for ever."""
        while True:
            self._news.clear()
            try:
                await self._settle()
            except StoreUnavailable as error:
                log.warning("discovery not written", extra={"error": error.message})
                await asyncio.sleep(RETRY_S)
                continue
            await self._wait()

    async def _settle(self) -> None:
        """Write down what follows from the view; nothing, if nothing does."""
        now = time()
        self._view = view = excuse(self._view, self._ledger.state, now)
        before = self._ledger.state
        if settle(before, view, now) is not before:
            after = await self._ledger.amend(lambda state: settle(state, view, now))
            _tell(before, after)
        if self._view is view:  # else something was told meanwhile, and is acted on next
            self._view = acted_on(view, self._ledger.state)
        if view.has_looked:
            self._acted.set()

    async def _wait(self) -> None:
        due_s = next_due(self._view, time())
        try:
            async with asyncio.timeout(due_s):
                await self._news.wait()
        except TimeoutError:
            return


def _tell(before: FleetState, after: FleetState) -> None:
    """Log who came, went, was replaced, leaves or is back."""
    for name in before.replicas.keys() | after.replicas.keys():
        told = _change(before.replicas.get(name), after.replicas.get(name))
        if told is not None:
            log.info("replica", extra={"replica": name, "discovery": told})


def _change(was: Replica | None, now: Replica | None) -> str | None:
    if was is None:
        return f"found {_named(now)}"
    if now is None:
        return f"gone: {_named(was)}"
    if was.origin and now.origin and was.origin.uid != now.origin.uid:
        return f"{_named(now)} in the place of {_named(was)}"
    if was.leaving != now.leaving:
        return f"leaves: {now.leaving}" if now.leaving else "is back"
    return None


def _named(replica: Replica | None) -> str:
    origin = replica.origin if replica else None
    return (origin.name or origin.uid) if origin else "no pod"
