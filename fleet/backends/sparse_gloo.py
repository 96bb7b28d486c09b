"""The sending end of sparse patches over gloo: vLLM's `sparse_nccl` trainer, on CPUs.

``trainer_init(SparseGlooTrainerInitInfo(...), client=...)`` and ``send_weights(patches)`` are
those of ``vllm/distributed/weight_transfer/sparse_nccl_engine.py`` (0.32 and 0.33), patches are
its `SparseWeightPatch`; importing this module registers the backend. `sparse_patches` makes the
patches from two sets of weights.

A patch fits only the weights that it was made from. The gateway lets a sparse round reach only
replicas that hold the committed version, and never lets it lift a fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

from fleet.backends import gloo_plugin
from fleet.backends.gloo import GlooTrainerInitInfo
from fleet.backends.gloo_calls import answer_or_breakage, call_beside, meet_workers
from fleet.backends.gloo_group import GlooError, GlooGroup
from fleet.backends.sparse_patches import changed_entries, check_patch

if TYPE_CHECKING:
    Patches = Iterable[SparseWeightPatch]


@dataclass
class SparseGlooTrainerInitInfo(GlooTrainerInitInfo):
    """Where the trainer's group meets; see `GlooTrainerInitInfo`."""

    backend: ClassVar[str] = gloo_plugin.SPARSE_BACKEND


def sparse_patches(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[SparseWeightPatch]:
    """Return what leads from one set of checkpoint tensors to the other, changed ones only.

    Raises ValueError if a tensor of `after` is new, or another shape or dtype than before.
    """
    patches: list[SparseWeightPatch] = []
    for name, tensor in after.items():
        if name not in before:
            raise ValueError(f"{name!r} is new: no patch leads there")
        changed = changed_entries(before[name], tensor)
        if changed is not None:
            indices, values = changed
            patches.append(SparseWeightPatch(name, indices, values, tuple(tensor.shape)))
    return patches


class SparseGlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[SparseGlooTrainerInitInfo]):
    """Sends each round's patches to all workers; ranks other than 0 send nothing."""

    init_info_cls = SparseGlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, is_sender: bool = True) -> None:
        super().__init__(client=client, source=None, is_sender=is_sender)
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: SparseGlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Meet the workers and return a ready engine; see `GlooTrainerWeightTransferEngine`."""
        if source is not None:
            raise ValueError("sparse gloo takes no WeightSource, but patches in send_weights()")
        engine = cls(client=client, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._group = meet_workers(client, init_info)
        return engine

    def send_weights(self, patches: Patches | None = None) -> None:
        """One whole round of patches; none is no round.

        Raises ValueError for a malformed patch before anything is sent, GlooError for a broken
        group, after which a new `trainer_init` is needed, and what the client raised.
        """
        prepared = self._prepared(patches)
        if not prepared:
            return
        self.client.start_weight_update()
        self._transfer(prepared)
        self.client.finish_weight_update()

    def send_weight_chunk(self, patches: Patches | None = None) -> None:
        """One update call, inside a round that the caller has started and will finish."""
        prepared = self._prepared(patches)
        if prepared:
            self._transfer(prepared)

    def shutdown(self) -> None:
        """Leave the group; the workers notice at their next broadcast."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _prepared(self, patches: Patches | None) -> list[SparseWeightPatch]:
        prepared = list(patches or ()) if self.is_sender else []
        for patch in prepared:
            if patch.indices.dtype != torch.int32:
                raise ValueError(f"{patch.name}: indices are int32, not {patch.indices.dtype}")
            check_patch(patch.name, patch.full_shape, patch.indices, patch.values)
        return prepared

    def _transfer(self, patches: list[SparseWeightPatch]) -> None:
        group = self._group
        if group is None or group.closed:
            raise GlooError("sparse gloo: the group is closed, trainer_init() again")
        info = _update_info(patches)
        answer = call_beside(lambda: self.client.update_weights(info), on_failure=group.close)
        try:
            for patch in patches:
                group.broadcast(patch.indices, src=0)
                group.broadcast(patch.values, src=0)
        except GlooError as error:
            raise answer_or_breakage(answer, error) from error
        answer.result()


def _update_info(patches: list[SparseWeightPatch]) -> dict[str, Any]:
    return {
        "names": [patch.name for patch in patches],
        "dtype_names": [str(patch.values.dtype).removeprefix("torch.") for patch in patches],
        "shapes": [list(patch.full_shape) for patch in patches],
        "num_updates_list": [patch.indices.numel() for patch in patches],
    }


gloo_plugin.register()
