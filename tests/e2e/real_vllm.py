"""Real vLLM servers as child processes: started, awaited, asked and always stopped.

Each server gets a process group of its own, so that stopping it stops its engine and workers
too, and a log file. Nothing here is a fake: environment and flags are those with which vLLM 0.32
runs on a machine without a GPU, and no answer is interpreted beyond its JSON.

It needs no import of vLLM: the `vllm` command beside the running interpreter is used.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

BOOT_TIMEOUT_S = 400.0  # about 35 s alone on a quiet machine, minutes on a busy one
STOP_TIMEOUT_S = 15.0
MODEL_NAME = "tiny"

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_FLAGS = (
    *("--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
    *("--enforce-eager", "--enable-scale-out"),
    *("--weight-transfer-config", '{"backend":"gloo"}'),
)


@dataclass
class RealServer:
    """One `vllm serve` on 127.0.0.1; `start` and `stop` may alternate, the port stays."""

    model_dir: Path
    log: Path
    port: int
    flags: Sequence[str] = ()
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process and return at once; `wait_healthy` waits for it."""
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.model_dir)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *_FLAGS, *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Whether the server's main process runs; a wedged one is alive too."""
        return self.process is not None and self.process.poll() is None

    def wait_healthy(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Return once /health is 200; RuntimeError with the log's end if that does not come."""
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if not self.alive() or time.monotonic() > deadline:
                raise RuntimeError(f"{self.url} did not come up:\n{self.log_tail()}")
            time.sleep(0.25)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server (SIGSTOP wedges it, SIGKILL ends it)."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End every process of the server, kindly first; idempotent."""
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.signal(signal.SIGKILL)  # what outlived its parent, too
        self.process.wait()
        self.process = None

    def settle(self) -> None:
        """Close and resume what a test that failed has left open or paused."""
        httpx.post(f"{self.url}/finish_weight_update", timeout=60.0)  # refused if nothing is open
        self.post("/resume")

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET a path and return its JSON; httpx.HTTPStatusError unless 2xx."""
        return httpx.get(self.url + path, timeout=timeout_s).raise_for_status().json()

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        """POST JSON (or no body) and return the JSON answer; httpx.HTTPStatusError unless 2xx."""
        return httpx.post(self.url + path, json=body, timeout=timeout_s).raise_for_status().json()

    def checksums(self) -> dict[str, str]:
        """The checksum of each parameter, by ``/weight_checker``.

        On a CPU those of linear layers never change: vLLM keeps them packed, elsewhere.
        """
        return self.post("/weight_checker", {"action": "checksum"})["checksums"]

    def greedy(self, prompt_ids: list[int], count: int) -> list[int]:
        """The `count` tokens that the server appends to `prompt_ids` at temperature 0."""
        return greedy(self.url, prompt_ids, count)

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, for failure messages."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/health", timeout=2.0).status_code == 200
        return False


@dataclass(frozen=True)
class RealFleet:
    """Several servers of the same model, as independent replicas."""

    servers: tuple[RealServer, ...]

    @property
    def urls(self) -> list[str]:
        """The servers' base URLs, in the order of `servers`."""
        return [server.url for server in self.servers]

    @property
    def logs(self) -> list[Path]:
        """The servers' log files, in the order of `servers`."""
        return [server.log for server in self.servers]

    def alive(self) -> list[bool]:
        """Whether each server's main process runs."""
        return [server.alive() for server in self.servers]

    def revive(self) -> None:
        """Start again what a test killed, and wait until all are healthy."""
        for server in self.servers:
            if not server.alive():
                server.stop()
                server.start()
        for server in self.servers:
            server.wait_healthy()


@contextlib.contextmanager
def running_fleet(model_dir: Path, log_dir: Path, count: int = 2) -> Generator[RealFleet]:
    """Start `count` servers at the same time, yield them once healthy, stop them in any case."""
    servers = tuple(
        RealServer(model_dir, log_dir / f"vllm-{number}.log", free_port())
        for number in range(count)
    )
    fleet = RealFleet(servers)
    try:
        fleet.revive()
        yield fleet
    finally:
        for server in servers:
            server.stop()


def greedy(url: str, prompt_ids: list[int], count: int, timeout_s: float = 60.0) -> list[int]:
    """Greedy decoding over HTTP, by a server or a gateway in front of one."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt_ids,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout_s)
    return answer.raise_for_status().json()["choices"][0]["token_ids"]


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
