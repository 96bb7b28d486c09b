"""Trainer and replicas on GPUs of their own: weights go from one to all of them by broadcast.

    python examples/separate_gpus.py --model MODEL                   # NCCL
    python examples/separate_gpus.py --model MODEL --backend gloo    # CPUs

It is vLLM's own loop: its factory, its engine, its source. Only the client knows of a fleet.
"""

import requests
from common import arguments, explains, init_info, load_model, shake
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from fleet.client import FleetWeightSyncClient

PROMPT = [7, 300, 12, 45]


def main() -> None:
    """Send a few versions, and let a replica say what it makes of them."""
    args = arguments(str(__doc__).splitlines()[0])
    model = load_model(args.model, args.backend)
    with FleetWeightSyncClient(args.url, token=args.token) as client:
        world_size = 1 + client.get_world_size()
        engine = WeightTransferTrainerFactory.trainer_init(
            init_info(args.backend, args.address, world_size),
            client=client,
            source=ModuleSource(model),
        )
        for step in range(args.steps):
            shake(model, step)
            client.next_weight_version = f"step-{step}"
            engine.send_weights()
            tokens = ask(args.url, args.token)
            same = explains(model, PROMPT, tokens)
            print(f"{client.weight_info()}: {tokens} {'as' if same else 'NOT as'} transformers")
            assert same
        engine.shutdown()


def ask(url: str, token: str | None) -> list[int]:
    """Greedy tokens from whichever replica the gateway chooses."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = requests.post(
        f"{url}/v1/completions", json={**body, "return_token_ids": True}, headers=headers
    )
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


if __name__ == "__main__":
    main()
