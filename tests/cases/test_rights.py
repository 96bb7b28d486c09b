"""Rights through real HTTP: each group of routes, each way to send a token, and whom it reaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import requests
from pydantic import SecretStr

from gateway.settings_model import Auth
from tests.cases.conftest import FINISH, INIT, START, UPDATE, Case, case_of, check_error

TOKENS = {"rollout": "r-secret", "trainer": "t-secret", "operator": "o-secret"}
RANK = {None: 0, "rollout": 1, "trainer": 2, "operator": 3}

# method, path, body, the right it takes; bodies are well formed, since the form is checked first.
ROUTES: list[tuple[str, str, Any, str | None]] = [
    ("GET", "/health", None, None),
    ("GET", "/livez", None, None),
    ("GET", "/readyz", None, None),
    ("GET", "/metrics", None, None),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, "rollout"),
    ("POST", "/tokenize", {"prompt": "x"}, "rollout"),
    ("GET", "/v1/models", None, "rollout"),
    ("GET", "/is_paused", None, "trainer"),
    ("GET", "/weight_info", None, "trainer"),
    ("GET", "/get_world_size", None, "trainer"),
    ("POST", "/pause", None, "trainer"),
    ("POST", "/resume", None, "trainer"),
    ("POST", "/abort_requests", {}, "trainer"),
    ("POST", INIT, {"init_info": {"rank_offset": 1, "world_size": 99}}, "trainer"),
    ("POST", START, None, "trainer"),
    ("POST", UPDATE, {"update_info": {}}, "trainer"),
    ("POST", FINISH, None, "trainer"),
    ("POST", "/update_weight_version", {"new_version": "x"}, "trainer"),
    ("POST", "/reset_prefix_cache", None, "trainer"),
    ("POST", "/sleep", None, "trainer"),
    ("POST", "/wake_up", None, "trainer"),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, "trainer"),
    ("POST", "/collective_rpc", {"method": "check_health"}, "operator"),
    ("GET", "/fleet", None, "operator"),
    ("GET", "/fleet/replicas", None, "operator"),
    ("GET", "/fleet/rounds", None, "operator"),
    ("GET", "/fleet/layout", None, "operator"),
    ("POST", "/fleet/reset", None, "operator"),
    ("DELETE", "/fleet/replicas/nobody:1", None, "operator"),
]


def guarded(replica_token: str | None = None) -> Auth:
    """Every token set."""
    tokens = {f"{right}_token": SecretStr(token) for right, token in TOKENS.items()}
    if replica_token is not None:
        tokens["replica_token"] = SecretStr(replica_token)
    return Auth(**tokens)


@pytest.mark.parametrize("held", [None, "rollout", "trainer", "operator"])
async def test_every_route_opens_to_its_own_right_and_those_above(held: str | None) -> None:
    """401 without a token, 403 with a lower one; nothing reaches a replica."""
    headers = {"Authorization": f"Bearer {TOKENS[held]}"} if held else {}
    async with case_of(auth=guarded()) as case:
        for method, path, body, right in ROUTES:
            answer = await case.http.request(method, path, json=body, headers=headers)
            if RANK[held] >= RANK[right]:
                assert answer.status_code not in (401, 403) or path == "/collective_rpc", path
                continue
            body = check_error(answer, 403 if held else 401)
            assert "secret" not in answer.text
            assert ("WWW-Authenticate" in answer.headers) is (held is None), path
        if held in (None, "rollout"):
            assert case.all_sent() == [[], [], []]


async def test_a_wrong_token_is_401_and_is_not_repeated_in_the_answer() -> None:
    """Neither the message nor the hint quotes what was sent."""
    async with case_of(auth=guarded()) as case:
        answer = await case.post("/pause", headers={"Authorization": "Bearer wrong-secret"})
        check_error(answer, 401)
        assert "wrong-secret" not in answer.text


async def test_the_stock_client_authenticates_through_the_url() -> None:
    """`requests` turns userinfo into Basic; that is all the stock trainer can send."""
    async with case_of(auth=guarded()) as case:
        host = case.served.url.removeprefix("http://")
        good = f"http://trainer:{TOKENS['trainer']}@{host}/pause"
        bad = f"http://trainer:{TOKENS['rollout']}@{host}/pause"
        assert await asyncio.to_thread(_post, good) == 200
        assert await asyncio.to_thread(_post, bad) == 403
        assert await asyncio.to_thread(_post, f"http://{host}/pause") == 401


def _post(url: str) -> int:
    with requests.Session() as session:
        session.trust_env = False
        return session.post(url, timeout=10).status_code


@pytest.mark.parametrize("own", [None, "replica-token"])
async def test_the_callers_token_never_reaches_a_replica(own: str | None) -> None:
    """Neither by control calls nor by rollouts; replicas get the gateway's own, or none."""
    async with case_of(auth=guarded(own)) as case:
        headers = {"Authorization": f"Bearer {TOKENS['operator']}"}
        case.http.headers.update(headers)
        await case.first_sync()
        assert (await case.complete()).status_code == 200
        expected = f"Bearer {own}" if own else None
        assert _authorizations(case) == {expected}


async def test_a_stranger_is_told_of_a_bad_form_first_and_may_not_send_much() -> None:
    """Order of checks: form, then rights; but a large body is not read for nothing."""
    async with case_of(auth=guarded()) as case:
        check_error(await case.http.post(FINISH, content=b"{"), 400)
        check_error(await case.post(FINISH, {}), 401)
        answer = await case.http.post(UPDATE, content=b"x" * (17 * 1024 * 1024))
        assert answer.status_code == 401
        assert case.all_sent() == [[], [], []]


async def test_a_stranger_who_does_not_say_how_much_comes_is_cut_off_early() -> None:
    """A body without a length is read no further than any control call's, weights or not."""
    async with case_of(auth=guarded()) as case:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(17):
                yield b" " * (1024 * 1024)

        check_error(await case.http.post(UPDATE, content=chunks()), 413)
        assert case.all_sent() == [[], [], []]


def _authorizations(case: Case) -> set[str | None]:
    calls = [call for replica in case.replicas for call in replica.log.control]
    assert calls
    return {call.headers.get("authorization") for call in calls}
