"""Rollouts through the gateway beside other proxies, on one machine, in one run.

    make bench-rollouts       or: python -m benchmarks.rollouts [--quick | --only json 32]

Two cheap replicas (benchmarks/sinks.py), and in front of them: nothing, this gateway as one process
and as two workers on a Redis, and whatever of vllm-router, HAProxy and nginx is installed. Runs
alternate: every way gets a second of wrk, then every way again. Ratios are taken within one turn,
and their median is printed.

Then, for the gateway alone: what it adds to the median latency at one connection, and how large it
is while 10,000 rollouts are held at its gate, and while 10,000 stream through it.

Before all that a crowd (benchmarks/crowd.py) compares every byte of some thousand answers.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import children
from benchmarks.children import Server, cpu_s, kilobytes
from benchmarks.load import Load, crowd, drive, find_wrk
from benchmarks.sinks import raise_file_limit

DIRECT, GATEWAY, ROUTER = "no proxy", "this gateway", "vllm-router"
WORKERS = 2
KINDS = {
    "json": "JSON, 1 KB",
    "burst": "stream of 50 events, at once",
    "paced": "stream of 50 events, one per 4 ms",
}
RATES = (
    "| connections | through | of no proxy | of vllm-router | requests/s | p50 ms | p99 ms "
    "| CPU µs each | failed |\n| ---: | --- |" + " ---: |" * 7
)
ONLY_TURNS = 15
SPARE_FILES = 300
READY_S = 60.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    turns: Mapping[str, int]
    """For each kind of answer: how often each way gets its second."""
    connections: Sequence[int]
    visits: Mapping[str, tuple[int, int]]
    """For each kind of answer: connections of the checking crowd, requests of each."""
    pairs: int
    crowd: int


FULL = Size(
    turns={"json": 5, "burst": 3, "paced": 3},
    connections=(1, 32, 256),
    visits={"json": (256, 10), "burst": (256, 4), "paced": (256, 1)},
    pairs=7,
    crowd=10_000,
)
QUICK = Size(
    turns={"json": 1, "burst": 1},
    connections=(32,),
    visits={"json": (256, 1), "burst": (64, 1)},
    pairs=2,
    crowd=1_000,
)


@dataclass
class Cell:
    """All runs of one way under one kind of load, in turn."""

    loads: list[Load] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def of(self, other: Cell | None) -> str:
        """Return the median of the ratios of rates, turn by turn, and between what they lie."""
        if other is None:
            return "–"
        if other is self:
            return "1"
        pairs = zip(self.loads, other.loads, strict=True)
        ratios = [a.requests_per_s / b.requests_per_s for a, b in pairs]
        return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

    def columns(self) -> Iterable[str]:
        """Return rate, latencies, CPU time and failures."""
        yield f"{median(load.requests_per_s for load in self.loads):,.0f}"
        yield f"{median(load.p50_s for load in self.loads) * 1000:.2f}"
        yield f"{median(load.p99_s for load in self.loads) * 1000:.2f}"
        pairs = zip(self.cpu_s, self.loads, strict=True)
        yield f"{median(cpu / max(1, load.requests) for cpu, load in pairs) * 1e6:,.0f}"
        yield str(sum(load.failed for load in self.loads))


@contextmanager
def ways(urls: list[str], sinks_pid: int) -> Generator[dict[str, Server]]:
    """Run everything that can stand in front of the replicas."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway = stack.enter_context(children.gateway(urls))
        workers = stack.enter_context(several_workers(urls))
        found = {
            DIRECT: Server(urls[0], sinks_pid),
            GATEWAY: gateway,
            f"{GATEWAY}, {WORKERS} workers": workers,
            ROUTER: stack.enter_context(children.vllm_router(urls)),
            "HAProxy": stack.enter_context(children.haproxy(urls, scratch)),
            "nginx": stack.enter_context(children.nginx(urls, scratch)),
        }
        for running in (gateway, workers):
            if running is not None:
                until(lambda g=running: all_ready(g, len(urls)), "the gateway sees its replicas")
        for name in (name for name, server in found.items() if server is None):
            print(f"{name} is not installed (or what it needs): skipped.")
        yield {name: server for name, server in found.items() if server is not None}


@contextmanager
def several_workers(urls: list[str]) -> Generator[Server | None]:
    """Run the gateway as several workers, if there is a Redis that they can share."""
    with children.redis_store() as store:
        if store is None:
            yield None
            return
        with children.gateway(urls, store, WORKERS) as gateway:
            yield gateway


def check(running: dict[str, Server], visits: Mapping[str, tuple[int, int]]) -> None:
    """Compare every byte of some answers of every way, and print what was right."""
    print("\n| through | answers compared | wrong |\n| --- | ---: | ---: |")
    complaints: list[str] = []
    for name, server in running.items():
        right = wrong = 0
        for kind, (connections, requests) in visits.items():
            with crowd(server.url, kind, connections, "--requests", str(requests)) as people:
                told = people.result()
            right, wrong = right + told["right"], wrong + told["wrong"]
            complaints += [f"{name}, {kind}: {text}" for text in told["complaints"]]
        print(f"| {name} | {right + wrong:,} | {wrong:,} |", flush=True)
    print("".join(f"\n- {text}" for text in complaints), flush=True)


def compare(running: dict[str, Server], kind: str, connections: int, turns: int) -> dict[str, Cell]:
    """Let every way have its second, again and again."""
    cells = {name: Cell() for name in running}
    for turn in range(turns):
        names = list(running) if turn % 2 == 0 else list(reversed(running))
        for name in names:
            before = cpu_s(running[name].pid)
            load = drive(running[name].url, kind, connections, seconds=1)
            cells[name].cpu_s.append(cpu_s(running[name].pid) - before)
            cells[name].loads.append(load)
    return cells


