"""One rank of a trainer of two, as a process: `python -m tests.client.elastic_rank URL RANK PORT`.

Its source walks by collectives, as FSDP's does. Rank 0 sends the weights of each seed that it
reads from its standard input and says how that went; both end at the end of input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from fleet.client import FleetWeightSyncClient
from fleet.client.elastic import ElasticSession, Persistence
from fleet.client.errors import FleetError
from fleet.client.ranks import SenderFailed, TrainerRanks
from tests.client.gloo_engine import InitInfo, Weights, trainer_init


class Sharded(Weights):
    """Every rank must take every step, and ask for the metadata, or all of them hang."""

    def metadata(self) -> dict[str, Any]:
        distributed.barrier()
        return super().metadata()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for tensor in super().__iter__():
            distributed.barrier()
            yield tensor


def main(url: str, rank: int, port: str) -> None:
    """Train until the end of input."""
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    client = FleetWeightSyncClient(url)
    weights = Sharded()
    session = ElasticSession(
        client,
        lambda size: InitInfo(size, rank),
        weights,
        ranks=TrainerRanks.of_torch(timeout_s=60),
        persistence=Persistence(attempts=3, first_wait_s=0.05, longest_wait_s=0.5),
        trainer_init=trainer_init,
    )
    while (seed := next_seed(rank)) is not None:
        weights.seed = seed
        try:
            session.send_weights()
        except (FleetError, SenderFailed) as error:
            print(f"rank {rank} seed {seed}: {type(error).__name__}", flush=True)
        else:
            print(f"rank {rank} seed {seed}: world_size {session.world_size}", flush=True)
    session.close()
    distributed.destroy_process_group()


def next_seed(rank: int) -> int | None:
    """What rank 0 has read, on both ranks."""
    line = sys.stdin.readline() if rank == 0 else ""
    seed = [int(line) if line.strip() else None]
    distributed.broadcast_object_list(seed, src=0)
    return seed[0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
