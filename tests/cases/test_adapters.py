"""LoRA adapters: a replica that came back has none, and the trainer loads them again."""

from __future__ import annotations

import pytest

from gateway.settings_model import Routing, RoutingPolicy
from tests.cases.conftest import Case, case_of, check_error

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = {"lora_name": "a", "lora_path": "/a"}


async def lose_it(case: Case) -> None:
    """Load an adapter everywhere; then one replica restarts without it, and gets its weights."""
    await case.first_sync("1")
    assert (await case.post(LOAD, ADAPTER)).status_code == 200
    await case.replicas[1].restart()
    await case.await_states("ready", "stale", "ready")
    await case.first_sync("2")
    assert loaded(case) == [{"a": "/a"}, {}, {"a": "/a"}]


def loaded(case: Case) -> list[dict[str, str]]:
    """Which adapters each replica has."""
    return [replica.engine.loras for replica in case.replicas]


@pytest.mark.parametrize("more", [{}, {"load_inplace": True}])
async def test_an_adapter_is_loaded_again_where_it_is_missing(more: dict[str, bool]) -> None:
    """Those that have it refuse it, and that is no failure; in place they load it once more."""
    async with case_of() as case:
        await lose_it(case)
        answer = await case.post(LOAD, ADAPTER | more)
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'a' added successfully.",
        )
        assert loaded(case) == [{"a": "/a"}] * 3


async def test_an_adapter_that_is_loaded_again_in_time_misses_no_rollout() -> None:
    """A stale replica takes it, keeps it through the update, and serves it from the first."""
    async with case_of(routing=Routing(policy=RoutingPolicy.ROUND_ROBIN)) as case:
        await case.first_sync("1")
        assert (await case.post(LOAD, ADAPTER)).status_code == 200
        await case.replicas[1].restart()
        await case.await_states("ready", "stale", "ready")
        assert (await case.post(LOAD, ADAPTER)).status_code == 200
        await case.first_sync("2")
        rollout = {"model": "a", "prompt": "x", "max_tokens": 1}
        answers = [await case.post("/v1/completions", rollout) for _ in case.replicas]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.headers["X-Fleet-Replica"] for answer in answers}) == 3


async def test_an_adapter_is_unloaded_where_it_is_left() -> None:
    """The one that lost it cannot find it, and need not."""
    async with case_of() as case:
        await lose_it(case)
        answer = await case.post(UNLOAD, {"lora_name": "a"})
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'a' removed successfully.",
        )
        assert loaded(case) == [{}] * 3


async def test_an_adapter_of_that_name_from_elsewhere_is_another_one() -> None:
    """Some would serve the old one under the name of the new."""
    async with case_of() as case:
        await lose_it(case)
        answer = await case.post(LOAD, ADAPTER | {"lora_path": "/b"})
        check_error(answer, 424, "already been loaded")


async def test_an_adapter_that_everybody_has_or_nobody_has_is_refused_as_by_one_server() -> None:
    """Nothing was done, so nothing is said to be done."""
    async with case_of() as case:
        check_error(await case.post(UNLOAD, {"lora_name": "a"}), 424, "cannot be found")
        assert (await case.post(LOAD, ADAPTER)).status_code == 200
        check_error(await case.post(LOAD, ADAPTER), 424, "already been loaded")


async def test_a_refusal_beside_a_failure_is_a_failure() -> None:
    """The one that came back could not load it, so a rollout might find none."""
    async with case_of() as case:
        await lose_it(case)
        case.replicas[1].faults.add(LOAD, "status", status=500)
        check_error(await case.post(LOAD, ADAPTER), 424, case.replicas[1].id)
        assert (await case.post(LOAD, ADAPTER)).status_code == 200
        assert loaded(case) == [{"a": "/a"}] * 3
