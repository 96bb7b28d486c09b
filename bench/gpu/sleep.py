"""Trainer and replicas take turns with one GPU's memory: sleep, train, wake, update, wake the rest.

    python -m bench.gpu.sleep --replicas 2

`fleet.client.colocated` does it over the fleet, with sleep level 2 (weights thrown away) and level
1 (kept on the host), while rollouts are asked for: one that was running goes on, one that comes
meanwhile waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from bench.gpu.evidence import Evidence
from bench.gpu.fleets import BOOTED, SENT, boot_fleet, check_fleet
from bench.gpu.options import Options, parser
from bench.gpu.processes import Served
from bench.gpu.rollouts import Answer, ask
from bench.gpu.script import run_script
from bench.gpu.stage import Stage, staged
from fleet.client.colocated import colocated_update

CACHE_BYTES = 4 << 30  # of each replica, so that its release shows
TOKENS = 200
Level = Literal[1, 2]
CYCLES: tuple[tuple[Level, int], ...] = ((2, SENT), (1, BOOTED), (2, BOOTED), (1, SENT))
FLAGS = ("--enable-sleep-mode", "--kv-cache-memory-bytes", str(CACHE_BYTES))


def run(options: Options, evidence: Evidence) -> None:
    """Boot, then a cycle of each level, twice."""
    if options.kind == "gloo":
        evidence.line("not run: vLLM sleeps on GPUs only")
        return
    with staged(options, evidence) as stage:
        flags = FLAGS if options.real else ()
        fleet = boot_fleet(stage, options.most_replicas, flags=lambda _: flags)
        front = stage.before(fleet.servers)
        with stage.client(front.url) as client:
            engine = stage.join(client, 1 + len(fleet.servers), packed=True)
            for number, (level, seed) in enumerate(CYCLES):
                with evidence.part(f"cycle {number}: level {level}"):
                    stage.weights.take(seed)
                    client.next_weight_version = f"cycle-{number}"
                    _cycle(stage, front, client, engine.send_weights, level)
                    wanted = fleet.of_seed[seed]
                    stage.compare(fleet.servers, wanted, f"a booted server's (seed {seed})")
                    check_fleet(stage, front)


def _cycle(
    stage: Stage,
    front: Served,
    client: Any,
    send: Callable[[], object],
    level: Level,
) -> None:
    """One cycle with memory readings and two rollouts, one on each side of the gate."""
    held: list[Future[Answer]] = []
    began = time.monotonic()

    def note(what: str) -> None:
        took = time.monotonic() - began
        stage.evidence.line(f"{took:7.3f} s  {memory_used(stage):>9}  {what}")

    with ThreadPoolExecutor(2) as pool:
        note("awake, before")
        running = pool.submit(ask, front.url, TOKENS)
        _until_in_flight(front)

        def train() -> None:
            note("asleep, the trainer has the memory")
            held.append(pool.submit(ask, front.url, 8))

        def sending() -> None:
            note("weights awake")
            send()
            note("weights sent")

        colocated_update(client, sending, train=train, level=level)
        note("wholly awake")
        answers = [running.result(120), *(future.result(120) for future in held)]
    for name, answer in zip(("running before", "asked meanwhile"), answers, strict=True):
        told = f"{answer.tokens} tokens, version {answer.version} to {answer.ended}"
        stage.evidence.check(answer.error is None, f"rollout {name}: {answer.error or told}")
    late = answers[-1]
    stage.evidence.check(late.version == client.weight_info(), "the one that waited is the new one")


def _until_in_flight(front: Served, timeout_s: float = 20.0) -> None:
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if any(r["inflight"] for r in front.get("/fleet/replicas")["replicas"]):
            return


def memory_used(stage: Stage) -> str:
    """All processes' share of the trainer's GPU."""
    if stage.options.kind != "gpu":
        return "no GPU"
    import torch

    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / 2**30:.2f} GiB"


def main() -> None:
    """The command line."""
    run_script(parser(str(__doc__).splitlines()[0], backend="ipc"), run, backend="ipc")


if __name__ == "__main__":
    main()
