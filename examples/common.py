"""What every example needs: its arguments, the model, and where the group meets.

Each example is a trainer. It expects a gateway with replicas behind it, which serve the same model
and were started with `--weight-transfer-config '{"backend": …}'` for the backend in use.
"""

import argparse
import copy
import socket
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def arguments(description: str, backends: tuple[str, ...] = ("nccl", "gloo")) -> Any:
    """Parse the command line; the first backend is the default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--token", help="a trainer's token, if the gateway asks for one")
    parser.add_argument("--model", required=True, help="directory or name of the model")
    parser.add_argument("--backend", choices=backends, default=backends[0])
    parser.add_argument("--address", default="127.0.0.1", help="this host, as replicas see it")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def load_model(name: str, backend: str) -> Any:
    """The model in bf16, where this backend wants it."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return model.to("cpu" if backend == "gloo" else "cuda").eval()


def init_info(backend: str, address: str, world_size: int, rank: int = 0) -> Any:
    """Where this trainer's group of `world_size` meets: here, on a port that is free now."""
    port = free_port()
    if backend == "gloo":
        from fleet.backends.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(address, port, world_size, rank=rank)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=world_size, rank=rank
    )


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def shake(model: torch.nn.Module, step: int, portion: float = 1.0) -> None:
    """Stand in for an optimizer: change this portion of the weights, a little or a lot."""
    noise = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            fresh = torch.randn(weight.shape, generator=noise) * weight.float().std().cpu()
            chosen = torch.rand(weight.shape, generator=noise) < portion
            mixed = torch.where(chosen, fresh, weight.float().cpu())
            weight.copy_(mixed.to(weight))


def explains(model: Any, prompt: list[int], tokens: list[int], tolerance: float = 0.5) -> bool:
    """Whether `transformers` with these weights appends the same tokens, greedily.

    Two implementations in bf16 now and then prefer another one of two equals, so a token counts
    as the same if its logit is within `tolerance` of the best, computed in fp32.
    """
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens], device=exact.device)
        logits = exact(ids).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens, device=logits.device)]
    return bool((logits.max(dim=-1).values - chosen).max() < tolerance)
