"""CUDA IPC updates with trainer and replicas on one GPU, whole and packed, by turns.

    python -m bench.gpu.ipc --replicas 2

No group and no ranks: every replica opens the same handles of the trainer's memory. Otherwise it is
measured and checked as `nccl` is.
"""

from __future__ import annotations

from bench.gpu.evidence import Evidence
from bench.gpu.fleets import boot_fleet
from bench.gpu.nccl import measure
from bench.gpu.options import Options, parser
from bench.gpu.script import run_script
from bench.gpu.stage import staged


def run(options: Options, evidence: Evidence) -> None:
    """Boot once, then measure every size, whole and packed."""
    if options.kind == "gloo":
        evidence.line("not run: handles of GPU memory need a GPU")
        return
    with staged(options, evidence) as stage:
        fleet = boot_fleet(stage, options.most_replicas)
        for size in options.replicas:
            for packed in options.packings[::-1]:
                with evidence.part(f"{'packed' if packed else 'whole'}, {size} replicas"):
                    measure(stage, fleet, size, packed=packed)


def main() -> None:
    """The command line."""
    run_script(parser(str(__doc__).splitlines()[0], backend="ipc"), run, backend="ipc")


if __name__ == "__main__":
    main()
