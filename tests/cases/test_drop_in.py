"""Promise 1, seen by a client: each control route asks and answers as one vLLM server does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fleet.sim import SimOptions
from tests.cases.conftest import FINISH, INIT, START, UPDATE, Case, case_of, check_error, update_of

Row = tuple[str, Any, dict[str, Any]]

INFO = {"init_info": {"rank_offset": 1, "world_size": 4}}
RELABEL = {"new_version": "v9"}

# In an order in which every call is legal: path with query, body, vLLM's own fields of the answer.
CALLS: list[Row] = [
    ("/pause", None, {"status": "paused"}),
    ("/pause?mode=wait&clear_cache=false", {}, {"status": "paused"}),
    ("/resume", None, {"status": "resumed"}),
    ("/resume", {}, {"status": "resumed"}),
    ("/abort_requests", {}, {"status": "aborted", "aborted": 0}),
    ("/abort_requests", {"request_ids": ["cmpl-a-0"]}, {"status": "aborted", "aborted": 1}),
    (INIT, INFO, {"message": "Weight transfer initialized"}),
    (START, None, {"message": "Weight update started"}),
    (UPDATE, update_of(), {"message": "Weights updated"}),
    (FINISH, None, {"message": "Weight update finished"}),
    (START, {}, {"message": "Weight update started"}),
    (UPDATE, update_of(), {"message": "Weights updated"}),
    (FINISH, {}, {"message": "Weight update finished"}),
    (START, {}, {"message": "Weight update started"}),
    (UPDATE, update_of(), {"message": "Weights updated"}),
    (FINISH, {"weight_version": "v3"}, {"message": "Weight update finished"}),
    ("/start_draft_weight_update", {}, {"message": "Draft weight update started"}),
    (FINISH, {}, {"message": "Weight update finished"}),
    ("/update_weight_version", RELABEL, {"success": True, "new_version": "v9"}),
    ("/reset_prefix_cache", None, {"success": True}),
    ("/reset_prefix_cache?reset_running_requests=true", {}, {"success": True}),
    ("/reset_mm_cache", None, {}),
    ("/reset_encoder_cache", {}, {}),
    ("/sleep", None, {"status": "sleeping", "level": 1}),
    ("/wake_up?tags=weights", None, {"status": "sleeping", "tags": ["weights"]}),
    ("/wake_up?tags=kv_cache", None, {"status": "awake", "tags": ["kv_cache"]}),
    ("/sleep?level=0&mode=keep", None, {"status": "sleeping", "level": 0}),
    ("/wake_up", None, {"status": "awake", "tags": None}),
    ("/sleep?level=2&mode=abort", None, {"status": "sleeping", "level": 2}),
    (
        "/wake_up?tags=weights&tags=kv_cache",
        {},
        {"status": "awake", "tags": ["weights", "kv_cache"]},
    ),
    ("/pause?mode=abort", None, {"status": "paused"}),
    ("/release_kv_cache_memory", None, {"status": "kv_cache_released"}),
    ("/wake_up", None, {"status": "awake", "tags": None}),
    ("/shutdown_weight_transfer_engine", None, {"message": "Weight transfer shut down"}),
]


async def test_every_control_call_answers_with_vllms_fields() -> None:
    """200, JSON, vLLM's fields with vLLM's values, and the replicas' outcomes beside them."""
    async with case_of() as case:
        for path, body, fields in CALLS:
            answer = await case.post(path, body)
            assert answer.status_code == 200, (path, answer.text)
            found = answer.json()
            assert {key: found[key] for key in fields} == fields, path
            assert {r["outcome"] for r in found["replicas"].values()} <= {"ok", "skipped"}, path
            assert set(found["replicas"]) == {r.id for r in case.replicas}, path
            _check_headers(answer)


READS: list[tuple[str, dict[str, Any]]] = [
    ("/is_paused", {"is_paused": False}),
    ("/is_sleeping", {"is_sleeping": False}),
    ("/weight_info", {"weight_version": "default"}),
    ("/get_world_size", {"world_size": 3}),
    ("/get_world_size?include_dp=true", {"world_size": 3}),
    ("/get_world_size?include_dp=false", {"world_size": 3}),
]


