"""The control calls of a trainer, each as one frozen value. Pure.

Both clients, the blocking one and the asynchronous one, send these. Paths, queries and bodies are
vLLM's (``vllm/entrypoints/rl/online/api_router.py`` and ``serve/dev``, 0.32 and 0.33).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long to wait for the gateway's answers, in seconds.

    Each outlasts what the gateway itself may take with its default deadlines, undoing included:
    its typed answer says who was late, a client that hangs up first learns nothing. Raise both
    together.
    """

    connect_s: float = 10.0
    init_s: float = 420.0
    start_s: float = 840.0
    update_s: float = 1_900.0
    finish_s: float = 480.0
    pause_s: float = 720.0
    control_s: float = 150.0
    rollout_s: float = 3_600.0


@dataclass(frozen=True)
class Call:
    """One request; `waits` names the field of `Timeouts` that bounds it."""

    method: str
    path: str
    body: Any = None
    query: tuple[tuple[str, str], ...] = ()
    waits: str = "control_s"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def init(init_info: Mapping[str, Any]) -> Call:
    """Let all workers join the trainer's group; a collective."""
    body = {"init_info": dict(init_info)}
    return Call("POST", "/init_weight_transfer_engine", body, waits="init_s")


def shutdown() -> Call:
    """Let all workers leave the trainer's group."""
    return Call("POST", "/shutdown_weight_transfer_engine")


def start(*, draft: bool = False) -> Call:
    """Open a weight update, of the draft model if asked to."""
    path = "/start_draft_weight_update" if draft else "/start_weight_update"
    return Call("POST", path, waits="start_s")


def update(update_info: dict[str, Any] | list[dict[str, Any]]) -> Call:
    """Receive weights, on every worker the same or each its own item of a list; a collective."""
    info: Any = (
        [_json_safe(item) for item in update_info]
        if isinstance(update_info, list)
        else _json_safe(update_info)
    )
    return Call("POST", "/update_weights", {"update_info": info}, waits="update_s")


def finish(weight_version: str | None) -> Call:
    """Close the update and commit it, under this version or the fleet's next number."""
    body = None if weight_version is None else {"weight_version": weight_version}
    return Call("POST", "/finish_weight_update", body, waits="finish_s")


def relabel(new_version: str) -> Call:
    """Give the weights that are there another label."""
    return Call("POST", "/update_weight_version", {"new_version": new_version})


def weight_info() -> Call:
    """Ask for the committed version."""
    return Call("GET", "/weight_info")


def checksums() -> Call:
    """Ask for the checksum of every parameter, which must be the same on all replicas."""
    return Call("POST", "/weight_checker", {"action": "checksum"})


def world_size(*, include_dp: bool = True) -> Call:
    """Ask how many workers the next init would find."""
    return Call("GET", "/get_world_size", query=(("include_dp", _flag(include_dp)),))


def pause(mode: str, *, clear_cache: bool) -> Call:
    """Shut the gate and pause every replica."""
    query = (("mode", mode), ("clear_cache", _flag(clear_cache)))
    return Call("POST", "/pause", query=query, waits="pause_s")


def resume() -> Call:
    """Resume every replica and open the gate."""
    return Call("POST", "/resume")


def is_paused() -> Call:
    """Ask whether rollouts wait because of a pause or an update."""
    return Call("GET", "/is_paused")


def abort(request_ids: Iterable[str] | None) -> Call:
    """Abort these rollouts, or all of them."""
    body = {} if request_ids is None else {"request_ids": list(request_ids)}
    return Call("POST", "/abort_requests", body)


def sleep(level: int, mode: str) -> Call:
    """Let every replica give its memory back."""
    return Call("POST", "/sleep", query=(("level", str(level)), ("mode", mode)), waits="pause_s")


def wake_up(tags: Iterable[str]) -> Call:
    """Wake parts of every replica, or all of it."""
    return Call("POST", "/wake_up", query=tuple(("tags", tag) for tag in tags))


def is_sleeping() -> Call:
    """Ask whether any replica is not wholly awake."""
    return Call("GET", "/is_sleeping")


def reset_prefix_cache(*, reset_running_requests: bool) -> Call:
    """Drop every replica's prefix cache."""
    query = (("reset_running_requests", _flag(reset_running_requests)),)
    return Call("POST", "/reset_prefix_cache", query=query)


def fleet() -> Call:
    """Ask for the operators' summary."""
    return Call("GET", "/fleet")


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _json_safe(update_info: Mapping[str, Any]) -> dict[str, Any]:
    """CUDA IPC handles are no JSON: they travel pickled, as vLLM's own client sends them.

    The worker opens them only with VLLM_ALLOW_INSECURE_SERIALIZATION=1; nothing between does.
    """
    handles = update_info.get("ipc_handles")
    if handles is None:
        return dict(update_info)
    others = {key: value for key, value in update_info.items() if key != "ipc_handles"}
    return {**others, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
