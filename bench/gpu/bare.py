"""A bare broadcast of the same bytes over a group of the same shape: what the wire itself can do.

Its receivers are processes of their own, one for each replica, on the replicas' GPUs, under the
same variables. They do nothing but take part; a transfer also packs, unpacks and loads.

Run as a program it is one receiver: KIND RANK WORLD PORT BYTES PIECE ROUNDS.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.processes import Child, free_port, spawn
from bench.gpu.stage import Stage

PIECE = 1 << 30  # bytes of one broadcast: vLLM's packed buffer
ROUNDS = 6  # the first one is not counted
READY, READY_S = "ready to receive", 120.0


@dataclass
class Bare:
    """Receivers on their way up, and what they are for."""

    stage: Stage
    receivers: list[Child]
    port: int
    total: int

    def measure(self) -> list[float]:
        """Join as rank 0, broadcast, and return the seconds of each round but the first."""
        kind, world = self.stage.options.kind, 1 + len(self.receivers)
        marks = [time.monotonic()]
        self._wait_ready()
        group = join(kind, 0, world, self.port)
        marks.append(time.monotonic())
        taken: list[float] = []
        pieces = buffers(kind, self.total)
        for number in range(ROUNDS):
            self.stage.synchronize()
            began = time.monotonic()
            run_round(kind, group, pieces)
            if number:
                taken.append(time.monotonic() - began)
            else:
                marks.append(time.monotonic())
        marks.append(time.monotonic())
        leave(group)
        self.stage.stop(*self.receivers)
        marks.append(time.monotonic())
        steps = ("met", "first round", "other rounds", "left")
        spans = (
            f"{what} {b - a:.1f} s" for what, a, b in zip(steps, marks, marks[1:], strict=False)
        )
        self.stage.evidence.line(", ".join(spans))
        return taken

    def _wait_ready(self) -> None:
        """Wait until all have imported what they need; whoever dies before is told."""
        ends = time.monotonic() + READY_S
        for receiver in self.receivers:
            while READY not in receiver.log.read_text(errors="replace"):
                if not receiver.alive or time.monotonic() > ends:
                    raise RuntimeError(f"a receiver did not come up:\n{receiver.tail()}")
                time.sleep(0.05)


def receivers(stage: Stage, gpus: Sequence[Sequence[int]], total: int) -> Bare:
    """Start one receiver for each entry of `gpus`; they meet whoever calls `measure`."""
    port, world = free_port(), 1 + len(gpus)
    made: list[Child] = []
    for rank, visible in enumerate(gpus, start=1):
        told, log = (rank, world, port, total), stage.scratch / f"bare-{port}-{rank}.log"
        if stage.forks is not None:
            made.append(Child(stage.forks.start("receiver", told, log), log))
            continue
        command = [sys.executable, "-m", "bench.gpu.bare", stage.options.kind, *map(str, told)]
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))} if visible else {}
        made.append(Child(spawn(command, log, seen), log))
    stage.children.extend(made)
    return Bare(stage, made, port, total)


def rate(total: int, taken: Sequence[float]) -> float:
    """Bytes per second, by the median."""
    return total / statistics.median(taken)


def join(kind: str, rank: int, world: int, port: int) -> Any:
    """The group, by vLLM's own rendezvous."""
    if kind != "gpu":
        from fleet.backends.gloo_group import join_group

        return join_group("127.0.0.1", port, rank, world, timeout_s=180)
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    torch.cuda.set_device(0)
    return stateless_init_process_group("127.0.0.1", port, rank, world, torch.device("cuda:0"))


def buffers(kind: str, total: int) -> list[torch.Tensor]:
    """What `total` bytes are sent from, piece by piece, each as large as vLLM's packed buffers.

    All pieces are the same memory, which is far larger than any cache.
    """
    device = "cuda:0" if kind == "gpu" else "cpu"
    sizes = [min(PIECE, total - start) for start in range(0, total, PIECE)]
    whole = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    return [whole[:size] for size in sizes]


def run_round(kind: str, group: Any, pieces: Sequence[torch.Tensor]) -> None:
    """Broadcast every piece, to its end on this rank."""
    for piece in pieces:
        group.broadcast(piece, src=0)
    if kind == "gpu":
        torch.cuda.synchronize()


def leave(group: Any) -> None:
    """Leave either kind of group."""
    end = getattr(group, "destroy", None) or group.close
    end()


def receive(kind: str, rank: int, world: int, port: int, total: int) -> None:
    """Be one receiver, to the end."""
    if kind == "gpu":
        import vllm.distributed.weight_transfer.nccl_common as _

        torch.cuda.set_device(0)
    print(READY, flush=True)
    group = join(kind, rank, world, port)
    pieces = buffers(kind, total)
    for _ in range(ROUNDS):
        run_round(kind, group, pieces)
    leave(group)


if __name__ == "__main__":
    receive(sys.argv[1], *map(int, sys.argv[2:6]))
