"""A replica that answers 200 and nonsense: an error or a default, never a crash of the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.sim import SimFleet, SimReplica
from gateway.settings_model import Settings
from tests.cases.conftest import Case, case_of, nccl
from tests.gateway.serving import serve

NONSENSE: list[Any] = [[], "x", 5, {"data": None}, {"data": ["m"]}, {"data": [{"id": ["x"]}]}]
LORA = {"lora_name": "a", "lora_path": "/a"}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/get_world_size", {"world_size": "2"}),
        ("/get_world_size", {"world_size": -3}),
        ("/get_world_size", {"world_size": True}),
        ("/weight_info", {"weight_version": 5}),
        ("/weight_info", {"weight_version": {"a": 1}}),
        ("/weight_info", {"weight_version": "two\r\nlines: x"}),
        ("/is_paused", {"is_paused": "no"}),
    ],
)
async def test_what_a_probe_cannot_believe_it_does_not_pass_on(path: str, answer: Any) -> None:
    """As if the server had not told: the gateway starts, serves, counts and updates."""
    async with (
        SimFleet(nccl(2)) as sim,
        serve(Settings(replicas=(_lying(sim, path, answer), *sim.urls[1:]))) as served,
    ):
        case = Case(sim, served)
        await case.await_states("ready", "ready")
        found = await case.complete()
        assert (found.status_code, found.headers["X-Weight-Version"]) == (200, "default")
        assert (await case.http.get("/get_world_size")).json()["world_size"] == 2
        await case.first_sync("1")
        assert (await case.complete()).headers["X-Weight-Version"] == "1"


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
async def test_nonsense_about_models_costs_only_the_one_who_tells_it(answer: Any) -> None:
    """The others' models are listed."""
    async with case_of(nccl(2)) as case:
        _lie(case.replicas[0], "/v1/models", answer)
        listed = await case.http.get("/v1/models")
        assert listed.status_code == 200
        assert case.sim.options.model in [model["id"] for model in listed.json()["data"]]


@pytest.mark.parametrize(
    ("path", "body", "answer", "status"),
    [
        ("/abort_requests", {}, {"aborted": "2"}, 200),
        ("/abort_requests", {}, [], 200),
        ("/v1/load_lora_adapter", LORA, [None], 200),
        ("/v1/load_lora_adapter", LORA, [1], 200),
        ("/v1/load_lora_adapter", LORA, 5, 200),
        ("/weight_checker", {"action": "checksum"}, {"checksums": [1]}, 200),
        ("/weight_checker", {"action": "compare", "baseline": {}}, {"mismatches": 3}, 200),
        ("/weight_checker", {"action": "compare", "baseline": {}}, {"mismatches": [{}]}, 200),
        ("/reset_prefix_cache", None, "yes", 200),
    ],
)
async def test_nonsense_in_an_answer_is_no_bug_of_the_gateway(
    path: str, body: Any, answer: Any, status: int
) -> None:
    """It has answered 200, so it has done it."""
    async with case_of(nccl(2)) as case:
        for replica in case.replicas:
            _lie(replica, path, answer)
        assert (await case.post(path, body)).status_code == status


def _lie(replica: SimReplica, path: str, answer: Any) -> None:
    replica.faults.add(path, "status", status=200, body=answer, times=0)


def _lying(sim: SimFleet, path: str, answer: Any) -> str:
    _lie(sim.replicas[0], path, answer)
    return sim.urls[0]
