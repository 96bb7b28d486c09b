"""Processes for `--dry-run`, forked from one that has imported everything: simulated replicas, and
receivers of a bare broadcast.

Each is still a process of its own, to be killed as one; but torch is imported once, not once for
each. Run as a program it is the parent: a line of JSON on stdin is a child, whose process id is the
line that it answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import environment

_POLL_S = 0.01


class Forked:
    """A process that another one forked, with what `subprocess.Popen` would offer."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it lives; its own status is its parent's to know."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -signal.SIGKILL
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return once it is gone. Raises subprocess.TimeoutExpired."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return status


class Forks:
    """The parent of all of them."""

    def __init__(self) -> None:
        search = [str(environment.root()), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(part for part in search if part)
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.forks"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, what: str, arguments: Sequence[int], log: Path) -> Forked:
        """Fork one child."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        log.parent.mkdir(parents=True, exist_ok=True)
        order = {"what": what, "arguments": list(arguments), "log": str(log)}
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        return Forked(int(self._parent.stdout.readline()))

    def close(self) -> None:
        """End the parent; its children are stopped one by one, by whoever has them."""
        self._parent.kill()
        self._parent.communicate()


def _serve() -> None:
    """Fork a child for every line."""
    from bench.gpu.bare import receive
    from fleet.sim import SimOptions, serve

    def replica(port: int, seed: int, workers: int) -> None:
        serve(SimOptions(base_port=port, seed=seed, world_size=workers, model="tiny"))

    def receiver(rank: int, world: int, port: int, total: int) -> None:
        receive("sim", rank, world, port, total)

    works: Mapping[str, Any] = {"replica": replica, "receiver": receiver}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the dead are gone at once
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be(works[order["what"]], order["arguments"], order["log"])
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        print(pid, flush=True)


def _be(work: Any, arguments: list[int], log: str) -> None:
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        work(*arguments)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
