"""Probing: what one replica is and can do, found out without any side effect.

`identify` asks everything (topology, backend, instance, endpoints) and is made on first contact
and whenever something looks different. `glance` asks only whether the engine lives and which
version it names, and is made every second. `same_instance` tells a restart, before an init or a
start; `start_time` one server from another that happens to tell the same instance.

A server can be asked for an endpoint without calling it: GET on a POST-only path is 405 where the
path exists and 404 where it does not (FastAPI, and so vLLM).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec

from fleet.errors import BadInput
from fleet.facts.options import Placement
from fleet.facts.outcome import Outcome, Result
from fleet.facts.replica import STARTED, Topology
from fleet.replicas.replica_client import Call, ReplicaClient
from fleet.rules.bodies import check_version
from fleet.rules.membership import Observation

T = TypeVar("T")

MEMBER_ENDPOINTS = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/pause",
    "/resume",
)
"""What a member must offer; servers before vLLM 0.21 lack start and finish."""

SERVER_INFO = "/server_info?config_format=json"
_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class _Parallel(msgspec.Struct, frozen=True):
    """The part of vllm/config/parallel.py that layout and restart detection need (0.32)."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_size_local: int = 1
    data_parallel_rank: int = 0
    data_parallel_index: int = 0
    data_parallel_master_ip: str = ""
    data_parallel_rpc_port: int = 0
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    api_processes: int = msgspec.field(default=1, name="_api_process_count")


class _Transfer(msgspec.Struct, frozen=True):
    backend: str | None = None


class _Config(msgspec.Struct, frozen=True):
    instance_id: str | None = None
    parallel_config: _Parallel | None = None
    weight_transfer_config: _Transfer | msgspec.UnsetType | None = msgspec.UNSET


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _Config = _Config()


async def glance(client: ReplicaClient, url: str) -> Observation:
    """Ask whether the engine lives and which version it names, in one request.

    /weight_info reaches the engine, which /health does not (seen on vLLM 0.32: during a lonely
    init /health answers and /weight_info hangs).
    """
    version = await client.call(url, Call("GET", "/weight_info"))
    if version.ok:
        return Observation(version=_version(version))
    if version.status == 404:
        version = await client.call(url, Call("GET", "/health"))
    return Observation() if version.ok else Observation(lost=_why_lost(version))


async def explain_silence(client: ReplicaClient, url: str, limit_s: float) -> Observation:
    """Tell a server that is dead from one whose engine is stuck in a collective."""
    told = f"no answer to a probe within {limit_s:g} s"
    try:
        async with asyncio.timeout(limit_s):
            health = await client.call(url, Call("GET", "/health"))
    except TimeoutError:
        return Observation(lost=f"unreachable: {told}")
    if health.ok:
        return Observation(silent=f"its engine is silent: /health answers, but {told}")
    return Observation(lost=_why_lost(health))


async def same_instance(client: ReplicaClient, url: str, instance: str) -> bool:
    """Whether the server is the same boot as before, in one request."""
    info = _server_info(await client.read(url, SERVER_INFO))
    return info.instance_id == instance


async def identify(client: ReplicaClient, url: str, placement: Placement) -> Observation:
    """Ask everything that membership, layout and restart detection need."""
    health = await client.call(url, Call("GET", "/health"))
    if not health.ok:
        return Observation(lost=_why_lost(health))
    info = _server_info(await client.read(url, SERVER_INFO))
    transfer = info.weight_transfer_config
    size = _workers(await client.call(url, Call("GET", "/get_world_size")))
    version = await client.call(url, Call("GET", "/weight_info"))
    paused = await client.call(url, Call("GET", "/is_paused"))
    return Observation(
        refusal=await _refusal(client, url, info, is_paused_known=paused.ok),
        topology=topology_of(info.parallel_config or _Parallel(), size, placement),
        backend=transfer.backend if isinstance(transfer, _Transfer) else None,
        instance=await _instance(client, url, info),
        version=_version(version),
        paused=_field(paused, "is_paused", bool),
        asleep=await _asleep(client, url, paused),
    )


async def _asleep(client: ReplicaClient, url: str, paused: Outcome) -> bool:
    """Whether a server sleeps for certain.

    vLLM calls a paused server a sleeping one (v1/engine/core.py: is_sleeping, 0.32), so it counts
    only if it was paused neither before nor after.
    """
    if _field(paused, "is_paused", bool):
        return False
    sleeping = await client.call(url, Call("GET", "/is_sleeping"))
    if not _field(sleeping, "is_sleeping", bool):
        return False
    return not _field(await client.call(url, Call("GET", "/is_paused")), "is_paused", bool)