async def test_every_question_is_answered_as_one_server_answers_it() -> None:
    """GET, with exactly vLLM's fields: TRL and others read them by name."""
    async with case_of() as case:
        for path, expected in READS:
            answer = await case.http.get(path)
            assert (answer.status_code, answer.json()) == (200, expected), path
            _check_headers(answer)
        await case.ok("/pause")
        assert (await case.http.get("/is_paused")).json() == {"is_paused": True}


async def test_world_size_without_data_parallelism_is_asked_of_the_servers() -> None:
    """include_dp=false counts a server's own workers."""
    options = SimOptions(replicas=2, world_size=2, backend="nccl", topology="moe_dp")
    async with case_of(options) as case:
        assert (await case.http.get("/get_world_size")).json() == {"world_size": 4}
        answer = await case.http.get("/get_world_size?include_dp=false")
        assert answer.json() == {"world_size": 2}


async def test_health_is_exactly_200_and_sends_no_address() -> None:
    """TRL wants 200 itself, and takes X-Forwarded-For on it for the server's address."""
    async with case_of() as case:
        for path in ("/health", "/ping", "/livez", "/readyz"):
            answer = await case.http.get(path, headers={"X-Forwarded-For": "1.2.3.4"})
            assert answer.status_code == 200
            _check_headers(answer)
        answer = await case.complete(X_Forwarded_For="1.2.3.4")
        _check_headers(answer)


async def test_health_stays_200_while_the_fleet_is_paused_updating_or_asleep() -> None:
    """Case 26: a probe must not restart what merely waits."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        for path in ("/pause", "/resume", START):
            await case.ok(path)
            await _check_alive(case)
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200
        await case.ok("/sleep")
        await _check_alive(case)


async def _check_alive(case: Case) -> None:
    for path in ("/health", "/ping", "/livez", "/readyz"):
        assert (await case.http.get(path)).status_code == 200, path


async def test_the_weight_checker_speaks_for_all_replicas() -> None:
    """checksum, compare and reset, as one server would; replicas that differ are a failure."""
    async with case_of(SimOptions(replicas=2)) as case:
        checksums = (await case.ok("/weight_checker", {"action": "checksum"}))["checksums"]
        assert checksums
        asked = {"action": "compare", "baseline": checksums}
        same = await case.ok("/weight_checker", asked)
        assert (same["match"], same["mismatches"]) == (True, [])
        wrong = {**checksums, next(iter(checksums)): "0"}
        found = await case.ok("/weight_checker", {"action": "compare", "baseline": wrong})
        assert (found["match"], found["mismatches"]) == (False, [next(iter(checksums))])
        await case.http.post(f"{case.replicas[1].url}/weight_checker", json={"action": "reset"})
        answer = await case.post("/weight_checker", {"action": "checksum"})
        check_error(answer, 424, case.replicas[1].id, "differ")


async def test_resetting_the_weights_takes_every_replica_out_of_service() -> None:
    """Zeroed weights are nobody's version: no rollout until a full update."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.ok("/weight_checker", {"action": "reset"}))["status"] == "reset"
        assert await case.states() == ["fenced"] * 3
        await case.sync("2")
        assert await case.states() == ["ready"] * 3


