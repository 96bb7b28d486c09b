"""Send only what has changed: patches of the checkpoint, a few percent of its size.

    python examples/sparse.py --model MODEL                   # replicas with sparse_nccl
    python examples/sparse.py --model MODEL --backend gloo    # replicas with sparse_gloo

Replicas must hold the weights that the patches were made from: those they booted with, and every
round since. The gateway keeps out whoever does not.
"""

from typing import Any

from common import arguments, explains, free_port, load_model, shake
from separate_gpus import PROMPT, ask

from fleet.client import FleetWeightSyncClient
from fleet.client.elastic import ElasticSession

PORTION = 0.02


def main() -> None:
    """A few rounds of small changes."""
    from fleet.backends.sparse_gloo import sparse_patches

    args = arguments(str(__doc__).splitlines()[0])
    model = load_model(args.model, args.backend)
    entries = sum(weight.numel() for weight in model.parameters())
    with FleetWeightSyncClient(args.url, token=args.token) as client:
        session = ElasticSession(client, lambda size: init_info(args, size))
        for step in range(args.steps):
            before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
            shake(model, step, PORTION)
            patches = sparse_patches(before, dict(model.named_parameters()))
            session.send_weights(patches, weight_version=f"step-{step}")
            sent = sum(patch.values.numel() for patch in patches)
            print(f"{client.weight_info()}: {sent} of {entries} entries sent")
            assert explains(model, PROMPT, ask(args.url, args.token))
        session.close()


def init_info(args: Any, world_size: int) -> Any:
    """Where the group meets, for either sparse backend."""
    if args.backend == "gloo":
        from fleet.backends.sparse_gloo import SparseGlooTrainerInitInfo

        return SparseGlooTrainerInitInfo(args.address, free_port(), world_size)
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo

    return SparseNCCLTrainerInitInfo(
        master_address=args.address, master_port=free_port(), world_size=world_size, rank=0
    )


if __name__ == "__main__":
    main()
