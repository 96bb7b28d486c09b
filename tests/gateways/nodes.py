"""Gateways without HTTP, in this process: control plane, gate, heartbeat, and a store that fails.

For tests that need many lives of several gateways in little time. A node is wired as
`gateway/app.py` wires it; it dies by being cancelled, without giving its seat back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from fleet.controls import Controls
from fleet.coordinator import Coordinator
from fleet.errors import StoreUnavailable
from fleet.facts.options import Deadlines, FleetOptions
from fleet.gateways.peers import Peers
from fleet.gateways.retries import Calls
from fleet.ledger import STATE, Ledger
from fleet.owner import task_owner
from fleet.performer import Performer
from fleet.replicas.fanout import FanOut
from fleet.replicas.registry import Registry
from fleet.replicas.replica_client import open_client
from fleet.store import Store, open_store
from fleet.store.base import Entry, Record
from gateway.gate import RolloutGate
from gateway.settings_model import Gate

LEASE_S = 0.6
BEAT_S = 0.1
OPTIONS = FleetOptions(
    deadlines=Deadlines(
        init_s=2,
        start_s=2,
        update_s=2,
        finish_s=2,
        pause_s=2,
        control_s=2,
        gate_s=5,
        probe_interval_s=0.2,
        probe_s=1,
    ),
    lease_s=LEASE_S,
)
Moment = Literal["before", "after"]


@dataclass
class Trap:
    """What happens around the state write with this number, counted down to 0."""

    number: int
    moment: Moment
    act: Callable[[], None]


@dataclass
class FailingStore:
    """A store of which one write of the fleet's state may fail, before or after it is done."""

    inner: Store
    trap: Trap | None = None

    async def swap(
        self,
        key: str,
        *,
        expected: str | None,
        stamp: str,
        body: bytes,
        ttl_s: float | None = None,
    ) -> bool:
        """Swap; at the trap's number do what it says around it, and tell of a failure."""
        trap = self._due(key)
        if trap is not None and trap.moment == "before":
            trap.act()
            raise StoreUnavailable("the connection broke before the write")
        done = await self.inner.swap(key, expected=expected, stamp=stamp, body=body, ttl_s=ttl_s)
        if trap is not None:
            trap.act()
            raise StoreUnavailable("the connection broke after the write")
        return done

    def _due(self, key: str) -> Trap | None:
        if key != STATE or self.trap is None:
            return None
        self.trap.number -= 1
        if self.trap.number > 0:
            return None
        trap, self.trap = self.trap, None
        return trap

    async def load(self, key: str) -> Entry | None:
        """As the store."""
        return await self.inner.load(key)

    async def drop(self, key: str, *, expected: str) -> bool:
        """As the store."""
        return await self.inner.drop(key, expected=expected)

    async def add_members(self, key: str, members: Iterable[str], ttl_s: float) -> None:
        """As the store."""
        await self.inner.add_members(key, members, ttl_s)

    async def members(self, key: str) -> frozenset[str]:
        """As the store."""
        return await self.inner.members(key)

    async def extend(
        self, stream: str, records: Sequence[Mapping[str, str | bytes]], *, cap: int
    ) -> None:
        """As the store."""
        await self.inner.extend(stream, records, cap=cap)

    async def append(self, stream: str, fields: Mapping[str, str | bytes], *, cap: int) -> str:
        """As the store."""
        return await self.inner.append(stream, fields, cap=cap)

    async def tail(self, stream: str, count: int) -> list[Record]:
        """As the store."""
        return await self.inner.tail(stream, count)

    def follow(self, stream: str, after: str | None) -> AsyncIterator[Record]:
        """As the store."""
        return self.inner.follow(stream, after)

    async def publish(self, channel: str, message: str | bytes) -> None:
        """As the store."""
        await self.inner.publish(channel, message)

    def subscribe(self, channel: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """As the store."""
        return self.inner.subscribe(channel)

    async def up_s(self) -> float:
        """As the store."""
        return await self.inner.up_s()

    async def ping(self) -> None:
        """As the store."""
        await self.inner.ping()


@dataclass
class Node:
    """One gateway's control plane, and the task that is its life."""

    store: FailingStore
    ledger: Ledger
    gate: RolloutGate
    registry: Registry
    coordinator: Coordinator
    controls: Controls
    peers: Peers
    life: asyncio.Task[None] | None = field(default=None)

    def kill(self) -> None:
        """Be gone at once: nothing is given back, nobody is told."""
        if self.life is not None:
            self.life.cancel()

    async def gone(self) -> None:
        """Return when nothing of it runs any more."""
        self.kill()
        if self.life is not None:
            with suppress(asyncio.CancelledError):
                await self.life


async def start_node(url: str, name: str, replicas: Iterable[str]) -> Node:
    """Start a node and return it when it has looked at every replica."""
    born: asyncio.Future[Node] = asyncio.get_running_loop().create_future()

    async def live() -> None:
        async with _node(url, name, replicas) as node:
            born.set_result(node)
            await asyncio.Event().wait()

    life = asyncio.ensure_future(live())
    await asyncio.wait((life, born), return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        await life
    node = born.result()
    node.life = life
    return node


@asynccontextmanager
async def _node(url: str, name: str, replicas: Iterable[str]) -> AsyncGenerator[Node]:
    async with open_store(url, name) as store, open_client(None) as client, task_owner() as owner:
        failing = FailingStore(store)
        ledger = await Ledger.open(failing, name)
        gate = RolloutGate(Gate(), "least_inflight")
        ledger.watch(gate.follow)
        fan_out = FanOut(owner)
        registry = Registry(ledger, client, fan_out, OPTIONS)
        peers = Peers(ledger, gate, fan_out.spawn, where="here", lease_s=LEASE_S)
        performer = Performer(ledger, client, fan_out, peers, OPTIONS)
        calls = Calls(ledger, peers.me)
        coordinator = Coordinator(ledger, performer, registry, fan_out, OPTIONS, calls)
        peers.runs, peers.take_over = calls.carries, coordinator.take_over
        calls.hears = peers.hears
        await peers.beat()
        await registry.add(replicas)
        owner.create_task(peers.run(BEAT_S), name="gateways")
        await registry.sweep()
        owner.create_task(registry.run(), name="probe replicas")
        controls = Controls(ledger, performer, registry, peers, OPTIONS)
        yield Node(failing, ledger, gate, registry, coordinator, controls, peers)
