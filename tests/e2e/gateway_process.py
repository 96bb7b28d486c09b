"""The gateway as users run it: `fleet serve` as a child process, awaited, asked, and stopped.

The command beside the running interpreter is used. Its log is kept for failure messages.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.real_vllm import free_port

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
_POLL_S = 0.02  # the condition is in another process, where no event can be set


@dataclass(frozen=True)
class RunningGateway:
    """One `fleet serve` that answers at `url`."""

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        """End it at once, as a crash would; nothing is asked of its exit then."""
        self.process.kill()
        self.process.wait()

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET a path and return its JSON; httpx.HTTPStatusError unless 2xx."""
        return httpx.get(self.url + path, timeout=timeout_s).raise_for_status().json()

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        """POST JSON (or no body) and return the JSON answer; httpx.HTTPStatusError unless 2xx."""
        return httpx.post(self.url + path, json=body, timeout=timeout_s).raise_for_status().json()

    @property
    def version(self) -> str:
        """The committed version, as a trainer asks for it."""
        return self.get("/weight_info")["weight_version"]

    def fleet(self) -> Any:
        """The summary for operators."""
        return self.get("/fleet")

    def states(self) -> dict[str, str]:
        """Each replica's state, by its URL."""
        return {r["url"]: r["state"] for r in self.get("/fleet/replicas")["replicas"]}

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Return once `holds()` does; AssertionError with the fleet and the log's end if late."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"{self.fleet()}\n{self.states()}\n{self.tail()}"
            time.sleep(_POLL_S)

    def wait_for_states(self, *states: str) -> None:
        """Return once the replicas are in these states, in the order of `--replica`."""
        self.wait_until(lambda: tuple(self.states().values()) == states)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def running_gateway(
    replicas: Sequence[str], log: Path, settings: Mapping[str, str]
) -> Generator[RunningGateway]:
    """Serve these replicas on a free port, with a state of its own; stopped in any case.

    `settings` are FLEET_* variables; none are taken from this process.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("fleet")), "serve", "--host", "127.0.0.1"]
    command += ["--port", str(port), *(f"--replica={url}" for url in replicas)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    gateway = RunningGateway(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_ready(gateway, process)
        yield gateway
        if process.returncode != -signal.SIGKILL:
            _stop(process, gateway)
    finally:
        process.kill()
        process.wait()


def _wait_ready(gateway: RunningGateway, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(gateway.url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the gateway did not come up:\n{gateway.tail()}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    return False


def _stop(process: "subprocess.Popen[bytes]", gateway: RunningGateway) -> None:
    """End it as an operator would, and hold it to a clean exit."""
    assert process.poll() is None, f"the gateway died:\n{gateway.tail()}"
    process.send_signal(signal.SIGTERM)
    status = process.wait(STOP_TIMEOUT_S)
    assert status in (0, -signal.SIGTERM), f"exit status {status}:\n{gateway.tail()}"
