"""The workers of a simulated replica: each holds its own tensors and its own rank in the group.

The session rules and error texts are those of vLLM 0.32's ``v1/worker/gpu_worker.py``, kept per
worker as there. All calls block and belong in a thread. With another backend than gloo a worker
moves no data: it accepts any init and update as if the collective had completed at once.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fleet.backends.gloo_group import GlooGroup, join_group
from fleet.sim.weights import StateDict, combine_digests, load_tensor, tensor_digests

_REQUIRED = ("master_address", "master_port", "rank_offset", "world_size")
_OPTIONAL = frozenset({"packed", "packed_buffer_size_bytes", "packed_num_buffers"})
_METADATA = ("names", "dtype_names", "shapes")


class SimWorker:
    """One worker; `rank` is its rank over the deployment (data parallel index included)."""

    def __init__(self, state: StateDict, rank: int, *, moves_data: bool, timeout_s: float) -> None:
        self.state = state
        self.rank = rank
        self.digests = tensor_digests(state)
        self.session: str | None = None
        self._moves_data = moves_data
        self._timeout_s = timeout_s
        self._group: GlooGroup | None = None
        self._previous: Mapping[str, Any] | None = None
        self._killed = False

    @property
    def checksum(self) -> str:
        """One checksum of all its tensors."""
        return combine_digests(self.digests)

    def init(self, info: Mapping[str, Any]) -> None:
        """Join the group; returns once every rank is there.

        Raises ValueError for a bad body, and what `join_group` raises.
        """
        if not self._moves_data:
            return
        _check_init(info)
        self.shutdown()
        group = join_group(
            info["master_address"],
            info["master_port"],
            info["rank_offset"] + self.rank,
            info["world_size"],
            timeout_s=self._timeout_s,
        )
        self._group = group
        if self._killed:
            self.shutdown()

    def start(self, kind: str) -> None:
        """Open a session of kind ``model`` or ``draft``."""
        if self.session is not None:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.session = kind

    def update(self, info: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Receive one chunk; a failure closes the session, as in vLLM."""
        if self.session is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self._receive(info[self.rank] if isinstance(info, list) else info)
        except BaseException:
            self.session = None
            raise

    def finish(self) -> None:
        """Close the session."""
        if self.session is None:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.session = None

    def zero(self) -> None:
        """Set every tensor to zero (weight_checker's reset, and what sleep level 2 leaves)."""
        for tensor in self.state.values():
            tensor.zero_()
        self.digests = tensor_digests(self.state)

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def kill(self) -> None:
        """Make a thread that is still inside a collective stop at its next step."""
        self._killed = True

    def _receive(self, info: Mapping[str, Any]) -> None:
        if not self._moves_data:
            return
        metadata = self._metadata(info)
        if self._group is None:
            raise RuntimeError(
                "Gloo weight transfer not initialized. Call init_transfer_engine() first."
            )
        received: StateDict = {}
        try:
            for name, dtype, shape in zip(*(metadata[key] for key in _METADATA), strict=True):
                received[name] = self._receive_one(self._group, name, dtype, shape)
        finally:
            self.digests.update(tensor_digests(received))
        self._previous = metadata

    def _receive_one(
        self, group: GlooGroup, name: str, dtype: str, shape: list[int]
    ) -> torch.Tensor:
        if self._killed:
            group.close()
            raise RuntimeError("the process was killed")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast(tensor, src=0)
        if self.session == "model":  # no answer here depends on a draft model
            load_tensor(self.state, name, tensor)
        return self.state[name]

    def _metadata(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Names, dtypes and shapes of this chunk; all empty stands for the previous call's."""
        unknown = sorted(set(info) - set(_METADATA))
        missing = [key for key in _METADATA if key not in info]
        if unknown or missing:
            raise ValueError(f"Invalid update_info: unknown {unknown}, missing {missing}")
        if len({len(info[key]) for key in _METADATA}) != 1:
            raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")
        if info["names"]:
            return info
        if self._previous is None:
            raise ValueError("empty metadata, and no previous update to take it from")
        return self._previous


def _check_init(info: Mapping[str, Any]) -> None:
    missing = [key for key in _REQUIRED if key not in info]
    unknown = sorted(set(info) - set(_REQUIRED) - _OPTIONAL)
    if missing or unknown:
        raise ValueError(f"Invalid init_info: unknown {unknown}, missing {missing}")
