"""Every process that a script starts: vLLM servers, simulated ones, the gateway, receivers.

Each is a process group of its own, so that a replica can be killed whole, and stays in the script's
session, so that whoever ends the session ends all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from bench.gpu import environment

STOP_S = 10.0
_POLL_S = 0.05


class Process(Protocol):
    """What a child is made of: `subprocess.Popen`, or a fork that offers the same."""

    pid: int

    def poll(self) -> int | None:
        """None while it lives."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return once it has ended. Raises subprocess.TimeoutExpired."""
        ...


class Child:
    """One process with a log; ends at the latest with `stop`."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.began = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether the first process of the group runs."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it, kindly first; idempotent."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill()

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Served(Child):
    """A process that answers HTTP on a port of 127.0.0.1."""

    def __init__(
        self, name: str, port: int, process: Process, log: Path, ready: str = "/health"
    ) -> None:
        super().__init__(process, log)
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.id = f"127.0.0.1:{port}"
        self.booted_s: float | None = None
        self._ready = ready

    def wait_ready(self, timeout_s: float) -> None:
        """Return once it is healthy; RuntimeError with its log's end if that does not come."""
        ends = self.began + timeout_s
        while not self._healthy():
            if not self.alive or time.monotonic() > ends:
                raise RuntimeError(f"{self.name} did not come up:\n{self.tail(40)}")
            time.sleep(_POLL_S)
        self.booted_s = time.monotonic() - self.began

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET a path and return its JSON; httpx.HTTPError unless 2xx."""
        answer = httpx.get(self.url + path, timeout=timeout_s, trust_env=False)
        return answer.raise_for_status().json()

    def post(self, path: str, body: Any = None, timeout_s: float = 120.0) -> Any:
        """POST JSON, or nothing, and return the answer's; httpx.HTTPError unless 2xx."""
        answer = httpx.post(self.url + path, json=body, timeout=timeout_s, trust_env=False)
        return answer.raise_for_status().json()

    def checksums(self) -> dict[str, str]:
        """The checksum of every parameter that it runs with."""
        return self.post("/weight_checker", {"action": "checksum"}, 300.0)["checksums"]

    def told(self, path: str, timeout_s: float = 2.0) -> str:
        """What a path answers, in a few words, even if nothing."""
        try:
            answer = httpx.get(self.url + path, timeout=timeout_s, trust_env=False)
        except httpx.HTTPError as error:
            return type(error).__name__
        return f"{answer.status_code} {answer.text[:80]}".strip()

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(self.url + self._ready, timeout=2.0, trust_env=False)
            return answer.status_code == 200
        return False


def gateway(
    replicas: Sequence[str], log: Path, settings: Mapping[str, str] | None = None
) -> Served:
    """`fleet serve` in front of these URLs, with a state of its own."""
    port = free_port()
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += [f"--replica={url}" for url in replicas]
    chosen = {"FLEET_LOG__LEVEL": "info", **(settings or {}), "LD_PRELOAD": ""}
    return Served("gateway", port, spawn(command, log, chosen), log, ready="/readyz")


def spawn(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program with these variables more, its output in the log.

    Settings of a gateway that is none of ours are not passed on.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(environment.root()), os.environ.get("PYTHONPATH", "")]
    search = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**inherited, **search, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def end_session(session: int, *, spare: int | None = None) -> None:
    """SIGKILL every process of a session that this program started."""
    for pid in _members(session):
        if pid not in (spare, os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _members(session: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    found.append(int(entry.name))
    return found


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
