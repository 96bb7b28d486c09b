"""Gateways that are there at once: forked from one process that has loaded the code already.

Each is a `fleet serve` of its own, with its own memory, sockets and process id, and can be killed,
frozen and ended like any other; only the second or two that Python needs to load everything are
spent once. Run as a program, this module is the process that forks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.reached import Reached
from tests.waiting import wait_until

LINE_LIMIT = 1 << 20


@dataclass(kw_only=True)
class ForkedGateway(Reached):
    """One `fleet serve`, with the words that a Case needs."""

    pid: int
    log: Path

    @property
    def is_alive(self) -> bool:
        """Whether the process is there, frozen or not."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """End it at once, as a crash would; one that has ended already stays so."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it where it is; its connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on as if no time had passed."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it as an operator would, and wait."""
        self._signal(signal.SIGTERM)
        await self.gone()

    async def gone(self) -> None:
        """Return when the process has ended."""

        async def ended() -> bool:
            return not self.is_alive

        await wait_until(ended, timeout_s=20)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Nursery:
    """Forks gateways with the settings given; whatever still runs is killed at the end."""

    process: asyncio.subprocess.Process
    folder: Path
    stack: AsyncExitStack
    all: list[ForkedGateway] = field(default_factory=list["ForkedGateway"])
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, **settings: str) -> ForkedGateway:
        """Start one gateway with these FLEET_ variables and wait until it is ready."""
        gateway = await self.fork(**settings)
        await wait_until(gateway.ready, timeout_s=20)
        return gateway

    async def fork(self, **settings: str) -> ForkedGateway:
        """Start one gateway and do not wait for it."""
        port = free_port()
        log = self.folder / f"gateway-{len(self.all)}-{port}.log"
        order = {"port": port, "log": str(log), "environment": settings}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self._turn:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            await self.process.stdin.drain()
            pid = int(await self.process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        await self.stack.enter_async_context(http)
        gateway = ForkedGateway(pid=pid, url=url, http=http, log=log)
        self.all.append(gateway)
        return gateway


@asynccontextmanager
async def nursery(folder: Path, **environment: str) -> AsyncGenerator[Nursery]:
    """Load the code once, with these variables set; gateways are forked from there."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.gateways.forked",
        env=clean | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    async with AsyncExitStack() as stack:
        made = Nursery(process, folder, stack)
        try:
            yield made
        finally:
            for gateway in made.all:
                gateway.kill()
            process.kill()
            await process.wait()


def main() -> None:
    """Fork one gateway for each line of standard input, and answer with its process id."""
    from gateway import app, cli, server

    del app, cli, server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave nothing behind
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(order["port"], order["log"], order["environment"])
        print(pid, flush=True)


def serve(port: int, log: str, environment: dict[str, str]) -> None:
    """Become `fleet serve`; never returns."""
    from gateway.cli import main as fleet

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    words: Sequence[str] = ("fleet", "serve", "--host", "127.0.0.1", "--port", str(port))
    sys.argv = list(words)
    status = 1
    try:
        fleet()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
