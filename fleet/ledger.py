"""The ledger: the fleet's state, kept in the store, changed one compare-and-swap at a time.

Every change is a pure function over the state (`advance` for weight updates, `membership.py` for
the rest). It is applied to what this gateway knows, written only if the store still has the same
stamp, and applied again to the newer state if not; a refusal, too, counts only if it stands on the
store's newest state. Stamps are `generation:revision:` and a random word, so a writer of an old
generation can never overwrite a newer one, nor mistake the stamps of a store that came back empty.

What other gateways write is taken over by `refresh`; who calls it when is `peers.py`'s business. A
store that has gone back in time (it came back empty, or from an old snapshot) is given what this
gateway knows: revisions only grow. Another gateway may know more, and have slept or waited for the
store longer. So such a state is written with its own revision and a stamp that says so, and for
`settle_s` nobody builds on it: whoever knows more puts that in its place. A gateway that starts
knows nothing, and takes an empty store for a new one only if its server has run for `patience_s`:
long enough for everyone who knows what it held to have brought it back.

Whoever must follow the state (the gate, the metrics) subscribes with `watch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic, time
from uuid import uuid4

import msgspec

from fleet.errors import FleetError, StoreUnavailable, WrongPhase
from fleet.facts.state import FleetState, Round
from fleet.rules.events import Action, Event
from fleet.rules.rounds import advance
from fleet.store import Store

log = logging.getLogger(__name__)

STATE = "state"
ROUNDS = "rounds"
ROUNDS_KEPT = 200
ATTEMPTS = 200
"""How often a change is made again on a newer state. Who lost needs two round trips for the next
attempt, who won only one, so a busy gateway may win many times in a row."""

LOOK_EVERY_S = 0.25
"""How often a gateway that starts looks whether others have brought a lost state back."""

RESTORED = "restored-"
"""How the word of a stamp begins whose state came from a gateway's memory."""

Watcher = Callable[[FleetState], None]
Listener = Callable[[Event, FleetState], None]


