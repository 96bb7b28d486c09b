"""The tensors of a simulated worker and their checksums.

Small, real and deterministic: every replica boots with the same values for a seed, in bf16 and
f32, so that broadcasts move real bytes and a checksum means what vLLM's means. No model is run.

Digests are those of vLLM 0.32's ``model_executor/model_loader/weight_checksum.py``: SHA-256 over
a tensor's bytes. Real vLLM digests the fused parameters it runs with, so names differ from it.
"""

import hashlib
from collections.abc import Mapping

import torch

StateDict = dict[str, torch.Tensor]

_BF16 = torch.bfloat16
_F32 = torch.float32


def build_state_dict(seed: int, hidden_size: int = 32, vocab_size: int = 512) -> StateDict:
    """A two-layer checkpoint with random values; equal for equal arguments."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=source, dtype=_F32).to(dtype)
        for name, (shape, dtype) in _layout(hidden_size, vocab_size).items()
    }


def _layout(hidden: int, vocab: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed_tokens.weight": ((vocab, hidden), _BF16)
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        layout[f"{prefix}.self_attn.qkv_proj.weight"] = ((3 * hidden, hidden), _BF16)
        layout[f"{prefix}.self_attn.o_proj.weight"] = ((hidden, hidden), _BF16)
        layout[f"{prefix}.mlp.down_proj.weight"] = ((hidden, 2 * hidden), _BF16)
        layout[f"{prefix}.input_layernorm.weight"] = ((hidden,), _F32)
    layout["model.norm.weight"] = ((hidden,), _F32)
    layout["lm_head.weight"] = ((vocab, hidden), _BF16)
    return layout


def tensor_digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, by name."""
    return {name: _digest(tensor) for name, tensor in state.items()}


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def replica_checksum(state: Mapping[str, torch.Tensor]) -> str:
    """One short checksum for a whole state dict, as answers carry it under ``sim.checksum``."""
    return combine_digests(tensor_digests(state))


def combine_digests(digests: Mapping[str, str]) -> str:
    """One short checksum from the digests of all tensors, whatever their order."""
    joined = "\n".join(f"{name}={digests[name]}" for name in sorted(digests))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def combine_workers(checksums: list[str]) -> str:
    """One checksum for all workers of a replica; workers that differ give a value of their own."""
    if len(set(checksums)) == 1:
        return checksums[0]
    return "torn:" + hashlib.sha256("|".join(checksums).encode()).hexdigest()[:16]


def load_tensor(state: StateDict, name: str, tensor: torch.Tensor) -> None:
    """Put a received tensor in its place.

    Raises KeyError for an unknown name and ValueError for a shape that does not fit.
    """
    held = state[name]
    if held.shape != tensor.shape:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, want {list(held.shape)}")
    held.copy_(tensor)
