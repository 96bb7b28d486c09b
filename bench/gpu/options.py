"""The command line that all scripts share, and what it means for servers, ranks and GPUs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench.gpu import environment

Kind = Literal["gpu", "gloo", "sim"]
SIZES = ("tiny", "1b", "8b")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one run was asked to do.

    `backend` is the servers' weight-transfer backend. `kind` is what the servers are: real vLLM on
    GPUs, real vLLM on CPUs, or simulated. `gpus` is how many GPUs there are.
    """

    kind: Kind = "gpu"
    backend: str = "nccl"
    model: str = "1b"
    placement: str = "same"
    rounds: int = 6
    replicas: tuple[int, ...] = (2,)
    ctas: int = 0
    gpus: int = 0
    out: Path = Path("evidence")
    scratch: Path = Path("/tmp/fleet-bench")
    flags: tuple[str, ...] = ()
    packings: tuple[bool, ...] = (True, False)
    extra: argparse.Namespace = field(default_factory=argparse.Namespace)

    @property
    def real(self) -> bool:
        """Whether the servers are vLLM."""
        return self.kind != "sim"

    @property
    def most_replicas(self) -> int:
        """How many replicas the largest group has."""
        return max(self.replicas)

    def gpu_of_replica(self, number: int, world: int = 1) -> tuple[int, ...]:
        """The GPUs of one replica: all on the trainer's, or on those behind it."""
        if self.kind != "gpu":
            return ()
        if self.placement == "same":
            return (0,)
        if self.placement == "separate":
            return (1,)
        first = 1 + number * world
        return tuple(range(first, first + world))

    @property
    def needs_gpus(self) -> int:
        """How many GPUs this placement takes."""
        if self.kind != "gpu":
            return 0
        return {"same": 1, "separate": 2, "spread": 1 + self.most_replicas}[self.placement]

    @property
    def ranks_per_gpu(self) -> int:
        """How many NCCL ranks meet on the busiest GPU."""
        if self.placement == "same":
            return 1 + self.most_replicas
        return self.most_replicas if self.placement == "separate" else 1

    @property
    def environment(self) -> dict[str, str]:
        """The variables of every rank, trainer and servers alike."""
        if self.kind != "gpu":
            return {**environment.LOCAL, "OMP_NUM_THREADS": "1"}
        wanted = {**environment.LOCAL, **environment.MULTICAST_OFF}
        if self.backend == "ipc":
            wanted["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        elif self.ranks_per_gpu > 1:
            wanted |= environment.ranks_on_one_gpu(self.ctas or self._default_ctas)
        return wanted

    @property
    def _default_ctas(self) -> int:
        return 2 if self.placement == "same" else 16

    def but(self, **changed: object) -> Options:
        """The same with some fields changed."""
        return replace(self, **changed)  # pyright: ignore[reportArgumentType]


def parser(description: str, *, backend: str = "nccl") -> argparse.ArgumentParser:
    """The arguments that every script takes; add the script's own ones."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--backend", choices=("gpu", "gloo"), default="gpu", help=f"gpu: {backend}")
    made.add_argument("--dry-run", action="store_true", help="simulated servers, no vLLM")
    made.add_argument("--model", choices=SIZES, default="1b", help="random weights of this size")
    made.add_argument(
        "--placement",
        choices=("same", "separate", "spread"),
        default="same",
        help="all ranks on GPU 0; replicas on GPU 1; or each rank on a GPU of its own",
    )
    made.add_argument("--rounds", type=int, default=6, help="measured rounds of each way")
    made.add_argument("--replicas", default="2", help="group sizes, by commas: 1,2,3")
    made.add_argument("--packing", choices=("packed", "unpacked"), help="default: both")
    made.add_argument("--ctas", type=int, default=0, help="thread blocks of a rank on a shared GPU")
    made.add_argument("--out", type=Path, default=Path("evidence"), help="where evidence goes")
    made.add_argument("--scratch", type=Path, default=Path("/tmp/fleet-bench"))
    return made


def options_from(
    made: argparse.ArgumentParser, backend: str, argv: Sequence[str] | None = None
) -> Options:
    """Parse a command line; `backend` is the one that the script is about."""
    given = made.parse_args(argv)
    kind: Kind = "sim" if given.dry_run else ("gloo" if given.backend == "gloo" else "gpu")
    on_cpu = "sparse_gloo" if backend.startswith("sparse") else "gloo"
    replicas = tuple(int(n) for n in str(given.replicas).split(","))
    if not replicas or min(replicas) < 1 or given.rounds < 1:
        made.error("at least one replica and one round")
    return Options(
        kind=kind,
        backend=backend if kind == "gpu" else on_cpu,
        model=given.model if kind == "gpu" else "tiny",
        placement=given.placement,
        rounds=given.rounds,
        replicas=replicas,
        ctas=given.ctas,
        gpus=environment.gpu_count() if kind == "gpu" else 0,
        out=given.out,
        scratch=given.scratch,
        packings=_packings(kind, given.packing),
        extra=given,
    )


def _packings(kind: Kind, wanted: str | None) -> tuple[bool, ...]:
    """Whether to pack, run by run; only vLLM's own backend on GPUs knows both."""
    if kind != "gpu":
        return (True,)
    return (True, False) if wanted is None else (wanted == "packed",)


def not_run(options: Options, needed: int | None = None) -> str | None:
    """Why this cannot run here, or None if it can."""
    needed = options.needs_gpus if needed is None else needed
    if options.kind != "gpu" or options.gpus >= needed:
        return None
    are = "is" if options.gpus == 1 else "are"
    return f"not run: needs {needed} GPU{'s' * (needed > 1)}, {options.gpus} {are} here"


def gigabytes(nbytes: float) -> str:
    """A number of bytes as a person reads it."""
    return f"{nbytes / 1e9:.3f} GB" if nbytes > 1e8 else f"{nbytes / 1e6:.3f} MB"


def close(measured: float, aimed: float) -> bool:
    """Whether a ratio is at most what was aimed at; NaN is not."""
    return not math.isnan(measured) and measured <= aimed
