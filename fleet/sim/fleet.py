"""A whole simulated fleet, for tests, the demo and the command line.

In a test, on the test's own loop::

    async with SimFleet(replicas=3, world_size=2) as fleet:
        fleet.urls                       # base URLs, free ports
        fleet.replicas[0].log.paths()    # control calls that replica 0 saw, in order
        fleet.replicas[1].faults.add("/update_weights", "status", status=500)
        await fleet.replicas[2].restart(after_s=0.2)

From the command line, blocking until Ctrl-C or SIGTERM::

    serve(SimOptions(replicas=64, base_port=9000, control_port=8999))

The control port, if one is asked for, answers for replicas that are down as well:

- GET /replicas; GET /replicas/{i}/log, /stats, /faults; DELETE /replicas/{i}/faults, /log
- POST /replicas/{i}/faults, /die; /start boots one that is down, and is a 409 for one that is up;
  /restart {"seconds": …} ends one, also inside a collective, and boots it so long after
"""

import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from fleet.sim.backdoor import ControlPort
from fleet.sim.options import SimOptions
from fleet.sim.replica import SimReplica
from fleet.sim.tasks import TaskOwner

if TYPE_CHECKING:
    from types import TracebackType


class SimFleet:
    """Simulated replicas in this process and on this loop; keywords are those of `SimOptions`."""

    def __init__(self, options: SimOptions | None = None, **fields: Any) -> None:
        self.options = replace(options or SimOptions(), **fields)
        self._owner = TaskOwner("sim fleet")
        self.replicas = [
            SimReplica(self.options, index, self._owner) for index in range(self.options.replicas)
        ]
        self.control: ControlPort | None = None

    @property
    def urls(self) -> list[str]:
        """The base URL of each replica."""
        return [replica.url for replica in self.replicas]

    @property
    def control_url(self) -> str:
        """The URL of the control port. Raises RuntimeError without one."""
        if self.control is None:
            raise RuntimeError("this fleet has no control port")
        return self.control.url

    async def start(self) -> None:
        """Boot every replica; all listen on return."""
        await self._owner.open()
        for replica in self.replicas:
            await replica.start()
        if self.options.control_port is not None:
            self.control = ControlPort(self.options.host, self.options.control_port, self.replicas)
            await self.control.start()

    async def add(self) -> SimReplica:
        """Boot one replica more, on a free port; it counts as the last one."""
        more = replace(self.options, base_port=0)
        replica = SimReplica(more, len(self.replicas), self._owner)
        await replica.start()
        self.replicas.append(replica)
        return replica

    async def close(self) -> None:
        """Stop everything."""
        if self.control is not None:
            await self.control.close()
        for replica in self.replicas:
            await replica.die()
        await self._owner.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        await self.close()


def serve(options: SimOptions) -> None:
    """Run a simulated fleet until SIGINT or SIGTERM; prints one line per replica once it listens.

    Blocking; runs a loop of its own. Raises OSError for a port in use.
    """
    asyncio.run(_serve(options))


async def _serve(options: SimOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with SimFleet(options) as fleet:
        for replica in fleet.replicas:
            workers = options.workers_of(replica.index)
            print(
                f"replica {replica.index} listening on {replica.url} (workers: {workers})",
                flush=True,
            )
        if fleet.control is not None:
            print(f"control port on {fleet.control.url}", flush=True)
        await stop.wait()