def topology_of(parallel: _Parallel, size: int | None, placement: Placement) -> Topology:
    """Return how a server takes part in a layout; what the operator said wins.

    `size` is the answer of /get_world_size. Behind an external or hybrid load balancer a server
    reports the whole deployment if its size covers all data-parallel ranks, else only itself.
    """
    own = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    workers = placement.workers or size or own * parallel.data_parallel_size
    if placement.explicit:
        return Topology(
            workers=workers,
            deployment=placement.deployment,
            counts_deployment=placement.counts_deployment,
        )
    balanced = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    shared = balanced and parallel.data_parallel_size > 1
    master = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
    if not (shared or parallel.data_parallel_index > 0):
        return Topology(workers=workers, master=master, index=0)
    local = max(1, parallel.data_parallel_size_local)
    return Topology(
        workers=workers,
        deployment=master,
        counts_deployment=workers > own * local,
        servers=parallel.data_parallel_size // local if shared else None,
        index=max(parallel.data_parallel_index, parallel.data_parallel_rank) // local,
    )


async def _refusal(
    client: ReplicaClient, url: str, info: _Config, *, is_paused_known: bool
) -> str | None:
    """Return why this server can never be a member as it was started, or None."""
    missing = await _missing_endpoint(client, url, is_paused_known=is_paused_known)
    if missing is not None:
        return (
            f"lacks POST {missing}; start vLLM 0.21 or newer with VLLM_SERVER_DEV_MODE=1 "
            "to make it a member"
        )
    if info.weight_transfer_config is None:
        return "was started without --weight-transfer-config, so it cannot receive weights"
    return None


async def _missing_endpoint(
    client: ReplicaClient, url: str, *, is_paused_known: bool
) -> str | None:
    """Return the first endpoint that a member needs and this server lacks.

    A server that answers 404 even to GET on /v1/completions, which it has, does not tell a wrong
    method from an unknown path; then an answer to /is_paused speaks for the rest.
    """
    for path in MEMBER_ENDPOINTS:
        outcome = await client.call(url, Call("GET", path))
        if outcome.status == 404:
            told = await client.call(url, Call("GET", "/v1/completions"))
            return None if told.status == 404 and is_paused_known else path
    return None


def _server_info(body: bytes) -> _Config:
    """Return the server's configuration as far as it tells one.

    Only the fields named above are decoded; the rest of these some 25 KB is skipped.
    """
    try:
        return msgspec.json.decode(body, type=_ServerInfo).vllm_config
    except msgspec.MsgspecError:
        return _Config()


async def start_time(client: ReplicaClient, url: str) -> str | None:
    """Return when the server's process was started, in its own digits (seconds since the epoch).

    Empty if its /metrics do not tell, None if there is no answer.
    """
    body = await client.read(url, "/metrics")
    found = _START_TIME.search(body)
    return (found.group(1).decode() if found else "") if body else None


async def _instance(client: ReplicaClient, url: str, info: _Config) -> str | None:
    """Return what tells this boot from any other, None if nothing does.

    Several API processes behind one port each name an instance of their own, and which of them
    answers is chance (vllm/entrypoints/launchers/api_server/entry.py, 0.33).
    """
    if info.parallel_config is not None and info.parallel_config.api_processes > 1:
        return None
    return info.instance_id or await _named_by_start(client, url)


async def _named_by_start(client: ReplicaClient, url: str) -> str | None:
    start = await start_time(client, url)
    return f"{STARTED}{start}" if start else None


def _why_lost(health: Outcome) -> str:
    if health.outcome is Result.FAILED:
        return f"unhealthy: it answers {health.status} ({health.detail})"
    return f"unreachable: {health.detail}"


def _workers(outcome: Outcome) -> int | None:
    """Return the workers that an answer to /get_world_size tells, or None if it tells none."""
    size = _field(outcome, "world_size", int)
    return size if size is not None and size > 0 else None


def _version(outcome: Outcome) -> str | None:
    """Return the version that a server names, if it is one that could have been given to it."""
    version = _field(outcome, "weight_version", str)
    try:
        check_version(version)
    except BadInput:
        return None
    return version


def _field(outcome: Outcome, name: str, kind: type[T]) -> T | None:
    """Return one field of an answer, if it is there and what it should be."""
    answer: Any = outcome.answer
    value = answer.get(name) if outcome.ok and isinstance(answer, dict) else None
    return value if type(value) is kind else None
