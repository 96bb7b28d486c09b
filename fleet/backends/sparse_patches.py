"""Sparse patches of checkpoint tensors: what changed between two sets of weights, and back again.

A patch is flat indices and the values that go there, in checkpoint coordinates, as vLLM's
`sparse_nccl` has it (``vllm/distributed/weight_transfer/sparse_nccl_engine.py`` and
``model_executor/model_loader/checkpoint_weight_patch.py``, 0.32 and 0.33). Bits count, not
numbers: after a patch the tensor is the newer one, byte for byte.

It imports torch only, never vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST = 2**31  # indices travel as int32


def changed_entries(
    before: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the flat int32 indices where two tensors differ and the new values; None if nowhere.

    Raises ValueError if they are not of one shape and dtype, or too large for int32.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ValueError(
            f"{before.dtype} {tuple(before.shape)} became {after.dtype} {tuple(after.shape)}: "
            "no patch leads there"
        )
    if after.numel() > _MOST:
        raise ValueError(f"{after.numel()} entries are more than int32 indices reach")
    new = after.detach().reshape(-1)
    indices = (_bits(before) != _bits(after)).nonzero().reshape(-1)
    return (indices.to(torch.int32), new[indices]) if indices.numel() else None


def check_patch(
    name: str, shape: Sequence[int], indices: torch.Tensor, values: torch.Tensor
) -> None:
    """Raise ValueError for a patch that vLLM would refuse, in words that name the tensor.

    Out of range, twice the same entry, or NaN, which stands for "unchanged" in vLLM's loader.
    """
    if indices.ndim != 1 or values.ndim != 1 or indices.numel() != values.numel():
        raise ValueError(f"{name}: a patch has as many values as indices, flat")
    if not values.dtype.is_floating_point:
        raise ValueError(f"{name}: {values.dtype} cannot be patched, only floating dtypes")
    if not indices.numel():
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < 0 or highest >= math.prod(shape):
        raise ValueError(f"{name}: indices {lowest} to {highest} leave the shape {tuple(shape)}")
    if indices.unique().numel() != indices.numel():
        raise ValueError(f"{name}: an entry is patched twice")
    if bool(values.isnan().any()):
        raise ValueError(f"{name}: NaN is no value to patch with")


def patched(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` with the values at the flat indices."""
    flat = tensor.detach().reshape(-1).clone()
    flat[indices.long()] = values.to(flat.dtype)
    return flat.reshape(tensor.shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers, so that -0 is not 0 and NaN is itself."""
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
