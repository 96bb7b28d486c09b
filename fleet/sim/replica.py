"""One simulated replica: a listening socket, an engine behind it, a log, faults, deaths and boots.

A *boot* is the time between a start and a death; each has a new engine, so a restarted replica has
a new instance id, its initial weights, version "default" and nothing paused. The log, the faults
and the port outlive it. A replica that dies inside a collective leaves it, so its peers fail, as
they would after SIGKILL.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet.sim.engine import SimEngine
from fleet.sim.faults import Faults
from fleet.sim.log import SimLog
from fleet.sim.server import SimServer
from fleet.sim.tasks import TaskOwner

if TYPE_CHECKING:
    from fleet.sim.options import SimOptions

_LOOP_TURNS = 3  # an accepted socket becomes a connection, and an aborted one goes, a turn later


@dataclass
class Boot:
    """What lives and dies with one process: engine, tasks, socket."""

    number: int
    engine: SimEngine
    owner: TaskOwner
    runner: web.ServerRunner
    listener: asyncio.Server | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class SimReplica:
    """One simulated vLLM server; `url` stays the same over restarts."""

    def __init__(self, options: "SimOptions", index: int, owner: TaskOwner) -> None:
        self.options = options
        self.index = index
        self.port = options.base_port + index if options.base_port else 0
        self.log = SimLog()
        self.faults = Faults()
        self._owner = owner  # outlives boots: deaths and restarts run here
        self._boot: Boot | None = None
        self._boots = 0
        self._dying = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<SimReplica {self.index} {self.url} {'up' if self.alive else 'down'}>"

    @property
    def url(self) -> str:
        """The base URL, without a slash at its end."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def id(self) -> str:
        """``host:port``, the fleet's id of this replica."""
        return f"{self.options.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the server listens."""
        return self._boot is not None

    @property
    def engine(self) -> SimEngine:
        """The engine of this boot. Raises RuntimeError while the replica is down."""
        if self._boot is None:
            raise RuntimeError(f"{self!r} has no engine")
        return self._boot.engine

    @property
    def checksum(self) -> str:
        """The checksum of the weights held."""
        return self.engine.checksum

    def stats(self) -> dict[str, int]:
        """Rollouts by how they ended, and how many run now."""
        running = len(self._boot.engine.requests) if self._boot is not None else 0
        names = ("finished", "cancelled", "aborted", "killed", "refused")
        return {"running": running} | {name: self.log.outcomes[name] for name in names}

    async def start(self) -> None:
        """Boot and listen; returns when connections are accepted."""
        async with self._dying:  # the port is free only then
            if self._boot is not None:
                raise RuntimeError(f"{self!r} is up already")
        self._boots += 1
        engine = SimEngine(self.options, self.index)
        owner = TaskOwner(f"sim replica {self.index} boot {self._boots}")
        await owner.open()
        server = SimServer(self, engine, owner, self._boots)
        runner = _runner(server, self.options.keep_alive_s)
        await runner.setup()
        boot = Boot(self._boots, engine, owner, runner)
        engine.on_death = lambda: self._owner.spawn(self._exit(boot), f"exit {self.index}")
        boot.listener = await _listen(runner, self.options.host, self.port)
        self.port = boot.listener.sockets[0].getsockname()[1]
        self._boot = boot

    async def die(self) -> None:
        """Be gone at once, as after SIGKILL; idempotent, and over only when all is closed."""
        boot, self._boot = self._boot, None
        async with self._dying:  # a second caller waits for the first one's work
            if boot is not None:
                await _end(boot)

    async def restart(self, after_s: float = 0.0) -> None:
        """Die, and boot again on the same port after `after_s` seconds."""
        await self.die()
        await asyncio.sleep(after_s)
        if self._boot is None:
            await self.start()

    def schedule(self, action: str, seconds: float = 0.0) -> None:
        """Die or restart soon, from inside one of this replica's own calls."""
        work = self.die() if action == "die" else self.restart(seconds)
        self._owner.spawn(work, f"{action} {self.index}")

    def as_json(self) -> dict[str, Any]:
        """What the control port tells about this replica."""
        return {
            "index": self.index,
            "id": self.id,
            "url": self.url,
            "alive": self.alive,
            "boots": self._boots,
            "stats": self.stats(),
        }

    async def _exit(self, boot: Boot) -> None:
        """The server goes a moment after its engine died, as vLLM's does."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(boot.over.wait(), self.options.death_grace_s)
        if self._boot is boot:
            await self.die()


async def _end(boot: Boot) -> None:
    boot.over.set()
    boot.engine.on_death = lambda: None
    _cut(boot.runner)  # before the engine's end can be answered: SIGKILL answers nobody
    boot.engine.die()
    if boot.listener is not None:
        await _stop_listening(boot.listener)
    await _break_connections(boot.runner)
    await boot.owner.close()


def _runner(server: "SimServer", keep_alive_s: float) -> web.ServerRunner:
    low_level = web.Server(
        server.handle,
        handler_cancellation=True,
        keepalive_timeout=keep_alive_s,
        access_log=None,
    )
    return web.ServerRunner(low_level, shutdown_timeout=0.1)


async def _listen(runner: web.ServerRunner, host: str, port: int) -> asyncio.Server:
    if runner.server is None:
        raise RuntimeError("the runner is not set up")
    loop = asyncio.get_running_loop()
    return await loop.create_server(runner.server, host, port, backlog=1024, reuse_address=True)


async def _stop_listening(listener: asyncio.Server) -> None:
    """Accept no more, see accepted sockets become connections, then close.

    Closing at once would drop a socket that was accepted in this very turn of the loop: asyncio
    forgets it unclosed, and its client hangs.
    """
    loop = asyncio.get_running_loop()
    for listening in listener.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)
    listener.close()


def _cut(runner: web.ServerRunner) -> None:
    for connection in tuple(runner.server.connections) if runner.server is not None else ():
        if connection.transport is not None:
            connection.transport.abort()


async def _break_connections(runner: web.ServerRunner) -> None:
    server = runner.server
    if server is not None:
        await _abort_all(server)
    await runner.cleanup()
    if server is not None:
        await _abort_all(server)


async def _abort_all(server: web.Server) -> None:
    """Abort every connection, those included that were accepted and not yet handed over."""
    for _ in range(_LOOP_TURNS):
        for connection in tuple(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