class Ledger:
    """Owns the current state of one fleet; open it with `open`."""

    def __init__(self, store: Store, state: FleetState, stamp: str | None) -> None:
        self.store = store
        self.state = state
        self.revision = _revision_of(stamp)
        self._stamp = stamp
        self._is_behind = False
        self._lock = asyncio.Lock()
        self._watchers: list[Watcher] = []
        self._listeners: list[Listener] = []
        self._savers: list[Callable[[], None]] = []
        self._doubtful = False
        self._stamp_seen_at = monotonic()
        self.settle_s = 0.0
        self.patience_s = 0.0

    @classmethod
    async def open(cls, store: Store, name: str) -> Ledger:
        """Read the fleet's state; an empty store begins with a generation from the clock."""
        entry = await store.load(STATE)
        if entry is None:
            return cls(store, FleetState(name=name, generation=int(time())), None)
        return cls(store, _decode(entry.body), entry.stamp)

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` now and after every change, on the event loop, in order."""
        self._watchers.append(watcher)
        watcher(self.state)

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every event of a round that was applied here and saved."""
        self._listeners.append(listener)

    def on_save(self, saver: Callable[[], None]) -> None:
        """Call `saver` whenever this gateway has written a new state."""
        self._savers.append(saver)

    async def refresh(self) -> None:
        """Take over what others have written; give a store that lost it what is known here."""
        async with self._lock:
            await self._reload()
            if self._is_behind:
                await self._restore()

    def check_settled(self) -> None:
        """Raise StoreUnavailable while the gateways agree on what a store has lost."""
        if self._unsettled_s > 0:
            raise StoreUnavailable(
                "the store has lost the fleet's state, and a gateway has brought back what it knew",
                hint="retry: another one that knows more has its say first",
            )

    async def settled(self) -> None:
        """Return when the gateways have agreed on what a store has lost; mostly at once.

        A store that is empty and has only just begun to run may have been killed and started anew:
        whoever knows what it held brings that back.
        """
        if (unsure_s := await self._unsure_s()) > 0:
            log.info(
                "the store is empty and has only just started: other gateways get the time to "
                "bring back what it may have held",
                extra={"wait_s": round(unsure_s, 1)},
            )
        while (wait_s := max(self._unsettled_s, await self._unsure_s())) > 0:
            await asyncio.sleep(min(wait_s, LOOK_EVERY_S))
            await self.refresh()

    async def _unsure_s(self) -> float:
        """For how long an empty store may still be one that was lost, in seconds."""
        return self.patience_s - await self.store.up_s() if self._stamp is None else 0.0

    async def until(self, condition: Callable[[FleetState], bool]) -> FleetState:
        """Return the first state that meets the condition, now or later."""
        met: asyncio.Future[FleetState] = asyncio.get_running_loop().create_future()

        def look(state: FleetState) -> None:
            if not met.done() and condition(state):
                met.set_result(state)

        self.watch(look)
        try:
            return await met
        finally:
            self._watchers.remove(look)

    async def apply(self, event: Event) -> tuple[Action, ...]:
        """Advance the round by one event, save, and return what must be done.

        Raises IllegalTransition (nothing changed) and StoreUnavailable (outcome unknown: the
        state is read again before the next change).
        """
        actions: tuple[Action, ...] = ()

        def step(state: FleetState) -> FleetState:
            nonlocal actions
            state, actions = advance(state, event)
            return state

        state = await self.amend(step)
        for listener in self._listeners:
            listener(event, state)
        return actions

    async def amend(self, change: Callable[[FleetState], FleetState]) -> FleetState:
        """Replace the state by `change(state)`; returning the same object writes nothing."""
        async with self._lock:
            if self._doubtful:
                await self._reload()
            for _ in range(ATTEMPTS):
                if self._is_behind and not await self._restore():
                    await self._reload()
                    continue
                self.check_settled()
                try:
                    state = change(self.state)
                except FleetError:
                    if not await self._caught_up():
                        raise
                    continue
                if state is self.state or await self._save(state):
                    return state
                await self._reload()
        raise StoreUnavailable("the fleet's state is being changed by others all the time")

    async def archive(self, finished: Round) -> None:
        """Keep the record of a round that is over, the newest ones only."""
        body = msgspec.json.encode(finished)
        await self.store.append(ROUNDS, {"round": body}, cap=ROUNDS_KEPT)

    async def rounds(self, count: int) -> list[Round]:
        """Return the records of rounds, newest first, the open one included."""
        records = await self.store.tail(ROUNDS, count)
        kept = [msgspec.json.decode(record.fields["round"], type=Round) for record in records]
        current = self.state.round
        return [current, *kept][:count] if current is not None else kept

    async def _save(self, state: FleetState) -> bool:
        revision = self.revision + 1
        return await self._write(state, revision, f"{state.generation}:{revision}:{_word()}")

    async def _restore(self) -> bool:
        """Write what this gateway knows, as it is; alone, it need not wait for others to agree."""
        revision, state = self.revision, self.state
        word = f"{RESTORED}{_word()}" if len(state.gateways) > 1 else _word()
        return await self._write(state, revision, f"{state.generation}:{revision}:{word}")

    async def _write(self, state: FleetState, revision: int, stamp: str) -> bool:
        try:
            saved = await self.store.swap(
                STATE, expected=self._stamp, stamp=stamp, body=msgspec.json.encode(state)
            )
        except BaseException:
            self._doubtful = True
            raise
        if saved:
            self._see(stamp)
            self._is_behind = False
            self._accept(state, revision)
            for saver in self._savers:
                saver()
        return saved

    def _see(self, stamp: str | None) -> None:
        self._stamp = stamp
        self._stamp_seen_at = monotonic()

    @property
    def _unsettled_s(self) -> float:
        """For how long nobody may build on the state, in seconds."""
        if not _is_restored(self._stamp):
            return 0.0
        return self._stamp_seen_at + self.settle_s - monotonic()

    async def _caught_up(self) -> bool:
        """Read the state again; say whether it is newer than what this gateway knew."""
        before = self._stamp
        await self._reload()
        return self._stamp not in (None, before)

    async def _reload(self) -> None:
        entry = await self.store.load(STATE)
        stamp = entry.stamp if entry else None
        # Equal revisions with other stamps: somebody who knew less has written after a loss, unless
        # it has only brought back the same state.
        known = self.revision - 1 if _is_restored(stamp) else self.revision
        is_old = stamp != self._stamp and _revision_of(stamp) <= known
        newer = None if entry is None or is_old or stamp == self._stamp else _decode(entry.body)
        self._doubtful = False  # only now, or what cannot be read would count as read
        if stamp == self._stamp:
            return
        self._see(stamp)
        self._is_behind = newer is None
        if newer is None:
            log.warning("the store lost the fleet's state; writing what this gateway knows")
        else:
            self._accept(newer, _revision_of(stamp))

    def _accept(self, state: FleetState, revision: int) -> None:
        self.state = state
        self.revision = revision
        for watcher in tuple(self._watchers):
            watcher(state)


def _word() -> str:
    return uuid4().hex[:8]


def _is_restored(stamp: str | None) -> bool:
    return stamp is not None and stamp.rpartition(":")[2].startswith(RESTORED)


def _revision_of(stamp: str | None) -> int:
    return int(stamp.split(":")[1]) if stamp else 0


def _decode(body: bytes) -> FleetState:
    try:
        return msgspec.json.decode(body, type=FleetState)
    except msgspec.DecodeError as error:
        raise WrongPhase(
            f"the store holds a state that this version cannot read: {error}",
            hint="start the gateway with another FLEET_NAME, or the version that wrote it",
        ) from error
