"""Replicas of one model and what two sets of weights look like inside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.gpu.processes import Served
from bench.gpu.stage import Stage

BOOTED, SENT = 0, 1
"""Seeds: what replicas boot with, and what a reference server, stopped at once, booted with."""

Flags = Callable[[int], Sequence[str]]


def no_flags(number: int) -> Sequence[str]:
    """Nothing beyond what every server gets."""
    del number
    return ()


@dataclass(frozen=True)
class Fleet:
    """Healthy servers, and the checksums of a server that booted from each seed."""

    servers: list[Served]
    of_seed: dict[int, dict[str, str]]


def boot_fleet(
    stage: Stage,
    count: int,
    *,
    flags: Flags = no_flags,
    take: Callable[[Stage, int], None] | None = None,
) -> Fleet:
    """Boot replicas and a reference at the same time; `take` says what the seeds stand for."""
    options, evidence = stage.options, stage.evidence
    evidence.step("boot")
    first, second = (_directory(stage, seed, take) for seed in (BOOTED, SENT))
    servers = [
        stage.launch(f"replica-{n}", first, gpus=options.gpu_of_replica(n), flags=flags(n))
        for n in range(count)
    ]
    reference = stage.launch("reference", second, gpus=options.gpu_of_replica(0))
    stage.wait_for([*servers, reference])
    booted, other = stage.checksums([servers[0], reference])
    evidence.check(booted != other, "servers booted from different weights tell so")
    stage.stop(reference)
    return Fleet(servers, {BOOTED: booted, SENT: other})


def _directory(stage: Stage, seed: int, take: Callable[[Stage, int], None] | None) -> str:
    if take is None:
        return stage.directory(seed)
    take(stage, seed)
    return stage.saved(f"other-{seed}", seed)


def check_fleet(stage: Stage, front: Served) -> None:
    """Every replica is ready, and has ranks of its own."""
    shown = front.get("/fleet/replicas")["replicas"]
    told = ", ".join(f"{r['id']} {r['state']} at rank {r['rank_offset']}" for r in shown)
    stage.evidence.check(all(r["state"] == "ready" for r in shown), f"fleet at the end: {told}")
