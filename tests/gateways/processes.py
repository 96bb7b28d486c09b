"""Gateways as they die in the field: real `fleet serve` processes on one Redis, killed and stopped.

Leases are short, so that a test does not wait long for the end of one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from fleet.sim import SimFleet
from tests.cases.conftest import Case
from tests.ports import free_port
from tests.reached import Reached
from tests.waiting import wait_until

FLEET = str(Path(sys.executable).with_name("fleet"))
LEASE_S = 1.5
QUICK = {
    "FLEET_TIMEOUTS__LEASE_S": str(LEASE_S),
    "FLEET_TIMEOUTS__LEASE_RENEW_S": "0.3",
    "FLEET_TIMEOUTS__PROBE_S": "0.2",
    "FLEET_TIMEOUTS__DRAIN_S": "1",
}


@dataclass(kw_only=True)
class GatewayProcess(Reached):
    """One `fleet serve`, with the words that a Case needs."""

    process: asyncio.subprocess.Process
    log: Path

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()

    def freeze(self) -> None:
        """Stop it where it is; its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on as if no time had passed."""
        self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it as an operator would, and wait."""
        self.process.terminate()
        await asyncio.wait_for(self.process.wait(), 20)


@dataclass
class Gateways:
    """Several gateways of one fleet, and the simulated replicas behind them."""

    sim: SimFleet
    store: str
    folder: Path
    environment: dict[str, str]
    stack: AsyncExitStack
    all: list[GatewayProcess] = field(default_factory=list["GatewayProcess"])

    def case(self, number: int) -> Case:
        """The fleet as seen through one of the gateways."""
        return Case(self.sim, self.all[number])

    async def start(self, *, store: str | None = None, **environment: str) -> GatewayProcess:
        """Start one more gateway and wait until it is ready."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = self.folder / f"gateway-{len(self.all)}.log"
        arguments = ["serve", "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--store", store or self.store]
        arguments += [f"--replica={replica.url}" for replica in self.sim.replicas]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                FLEET,
                *arguments,
                env=clean | QUICK | self.environment | environment,
                stdout=output,
                stderr=output,
            )
        self.stack.push_async_callback(_end, process)
        http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        await self.stack.enter_async_context(http)
        gateway = GatewayProcess(process=process, url=url, http=http, log=log)
        await wait_until(gateway.ready, timeout_s=20)
        self.all.append(gateway)
        return gateway


@asynccontextmanager
async def gateways(
    sim: SimFleet, store: str, folder: Path, count: int = 2, **environment: str
) -> AsyncGenerator[Gateways]:
    """Run `count` gateways in front of these replicas; whatever still runs is killed at the end."""
    async with AsyncExitStack() as stack:
        several = Gateways(sim, store, folder, environment, stack)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(several.start())
        yield several


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    await process.wait()
