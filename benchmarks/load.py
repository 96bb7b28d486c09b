"""What drives the load: `wrk` for rates and latencies, benchmarks/crowd.py for right answers.

wrk is one C thread, so it leaves the machine to what is measured; it reads each answer to its end
(chunked ones too) and counts failures. It takes whole seconds only. Its latencies are of whole
answers, and corrected for coordinated omission: a stall counts for every request that it delays.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.children import PATH

TIMEOUT_S = 10
_SCRIPT = """
wrk.method = "POST"
wrk.body = '%s'
wrk.headers["Content-Type"] = "application/json"
done = function(summary, latency, requests)
  local e = summary.errors
  print(string.format(
    'RESULT {"requests": %%d, "us": %%d, "p50_us": %%d, "p99_us": %%d, "failed": %%d}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """What one run of wrk has seen; latencies in seconds."""

    requests: int
    requests_per_s: float
    p50_s: float
    p99_s: float
    failed: int


def find_wrk() -> str:
    """Return where wrk is, or end the program."""
    found = shutil.which("wrk", path=PATH)
    if found is None:
        raise SystemExit("wrk is missing; `make bench-rollouts` installs it")
    return found


def drive(url: str, kind: str, connections: int, seconds: int) -> Load:
    """Let wrk keep so many connections busy for so long."""
    body = json.dumps({"model": kind, "prompt": "0", "stream": kind != "json"})
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_SCRIPT % body)
        script.flush()
        command = [find_wrk(), "-t1", f"-c{connections}", f"-d{seconds}s"]
        command += [f"--timeout={TIMEOUT_S}s", "-s", script.name, f"{url}/v1/completions"]
        limit = seconds + TIMEOUT_S + 20
        told = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    line = next((x for x in told.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{command} says: {told.stdout} {told.stderr}")
    seen = json.loads(line.removeprefix("RESULT "))
    rate = seen["requests"] / seen["us"] * 1e6
    p50_s, p99_s = seen["p50_us"] / 1e6, seen["p99_us"] / 1e6
    return Load(seen["requests"], rate, p50_s, p99_s, seen["failed"])


class Crowd:
    """A running benchmarks/crowd.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until_begun(self, count: int) -> None:
        """Return when so many answers have begun."""
        for told in self._lines():
            if told["begun"] >= count:
                return
            if "right" in told:
                raise SystemExit(f"only {told} of {count} answers begun")

    def result(self) -> dict[str, Any]:
        """Return the last word of the crowd: right, wrong, complaints, versions."""
        for told in self._lines():
            if "right" in told:
                return told
        raise SystemExit("the crowd ended without a result")

    def _lines(self) -> Generator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)


@contextmanager
def crowd(url: str, kind: str, connections: int, *options: str) -> Generator[Crowd]:
    """Run a crowd of connections in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.crowd", url, kind, str(connections), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Crowd(process)
        finally:
            process.kill()
