"""The receiving end of the gloo backend, inside a vLLM worker.

It is to gloo what ``NCCLWeightTransferEngine`` is to NCCL (vLLM 0.32 and 0.33,
``vllm/distributed/weight_transfer/nccl_engine.py``): the trainer is rank 0 and broadcasts
checkpoint-format tensors, the worker loads each through the layerwise reload. Three differences:

- An update without metadata, for a model that had none before, raises; NCCL's loads nothing.
- A failure closes the group, so that the trainer and the other workers fail too, at once.
- There is no device to synchronise with.

vLLM's worker, not this engine, decides whether a start, update or finish is legal.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fleet.backends.gloo_group import DEFAULT_TIMEOUT_S, GlooGroup, join_group

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(kw_only=True)
class GlooWeightTransferInitInfo(WeightTransferInitInfo):
    """The body of ``/init_weight_transfer_engine``: NCCL's fields, and gloo's deadline.

    `rank_offset` is the group rank of the deployment's first worker; `timeout_s` bounds the join
    and each broadcast after it. `packed` is what NCCL's trainers and TRL's client say of their
    broadcasts; it is taken and means nothing here, where tensors go out one by one.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(kw_only=True)
class GlooWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one update, in the order of their broadcasts.

    All three lists empty stand for those of the previous update of the same model.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(lengths) > 1:
            raise ValueError(
                f"names, dtype_names and shapes differ in length: "
                f"{len(self.names)}, {len(self.dtype_names)}, {len(self.shapes)}"
            )

    def empty_tensors(self, device: torch.device) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield each name with memory for its tensor; ValueError for an unknown dtype, first."""
        dtypes = [dtype_of(name) for name in self.dtype_names]
        for name, dtype, shape in zip(self.names, dtypes, self.shapes, strict=True):
            yield name, torch.empty(shape, dtype=dtype, device=device)


class GlooWeightTransferEngine(
    WeightTransferEngine[GlooWeightTransferInitInfo, GlooWeightTransferUpdateInfo]
):
    """One worker's membership in the trainer's gloo group, and its loading of what arrives."""

    init_info_cls = GlooWeightTransferInitInfo
    update_info_cls = GlooWeightTransferUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None
        self._previous: dict[torch.nn.Module, GlooWeightTransferUpdateInfo] = {}
        self._half_loaded: set[torch.nn.Module] = set()

    def init_transfer_engine(self, init_info: GlooWeightTransferInitInfo) -> None:
        """Join the trainer's group, leaving any earlier one; blocks until all ranks are there."""
        self.shutdown()
        self._previous.clear()
        self._group = join_as_worker(init_info, self.parallel_config)

    def start_weight_update(self) -> None:
        """Open the layerwise reload, through which checkpoint-format tensors are loaded.

        What an update that failed has left in there goes first: vLLM 0.32 would count it as
        loaded, and close a fused layer (q, k and v) before the last of its tensors has come.
        """
        if self.model in self._half_loaded:
            finalize_layerwise_reload(self.model, self.model_config)
            self._half_loaded.discard(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Close the layerwise reload; from here on the model computes with the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one update; the base class would then synchronise an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooWeightTransferUpdateInfo) -> None:
        """Load the trainer's broadcasts, tensor by tensor; a failure closes the group."""
        group = self._group
        if group is None:
            raise RuntimeError("gloo weight transfer: no group, /init_weight_transfer_engine first")
        try:
            self._load(group, self._complete(update_info))
        except BaseException:
            self._half_loaded.add(self.model)
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the group, if in one; idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _complete(self, update_info: GlooWeightTransferUpdateInfo) -> GlooWeightTransferUpdateInfo:
        if update_info.names:
            self._previous[self.model] = update_info
        elif self.model not in self._previous:
            raise ValueError(
                "gloo weight transfer: an update without names reuses those of the update before "
                "it, but this worker has had none since it joined the group"
            )
        return self._previous[self.model]

    def _load(self, group: GlooGroup, update_info: GlooWeightTransferUpdateInfo) -> None:
        with disable_mtp_completeness_check():
            for name, tensor in update_info.empty_tensors(self.device):
                group.broadcast(tensor, src=0)
                self.model.load_weights([(name, tensor)])


def join_as_worker(init_info: GlooWeightTransferInitInfo, parallel: Any) -> GlooGroup:
    """Join at this worker's own rank; `parallel` is the deployment's vLLM ParallelConfig."""
    in_deployment = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return join_group(
        init_info.master_address,
        init_info.master_port,
        init_info.rank_offset + in_deployment,
        init_info.world_size,
        timeout_s=init_info.timeout_s,
    )


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name, as vLLM names it. Raises ValueError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"gloo weight transfer: {name!r} is no torch dtype")
    return dtype
