"""Bad input on every control route: a clear refusal, nothing sent to a replica, nothing changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.settings_model import Limits
from tests.cases.conftest import FINISH, INIT, START, UPDATE, Case, case_of, check_error

DRAFT = "/start_draft_weight_update"
RELABEL = "/update_weight_version"
CHECKER = "/weight_checker"
LORA = "/v1/load_lora_adapter"

# Routes that take no body, or an empty object: what is sent must at least be an object.
BODILESS = (
    "/pause",
    "/resume",
    "/shutdown_weight_transfer_engine",
    START,
    DRAFT,
    "/sleep",
    "/wake_up",
    "/release_kv_cache_memory",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/fleet/reset",
)
WITH_BODY = (INIT, UPDATE, FINISH, RELABEL, CHECKER, "/abort_requests", LORA, "/fleet/replicas")
MALFORMED = (b"{", b"not json", b"[1]", b'"text"', b"7", b"{}}", b"\xff\xfe", b"null")

WRONG: list[tuple[str, Any, str]] = [
    (INIT, {}, "init_info"),
    (INIT, {"init_info": []}, "init_info"),
    (INIT, {"init_info": None}, "init_info"),
    (INIT, {"init_info": {"world_size": 4}}, "rank_offset"),
    (INIT, {"init_info": {"rank_offset": 1}}, "world_size"),
    (INIT, {"init_info": {"rank_offset": 0, "world_size": 4}}, "rank 0"),
    (INIT, {"init_info": {"rank_offset": "1", "world_size": 4}}, "integer"),
    (INIT, {"init_info": {"rank_offset": 1, "world_size": "4"}}, "integer"),
    (INIT, {"init_info": {"rank_offset": True, "world_size": 4}}, "integer"),
    (UPDATE, {}, "update_info"),
    (UPDATE, {"update_info": None}, "update_info"),
    (UPDATE, {"update_info": "x"}, "update_info"),
    (UPDATE, {"update_info": 1}, "update_info"),
    (UPDATE, {"update_info": [1, 2, 3]}, "update_info"),
    (UPDATE, {"update_info": {"names": "w"}}, "names"),
    (UPDATE, {"update_info": {"names": [1]}}, "names"),
    (FINISH, {"weight_version": 1}, "weight_version"),
    (FINISH, {"weight_version": ""}, "printable ASCII"),
    (RELABEL, {}, "new_version"),
    (RELABEL, {"new_version": 1}, "new_version"),
    (RELABEL, {"new_version": "a b"}, "printable ASCII"),
    (CHECKER, {}, "action"),
    (CHECKER, {"action": "guess"}, "checksum, reset or compare"),
    (CHECKER, {"action": "compare"}, "baseline"),
    (CHECKER, {"action": "compare", "baseline": [1]}, "baseline"),
    ("/abort_requests", {"request_ids": "a"}, "list of strings"),
    ("/abort_requests", {"request_ids": [1]}, "list of strings"),
    ("/abort_requests", None, "{} at least"),
    (LORA, None, "{} at least"),
    ("/fleet/replicas", {}, "url"),
    ("/fleet/replicas", {"url": 1}, "url"),
    ("/fleet/replicas", {"url": "ftp://x"}, "http"),
    ("/fleet/replicas", {"url": "http://"}, "host"),
    ("/pause?mode=stop", None, "abort, wait, keep"),
    ("/pause?mode=", None, "abort, wait, keep"),
    ("/pause?clear_cache=maybe", None, "clear_cache"),
    ("/sleep?level=3", None, "0, 1 or 2"),
    ("/sleep?level=deep", None, "level"),
    ("/sleep?mode=stop", None, "abort, wait, keep"),
    ("/wake_up?tags=everything", None, "tags"),
]


async def test_malformed_json_is_400_on_every_route_and_changes_nothing() -> None:
    """The message says that, and where, the JSON is broken or not an object."""
    async with case_of() as case:
        before = await _seen(case)
        for path in (*BODILESS, *WITH_BODY):
            for body in MALFORMED:
                answer = await case.http.post(path, content=body)
                told = check_error(answer, 400)["error"]["message"]
                helpful = any(word in told for word in ("JSON", "Expected", "required"))
                assert helpful, (path, body, told)
        await _check_untouched(case, before)


async def test_wrong_fields_and_queries_are_400_with_the_name_of_what_is_wrong() -> None:
    """Wrong types, unknown modes, missing fields: said in words that help."""
    async with case_of() as case:
        before = await _seen(case)
        for path, body, word in WRONG:
            answer = await case.post(path, body)
            check_error(answer, 400, word)
        for path in ("/get_world_size?include_dp=maybe", "/fleet/rounds?limit=0"):
            check_error(await case.http.get(path), 400)
        await _check_untouched(case, before)


@pytest.mark.parametrize("phase", ["started", "updated"])
async def test_bad_input_inside_a_round_leaves_the_round_as_it_is(phase: str) -> None:
    """The form comes before the phase, and the round goes on afterwards."""
    async with case_of() as case:
        await case.first_sync("1")
        assert (await case.start()).status_code == 200
        if phase == "updated":
            assert (await case.update()).status_code == 200
        before = await _seen(case)
        for path, body, word in WRONG:
            if not path.startswith("/fleet"):
                check_error(await case.post(path, body), 400, word)
        await _check_untouched(case, before)
        assert (await case.update()).status_code == 200
        assert (await case.finish()).status_code == 200


async def test_a_body_over_the_limit_is_413_and_changes_nothing() -> None:
    """Announced or not: chunked bodies are counted as they come."""
    limits = Limits(control_body_bytes=100, update_body_bytes=200, rollout_body_bytes=150)
    async with case_of(limits=limits) as case:
        before = await _seen(case)
        for path in (*BODILESS, *WITH_BODY, "/v1/completions", "/tokenize"):
            size = 300 if path == UPDATE else 200
            for content in (b"x" * size, _pieces(size)):
                answer = await case.http.post(path, content=content)
                check_error(answer, 413, "takes at most", "FLEET_LIMITS__")
        await _check_untouched(case, before)
        assert all(not replica.log.rollouts for replica in case.replicas)


async def test_a_body_within_its_limit_passes() -> None:
    """An update may be larger than other control bodies."""
    limits = Limits(control_body_bytes=150, update_body_bytes=4000)
    async with case_of(limits=limits) as case:
        assert (await case.init()).status_code == 200
        assert (await case.start()).status_code == 200
        assert (await case.update([f"layer.{n}" for n in range(100)])).status_code == 200


async def test_calls_in_the_wrong_phase_are_409_with_what_to_do() -> None:
    """Nothing is sent, and each message names the next step."""
    async with case_of() as case:
        before = await _seen(case)
        for path, body in (
            (START, None),
            (UPDATE, {"update_info": {"names": ["a"]}}),
            (FINISH, {}),
        ):
            check_error(await case.post(path, body), 409, "/init_weight_transfer_engine first")
        await _check_untouched(case, before)
        assert (await case.init()).status_code == 200
        case.forget_logs()
        before = await _seen(case)
        check_error(await case.update(), 409, "/start_weight_update first")
        check_error(await case.finish(), 409, "/start_weight_update first")
        await _check_untouched(case, before)


async def test_calls_about_an_unknown_replica_are_404_and_name_those_there_are() -> None:
    """A typing mistake must not look like a success."""
    async with case_of() as case:
        for action in ("drain", "readmit", "fence"):
            answer = await case.post(f"/fleet/replicas/nobody:1/{action}")
            check_error(answer, 404, "nobody:1", case.replicas[0].id)
        check_error(await case.http.delete("/fleet/replicas/nobody:1"), 404, "nobody:1")


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 10):
        yield b"x" * 10


async def _seen(case: Case) -> tuple[Any, Any]:
    replicas = (await case.http.get("/fleet/replicas")).json()
    case.forget_logs()
    return await case.fleet(), replicas


async def _check_untouched(case: Case, before: tuple[Any, Any]) -> None:
    assert case.all_sent() == [[] for _ in case.replicas]
    assert (await case.fleet(), (await case.http.get("/fleet/replicas")).json()) == before
