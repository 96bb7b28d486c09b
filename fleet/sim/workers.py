"""The workers of a simulated replica: each holds its own tensors and its own rank in the group.

The session rules and error texts are those of vLLM 0.32's ``v1/worker/gpu_worker.py`` and of this
project's gloo engine, kept per worker as there. From start to finish the weights are in pieces
(vLLM's layerwise reload): they can be neither digested nor computed with. A failed update closes
the session and leaves them so until the next finish, which puts together what is there, tensors
that arrived before the failure included.

All calls block and belong in a thread. With another backend than gloo a worker moves no data: it
accepts any init and update as if the collective had completed at once.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from fleet.backends.gloo_group import GlooGroup, join_group
from fleet.sim.weights import (
    StateDict,
    build_state_dict,
    combine_digests,
    load_tensor,
    tensor_digests,
)

Metadata = Mapping[str, Any]

_REQUIRED = ("master_address", "master_port", "rank_offset", "world_size")
_OPTIONAL = ("timeout_s", "packed")
_METADATA = ("names", "dtype_names", "shapes")


class SimWorker:
    """One worker; `rank` is its rank over the deployment (data parallel index included)."""

    def __init__(self, state: StateDict, rank: int, *, moves_data: bool, timeout_s: float) -> None:
        self.state = state
        self.rank = rank
        self.digests = tensor_digests(state)
        self.session: str | None = None
        self.in_pieces = False
        self._moves_data = moves_data
        self._timeout_s = timeout_s
        self._group: GlooGroup | None = None
        self._previous: dict[str, Metadata] = {}  # by kind of session
        self._killed = threading.Event()

    @property
    def checksum(self) -> str:
        """One checksum of all its tensors."""
        return combine_digests(self.digests)

    def init(self, info: Metadata) -> None:
        """Join the group; returns once every rank is there.

        Raises ValueError for a bad body, and what `join_group` raises.
        """
        if not self._moves_data:
            return
        _check_keys("init_info", info, _REQUIRED, _OPTIONAL)
        self.shutdown()
        self._previous.clear()
        self._group = join_group(
            info["master_address"],
            info["master_port"],
            info["rank_offset"] + self.rank,
            info["world_size"],
            timeout_s=info.get("timeout_s", self._timeout_s),
            cancelled=self._killed,
        )
        if self._killed.is_set():
            self.shutdown()

    def start(self, kind: str) -> None:
        """Open a session of kind ``model`` or ``draft``."""
        if self.session is not None:
            raise RuntimeError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self.session = kind
        self.in_pieces = True

    def update(self, info: Metadata | list[Metadata]) -> None:
        """Receive one chunk; a failure closes the session, as in vLLM."""
        if self.session is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self._receive(self.session, info[self.rank] if isinstance(info, list) else info)
        except BaseException:
            self.session = None
            self.shutdown()
            raise

    def finish(self) -> None:
        """Close the session."""
        if self.session is None:
            raise RuntimeError(
                "finish_weight_update called without a matching start_weight_update."
            )
        self.session = None
        self.in_pieces = False
        self.digests = tensor_digests(self.state)

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
        """Leave at once, from any thread: a join is cancelled, a broadcast ends for all ranks."""
        self._killed.set()
        self.shutdown()

    def _receive(self, kind: str, info: Metadata) -> None:
        if not self._moves_data:
            self._make_up(kind, info)
            return
        group = self._group
        if group is None:
            raise RuntimeError("gloo weight transfer: no group, /init_weight_transfer_engine first")
        metadata = self._complete(kind, info)
        for name, dtype, shape in zip(*(metadata[key] for key in _METADATA), strict=True):
            tensor = torch.empty(shape, dtype=_dtype(dtype))
            group.broadcast(tensor, src=0)
            if kind == "model":  # no answer here depends on a draft model
                load_tensor(self.state, name, tensor)

    def _make_up(self, kind: str, info: Metadata) -> None:
        """Take the tensors that `sim_seed` of the update stands for, if it names one."""
        seed = info.get("sim_seed") if isinstance(info, dict) else None
        if seed is None or kind != "model":
            return
        hidden_size = self.state["model.norm.weight"].shape[0]
        for name, tensor in build_state_dict(seed, hidden_size).items():
            load_tensor(self.state, name, tensor)

    def _complete(self, kind: str, info: Metadata) -> Metadata:
        """Names, dtypes and shapes of this chunk; all empty stands for the previous update's."""
        _check_keys("update_info", info, (), _METADATA)
        chunk = {key: info.get(key, []) for key in _METADATA}
        if len({len(values) for values in chunk.values()}) != 1:
            raise ValueError("names, dtype_names and shapes differ in length")
        if chunk["names"]:
            self._previous[kind] = chunk
        elif kind not in self._previous:
            raise ValueError(
                "gloo weight transfer: an update without names reuses those of the update before "
                "it, but this worker has had none since it joined the group"
            )
        return self._previous[kind]


def _check_keys(
    what: str, info: Metadata, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    missing = [key for key in required if key not in info]
    unknown = sorted(set(info) - {*required, *optional})
    if missing or unknown:
        raise ValueError(f"Invalid {what}: missing {missing}, unexpected {unknown}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"gloo weight transfer: {name!r} is no torch dtype")
    return dtype