async def test_models_are_the_merged_list() -> None:
    """Each model once, whatever replica lists it."""
    async with case_of() as case:
        adapter = {"lora_name": "only-here", "lora_path": "/a"}
        url = f"{case.replicas[1].url}/v1/load_lora_adapter"
        assert (await case.http.post(url, json=adapter)).status_code == 200
        models = (await case.http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["sim", "only-here"]


async def test_adapters_reach_every_replica() -> None:
    """vLLM's text comes back; a failure on one is a failure."""
    async with case_of() as case:
        adapter = {"lora_name": "a", "lora_path": "/a"}
        answer = await case.post("/v1/load_lora_adapter", adapter)
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'a' added successfully."
        assert [set(r.engine.loras) for r in case.replicas] == [{"a"}] * 3
        check_error(await case.post("/v1/load_lora_adapter", adapter), 424, "already been loaded")
        assert (await case.post("/v1/unload_lora_adapter", {"lora_name": "a"})).status_code == 200
        assert [set(r.engine.loras) for r in case.replicas] == [set()] * 3


@pytest.mark.parametrize("path", ["/v1/load%5Flora_adapter", "/v1/load_lora_adapter/"])
async def test_an_adapter_reaches_every_replica_however_its_path_is_written(path: str) -> None:
    """A server reads both as the same path, so neither may pass for a rollout to one replica."""
    async with case_of() as case:
        adapter = {"lora_name": "a", "lora_path": "/a"}
        answer = await case.post(path, adapter, follow_redirects=True)
        assert answer.status_code == 200
        assert [set(r.engine.loras) for r in case.replicas] == [{"a"}] * 3


async def test_collective_rpc_is_refused_unless_an_operator_turned_it_on() -> None:
    """It runs any method in the workers."""
    async with case_of() as case:
        answer = await case.post("/collective_rpc", {"method": "check_health"})
        check_error(answer, 403, "FLEET_ALLOW_COLLECTIVE_RPC")
        assert "/collective_rpc" not in case.sent(0)
    async with case_of(allow_collective_rpc=True) as case:
        answer = await case.ok("/collective_rpc", {"method": "check_health"})
        assert answer["results"] == [None, None, None]


async def test_an_unknown_path_is_404_in_our_shape() -> None:
    """The message names what was asked."""
    async with case_of() as case:
        for path in ("/nowhere", "/fleet/nowhere", "/pause/all"):
            check_error(await case.post(path), 404, path)
            check_error(await case.http.get(path), 404, path)


async def test_a_wrong_method_is_405_in_our_shape_and_does_nothing() -> None:
    """With the Allow header that the standard wants."""
    async with case_of() as case:
        for path in ("/pause", START, UPDATE, FINISH, INIT, "/sleep"):
            answer = await case.http.get(path)
            check_error(answer, 405, path)
            assert answer.headers["Allow"] == "POST"
        check_error(await case.post("/weight_info"), 405)
        assert case.all_sent() == [[], [], []]


async def test_a_slash_at_the_end_leads_to_the_route() -> None:
    """FastAPI, and so vLLM, redirects; `requests` follows with the same method and body."""
    async with case_of() as case:
        answer = await case.http.post("/pause/?mode=keep", follow_redirects=True)
        assert answer.json()["status"] == "paused"
        assert case.replicas[0].engine.paused == "keep"


async def test_a_body_needs_no_content_type() -> None:
    """curl -d sends a form's; the bytes are what counts."""
    async with case_of() as case:
        await case.first_sync()
        assert (await case.start()).status_code == 200
        assert (await case.update()).status_code == 200
        answer = await case.http.post(FINISH, content=b'{"weight_version": "v1"}')
        assert answer.json()["weight_version"] == "v1"
        assert await case.version() == "v1"


async def test_unknown_fields_of_a_control_body_are_no_mistake() -> None:
    """A newer client may send more than this gateway knows."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        await case.ok(UPDATE, {**update_of(), "later": 1})
        await case.ok(FINISH, {"weight_version": "v1", "later": 1})


async def test_bytes_of_an_update_reach_every_replica_as_they_came() -> None:
    """Spaces, order and repeated keys included: nothing is parsed and written again."""
    async with case_of() as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        raw = b'{ "update_info" : {"names":["a"],"x":1.0,"x":1e0, "u":"\\u00e9"} }'
        answer = await case.http.post(UPDATE, content=raw)
        assert answer.status_code == 200
        assert [len(_update_bodies(case, index)) for index in range(3)] == [1, 1, 1]
        assert _update_bodies(case, 0)[0]["update_info"]["u"] == "é"


def _update_bodies(case: Case, index: int) -> list[Any]:
    return [c.body for c in case.replicas[index].log.calls(UPDATE) if c.method == "POST"]


def _check_headers(answer: httpx.Response) -> None:
    assert "X-Forwarded-For" not in answer.headers
