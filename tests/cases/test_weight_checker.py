"""The weight checker compares those that must hold the same weights, and names the others."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.sim import SimOptions
from tests.cases.conftest import (
    Case,
    case_of,
    check_error,
    nccl,
    outcomes_of,
    posts,
)

CHECKER = "/weight_checker"
CHECKSUM = {"action": "checksum"}


async def test_a_replica_that_was_restarted_is_not_compared() -> None:
    """It holds other weights by design until the next full update: no alarm, and it is told."""
    async with case_of(nccl(3)) as case:
        await case.first_sync("1")
        await case.replicas[1].restart()
        await case.await_states("ready", "stale", "ready")
        await _zero(case, 1)
        stale = await _skipped(case)
        assert stale == {case.replicas[1].id: "does not hold the committed version"}


async def test_a_fenced_replica_is_not_compared() -> None:
    """Nobody knows what it holds, and in the middle of a session it could not even tell."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.ok(f"/fleet/replicas/{case.replicas[0].id}/fence")
        case.replicas[0].faults.add(CHECKER, "status", times=0)
        assert "operator" in (await _skipped(case))[case.replicas[0].id]
        assert not posts(case.replicas[0], CHECKER)


async def test_before_the_first_commit_all_that_are_not_fenced_are_compared() -> None:
    """What they booted with is the fleet's version then, and a difference is a failure."""
    async with case_of(nccl(3)) as case:
        await case.ok(f"/fleet/replicas/{case.replicas[0].id}/fence")
        await _zero(case, 1)
        answer = await case.post(CHECKER, CHECKSUM)
        check_error(answer, 424, "the replicas hold different weights", case.replicas[2].id)
        assert outcomes_of(answer)[case.replicas[0].id] == "skipped"


@pytest.mark.parametrize("rest", ["/pause", "/sleep?level=0"])
async def test_who_rests_with_its_weights_in_memory_is_compared(rest: str) -> None:
    """A pause, and a sleep of level 0, which is one, leave the weights where they are."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.ok(rest)
        assert not await _skipped(case)
        await _zero(case, 1)
        check_error(await case.post(CHECKER, CHECKSUM), 424, case.replicas[1].id)


async def test_who_sleeps_without_its_weights_is_not_asked_until_they_are_awake() -> None:
    """From level 1 on they are not in the GPU's memory: an engine that reads there dies."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.ok("/sleep?level=1")
        answer = await case.post(CHECKER, CHECKSUM)
        body = check_error(answer, 409, "there is no replica to ask", "asleep (level 1)", "wake up")
        assert body["error"]["type"] == "Refused"
        assert set(outcomes_of(answer).values()) == {"skipped"}
        assert not any(posts(replica, CHECKER) for replica in case.replicas)
        await case.ok("/wake_up?tags=weights")
        assert not await _skipped(case)


async def test_a_comparison_asks_the_same_replicas_as_a_checksum() -> None:
    """One that is fenced would tell mismatches that are none."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        baseline = (await case.ok(CHECKER, CHECKSUM))["checksums"]
        await case.ok(f"/fleet/replicas/{case.replicas[0].id}/fence")
        await _zero(case, 0)
        asked = {"action": "compare", "baseline": baseline}
        answer = await case.post(CHECKER, asked)
        assert (answer.json()["match"], answer.json()["mismatches"]) == (True, [])
        assert outcomes_of(answer)[case.replicas[0].id] == "skipped"
        await _zero(case, 1)
        assert (await case.ok(CHECKER, asked))["match"] is False


async def test_a_reset_fences_a_sleeper_without_calling_it() -> None:
    """It must not serve what the others have thrown away, and would die of touching its own."""
    async with case_of(nccl(2)) as case:
        await case.first_sync("1")
        await case.ok("/sleep?level=1")
        check_error(await case.post(CHECKER, {"action": "reset"}), 409, "no replica to ask")
        assert await case.states() == ["asleep", "asleep"]
        case.replicas[0].faults.add("/wake_up", "status")
        assert (await case.post("/wake_up")).status_code == 424
        assert await case.states() == ["asleep", "ready"]
        answer = await case.post(CHECKER, {"action": "reset"})
        assert answer.json()["status"] == "reset"
        assert outcomes_of(answer) == {case.replicas[0].id: "skipped", case.replicas[1].id: "ok"}
        await case.ok("/wake_up")
        assert await case.states() == ["fenced", "fenced"]


async def test_the_servers_of_one_deployment_compare_each_its_own_part() -> None:
    """Each names what only its siblings have; only what all of them name differs."""
    async with case_of(SimOptions(replicas=2, backend="nccl", topology="moe_dp")) as case:
        baseline = (await case.ok(CHECKER, CHECKSUM))["checksums"]
        assert {name.split(":")[0] for name in baseline} == {"dp0", "dp1"}
        asked = {"action": "compare", "baseline": baseline}
        assert (await case.ok(CHECKER, asked))["match"] is True
        await _zero(case, 1)
        found = await case.ok(CHECKER, asked)
        assert {name.split(":")[0] for name in found["mismatches"]} == {"dp1"}


async def test_replicas_of_other_sizes_are_compared_with_their_like() -> None:
    """A shard of two is not the whole tensor, though its name is the same."""
    async with case_of(SimOptions(replicas=3, backend="nccl", world_sizes=(1, 2, 2))) as case:
        for worker in case.replicas[0].engine.workers:
            worker.zero()
        assert not await _skipped(case)
        await _zero(case, 2)
        check_error(await case.post(CHECKER, CHECKSUM), 424, case.replicas[2].id)


async def _zero(case: Case, index: int) -> None:
    """Give one replica other weights, behind the gateway's back."""
    await case.http.post(f"{case.replicas[index].url}{CHECKER}", json={"action": "reset"})


async def _skipped(case: Case) -> dict[str, Any]:
    """Ask for checksums, which must be there, and return who was skipped, and why."""
    answer = await case.ok(CHECKER, CHECKSUM)
    assert answer["checksums"]
    told = answer["replicas"].items()
    return {replica: o["detail"] for replica, o in told if o["outcome"] == "skipped"}