def print_cells(cells: dict[str, Cell], connections: int) -> None:
    """Print a line for each way."""
    for name, cell in cells.items():
        ratios = (cell.of(cells[DIRECT]), cell.of(cells.get(ROUTER)))
        print("|", " | ".join([str(connections), name, *ratios, *cell.columns()]), "|", flush=True)


def print_rates(running: dict[str, Server], size: Size) -> None:
    """Print one table for each kind of answer."""
    for kind, turns in size.turns.items():
        print(f"\n{KINDS[kind]}:\n")
        print(RATES)
        for connections in size.connections:
            print_cells(compare(running, kind, connections, turns), connections)


def print_one(running: dict[str, Server], kind: str, connections: int) -> None:
    """Print how often the gateway was ahead of vllm-router under one kind of load."""
    cells = compare(running, kind, connections, ONLY_TURNS)
    print(f"\n{KINDS[kind]}, {ONLY_TURNS} turns:\n\n{RATES}")
    print_cells(cells, connections)
    if ROUTER in cells:
        pairs = zip(cells[GATEWAY].loads, cells[ROUTER].loads, strict=True)
        ahead = sum(ours.requests_per_s > theirs.requests_per_s for ours, theirs in pairs)
        print(f"\nAhead of vllm-router in {ahead} of {ONLY_TURNS} turns.")


def print_added(running: dict[str, Server], pairs: int) -> None:
    """Print what the gateway adds to the median latency when there is one connection."""
    added: list[float] = []
    for _ in range(pairs):
        direct, through = (drive(running[x].url, "json", 1, seconds=1) for x in (DIRECT, GATEWAY))
        added.append((through.p50_s - direct.p50_s) * 1000)
    print(
        f"\nAdded to the p50 at 1 connection, JSON: {median(added):.2f} ms "
        f"(median of {pairs} pairs of runs; {min(added):.2f} to {max(added):.2f})",
        flush=True,
    )


def hold(gateway: Server, count: int) -> tuple[int, dict[str, Any]]:
    """Let so many wait at the gate of a paused gateway; returns its size in KiB, what came."""
    post(f"{gateway.url}/pause")
    with crowd(gateway.url, "json", count, "--prompt-bytes", "1000", "--limit", "90") as people:
        until(lambda: get(f"{gateway.url}/fleet")["gate"]["held"] == count, f"{count} are held")
        size = kilobytes(gateway.pid, "VmRSS")
        post(f"{gateway.url}/resume")
        return size, people.result()


def stream(gateway: Server, count: int, sink: str) -> tuple[int, dict[str, Any]]:
    """Let so many stream at once; returns the gateway's size in KiB, what came."""
    with crowd(gateway.url, "open", count, "--prompt-bytes", "1000", "--limit", "90") as people:
        people.until_begun(count)
        time.sleep(2)  # two more events for each
        size = kilobytes(gateway.pid, "VmRSS")
        post(f"{sink}/end_streams")  # of all sinks: they share a process
        return size, people.result()


def print_memory(urls: list[str], count: int) -> None:
    """Print how large a gateway is with a crowd in it."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = min(count, (files - SPARE_FILES) // 2)
    print(
        "\n| 1 KB rollouts at once | number | gateway before, MiB | with them, MiB | KB each "
        "| peak, MiB | right | wrong |\n| --- |" + " ---: |" * 7
    )
    acts = {"held, then released": hold, "streaming": partial(stream, sink=urls[0])}
    for what, act in acts.items():
        with children.gateway(urls) as gateway:
            until(lambda g=gateway: all_ready(g, len(urls)), "the gateway sees its replicas")
            drive(gateway.url, "json", 1, seconds=1)
            before = kilobytes(gateway.pid, "VmRSS")
            size, told = act(gateway, most)
            peak = kilobytes(gateway.pid, "VmHWM")
        each = (size - before) * 1.024 / most
        print(
            f"| {what} | {most:,} | {before / 1024:.0f} | {size / 1024:.0f} | {each:.1f} "
            f"| {peak / 1024:.0f} | {told['right']:,} | {told['wrong']:,} |",
            flush=True,
        )
        print("".join(f"- {text}\n" for text in told["complaints"]), end="", flush=True)
    if most < count:
        print(f"\nNot {count:,}, since a process may open {files:,} files here, two for each.")


def all_ready(gateway: Server, count: int) -> bool:
    """Whether the gateway may send rollouts to so many replicas."""
    return get(f"{gateway.url}/fleet")["replicas"].get("ready") == count


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition, for a minute at most."""
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        try:
            if holds():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"waited {READY_S:g} s in vain until {what}")


def get(url: str) -> dict[str, Any]:
    """Return what a GET answers."""
    return json.loads(httpx.get(url, timeout=30).text)


def post(url: str) -> None:
    """Make a call that must succeed."""
    httpx.post(url, timeout=60).raise_for_status()


def main() -> None:
    """Run the benchmark and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything, within 40 s")
    parser.add_argument(
        "--only", nargs=2, metavar=("KIND", "CONNECTIONS"), help=f"one case, {ONLY_TURNS} turns"
    )
    asked = parser.parse_args()
    size = QUICK if asked.quick else FULL
    started = time.monotonic()
    find_wrk()
    raise_file_limit()
    children.end_on_sigterm()
    with children.sinks(2) as (urls, pid):
        with ways(urls, pid) as running:
            if asked.only:
                print_one(running, asked.only[0], int(asked.only[1]))
                return
            check(running, size.visits)
            print_rates(running, size)
            print_added(running, size.pairs)
        print_memory(urls, size.crowd)
    print(f"\nTook {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
