"""Blocking clients beside a gateway on the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fleet.client import FleetWeightSyncClient
from tests.cases.conftest import Case

P = ParamSpec("P")
T = TypeVar("T")

NAMES = ("embed", "layer.0", "layer.1", "head")


def url_of(case: Case) -> str:
    """The gateway's address, as a user has it."""
    return str(case.http.base_url).rstrip("/")


async def aside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread, as a trainer would be in a process of its own."""
    return await asyncio.to_thread(work, *args, **kwargs)


def init_info(world_size: int) -> dict[str, Any]:
    """The init body of a trainer that is one rank."""
    return {
        "master_address": "127.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": world_size,
    }


def update_info() -> dict[str, Any]:
    """The update body of a whole model."""
    shapes, dtypes = [[1] for _ in NAMES], ["float32" for _ in NAMES]
    return {"names": list(NAMES), "dtype_names": dtypes, "shapes": shapes}


def join(client: FleetWeightSyncClient) -> None:
    """Init with as many ranks as there are."""
    client.init_weight_transfer_engine(init_info(client.get_world_size() + 1))


def send(client: FleetWeightSyncClient, version: str | None = None) -> None:
    """One round, to replicas that move no data."""
    client.start_weight_update()
    client.update_weights(update_info())
    client.finish_weight_update(version)
