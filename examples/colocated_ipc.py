"""Trainer and replicas on the same GPU: they take turns with its memory, weights go by CUDA IPC.

    python examples/colocated_ipc.py --model MODEL

Replicas need `--enable-sleep-mode`, the `ipc` backend, and VLLM_ALLOW_INSECURE_SERIALIZATION=1,
which this process needs too: handles of GPU memory travel pickled, between hosts that trust each
other. There is no such thing without a GPU.
"""

import os

import torch
from common import arguments, load_model, shake

from fleet.client import FleetWeightSyncClient
from fleet.client.colocated import colocated_update


def main() -> None:
    """A few cycles of sleep, training, update and waking up."""
    if not torch.cuda.is_available():
        print("needs a GPU, not run")
        return
    args = arguments(str(__doc__).splitlines()[0], backends=("ipc",))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    model = load_model(args.model, args.backend)
    with FleetWeightSyncClient(args.url, token=args.token) as client:
        engine = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(rank=0), client=client, source=ModuleSource(model)
        )
        for step in range(args.steps):
            client.next_weight_version = f"step-{step}"
            colocated_update(client, engine.send_weights, train=lambda: train(model), level=2)
            print(f"{client.weight_info()}: {memory_used()} after waking up")
        engine.shutdown()


def train(model: torch.nn.Module) -> None:
    """What needs the memory that the replicas have given back."""
    print(f"{memory_used()} while the replicas sleep")
    shake(model, step=1, portion=0.01)


def memory_used() -> str:
    """All processes' share of this GPU."""
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
