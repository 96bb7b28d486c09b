"""Every process that a benchmark starts, each killed when its block ends, on ports that are free.

The gateway runs as users run it; other proxies run as their packages come, one thread or worker
each where that can be chosen. What is not installed yields None.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROUTER = Path(__file__).parents[1] / ".tools/vllm-router/bin/vllm-router"
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
READY_S = 60.0
STOP_S = 5.0


@dataclass(frozen=True)
class Server:
    """A running server: where it is, and which process it is."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.url.rpartition(":")[2])


@contextmanager
def sinks(count: int, *, paced: bool = False) -> Generator[tuple[list[str], int]]:
    """Run that many sinks in a process of their own; yields their URLs and the process id."""
    command = [sys.executable, "-m", "benchmarks.sinks", str(count), *(["--paced"] * paced)]
    with _child(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        yield [f"http://127.0.0.1:{port}" for port in ports], process.pid


@contextmanager
def gateway(
    urls: Sequence[str],
    store: str = "memory://",
    workers: int = 1,
    *,
    logs: bool = False,
    **more: str,
) -> Generator[Server]:
    """Run the gateway as users do, with `more` FLEET_ variables.

    Several workers need a store that they can share. `logs` lets it log as much as it does by
    default, to nowhere; else it shows warnings.
    """
    port = free_port()
    settings = {
        "FLEET_REPLICAS": ",".join(urls),
        "FLEET_LOG__LEVEL": "info" if logs else "warning",
        "FLEET_STORE": store,
        "FLEET_NAME": f"bench-{port}",
        "FLEET_AUTO_VERSION": "false",  # sinks keep no label, and a changed one would be probed
    }
    others = {k: v for k, v in os.environ.items() if not k.startswith("FLEET_")}
    fleet = str(Path(sys.executable).with_name("fleet"))
    command = [fleet, "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", str(workers)]
    errors = subprocess.DEVNULL if logs else None
    with _child(command, env=others | settings | more, stderr=errors) as process:
        yield Server(f"http://127.0.0.1:{port}", process.pid)


@contextmanager
def redis_store() -> Generator[str | None]:
    """Run a Redis server for the time of the benchmark, if there is one to run."""
    program = shutil.which("redis-server", path=PATH)
    if program is None:
        yield None
        return
    port = free_port()
    with _child([program, "--port", str(port), "--save", "", "--appendonly", "no"]):
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def vllm_router(urls: Sequence[str]) -> Generator[Server | None]:
    """Run the Rust vllm-router, if `make bench-rollouts` has installed it."""
    if not ROUTER.exists():
        yield None
        return
    port, metrics = free_port(), free_port()
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    command += ["--policy", "round_robin", "--log-level", "warning"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with _child(command) as process:
        yield _listening(port, process)


@contextmanager
def haproxy(urls: Sequence[str], scratch: Path) -> Generator[Server | None]:
    """Run HAProxy with one thread, if there is one to run."""
    program = shutil.which("haproxy", path=PATH)
    if program is None:
        yield None
        return
    port = free_port()
    servers = "\n".join(f"  server s{n} {_authority(url)}" for n, url in enumerate(urls))
    text = _HAPROXY.format(port=port, servers=servers)
    config = scratch / "haproxy.cfg"
    config.write_text(text)
    with _child([program, "-db", "-q", "-f", str(config)]) as process:
        yield _listening(port, process)


@contextmanager
def nginx(urls: Sequence[str], scratch: Path) -> Generator[Server | None]:
    """Run nginx with one worker, if there is one to run."""
    program = shutil.which("nginx", path=PATH)
    if program is None:
        yield None
        return
    port = free_port()
    servers = "\n".join(f"    server {_authority(url)};" for url in urls)
    config = scratch / "nginx.conf"
    config.write_text(_NGINX.format(port=port, servers=servers, scratch=scratch))
    command = [program, "-c", str(config), "-p", str(scratch), "-e", str(scratch / "error.log")]
    with _child(command) as process:
        yield _listening(port, process)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process and its children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(cpu_s(int(child)) for child in children)


def kilobytes(pid: int, field: str) -> int:
    """Return one size from /proc/PID/status, such as VmRSS."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_on_sigterm() -> None:
    """Let SIGTERM end the program through its `finally`s, so that no child stays behind."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def _child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Generator[subprocess.Popen[str]]:
    silent = subprocess.DEVNULL if stdout is None else stdout
    with subprocess.Popen(command, env=env, stdout=silent, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _listening(port: int, process: subprocess.Popen[str]) -> Server:
    """Return the server once it takes connections."""
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return Server(f"http://127.0.0.1:{port}", process.pid)
    raise SystemExit(f"{process.args!r} did not come up on port {port}")


def _authority(url: str) -> str:
    return url.removeprefix("http://")


_HAPROXY = """
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout connect 10s
  timeout client 600s
  timeout server 600s
  http-reuse always
frontend front
  bind 127.0.0.1:{port}
  default_backend back
backend back
  balance roundrobin
{servers}
"""

_NGINX = """
daemon off;
worker_processes 1;
pid {scratch}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {scratch}/body;
  proxy_temp_path {scratch}/proxy;
  fastcgi_temp_path {scratch}/fastcgi;
  uwsgi_temp_path {scratch}/uwsgi;
  scgi_temp_path {scratch}/scgi;
  keepalive_requests 1000000000;
  upstream back {{
{servers}
    keepalive 512;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://back;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""
