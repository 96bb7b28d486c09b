"""Sparse patches over NCCL: a few percent of the entries, held against servers with all of them.

    python -m bench.gpu.sparse --replicas 2

Patches to other weights and back again: both must be, byte for byte, what servers boot with.
"""

from __future__ import annotations

import time
from typing import Any

from bench.gpu.evidence import Evidence, spread
from bench.gpu.fleets import BOOTED, SENT, Fleet, boot_fleet, check_fleet
from bench.gpu.models import nbytes, shake
from bench.gpu.options import Options, gigabytes, parser
from bench.gpu.processes import Served
from bench.gpu.script import run_script
from bench.gpu.stage import Stage, staged

PORTION = 0.02


def run(options: Options, evidence: Evidence) -> None:
    """Boot, then patch forth and back until every round is measured."""
    with staged(options, evidence) as stage:
        fleet = boot_fleet(stage, options.most_replicas, take=_take)
        _take(stage, BOOTED)
        front = stage.before(fleet.servers)
        with evidence.part(f"{options.rounds} rounds, forth and back"):
            _rounds(stage, fleet, front)


def _rounds(stage: Stage, fleet: Fleet, front: Served) -> None:
    taken, sent = list[float](), 0
    with stage.client(front.url) as client:
        engine = stage.join(client, 1 + len(fleet.servers))
        for number in range(stage.options.rounds):
            seed = (SENT, BOOTED)[number % 2]
            payload, sent = _patches(stage, seed)
            client.next_weight_version = f"patch-{number}"
            began = time.monotonic()
            engine.send_weights(*payload)
            taken.append(time.monotonic() - began)
            if number < 2:
                what = f"a booted server's (round {number})"
                stage.compare(fleet.servers, fleet.of_seed[seed], what)
        engine.shutdown()
    part = f"{gigabytes(sent)} of {gigabytes(nbytes(stage.weights))}"
    stage.evidence.line(f"{part} a round, pause → resume {spread(taken)}")
    full = any(r["full"] for r in front.get("/fleet/rounds")["rounds"])
    stage.evidence.check(not full or not stage.options.real, "no round counts as a full one")
    check_fleet(stage, front)


def _take(stage: Stage, seed: int) -> None:
    """Hold what servers booted with, or that with a few changes."""
    if seed == SENT and stage.options.real:
        stage.weights.take(BOOTED)
        shake(stage.weights, SENT, PORTION)
    else:
        stage.weights.take(seed)


def _patches(stage: Stage, seed: int) -> tuple[tuple[Any, ...], int]:
    """What leads from the weights that are held to others, and its bytes on the wire."""
    before = {name: tensor.detach().clone() for name, tensor in stage.weights.tensors().items()}
    _take(stage, seed)
    if not stage.options.real:
        return (), nbytes(stage.weights)
    from fleet.backends.sparse_gloo import sparse_patches

    made = sparse_patches(before, stage.weights.tensors())
    sent = sum(p.indices.numel() * 4 + p.values.numel() * p.values.element_size() for p in made)
    return (made,), sent


def main() -> None:
    """The command line."""
    made = parser(str(__doc__).splitlines()[0], backend="sparse_nccl")
    run_script(made, run, backend="sparse_nccl")


if __name__ == "__main__":
    main()
