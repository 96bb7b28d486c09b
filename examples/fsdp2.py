"""A trainer of several ranks, sharded by FSDP2, that sends through the gateway.

    python examples/fsdp2.py --model MODEL                            # one GPU per rank
    RANKS=2 python examples/fsdp2.py --model MODEL --backend gloo     # CPUs

All ranks call `send_weights()`: each step of the walk over the weights is an all-gather among
them. Only rank 0 speaks to the gateway; it tells the others what to do, a new group included.
"""

import os
from typing import Any

import torch
from common import arguments, explains, free_port, init_info, load_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from fleet.client import FleetWeightSyncClient
from fleet.client.elastic import ElasticSession
from fleet.client.ranks import TrainerRanks

PROMPT = [7, 300, 12, 45]


def train(rank: int, size: int, port: int, args: Any) -> None:
    """One rank of the trainer."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    on_cpu = args.backend == "gloo"
    if not on_cpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if on_cpu else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
    )
    mesh = init_device_mesh("cpu" if on_cpu else "cuda", (size,))
    model = load_model(args.model, args.backend).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    client = FleetWeightSyncClient(args.url, token=args.token)
    session = ElasticSession(
        client,
        lambda world_size: init_info(args.backend, args.address, world_size, rank),
        ModuleSource(model),
        ranks=TrainerRanks.of_torch(timeout_s=600),
    )
    for step in range(args.steps):
        loss = one_step(model, optimizer, rank)
        session.send_weights(weight_version=f"step-{step}")
        check(model, client, args, rank)
        if rank == 0:
            print(f"{client.weight_info()}: loss {loss:.3f}, world_size {session.world_size}")
    session.close()
    distributed.destroy_process_group()


def one_step(model: Any, optimizer: Any, rank: int) -> float:
    """Learn a text by heart, each rank another one."""
    ids = torch.arange(20, 60, device=model.device).roll(rank).unsqueeze(0)
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def check(model: Any, client: FleetWeightSyncClient, args: Any, rank: int) -> None:
    """Hold a replica's tokens against the gathered model; gathering takes all ranks."""
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank != 0:
        return
    from separate_gpus import ask

    plain = load_model(args.model, args.backend)
    plain.load_state_dict(whole)
    tokens = ask(args.url, args.token)
    assert explains(plain, PROMPT, tokens), f"{client.weight_info()} is not what was sent"


def main() -> None:
    """Start the ranks."""
    args = arguments(str(__doc__).splitlines()[0])
    size = int(os.environ.get("RANKS", torch.cuda.device_count()))
    if size == 0:
        print("needs GPUs, or --backend gloo with RANKS=2: not run")
        return
    spawn(train, (size, free_port(), args), nprocs=size)


if __name__ == "__main__":
    main()
