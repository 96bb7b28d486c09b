"""What a chaos run happens to: Redis, gateways as real processes, replicas, and what breaks them.

Gateways are forked `fleet serve` processes (SIGKILL and SIGSTOP are real), each with a proxy of its
own to one real Redis. Replicas are simulated, in the driver's process, each with sockets of its
own; a killed one resets every connection and stops to listen, as after SIGKILL. If libfaketime is
installed, gateways run under it and their wall clocks can jump one by one; monotonic ones do not.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from time import monotonic

import httpx
from msgspec.structs import replace as change

from fleet.facts.state import FleetState
from fleet.ledger import RESTORED
from fleet.sim import SimFleet, SimOptions, SimReplica
from tests.chaos.history import Did, History, Outage, Served, Written
from tests.chaos.schedule import Fault
from tests.gateways.forked import ForkedGateway, Nursery, nursery
from tests.gateways.store_proxy import StoreProxy, store_proxy
from tests.redis_server import RedisServer

LEASE_S = 1.5
HELD_S = 40.0
COLLECTIVE_S = 3.0
PHASE_S = 3.0
SETTINGS = {
    "FLEET_NAME": "chaos",
    "FLEET_TIMEOUTS__LEASE_S": str(LEASE_S),
    "FLEET_TIMEOUTS__LEASE_RENEW_S": "0.3",
    "FLEET_TIMEOUTS__PROBE_S": "0.2",
    "FLEET_TIMEOUTS__PROBE_TIMEOUT_S": "1",
    "FLEET_TIMEOUTS__INIT_S": str(COLLECTIVE_S),
    "FLEET_TIMEOUTS__UPDATE_S": str(COLLECTIVE_S),
    "FLEET_TIMEOUTS__PAUSE_S": str(PHASE_S),
    "FLEET_TIMEOUTS__START_S": str(PHASE_S),
    "FLEET_TIMEOUTS__FINISH_S": str(PHASE_S),
    "FLEET_TIMEOUTS__CONTROL_S": str(PHASE_S),
    "FLEET_GATE__TIMEOUT_S": str(HELD_S),
    "FLEET_LOG__LEVEL": "warning",
}
FAKETIME = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1"}
BOOT_S = 1.0
"""How long a replica is down at least. A real server takes longer to boot; one that came back
within the probe interval (0.2 s here) could answer before anybody sees that it is another."""
DEADLINE_S = 30.0
"""The longest that a call may take at a gateway that is there: settling, a lease or two, the phases
of a start, and their undoing, each up to its own deadline."""


def faketime() -> str | None:
    """Return the library that lets wall clocks jump, if it is installed (apt: faketime)."""
    found = glob("/usr/lib/*/faketime/libfaketimeMT.so.1") if shutil.which("faketime") else []
    return found[0] if found else None


@dataclass
class Place:
    """One gateway that is restarted whenever it died, always with the same name and proxy."""

    name: str
    proxy: StoreProxy
    clock: Path
    gateway: ForkedGateway | None = None

    @property
    def http(self) -> httpx.AsyncClient | None:
        """A client of the gateway, unless it is down."""
        return self.gateway.http if self.gateway is not None else None


@dataclass
class Field:
    """Everything that runs, and the history that it leaves."""

    redis: RedisServer
    sim: SimFleet
    born: Nursery
    history: History
    places: list[Place] = field(default_factory=list[Place])
    killed_by_us: set[int] = field(default_factory=set[int])
    _repairs: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _store_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    # -- gateways ----------------------------------------------------------------------------------

    async def start_gateway(self, place: Place) -> None:
        """Start the gateway of one place and wait until it is ready, however long that takes."""
        place.clock.write_text("+0s")
        gateway = await self.born.fork(
            FLEET_STORE=place.proxy.url,
            FLEET_REPLICAS=",".join(replica.url for replica in self.sim.replicas),
            FAKETIME_TIMESTAMP_FILE=str(place.clock),
            **SETTINGS,
        )
        while not await gateway.ready():
            if not gateway.is_alive:  # the store is away: it says so and ends
                return await self.start_gateway(place)
            await asyncio.sleep(0.05)
        place.gateway = gateway
        return None

    async def _kill_gateway(self, place: Place, seconds: float) -> None:
        gateway, place.gateway = place.gateway, None
        if gateway is not None:
            gateway.kill()
        await asyncio.sleep(seconds)
        if place.gateway is None:
            await self.start_gateway(place)

    async def _freeze_gateway(self, place: Place, seconds: float) -> None:
        gateway = place.gateway
        if gateway is not None:
            gateway.freeze()
            await asyncio.sleep(seconds)
            gateway.thaw()

    async def _jump(self, place: Place, seconds: float) -> None:
        place.clock.write_text(f"{'-' if seconds < 1 else '+'}{seconds * 600:.0f}s")
        await asyncio.sleep(seconds)

    # -- replicas ----------------------------------------------------------------------------------

    async def _kill_replica(self, replica: SimReplica, seconds: float) -> None:
        self.killed_by_us.add(replica.index)
        await replica.die()
        await asyncio.sleep(seconds)
        await self._boot(replica)

    async def _boot(self, replica: SimReplica) -> None:
        if not replica.alive:
            await replica.start()
        self.killed_by_us.discard(replica.index)

    async def _hang(self, replica: SimReplica, seconds: float) -> None:
        """Every call is answered late, as by a process that is stopped for a while."""
        until = monotonic() + seconds
        rule = replica.faults.add("*", "delay", seconds=seconds, times=0)
        while (left := until - monotonic()) > 0:
            rule.seconds = left
            await asyncio.sleep(0.02)
        replica.faults.clear()

    async def watch_engines(self) -> None:
        """Note engines that die by themselves (a rollout between start and finish), and reboot."""
        while True:
            for replica in self.sim.replicas:
                if not replica.alive and replica.index not in self.killed_by_us:
                    self.history.engines_killed.append((replica.id, monotonic()))
                    await self._boot(replica)
            await asyncio.sleep(0.05)

    # -- the store ---------------------------------------------------------------------------------

    async def _kill_store(self, seconds: float) -> None:
        async with self._store_turn:
            self.redis.kill()
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self.redis.start)

    async def _freeze_store(self, seconds: float) -> None:
        async with self._store_turn:
            self.redis.freeze()
            await asyncio.sleep(seconds)
            self.redis.thaw()

    async def _slow_store(self, proxy: StoreProxy, seconds: float) -> None:
        proxy.delay_s = 0.02
        await asyncio.sleep(seconds)
        proxy.delay_s = 0.0

    async def _lose_answers(self, proxy: StoreProxy, seconds: float) -> None:
        proxy.deaf = True
        await asyncio.sleep(seconds)
        proxy.deaf = False
        proxy.cut()

    def heard(self, stamp: str, state: FleetState) -> None:
        """Note one state that Redis has confirmed."""
        if self.history.states:  # the last one has all commits; the others need not keep them
            last = self.history.states[-1]
            brief = change(last.state, commits=last.state.commits[-1:], ended=None)
            self.history.states[-1] = replace(last, state=brief)
        revision = int(stamp.split(":")[1])
        restores = stamp.rpartition(":")[2].startswith(RESTORED)
        self.history.states.append(
            Written(at=monotonic(), revision=revision, state=state, restores=restores)
        )

    # -- faults ------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Let a fault happen, and be repaired in its time."""
        work, target = self._work(fault)
        task = asyncio.ensure_future(self._through(fault.kind, target, work))
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    def note(self, kind: str, target: str) -> None:
        """Note a fault that somebody else made, over as soon as it began."""
        now = monotonic()
        self.history.outages.append(Outage(kind=kind, target=target, began=now, ended=now))

    async def repaired(self) -> None:
        """Return when every fault is over."""
        while self._repairs:
            await asyncio.wait(self._repairs)

    async def _through(self, kind: str, target: str, work: Awaitable[None]) -> None:
        began = monotonic()
        open_outage = Outage(kind=kind, target=target, began=began, ended=began + 3600)
        self.history.outages.append(open_outage)
        try:
            await work
        finally:
            at = self.history.outages.index(open_outage)
            done = Outage(kind=kind, target=target, began=began, ended=monotonic())
            self.history.outages[at] = done

    def _work(self, fault: Fault) -> tuple[Awaitable[None], str]:
        place = self.places[fault.target % len(self.places)]
        replica = self.sim.replicas[fault.target % len(self.sim.replicas)]
        seconds = fault.seconds
        gateways: dict[str, Callable[[], Awaitable[None]]] = {
            "gateway killed": lambda: self._kill_gateway(place, seconds / 2),
            "gateway frozen": lambda: self._freeze_gateway(place, seconds),
            "gateway clock jumps": lambda: self._jump(place, seconds),
        }
        if fault.kind in gateways:
            return gateways[fault.kind](), place.name
        if fault.kind.startswith("replica"):
            return self._replica_work(fault, replica), replica.id
        links: dict[str, Callable[[], Awaitable[None]]] = {
            "store connections dropped": lambda: _soon(place.proxy.cut),
            "store slow": lambda: self._slow_store(place.proxy, seconds),
            "store answers lost": lambda: self._lose_answers(place.proxy, seconds / 2),
        }
        if fault.kind in links:  # one gateway's way to the store; the others are not concerned
            return links[fault.kind](), place.name
        if fault.kind == "store frozen":
            return self._freeze_store(seconds / 2), "store"
        return self._kill_store(seconds / 4), "store"

    def _replica_work(self, fault: Fault, replica: SimReplica) -> Awaitable[None]:
        seconds = fault.seconds
        if fault.kind == "replica killed":
            return self._kill_replica(replica, BOOT_S + seconds)
        if fault.kind == "replica restarted":
            return self._kill_replica(replica, BOOT_S)
        if fault.kind == "replica hangs":
            return self._hang(replica, seconds + 2)
        if fault.kind == "replica call fails":
            return _soon(lambda: replica.faults.add(fault.path, "status", status=500))
        if fault.kind == "replica call is slow":
            return _soon(lambda: replica.faults.add(fault.path, "delay", seconds=seconds / 4))
        return _soon(lambda: replica.faults.add(fault.path, "drop", when="after"))

    # -- at the end --------------------------------------------------------------------------------

    def collect(self) -> None:
        """Copy the replicas' own logs into the history."""
        for replica in self.sim.replicas:
            for call in replica.log.control:
                if call.method != "POST":
                    continue  # probes ask for the same paths with GET
                body = call.body if isinstance(call.body, dict) else {}
                self.history.did.append(
                    Did(
                        replica=replica.id,
                        boot=call.boot,
                        path=call.path,
                        began=call.t_start,
                        ended=call.t_end,
                        status=call.status,
                        version=body.get("weight_version"),
                    )
                )
            self.history.served += [
                Served(replica=replica.id, began=r.t_start, ended=r.t_end, outcome=r.outcome)
                for r in replica.log.rollouts
            ]


async def _soon(act: Callable[[], object]) -> None:
    act()


@asynccontextmanager
async def field_of(folder: Path, *, gateways: int = 3, replicas: int = 3) -> AsyncGenerator[Field]:
    """Run a whole fleet; its gateways are ready on entry."""
    redis = RedisServer(folder)
    redis.start()
    options = SimOptions(replicas=replicas, backend="nccl", hidden_size=4, pause_latency_s=0.005)
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        sim = await stack.enter_async_context(SimFleet(options))
        library = faketime()
        more = {"LD_PRELOAD": library} | FAKETIME if library else {}
        born = await stack.enter_async_context(nursery(folder, **more))
        made = Field(redis, sim, born, History())
        for number in range(gateways):
            proxy = await stack.enter_async_context(store_proxy(redis.port))
            proxy.heard = made.heard
            made.places.append(Place(f"gateway {number}", proxy, folder / f"clock-{number}"))
        for place in made.places:
            await made.start_gateway(place)
        watching = asyncio.ensure_future(made.watch_engines())
        try:
            yield made
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await made.repaired()
