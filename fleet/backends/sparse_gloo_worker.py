"""The receiving end of sparse patches over gloo, inside a vLLM worker.

vLLM's `sparse_nccl` writes patches into the tensors that the model runs with. On a CPU most of
those are gone: linear layers are packed for the processor after loading. So this engine keeps the
checkpoint itself, as it was booted from, patches that, and loads all of it at the round's finish
through the layerwise reload, as the dense gloo backend does. It costs one more copy of the
weights, and makes a round atomic in the worker: what a broken update has brought is forgotten.

Only checkpoints of a load format whose loader gives all weights can be patched (safetensors and
its like). vLLM's worker, not this engine, decides whether a start, update or finish is legal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fleet.backends.gloo_group import GlooGroup
from fleet.backends.gloo_worker import GlooWeightTransferInitInfo, dtype_of, join_as_worker
from fleet.backends.sparse_patches import check_patch, patched


@dataclass(kw_only=True)
class SparseGlooWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """The patches of one update, in the order of their broadcasts: indices, then values, of each.

    The fields are those of `sparse_nccl`; `num_updates_list` has the number of entries per name.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    num_updates_list: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lists = (self.names, self.dtype_names, self.shapes, self.num_updates_list)
        lengths = [len(values) for values in lists]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"names, dtype_names, shapes and num_updates_list differ in length: {lengths}"
            )
        if not self.names:
            raise ValueError("a sparse update names its tensors each time; this one names none")
        if min(self.num_updates_list) < 0:
            raise ValueError("num_updates_list has a negative number of entries")


class SparseGlooWeightTransferEngine(
    WeightTransferEngine[GlooWeightTransferInitInfo, SparseGlooWeightTransferUpdateInfo]
):
    """One worker's membership in the trainer's group, its checkpoint, and the patches to it."""

    init_info_cls = GlooWeightTransferInitInfo
    update_info_cls = SparseGlooWeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._checkpoint: dict[str, torch.Tensor] | None = None
        self._received: dict[str, torch.Tensor] = {}  # since the start, not yet loaded

    def init_transfer_engine(self, init_info: GlooWeightTransferInitInfo) -> None:
        """Join the trainer's group, leaving any earlier one; blocks until all ranks are there."""
        self.shutdown()
        self._group = join_as_worker(init_info, self.parallel_config)

    def start_weight_update(self) -> None:
        """Forget what a round that failed has left."""
        self._received.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update; the base class would then synchronise an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SparseGlooWeightTransferUpdateInfo) -> None:
        """Receive the trainer's patches and keep what they make; a failure closes the group."""
        group = self._group
        if group is None:
            raise RuntimeError("sparse gloo: no group, /init_weight_transfer_engine first")
        try:
            self._receive(group, update_info)
        except BaseException:
            self._received.clear()
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        """Load the patched checkpoint; a round without patches changes nothing."""
        if not self._received:
            return
        checkpoint = {**self._base(), **self._received}
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(checkpoint.items())
        finally:  # what is left open here would count as loaded the next time
            finalize_layerwise_reload(self.model, self.model_config)
        self._checkpoint = checkpoint
        self._received.clear()

    def shutdown(self) -> None:
        """Leave the group, if in one; idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _receive(self, group: GlooGroup, info: SparseGlooWeightTransferUpdateInfo) -> None:
        targets = [
            self._target(name, shape) for name, shape in zip(info.names, info.shapes, strict=True)
        ]
        dtypes = [dtype_of(name) for name in info.dtype_names]
        for name, dtype, target, count in zip(
            info.names, dtypes, targets, info.num_updates_list, strict=True
        ):
            indices = torch.empty(count, dtype=torch.int32)
            values = torch.empty(count, dtype=dtype)
            group.broadcast(indices, src=0)
            group.broadcast(values, src=0)
            check_patch(name, target.shape, indices, values)
            self._received[name] = patched(self._received.get(name, target), indices, values)

    def _target(self, name: str, shape: list[int]) -> torch.Tensor:
        """The tensor to patch, before the first byte is received."""
        target = self._base().get(name)
        if target is None:
            raise ValueError(f"{name}: the checkpoint that this worker booted from has no such")
        if list(target.shape) != shape:
            raise ValueError(f"{name}: the checkpoint has {tuple(target.shape)}, not {shape}")
        return target

    def _base(self) -> dict[str, torch.Tensor]:
        """The checkpoint that the model was booted from, with all patches since; read once."""
        if self._checkpoint is None:
            loader: Any = get_model_loader(self.vllm_config.load_config)
            weights = loader.get_all_weights(self.model_config, self.model)
            self._checkpoint = {name: tensor.clone() for name, tensor in weights}
        return self._checkpoint
